"""Fingerprints of the files that a run reads, compared at a resume. Needs no torch.

A checkpoint has a dictionary from ``SETTING: FILE`` to a digest::

    {"data.train: train.jsonl": "5c1f09d2e0a7b3c4…", "model.path: model.safetensors": "91f0…", …}

Files are read whole, except files of weights, which are sampled: see
:func:`compute_weight_digests`. A function given from Python is compared by its text::

    {"reward.function: from Python": "my_reward 8d2f…"}

Not covered:

- modules imported by a function's file, and files opened by a function;
- names in a function given from Python, and functions whose text Python lacks;
- the problems of reasoning-gym and of a verifiers environment, compared only by version. An
  environment may draw different problems at each load;
- teachers behind a URL, because servers change addresses and report no digest of weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, METADATA, find_checkpoint
from megatron_dppo.bridge.safetensors_files import read_tensor_index
from megatron_dppo.config import Config
from megatron_dppo.data.examples import Source, resolve_sources
from megatron_dppo.data.generators import GENERATORS, REASONING_GYM, VERIFIERS
from megatron_dppo.data.stored import list_tokenizer_files
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import list_sources
from megatron_dppo.hub import policy_folder
from megatron_dppo.plugins import find_source_file
from megatron_dppo.process.files import file_digest, get_file_state

FUNCTIONS = (
    "reward.function",
    "loss.advantage",
    "loss.objective",
    "pruning.prompts.function",
    "pruning.completions.function",
    "rollout.conversation",
    "rollout.agent",
)
"""Settings with user functions that affect results."""
HELD_OUT = ("data.eval", "eval.benchmarks")
"""Settings that name held-out problems."""
FROM_PYTHON = "from Python"
PICKLED = ".pkl"
TEXT = ".source"
"""Name of a function given from Python, and the extensions of its two files in ``run.dir``."""
RELEASES = {REASONING_GYM: "reasoning-gym", VERIFIERS: "verifiers"}
"""Generators whose problems depend on a package."""


def compute_fingerprints(
    config: Config, function_texts: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Return digests of data, policy, teachers and user functions, by ``SETTING: FILE``.

    Args:
        function_texts: texts of functions from Python, by setting, instead of the texts in
            ``run.dir``.

    Raises:
        UserError: if a file is absent or cannot be read.
    """
    try:
        found = {
            name: digest
            for setting, source in _list_sources(config)
            for name, digest in _compute_source_digests(setting, source)
        }
        # The package of verifiers does not contain the environments, so that each has a version.
        if any(name.endswith(VERIFIERS) for name in found):
            name = config.data.verifiers.environment
            found[f"data.verifiers.environment: {name}"] = _get_environment_version(name)
        for setting, folder, checkpoint in _list_models(config):
            found |= {
                f"{setting}: {name}": digest
                for name, digest in _compute_policy_digests(folder, checkpoint).items()
            }
        for setting, spec in _list_functions(config):
            if function_texts and setting in function_texts:
                found |= {
                    f"{setting}: {name}": digest
                    for name, digest in _compute_text_digest(spec, function_texts[setting])
                }
            elif (file := find_source_file(spec)) is not None:
                found |= {
                    f"{setting}: {name}": digest
                    for name, digest in _compute_function_digests(spec, file)
                }
    except (OSError, ValueError) as error:
        problem = (
            f"the files of its settings cannot be compared with those of its checkpoint ({error})"
        )
        raise UserError("run.dir", config.run.dir, problem, "Make that file readable") from error
    return found


def list_functions_without_text(config: Config) -> list[str]:
    """Return the functions from Python without a known text, as ``SETTING: FUNCTION``."""
    found = []
    for setting, spec in _list_functions(config):
        file = find_source_file(spec)
        if (
            file is not None
            and file.with_suffix(PICKLED).is_file()
            and not file.with_suffix(TEXT).is_file()
        ):
            found.append(f"{setting}: {spec.rpartition(':')[2]}")
    return found


def describe_difference(name: str, before: str | None, now: str | None) -> str:
    """Describe the difference of two digests; ``None``: the file is absent."""
    if before is None or now is None:
        return f"{name} was not there" if before is None else f"{name} is missing now"
    if name.endswith(FROM_PYTHON):
        return f"{name.removesuffix(FROM_PYTHON)}{now.split()[0]}, given from Python, has changed"
    return f"{name} has changed"


def _list_functions(config: Config) -> Iterator[tuple[str, str]]:
    for setting in FUNCTIONS:
        if isinstance(named := attrgetter(setting)(config), str):
            yield setting, named
        elif named is not None:
            # Several reward functions are separate entries.
            for number, each in enumerate(named):
                spec = each if isinstance(each, str) else each.function
                yield f"{setting}[{number}]", spec


def _list_sources(config: Config) -> Iterator[tuple[str, Source]]:
    training = resolve_sources(config.data, "train")
    for number, source in enumerate(training):
        yield source.setting if len(training) == 1 else f"{source.setting}[{number}]", source
    for held_out in list_sources(config) if config.eval.problems != 0 else ():
        yield (
            f"{held_out.setting}.{held_out.name}".rstrip("."),
            Source(held_out.file, held_out.setting),
        )


def _get_environment_version(name: str) -> str:
    """Return the version of an environment's package, or the digest of a module outside of
    packages."""
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):
        file = find_source_file(f"{name.rpartition('/')[2].replace('-', '_')}:load_environment")
        return "" if file is None else file_digest(file)


def _compute_function_digests(spec: str, file: Path) -> Iterator[tuple[str, str]]:
    if file.with_suffix(PICKLED).is_file():
        text = file.with_suffix(TEXT)
        yield from _compute_text_digest(
            spec, text.read_text(encoding="utf-8") if text.is_file() else None
        )
    else:
        yield file.name, file_digest(file)


def _compute_text_digest(spec: str, text: str | None) -> Iterator[tuple[str, str]]:
    if text is not None:
        yield (
            FROM_PYTHON,
            f"{spec.rpartition(':')[2]} {blake2b(text.encode(), digest_size=16).hexdigest()}",
        )


def _compute_source_digests(setting: str, source: Source) -> Iterator[tuple[str, str]]:
    if source.name in RELEASES:
        yield f"{setting}: {source.name}", version(RELEASES[source.name])
    # Arithmetic problems depend on the settings alone.
    elif source.name not in GENERATORS:
        for file in source.list_files():
            yield f"{setting}: {file.name}", file_digest(file)


def _list_models(config: Config) -> Iterator[tuple[str, Path, str | None]]:
    """Yield setting, folder and checkpoint of each policy that the trainer runs."""
    yield "model.path", config.model.folder, config.model.checkpoint
    given = config.loss.distillation
    of_sources = {f"teachers.{source}": teacher for source, teacher in given.teachers.items()}
    for name, teacher in {"teacher": given.teacher, **of_sources}.items():
        if teacher is not None and teacher in given.models:
            setting = f"loss.distillation.{name}"
            checkpoint = given.teacher_checkpoint if teacher == given.teacher else None
            yield setting, policy_folder(teacher, setting, weights=checkpoint is None), checkpoint


def _compute_policy_digests(folder: Path, checkpoint: str | None) -> dict[str, str]:
    settings = [
        file
        for name in ("config.json", "generation_config.json")
        if (file := folder / name).is_file()
    ]
    digests = {
        str(file.relative_to(folder)): file_digest(file)
        for file in (*settings, *list_tokenizer_files(folder))
    }
    return digests | compute_weight_digests(folder, Path(checkpoint) if checkpoint else None)


SAMPLES = 64
SAMPLE_BYTES = 2**14
"""Evenly spaced samples of a file, and their length: 1 MiB in total, or all of a smaller file."""


def compute_weight_fingerprint(path: Path, checkpoint: Path | None) -> str:
    """Return a single digest of :func:`compute_weight_digests`."""
    return hashlib.sha256(json.dumps(compute_weight_digests(path, checkpoint)).encode()).hexdigest()


def compute_weight_digests(path: Path, checkpoint: Path | None) -> dict[str, str]:
    """Return a digest of each file of the weights of ``model.path`` and ``model.checkpoint``.

    - A safetensors file's digest covers size, header, and a sample of the bytes. A few changed
      weights of a larger file may be missed.
    - A checkpoint's digest is the digest of the checksums.
    - The same weights in different files, or in a different type, have different digests.

    Raises:
        UserError: if the weights are missing.
    """
    if checkpoint is not None:
        # The checksums or the index identify a checkpoint, without reading the weights.
        place = find_checkpoint(checkpoint)
        index = place / CHECKSUMS if (place / CHECKSUMS).is_file() else place / METADATA
        return {index.name: file_digest(index)}
    # The state of a file is part of the cache's key, because a file may change within a process.
    # Training changes nearly all weights, so that 1 MiB of any file detects training.
    files = sorted({tensor.file for tensor in read_tensor_index(path).values()})
    return {file.name: _compute_sample_digest(file, *get_file_state(file)) for file in files}


@cache
def _compute_sample_digest(file: Path, *state: int) -> str:
    size = file.stat().st_size
    seen = hashlib.blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as opened:
        length = opened.read(8)
        seen.update(opened.read(int.from_bytes(length, "little")))
        for start in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            opened.seek(start)
            seen.update(opened.read(SAMPLE_BYTES))
    return seen.hexdigest()

"""Check a run before any rank starts. No check needs torch.

Reading files of prompts takes a second for about 20,000 rows, all other checks a fraction of a
second.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.bridge.safetensors_files import check_finite, check_weights
from megatron_dppo.config import WEIGHT_BYTES, Config, exclusions, replace
from megatron_dppo.config.types import TRAINING, Command
from megatron_dppo.data.date import with_date
from megatron_dppo.data.examples import (
    Example,
    Source,
    parse_example,
    read_examples,
    resolve_sources,
)
from megatron_dppo.data.generators import GENERATORS
from megatron_dppo.data.prompts import (
    NO_CHECK,
    LabelCheck,
    are_stored,
    load_offline_prompts,
    load_prompts,
    load_supervised_examples,
    prepare,
)
from megatron_dppo.data.tokenizer import check_template, check_token_ids, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import (
    KNOWN,
    SETTING,
    EvalSource,
    list_sources,
    read_source_rows,
)
from megatron_dppo.hub import is_id, policy_folder
from megatron_dppo.models.shape import PolicyShape, check_layout, check_megatron, read_shape
from megatron_dppo.observe.loggers import check_loggers
from megatron_dppo.process.files import check_folder
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import (
    BUILTIN,
    TEXT_VERIFIERS,
    check_columns,
    check_completion_form,
    check_labels,
    resolve,
)
from megatron_dppo.rollout.conversation_functions import check_rollout_function
from megatron_dppo.rollout.servers.launch import uses_file_sync
from megatron_dppo.rollout.servers.preflight import check_launch, check_split, server_checks
from megatron_dppo.trainer.resume import check_resume, check_warm_up

MOST_READ = 2**29
"""Largest bytes of weights to check before a run; larger weights are checked during loading."""
Check = Callable[[], object]
"""Function that raises UserError for the first problem found."""


def run_preflight(config: Config, command: Command) -> None:
    """Check all requirements of a command that a single process can check.

    Raises:
        UserError: first problem found; no file has been written.
    """
    for mistake in find_mistakes(config, command):
        raise mistake
    prepare_data(config, command)


def find_mistakes(
    config: Config,
    command: Command,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[UserError]:
    """Yield all problems of a run, except in rows of large files: see :func:`prepare_data`."""
    found = False
    for mistake in run_checks(_list_checks(config, command, environ)):
        found = True
        yield mistake
    # Last, because a mistyped file name must not be reported as a changed setting.
    if command in TRAINING and not found:
        yield from run_checks(
            [partial(check_resume if command == "train" else check_warm_up, config)]
        )


def run_checks(
    checks: Iterable[Check], *, earlier: Sequence[UserError] = ()
) -> Iterator[UserError]:
    """Yield the first problem of each check; ``earlier``: errors found before."""
    # After an error, an unexpected exception of a later check is likely a consequence, and dropped;
    # otherwise it is a bug.
    stumbles = bool(earlier)
    for check in checks:
        try:
            check()
        except UserError as error:
            stumbles = True
            yield error
        except Exception:
            if not stumbles:
                raise


def _list_checks(config: Config, command: Command, environ: Mapping[str, str]) -> Iterator[Check]:
    yield from _list_settings_checks(config, command)
    if command in TRAINING:
        yield partial(check_run_dir, Path(config.run.dir))
    found: list[PolicyShape] = []
    yield lambda: found.append(read_shape(config.model.folder))
    for shape in found:
        yield from _list_policy_checks(config, shape, command)
    yield from _list_environment_checks(config, command, environ)


def check_config(config: Config, command: Command = "train") -> None:
    """Check the settings against each other, without reading anything else.

    Raises:
        UserError: first contradiction found.
    """
    for check in _list_settings_checks(config, command):
        check()


def _list_settings_checks(config: Config, command: Command) -> Iterator[Check]:
    yield partial(exclusions.check_numbers, config)
    yield from exclusions.build_checks(config, command)
    if command != "sft":
        yield partial(check_launch, config)


def _list_policy_checks(config: Config, shape: PolicyShape, command: Command) -> Iterator[Check]:
    yield partial(check_megatron, shape)
    yield partial(check_layout, shape, config.layout)
    yield from exclusions.build_checks(config, command, shape)
    yield partial(_check_weights, config, shape, command)
    yield partial(_check_tokens, config)
    if config.data.chat_template:
        yield partial(check_template, config.model.folder)
    if command in ("train", "probe-batch"):
        for teacher in config.loss.distillation.models:
            yield partial(
                _check_teacher,
                config,
                shape,
                teacher,
                config.loss.distillation.get_setting(teacher),
            )
    if command != "sft":
        yield partial(check_split, config, shape)
    if command in TRAINING:
        yield partial(_check_disk_space, config, shape, command)


def _list_environment_checks(
    config: Config,
    command: Command,
    environ: Mapping[str, str],
) -> Iterator[Check]:
    if command != "sft":
        yield from server_checks(config, environ)
    yield from _list_data_checks(config, command)
    if command != "sft":
        for function in config.reward.functions:
            yield partial(_check_reward, function)
    if command == "train":
        yield partial(check_loggers, config.run.loggers)


def list_function_checks(config: Config, command: Command) -> Iterator[Check]:
    """Yield checks that the user's functions can be imported and called, and find their columns."""
    if command != "train":
        return
    yield partial(_check_columns, config)
    yield partial(check_rollout_function, config)
    rules = config.pruning.prompts.function, config.pruning.completions.function
    loss = config.loss
    functions = {loss.advantage, loss.objective, config.rollout.engine_function, *rules}
    if functions != {None}:
        # Only if needed, because torch takes long to import.
        from megatron_dppo.trainer.functions import (
            load_engine_factory,
            load_objective,
            register_functions,
        )

        yield partial(load_engine_factory, config)
        yield partial(register_functions, config)
        yield partial(load_objective, config.loss)


def _check_columns(config: Config) -> None:
    resolve(config.reward.spec)
    has_own_functions = {*config.reward.functions} - {*BUILTIN}
    for source in resolve_sources(config.data, "train") if has_own_functions else ():
        if source.setting == "data.train" and not are_stored(source):
            examples = read_examples(source, config.data, "train")
            columns = [(example.row.place, example.extra) for example in examples]
            check_columns(config.reward.spec, columns)
            if text := next((each for each in examples if isinstance(each.prompt, str)), None):
                completion = ScoreItem(
                    text.data_source,
                    "1",
                    text.label,
                    text.extra,
                    raw_prompt=text.prompt,
                    place=text.row.place,
                )
                check_completion_form(config.reward.spec, completion)


def _check_weights(config: Config, shape: PolicyShape, command: Command) -> None:
    if config.model.checkpoint is None:
        tensors = check_weights(config.model.folder, shape)
        check_finite(tensors, config.model.folder, most_bytes=MOST_READ)
        return
    place = find_checkpoint(Path(config.model.checkpoint))
    if command in TRAINING:
        _check_initial_weights(
            place, "model.checkpoint", Path(config.model.checkpoint), Path(config.run.dir)
        )


def _check_tokens(config: Config) -> None:
    """Check token ids without the tokenizer itself."""
    # Incomplete, because the tokenizer may add tokens.
    folder = config.model.folder
    stops = config.rollout.stop_token_ids or ()
    check_token_ids(_read_tokens(folder), folder, "its tokenizer.json")
    check_token_ids(stops, folder, "the setting", "rollout.stop_token_ids")


def _check_teacher(config: Config, shape: PolicyShape, path: str, setting: str) -> None:
    """Check a teacher's files, and the shape against the policy's vocabulary, lengths and layout.

    Args:
        path: directory of the teacher, or id on the hub.
        setting: setting that names the teacher.

    Raises:
        UserError: first problem found.
    """
    stored = (
        config.loss.distillation.teacher_checkpoint
        if setting == "loss.distillation.teacher"
        else None
    )
    teacher = policy_folder(path, setting, weights=stored is None)
    try:
        teacher_shape = read_shape(teacher)
        check_layout(teacher_shape, config.layout)
        if stored is None:
            check_weights(teacher, teacher_shape)
        else:
            _check_initial_weights(
                find_checkpoint(Path(stored)),
                f"{setting}_checkpoint",
                Path(stored),
                Path(config.run.dir),
            )
    except UserError as error:
        # The checks name settings of the policy: name the settings of the teacher instead.
        called = {"model.path": setting, "model.checkpoint": f"{setting}_checkpoint"}
        problem = (
            error.problem
            if error.setting in called
            else f"{error.problem}, of the teacher in {teacher}"
        )
        raise UserError(
            called.get(error.setting, error.setting), error.value, problem, error.remedy
        ) from error
    if teacher_shape.vocab_size != shape.vocab_size:
        problem = (
            f"has {teacher_shape.vocab_size} tokens, and the policy in {config.model.path} has "
            f"{shape.vocab_size}"
        )
        raise UserError(setting, teacher, problem, "Give a teacher of the policy's vocabulary")
    policy_tokens = _read_tokens(config.model.folder)
    teacher_tokens = _read_tokens(teacher)
    # Compare shared ids only, because a tokenizer.json may be missing or list fewer tokens.
    different = [
        token
        for token in sorted(policy_tokens.keys() & teacher_tokens.keys())
        if policy_tokens[token] != teacher_tokens[token]
    ]
    if different:
        first = different[0]
        problem = (
            f"its token {first} is {teacher_tokens[first]!r:.40}, and that of the policy is "
            f"{policy_tokens[first]!r:.40}"
        )
        raise UserError(setting, teacher, problem, "Give a teacher of the policy's vocabulary")
    longest = config.longest
    if longest > teacher_shape.max_positions:
        problem = (
            f"was made for {teacher_shape.max_positions} positions, and the longest sequence has "
            f"{longest} tokens"
        )
        remedy = (
            "Lower data.max_prompt_tokens or rollout.max_response_tokens, or give another teacher"
        )
        raise UserError(setting, teacher, problem, remedy)


def _read_tokens(folder: Path) -> dict[int, str]:
    """Return the tokens of ``tokenizer.json`` by id; empty without tokens by name."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = dict(content["model"]["vocab"])
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {int(number): token for token, number in {**listed, **added}.items()}


def _list_data_checks(config: Config, command: Command) -> Iterator[Check]:
    if command != "eval":
        for training in resolve_sources(config.data, "train"):
            yield partial(_check_file, training, config, command)
    if command in ("sft", "probe-batch") or config.eval.problems == 0:
        return
    held_out: list[EvalSource] = []
    yield lambda: held_out.extend(_find_held_out(config, command))
    for source in held_out:
        yield partial(_check_held_out, source, config, command)


def _find_held_out(config: Config, command: Command) -> list[EvalSource]:
    found = list_sources(config)
    if command == "eval" and not found:
        remedy = f"Name some with --benchmarks: {', '.join(KNOWN)}, or NAME=FILE"
        raise UserError(
            "eval.benchmarks",
            "[]",
            "names nothing to evaluate on, and data.eval does not either",
            remedy,
        )
    return found


def _check_held_out(source: EvalSource, config: Config, command: Command) -> None:
    place = Path(source.file)
    may_be_several = source.setting != SETTING
    known = place.is_file() or (may_be_several and (place.is_dir() or is_id(source.file)))
    if source.name and source.file not in GENERATORS and not known:
        columns = f"the columns {config.data.prompt_key} and {config.data.label_key}"
        remedy = (
            f"Put its problems there, one JSON object a line with {columns}, or leave "
            f"{source.name} out"
        )
        raise UserError(source.setting, source.file, "is no file", remedy)
    if source.setting == SETTING and source.file not in GENERATORS:
        rows, data = read_source_rows(source, config.data)
        verifier = source.benchmark.verifier if source.benchmark else config.reward.spec
        _check_labels(verifier, [parse_example(row, data) for row in rows[: config.eval.problems]])
    else:
        _check_file(Source(source.file, source.setting), config, command)


def _check_file(source: Source, config: Config, command: Command) -> None:
    """Check each row of a file without a tokenizer."""
    if source.setting == "data.train" and are_stored(source):
        return
    if source.name in GENERATORS:
        GENERATORS[source.name].check(config.data)
        return
    examples = read_examples(source, config.data, "train", responses=command == "sft")
    if command in ("train", "probe-batch") and source.setting in ("data.train", "data.rollouts"):
        config.loss.distillation.check_sources(example.data_source for example in examples)
    if command != "sft" and source.setting != "data.rollouts":
        wanted = len(examples) if source.setting == "data.train" else config.eval.problems
        _check_labels(config.reward.spec, examples[:wanted])


def prepare_data(config: Config, command: Command) -> None:
    """Check, tokenize and store the rows of large files once. May take minutes.

    Raises:
        UserError: first wrong row.
    """
    if command == "eval":
        return
    responses = command == "sft"
    check = NO_CHECK if responses else make_label_check(config)
    policy = config.model.folder
    run_dir = Path(config.run.dir)
    for training in resolve_sources(config.data, "train"):
        if are_stored(training):
            data = with_date(config.data, policy, run_dir, keep=command in TRAINING)
            prepare(training, data, policy, responses=responses, check=check)


def tokenize_data(config: Config, command: Command) -> None:
    """Tokenize prompts and worked answers like a run.

    Raises:
        UserError: first prompt or answer that a template cannot render, or that is too long.
    """
    from megatron_dppo.evaluation.evaluator import load_problems  # imports torch

    policy = config.model.folder
    tokenizer = load_tokenizer(policy)
    data = with_date(config.data, policy, Path(config.run.dir))
    if command == "sft":
        load_supervised_examples(data, tokenizer)
        return
    if data.rollouts is None:
        load_prompts(data, tokenizer, split="train", check=make_label_check(config))
    else:
        load_offline_prompts(data, tokenizer)
    load_problems(
        replace(config, data=data), tokenizer, max_positions=read_shape(policy).max_positions
    )


def make_label_check(config: Config) -> LabelCheck:
    spec = config.reward.spec
    if config.data.rollouts is not None or not {*config.reward.functions} & {*TEXT_VERIFIERS}:
        return NO_CHECK
    return LabelCheck(spec, partial(check_labels, spec))


def _check_labels(verifier: str, examples: Sequence[Example]) -> None:
    check_labels(verifier, [(example.row.place, example.label) for example in examples])


def _check_reward(function: str) -> None:
    where = function.rpartition(":")[0]
    missing = where.endswith(".py") and not Path(where).is_file()
    # Only missing functions are resolved here, to raise the error. Existing files are imported in
    # the process that runs the function.
    if function not in BUILTIN and (not where or missing):
        resolve(function)


def _check_initial_weights(place: Path, setting: str, folder: Path, run_dir: Path) -> None:
    place = place.resolve()
    own = (run_dir / "checkpoints").resolve()
    if own in (place, *place.parents):
        problem = "is a checkpoint of the same run, whose initial policy must stay the same"
        remedy = "Restore the original value (the run resumes by itself), or name another run.dir"
        raise UserError(setting, folder, problem, remedy)


def check_run_dir(folder: Path) -> None:
    check_folder(folder, "run.dir")
    place = _find_existing_parent(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            "run.dir",
            folder,
            f"{place} cannot be written to",
            "Name a directory that you may write to",
        )


def _check_disk_space(config: Config, shape: PolicyShape, command: Command) -> None:
    folder = Path(config.run.dir)
    # A resumed run reuses the space of the existing checkpoints.
    taken = sum(
        file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file()
    )
    needed = estimate_disk(config, shape, command).total - taken
    free = shutil.disk_usage(_find_existing_parent(folder)).free
    if free < needed:
        fewer = (
            "lower run.keep_checkpoints, "
            if command == "train" and config.run.keep_checkpoints > 1
            else ""
        )
        problem = (
            f"what the run writes will take about {format_size(needed)}, and {format_size(free)} "
            "are free there"
        )
        raise UserError(
            "run.dir", folder, problem, f"Free some room, {fewer}or point run.dir at another disk"
        )


def _find_existing_parent(folder: Path) -> Path:
    return next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )


MASTER_AND_MOMENTS = 12
"""Bytes per weight of the optimizer's state: an fp32 master copy and Adam's two moments."""
OVERHEAD = 4 * 2**20
"""Bytes of other files in the folder: logs, the tokenizer, the picture."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Approximate disk usage of a run's folder, in bytes."""

    checkpoint: int
    """Size of a checkpoint: the trained weights, and the optimizer's state."""
    checkpoints: int
    """Retained checkpoints, the best one, and one more while the newest is being written."""
    export: int
    """Policy for Hugging Face, and adapters, if any."""
    sync: int = 0
    """Weights that servers read back at a sync; 0 if ``rollout.sync.folder`` names another
    place."""

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export + self.sync + OVERHEAD


def estimate_disk(config: Config, shape: PolicyShape, command: Command = "train") -> DiskUsage:
    """Return the disk usage of a training command."""
    weights = count_parameters(shape)
    dtype = WEIGHT_BYTES[config.model.dtype]
    run = config.run
    lora = config.model.lora
    if command == "sft":
        return DiskUsage(0, 0, weights * dtype)
    # Without periodic checkpoints a run writes only the final checkpoint.
    written = math.ceil(run.steps / run.checkpoint_every) if run.checkpoint_every else 1
    trained = count_parameters(shape, lora) if lora.rank else weights
    exported = weights + (trained if lora.rank else 0) if run.export else 0
    sync = config.rollout.sync
    synced = (
        (trained if sync.adapter else weights)
        if uses_file_sync(config.rollout) and sync.folder is None
        else 0
    )
    return DiskUsage(
        checkpoint=trained * (dtype + MASTER_AND_MOMENTS),
        checkpoints=min(written, run.keep_checkpoints + run.keep_best + 1),
        export=exported * dtype,
        sync=synced * dtype,
    )


def format_size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

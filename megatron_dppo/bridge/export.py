"""The policy as a Hugging Face directory, from the weight stream, put in place by one rename.

Where every byte goes follows from the policy's shape alone: the files are the same, byte by byte, whatever layout wrote
them, and the leader holds one bucket at a time, whatever the model's size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from megatron_dppo.bridge.file_plan import FilePlan, plan_files
from megatron_dppo.bridge.safetensors_files import INDEX
from megatron_dppo.bridge.stream import Tensors, weight_stream
from megatron_dppo.errors import UserError
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)
"""Files that belong to the weights and are copied as they are, where the source has them."""


def export_hf(
    model: PolicyModel,
    shape: PolicyShape,
    world: World,
    *,
    source: Path,
    out: Path,
    max_shard_bytes: int,
    dtype: torch.dtype,
    setting: str = "run.dir",
) -> None:
    """Write the policy for ``AutoModelForCausalLM`` and ``AutoTokenizer``. Collective over all ranks; one writes.

    Until everything is written it stands in a hidden directory beside ``out``. A model that is in ``out`` already is
    replaced then, and stays as it was if anything fails.

    Args:
        model: the bare model.
        source: Hugging Face directory that configuration, tokenizer and chat template are taken from.
        out: the directory to make.
        max_shard_bytes: most bytes of tensors in a file, unless a single tensor is larger.
        dtype: of the tensors, and the one that config.json then says.
        setting: what an error names as the place to mend.

    Raises:
        UserError: on every rank, if ``out`` holds something else than a model, or cannot be written.
    """
    plan = plan_files(shape, max_shard_bytes, dtype)
    world.from_leader(lambda: check_destination(source, out, plan.total_bytes, setting))
    failure: Exception | None = None
    if world.dp_rank == 0 and world.cp_rank == 0:  # the leader's own copy of the policy; replicas are not asked
        stream = weight_stream(model, shape, world, dtype=dtype)
        if world.leads:
            failure = _write_directory(stream, plan, source, out)
        else:
            for _ in stream:
                pass
    world.together(lambda: _report(failure, out, setting))


def check_destination(source: Path, out: Path, size: int, setting: str = "run.dir") -> None:
    """Refuse an export that can be known not to work; also for before a run, whose result it would lose.

    Args:
        size: bytes of the tensors, :attr:`FilePlan.total_bytes`.

    Raises:
        UserError: naming ``setting``, if ``out`` is the source or no model directory, or its disk has too little room.
    """
    if out.resolve() == source.resolve():
        raise UserError(setting, out, "is where the initial policy is read from", "write to another directory")
    if out.exists() and not (out / "config.json").is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(setting, out, "is there already and is no model directory", "name another, or remove it")
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        problem = f"needs {size / 2**30:.2f} GiB for the export, and {place} has {free / 2**30:.2f} GiB free"
        raise UserError(setting, out, problem, "free some space, or name a directory on another disk")


def _write_directory(stream: Iterator[Tensors], plan: FilePlan, source: Path, out: Path) -> Exception | None:
    """Write and put in place. The stream is taken to its end whatever happens: other ranks take part in it."""
    draft = out.parent / f".{out.name}.writing"
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
        draft.mkdir(parents=True)
        _copy_companions(source, draft, plan.dtype)
        _write_tensors(stream, plan, draft)
        _put_in_place(draft, out)
    except Exception as error:  # raised on every rank once the stream has ended
        for _ in stream:
            pass
        shutil.rmtree(draft, ignore_errors=True)
        return error
    return None


def _copy_companions(source: Path, draft: Path, dtype: torch.dtype) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older spelling
    config["dtype"] = str(dtype).removeprefix("torch.")
    (draft / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _write_tensors(stream: Iterator[Tensors], plan: FilePlan, draft: Path) -> None:
    missing = set(plan.tensors)
    with _opened(plan, draft) as places:
        for bucket in stream:
            for name, tensor in bucket.items():
                file, start = places[name]
                data = tensor.contiguous().cpu().view(torch.uint8).flatten().numpy()
                file.seek(start)
                file.write(data.data)
                missing.remove(name)
    if missing:
        raise ValueError(f"the weight stream left out {', '.join(sorted(missing))}")
    if len(plan.files) > 1:
        (draft / INDEX).write_text(plan.index())


@contextmanager
def _opened(plan: FilePlan, draft: Path) -> Iterator[dict[str, tuple[BinaryIO, int]]]:
    """The files with their headers written, and for each tensor its file and where its bytes begin."""
    with ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for name in plan.files:
            file = stack.enter_context((draft / name).open("wb"))
            head, starts = plan.header(name)
            file.write(head)
            places |= {tensor: (file, start) for tensor, start in starts.items()}
        yield places


def _put_in_place(draft: Path, out: Path) -> None:
    """One rename; a directory with something in it cannot be renamed over, so a former export steps aside first."""
    former = out.parent / f".{out.name}.former"
    shutil.rmtree(former, ignore_errors=True)
    replaces = out.exists()
    if replaces:
        out.rename(former)
    try:
        draft.rename(out)
    except OSError:
        if replaces:
            former.rename(out)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _report(failure: Exception | None, out: Path, setting: str) -> None:
    """Raise what went wrong on the leader, a failing disk in the user's words."""
    if isinstance(failure, OSError):
        problem = f"the export cannot be written ({failure.strerror or failure})"
        remedy = "free some space and check the permissions, or name another directory"
        raise UserError(setting, out, problem, remedy) from failure
    if failure is not None:
        raise failure

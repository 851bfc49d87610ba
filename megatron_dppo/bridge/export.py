"""The policy as a Hugging Face directory, written from the weight stream and put in place by one rename.

The files are the same, byte by byte, whatever layout wrote them. The leader holds what the stream holds, whatever the
model's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_dppo.bridge.hf_directory import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    MAX_SHARD_BYTES,
    MODEL_FILES,
    FilePlan,
    SafetensorsWriter,
    copy_config_and_tokenizer,
    list_stops,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
)
from megatron_dppo.bridge.stream import Consumers, adapter_stream, weight_stream
from megatron_dppo.config import LoraConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.parallel.world import World
from megatron_dppo.process.files import check_replaceable, replacing_directory

Stream = Iterator[Mapping[str, torch.Tensor]]
"""Buckets of tensors by name. Whoever takes some of them takes all, since other ranks wait for it."""


def export_hf(
    chunks: Sequence[PolicyModel],
    world: World,
    *,
    source: Path,
    out: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype,
    setting: str = "run.dir",
) -> None:
    """Write the policy for ``AutoModelForCausalLM`` and ``AutoTokenizer``. Collective over all ranks; one writes.

    A model that is in ``out`` already is replaced at the end, and stays as it was if anything fails.

    Args:
        chunks: the bare model, one for each virtual stage.
        source: Hugging Face directory that configuration, tokenizer and chat template are taken from.
        out: the directory to make.
        max_shard_bytes: most bytes of tensors in a file, unless a single tensor is larger.
        dtype: of the tensors, and the one that config.json then says.
        setting: what an error names.

    Raises:
        UserError: on every rank, if ``out`` holds something else than a model, or cannot be written.
    """
    plan = plan_files(chunks[0].shape, dtype, max_shard_bytes)
    world.from_leader(lambda: check_destination(source, out, plan.total_bytes, setting))
    stream = weight_stream(chunks, world, to=Consumers.LEADER, dtype=dtype)
    _export(world, stream, partial(write_directory, plan=plan, source=source, out=out), out, setting)


def export_adapter(chunks: Sequence[PolicyModel], world: World, *, base: str, out: Path, dtype: torch.dtype) -> None:
    """Write the policy's adapters for ``PeftModel.from_pretrained``. Collective over all ranks; one writes.

    Args:
        base: the Hugging Face directory of the policy that they were trained beside, as PEFT is to find it.
        out: the directory to make; one of adapters that is there is replaced.

    Raises:
        UserError: on every rank, if ``out`` holds something else, or cannot be written.
    """
    lora = chunks[0].lora
    plan = plan_adapter_file(chunks[0].shape, lora, dtype)
    world.from_leader(lambda: check_adapter_destination(out, plan))
    write = partial(write_adapter_directory, plan=plan, out=out, base=base, lora=lora)
    _export(world, adapter_stream(chunks, world), write, out, "run.dir")


def _export(world: World, stream: Stream, write: Callable[[Stream], Exception | None], out: Path, setting: str) -> None:
    failure: Exception | None = None
    if world.leads:
        failure = write(stream)
    elif world.in_first_copy:  # the others take no part
        deque(stream, maxlen=0)
    world.together(lambda: _report(failure, out, setting))


def check_destination(source: Path, out: Path, size: int, setting: str = "run.dir") -> None:
    """Refuse an export that cannot work. A run calls this before it begins, since its result would be lost.

    Args:
        size: bytes of the tensors, :attr:`FilePlan.total_bytes`.

    Raises:
        UserError: naming ``setting``, if ``out`` is the source or no model directory, or its disk has too little room.
    """
    if out.resolve() == source.resolve():
        raise UserError(setting, out, "is where the initial policy is read from", "write to another directory")
    check_replaceable(out, size, setting, mark="config.json", what="model directory", files=MODEL_FILES)


def check_adapter_destination(out: Path, plan: FilePlan) -> None:
    """Refuse an export of adapters that cannot work, as :func:`check_destination` does one of the policy."""
    mark, files = ADAPTER_CONFIG, ADAPTER_FILES
    check_replaceable(out, plan.total_bytes, "run.dir", mark=mark, what="directory of adapters", files=files)


def write_directory(stream: Stream, plan: FilePlan, source: Path, out: Path) -> Exception | None:
    """Write a stream's tensors and put the directory in place. Returns the error, if there was one."""

    def describe(draft: Path) -> None:
        copy_config_and_tokenizer(source, draft, plan.dtype)
        list_stops(draft)

    return _write(stream, plan, out, describe)


def write_adapter_directory(
    stream: Stream, plan: FilePlan, out: Path, *, base: str, lora: LoraConfig
) -> Exception | None:
    """As :func:`write_directory`, for adapters."""
    return _write(stream, plan, out, partial(write_adapter_config, base=base, lora=lora))


def _write(stream: Stream, plan: FilePlan, out: Path, describe: Callable[[Path], None]) -> Exception | None:
    """The stream is taken to its end whatever happens, since other ranks take part in it."""
    try:
        with replacing_directory(out) as draft, SafetensorsWriter.open(plan, draft) as writer:
            describe(draft)
            for bucket in stream:
                for name, tensor in bucket.items():
                    writer.write(name, tensor)
    except Exception as error:  # raised on every rank once the stream has ended
        deque(stream, maxlen=0)
        return error
    return None


def _report(failure: Exception | None, out: Path, setting: str) -> None:
    """Raise what went wrong on the leader; a failing disk as a UserError that names ``setting``."""
    if isinstance(failure, OSError):
        problem = f"the export cannot be written ({failure.strerror or failure})"
        remedy = "free some space and check the permissions, or name another directory"
        raise UserError(setting, out, problem, remedy) from failure
    if failure is not None:
        raise failure

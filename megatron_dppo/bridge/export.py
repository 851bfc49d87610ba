"""The policy as a Hugging Face directory, written from the weight stream and put in place by one
rename.

The files are the same, byte by byte, whatever layout wrote them. The leader holds what the stream
holds, whatever the model's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_dppo.bridge.chunks import TYPES, FilePlan, create_files, tensor_bytes
from megatron_dppo.bridge.hf_directory import (
    ADAPTERS,
    MAX_SHARD_BYTES,
    MODEL,
    add_stop_tokens,
    copy_config_and_tokenizer,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
    write_index,
)
from megatron_dppo.bridge.stream import Consumers, adapter_stream, weight_stream
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.parallel.world import World
from megatron_dppo.process.files import check_replaceable, write_directory

Stream = Iterator[Mapping[str, torch.Tensor]]
"""Buckets of tensors by name. A consumer must exhaust the stream: producing it is collective."""


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
    """Write the policy for ``AutoModelForCausalLM`` and ``AutoTokenizer``. Collective over all
    ranks; one writes.

    A model that is in ``out`` already is replaced at the end, and stays as it was if anything
    fails.

    Args:
        chunks: the bare model, one for each virtual stage.
        source: Hugging Face directory that configuration, tokenizer and chat template are taken
            from.
        out: the directory to make.
        max_shard_bytes: most bytes of tensors in a file, unless a single tensor is larger.
        dtype: of the tensors, and the one that config.json then says.
        setting: what an error names.

    Raises:
        UserError: on every rank, if ``out`` holds something else than a model, or cannot be
            written.
    """
    plan = plan_files(chunks[0].shape, dtype, max_shard_bytes)
    world.broadcast(lambda: check_destination(source, out, plan.total_bytes, setting))
    stream = weight_stream(chunks, world, to=Consumers.LEADER, dtype=dtype)
    write_stream(stream, world, plan, out, partial(describe_policy, source, dtype=dtype), setting)


def export_adapter(
    chunks: Sequence[PolicyModel], world: World, *, base: str, out: Path, dtype: torch.dtype
) -> None:
    """Write the policy's adapters for ``PeftModel.from_pretrained``. Collective over all ranks; one
    writes.

    Args:
        base: the Hugging Face directory of the base model, as written into adapter_config.json.
        out: the directory to make; one of adapters that is there is replaced.

    Raises:
        UserError: on every rank, if ``out`` holds something else, or cannot be written.
    """
    lora = chunks[0].lora
    plan = plan_adapter_file(chunks[0].shape, lora, dtype)
    world.broadcast(lambda: check_adapter_destination(out, plan))
    write_stream(
        adapter_stream(chunks, world),
        world,
        plan,
        out,
        partial(write_adapter_config, base=base, lora=lora),
        "run.dir",
    )


def check_destination(source: Path, out: Path, size: int, setting: str = "run.dir") -> None:
    """Refuse an export that cannot work. A run calls this before it begins, since its result would
    be lost.

    Args:
        size: bytes of the tensors, :attr:`FilePlan.total_bytes`.

    Raises:
        UserError: naming ``setting``, if ``out`` is the source or no model directory, or its disk
            has too little room.
    """
    check_replaceable(out, size, setting, MODEL, sources=[source])


def check_adapter_destination(out: Path, plan: FilePlan[str]) -> None:
    """Refuse an export of adapters that cannot work, as :func:`check_destination` does one of the
    policy."""
    check_replaceable(out, plan.total_bytes, "run.dir", ADAPTERS)


def describe_policy(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the files of a policy beside its weights, with the tokenizer's end of turn among the
    stop tokens."""
    copy_config_and_tokenizer(source, folder, dtype)
    add_stop_tokens(folder)


def write_stream(
    stream: Stream,
    world: World,
    plan: FilePlan[str],
    out: Path,
    describe: Callable[[Path], None],
    setting: str,
) -> None:
    """Write a stream's tensors and put the directory in place. Collective over all ranks; one
    writes.

    Args:
        stream: of this rank; ranks outside the first copy of the policy leave it alone.
        describe: writes what is beside the weights.
        setting: what an error names.

    Raises:
        UserError: on every rank, for a failing disk.
    """
    failure: Exception | None = None
    if world.is_rank0:
        try:
            with write_directory(out, setting) as draft:
                describe(draft)
                with create_files(plan, draft) as write:
                    for bucket in stream:
                        for name, tensor in bucket.items():
                            write(name, [tensor_bytes(tensor.to(TYPES[plan.places[name].dtype]))])
                write_index(draft, plan)
        except Exception as error:  # raised on every rank once the stream has ended
            failure = error
    if world.is_in_first_shard_group:
        deque(stream, maxlen=0)

    def report() -> None:
        if failure is not None:
            raise failure

    world.run_on_all_ranks(report)

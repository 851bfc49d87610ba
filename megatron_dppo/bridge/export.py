"""Write the policy as a Hugging Face directory from the weight stream.

The files are identical, byte by byte, for every layout. Rank 0 holds only buckets of the stream.
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
"""Buckets of tensors by name, to be exhausted, because producing buckets is collective."""


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
    """Write the policy for ``AutoModelForCausalLM`` and ``AutoTokenizer``. Collective; rank 0
    writes.

    An existing model in ``out`` is replaced at the end, and unchanged after a failure.

    Args:
        chunks: bare model, an element per virtual stage.
        source: Hugging Face directory with configuration, tokenizer and chat template.
        max_shard_bytes: maximum bytes of tensors in a file, unless a single tensor is larger.
        dtype: type of the tensors, also written to config.json.
        setting: setting that errors name.

    Raises:
        UserError: on every rank, if ``out`` holds anything but a model, or is not writable.
    """
    plan = plan_files(chunks[0].shape, dtype, max_shard_bytes)
    world.broadcast(lambda: check_destination(source, out, plan.total_bytes, setting))
    stream = weight_stream(chunks, world, to=Consumers.LEADER, dtype=dtype)
    write_stream(stream, world, plan, out, partial(describe_policy, source, dtype=dtype), setting)


def export_adapter(
    chunks: Sequence[PolicyModel],
    world: World,
    *,
    base: str,
    out: Path,
    dtype: torch.dtype,
) -> None:
    """Write the policy's adapters for ``PeftModel.from_pretrained``. Collective; rank 0 writes.

    Args:
        chunks: bare model, an element per virtual stage.
        base: directory of the base model, as written into adapter_config.json.
        out: directory to write; existing adapters are replaced.

    Raises:
        UserError: on every rank, if ``out`` holds anything but adapters, or is not writable.
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
    """Check that an export can be written.

    Args:
        source: Hugging Face directory with configuration and tokenizer.
        size: bytes of the tensors, :attr:`FilePlan.total_bytes`.

    Raises:
        UserError: naming ``setting``, if ``out`` is the source or no model directory, or if the
            disk is too small.
    """
    # A run checks before it begins, because a later failure would lose the final result.
    check_replaceable(out, size, setting, MODEL, sources=[source])


def check_adapter_destination(out: Path, plan: FilePlan[str]) -> None:
    """Check that an export of adapters can be written; errors as in :func:`check_destination`."""
    check_replaceable(out, plan.total_bytes, "run.dir", ADAPTERS)


def describe_policy(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a policy's files beside the weights, with the tokenizer's end of turn as a stop
    token."""
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
    """Write a stream's tensors, and rename the directory into place. Collective; rank 0 writes.

    Args:
        stream: stream of this rank; not consumed on ranks outside the first copy of the policy.
        describe: function that writes the files beside the weights.

    Raises:
        UserError: on every rank, if the disk fails.
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
        # Raise later, on every rank, because the remaining ranks still take part in the stream.
        except Exception as error:
            failure = error
    # Exhaust the stream, because producing buckets is collective.
    if world.is_in_first_shard_group:
        deque(stream, maxlen=0)

    def report() -> None:
        if failure is not None:
            raise failure

    world.run_on_all_ranks(report)

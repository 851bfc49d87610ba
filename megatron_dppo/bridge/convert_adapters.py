"""A checkpoint of adapters as the directory that PEFT loads, or merged into the policy that they were trained beside.

As in the other conversions weights go from file to file. No process group and no GPU take part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint
from megatron_dppo.bridge.chunks import Chunk, read_rows
from megatron_dppo.bridge.convert import in_threads, stored_chunks, write_tensors
from megatron_dppo.bridge.convert_commands import (
    check_out,
    checkpoint_and_directory,
    chosen_dtype,
    in_place,
    naming,
    stored_policy,
)
from megatron_dppo.bridge.hf_directory import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    MODEL_FILES,
    SafetensorsWriter,
    copy_config_and_tokenizer,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
)
from megatron_dppo.bridge.mapping import Entry, adapters_of_tensor, entries, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.config import LoraConfig
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.progress import GB, progress

Base = Callable[[Entry], Mapping[str, Sequence[Chunk]]]
"""The Hugging Face tensors of a parameter of the policy without adapters, by name."""


def adapters_to_hf(chosen: argparse.Namespace, lora: LoraConfig, *, base: str, also: Sequence[str] = ()) -> None:
    """Write the adapters for ``PeftModel.from_pretrained``, and for servers that load PEFT's directories.

    Args:
        chosen: the options of ``megatron_to_hf``.
        lora: of the run.
        base: the policy that they were trained beside, as PEFT is to find it.
        also: names of further files that ``--overwrite`` may replace.

    Raises:
        UserError: for a checkpoint that is not whole, or a destination that cannot be written; ``OUT`` is as it was.
    """
    checkpoint, hf, shape = checkpoint_and_directory(chosen)
    adapters = stored_policy(checkpoint, shape, lora)
    plan = plan_adapter_file(shape, lora, chosen_dtype(chosen, adapters.dtype))
    what = "directory of adapters"
    check_out(chosen, plan.total_bytes, [checkpoint, hf], ADAPTER_CONFIG, what, (*ADAPTER_FILES, *also))
    with in_place(chosen.out) as draft, progress("to PEFT", plan.total_bytes, unit="bytes") as advance:
        write_adapter_config(draft, base=base, lora=lora)
        write_tensors(adapters, plan, draft, workers=chosen.workers, advance=advance)
    print(
        f"{chosen.out}: adapters of rank {lora.rank}, {parameters(shape, lora) / 1e6:,.2f} million weights, of {base}"
    )


def merged_to_hf(
    chosen: argparse.Namespace,
    lora: LoraConfig,
    *,
    base: Path,
    base_is_checkpoint: bool,
    dtype: torch.dtype,
    also: Sequence[str] = (),
) -> None:
    """Write W + alpha/rank · B A in the place of every matrix that has adapters, and all other weights as they are.

    The sum is taken in fp32 and rounded once to the run's type, as the run's own export and its servers have it. Each
    worker holds a matrix whole.

    Args:
        chosen, lora, also: see :func:`adapters_to_hf`.
        base: the policy that they were trained beside: a Hugging Face directory, or a Megatron checkpoint.
        base_is_checkpoint: which of the two.
        dtype: of the run's weights.

    Raises:
        UserError: as ``adapters_to_hf``; also for a policy that is not whole.
    """
    checkpoint, hf, shape = checkpoint_and_directory(chosen)
    adapters = stored_policy(checkpoint, shape, lora)
    tensors = _base(base, shape, is_checkpoint=base_is_checkpoint)
    plan = plan_files(shape, chosen_dtype(chosen, dtype), int(chosen.shard_gb * GB))
    check_out(chosen, plan.total_bytes, [checkpoint, hf, base], "config.json", "model directory", (*MODEL_FILES, *also))
    of_name = {name: entry for entry in adapters.parameters for name in entry.tensors}

    def adapter(name: str) -> torch.Tensor | None:
        if (entry := of_name.get(name)) is None:
            return None
        return _read(entry.tensors[name], adapters.tensors(entry)[name], torch.float32)

    with (
        in_place(chosen.out) as draft,
        SafetensorsWriter.open(plan, draft) as writer,
        progress("to Hugging Face", plan.total_bytes, unit="bytes") as advance,
    ):
        copy_config_and_tokenizer(hf, draft, plan.dtype)

        def merge(entry: Entry) -> None:
            chunks = tensors(entry)
            for name, size in entry.tensors.items():
                weight = _read(size, chunks[name], dtype)
                a, b = map(adapter, adapters_of_tensor(name))
                if a is not None and b is not None:
                    weight = torch.addmm(weight.float(), b, a, alpha=lora.alpha / lora.rank).to(dtype)
                writer.write(name, weight)
                advance(plan.bytes_of(name))

        in_threads(merge, entries(shape), chosen.workers)
    print(f"{chosen.out}: {parameters(shape) / 1e6:,.2f} million weights, with the adapters merged")


def _base(folder: Path, shape: PolicyShape, *, is_checkpoint: bool) -> Base:
    if is_checkpoint:
        return StoredPolicy(find_checkpoint(folder, "model.checkpoint"), shape, "model.checkpoint").tensors
    with naming("model.path"):
        stored = stored_chunks(check_weights(folder, shape))
    return lambda entry: {name: [stored[name]] for name in entry.tensors}


def _read(shape: tuple[int, ...], chunks: Sequence[Chunk], dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor, cast to ``dtype``."""
    data = bytearray()
    for rows in read_rows(shape, chunks, dtype):  # in a buffer that the next ones are written into
        data += rows
    return torch.frombuffer(data, dtype=dtype).view(shape)

"""A conversion held against its source: both read again from the disk, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

import psutil
import torch

from megatron_dppo.bridge.convert import Advance, side_by_side
from megatron_dppo.bridge.mapping import Entry, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.slices import stored_parts
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.strips import strips
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

MEMORY = 1.9
"""Over the weights' own: Megatron holds gated layers twice while it loads them, and bf16 logits take the output layer
once more in fp32. 1.3 to 1.8 were measured."""


def compare_tensors(
    policy: StoredPolicy, hf: Path, shape: PolicyShape, *, written: torch.dtype, workers: int, advance: Advance
) -> str:
    """Compare the SHA-256 of every tensor.

    Args:
        policy: what the checkpoint holds.
        hf: Hugging Face directory.
        written: the type that was written; the other side is cast to it, as the conversion did.

    Returns:
        The SHA-256 over the names and hashes of all tensors, in hexadecimal.

    Raises:
        UserError: if the Hugging Face directory is not complete, or a tensor differs.
    """
    tensors = stored_parts(check_weights(hf, shape))
    digests: dict[str, bytes] = {}

    def compare(entry: Entry) -> None:
        sizes = entry.tensors
        for name, parts in policy.tensors(entry).items():
            digests[name] = _digest(strips(sizes[name], parts, written))
            if digests[name] != _digest(strips(sizes[name], [tensors[name]], written)):
                raise UserError("--verify", name, "differs between the two forms", "Convert again, and report it")
            advance(prod(sizes[name]) * written.itemsize)

    side_by_side(compare, policy.parameters, workers)
    return hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(digests))).hexdigest()


def logits_dtype(shape: PolicyShape, stored: torch.dtype) -> torch.dtype:
    """The type to compute logits in: fp32, in which they are told apart best, or bf16 where there is no room for that.

    Raises:
        UserError: with the way to verify without logits, if there is no room at all.
    """
    free = psutil.virtual_memory().available
    candidates = [torch.float32] + [torch.bfloat16] * (stored is torch.bfloat16)
    needed = {dtype: parameters(shape) * dtype.itemsize * MEMORY for dtype in candidates}
    if fitting := [dtype for dtype in candidates if needed[dtype] <= free]:
        return fitting[0]
    gib = f"{needed[candidates[-1]] / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    remedy = "Give --verify tensors, which compares every tensor's hash"
    raise UserError("--verify", "all", f"logits take the whole model in memory: {gib}", remedy)


def _digest(data: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for strip in data:
        digest.update(strip)
    return digest.digest()

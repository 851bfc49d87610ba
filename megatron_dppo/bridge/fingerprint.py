"""A fingerprint of a policy's stored weights, by which adapters know the policy that they were trained beside."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from math import prod
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import METADATA, find_checkpoint
from megatron_dppo.bridge.checksums import FILE
from megatron_dppo.bridge.safetensors_files import stored_tensors

SAMPLE = 256
"""Bytes that are read of a tensor, from its middle. Training changes nearly all weights of a policy."""
TENSORS = 256
"""Most tensors that are looked at. A mixture has tens of thousands, and each rank of a run looks."""


def fingerprint(path: Path, checkpoint: Path | None) -> str:
    """Of the weights that ``model.path`` and ``model.checkpoint`` name. Reads a little of some tensors.

    The same weights stored otherwise (in other files, or in another type) have another fingerprint.

    Raises:
        UserError: if there are none.
    """
    seen = hashlib.sha256()
    if checkpoint is not None:
        place = find_checkpoint(checkpoint)
        index = place / FILE
        seen.update((index if index.is_file() else place / METADATA).read_bytes())
        return seen.hexdigest()
    tensors = stored_tensors(path)
    with ExitStack() as stack:
        files = {tensor.file: stack.enter_context(tensor.file.open("rb")) for tensor in tensors.values()}
        for name, tensor in sorted(tensors.items())[:: -(-len(tensors) // TENSORS)]:
            file, half = files[tensor.file], prod(tensor.shape)  # bytes: no weight has fewer than two
            file.seek(tensor.start + half)
            seen.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + file.read(min(half, SAMPLE)))
    return seen.hexdigest()

"""Slices of tensors on disk, read without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod

import torch
from safetensors import safe_open

from megatron_dppo.bridge.file_plan import SAFETENSORS
from megatron_dppo.bridge.safetensors_files import StoredTensor
from megatron_dppo.bridge.strips import Part


class SliceReader(ExitStack):
    """Reads slices of the tensors of safetensors files, to be closed when done.

    Each file is opened once and mapped, and a slice is a view of it. Threads may read side by side.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        files = {tensor.file for tensor in stored.values()}
        opened = {file: self.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files}
        self._slices = {name: opened[tensor.file].get_slice(name) for name, tensor in stored.items()}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        return self._slices[name][start:stop] if axis == 0 else self._slices[name][:, start:stop]


def stored_parts(stored: Mapping[str, StoredTensor]) -> dict[str, Part]:
    """Every tensor as the rectangle of its file that it is."""
    torch_types = {name: dtype for dtype, name in SAFETENSORS.items()}
    return {
        name: Part(tensor.file, tensor.start, torch_types[tensor.dtype], tensor.shape[0], prod(tensor.shape[1:]))
        for name, tensor in stored.items()
    }

"""Which safetensors file every tensor of an export goes to, and where in it: a function of the policy's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import SINGLE
from megatron_dppo.models.shape import PolicyShape

SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of weights, as safetensors spells them."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Which file each tensor goes to, and where in it."""

    dtype: torch.dtype
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes, in the order in which they lie in the files."""
    files: Mapping[str, list[str]]
    """The tensors of each file, in order."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of(name) for name in self.tensors)

    def bytes_of(self, tensor: str) -> int:
        return prod(self.tensors[tensor]) * self.dtype.itemsize

    def header(self, file: str) -> tuple[bytes, dict[str, int]]:
        """A file's first bytes, up to the data, and where in the file each tensor begins."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        for name in self.files[file]:
            starts[name], end = end, end + self.bytes_of(name)
            offsets = [starts[name], end]
            entries[name] = {"dtype": SAFETENSORS[self.dtype], "shape": self.tensors[name], "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        head = len(text).to_bytes(8, "little") + text
        return head, {name: len(head) + start for name, start in starts.items()}

    def index(self) -> str:
        files = {name: file for file, names in self.files.items() for name in names}
        return json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": files}, indent=2) + "\n"


def plan_files(shape: PolicyShape, max_shard_bytes: int, dtype: torch.dtype) -> FilePlan:
    """Tensors in the order of the forward pass, as many to a file as fit."""
    tensors = expected_tensors(shape)
    files: list[list[str]] = []
    room = 0
    for name, size in tensors.items():
        length = prod(size) * dtype.itemsize
        if not files or length > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(name)
        room -= length
    if len(files) == 1:
        return FilePlan(dtype, tensors, {SINGLE: files[0]})
    named = {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}
    return FilePlan(dtype, tensors, named)

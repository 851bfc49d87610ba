"""Read the weights of a Hugging Face directory: locate each tensor, and check completeness.

Needs only the headers, and no torch, so that an invalid directory is rejected before any rank
starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.bridge.mapping import (
    EMBEDDING,
    Entry,
    describe_mismatch,
    expected_tensors,
    file_shape,
    file_tensors,
    format_nearest_name,
    list_redundant_tensors,
)
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARRIED = "model-carried.safetensors"
"""File of carried tensors, which are no part of the policy and unchanged from the source."""
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Readable types of weights, by NumPy's names; BF16, absent there, as integers of the same size."""
ROWS = 1024
"""Rows of a tensor per comparison."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor, or a rectangle of a matrix, stored row by row from a byte offset of a file."""

    file: Path
    start: int
    """First byte in the file."""
    dtype: str
    """As spelled by safetensors: F32, BF16, …"""
    shape: tuple[int, ...]
    row: int = 0
    """First row in the matrix."""
    column: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])

    @property
    def length(self) -> int:
        """Size in bytes."""
        # Also for unreadable types, because carried tensors may have any type.
        bits = re.search(r"\d+", self.dtype)
        return prod(self.shape) * int(bits[0] if bits else 8) // 8

    def select_rows(self, first: int, rows: int, row: int) -> Chunk:
        """Return ``rows`` rows from the chunk's row ``first``, placed at row ``row`` of a
        matrix."""
        skipped = replace(self, shape=(first, *self.shape[1:])).length
        return replace(self, start=self.start + skipped, shape=(rows, *self.shape[1:]), row=row)

    def map_values(self) -> NDArray[Any]:
        """Map the values copy-on-write, without reading; BF16 as integers."""
        return np.memmap(self.file, NUMPY[self.dtype], "c", self.start, self.shape)


def read_tensor_index(path: Path) -> dict[str, Chunk]:
    """Return every tensor of the directory's weights, from an index or a single file.

    Raises:
        UserError: if files are missing or damaged, or the index names a tensor that the file
            lacks.
    """
    index = path / INDEX
    if not index.is_file():
        if not path.is_dir():
            raise _build_error(path, "is no directory", "give a Hugging Face model directory")
        if not (path / SINGLE).is_file():
            remedy = "give a Hugging Face model directory with safetensors weights"
            raise _build_error(path, f"holds neither {SINGLE} nor {INDEX}", remedy)
        return read_header(path / SINGLE)
    files = _read_weight_map(index)
    found: dict[str, Chunk] = {}
    for name in sorted(set(files.values())):
        if not (path / name).is_file():
            lost = sum(file == name for file in files.values())
            raise _build_error(
                path, f"{name} is missing, which {INDEX} names for {lost} tensors", "fetch it again"
            )
        found |= read_header(path / name)
    for tensor, name in files.items():
        if tensor not in found or found[tensor].file.name != name:
            problem = (
                f"{INDEX} places {tensor} in {name}, where it is "
                f"not{format_nearest_name(tensor, found)}"
            )
            raise _build_error(
                path, problem, f"fetch {INDEX} and {name} again, from one version of the model"
            )
    return found


def read_header(file: Path) -> dict[str, Chunk]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        UserError: if the file is truncated or is no safetensors file.
    """
    # Import here, because safetensors is installed only with an extra.
    from safetensors import SafetensorError, safe_open

    # Open with the library as well, because safe_open checks sizes and offsets.
    try:
        with safe_open(file, "numpy"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError) as error:
        problem = f"{file.name} is not a complete safetensors file ({error})"
        raise _build_error(
            file.parent, problem, "fetch it again (through Git LFS, if it is a pointer)"
        ) from None
    header.pop("__metadata__", None)
    return {
        name: Chunk(
            file, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
    }


def check_finite(tensors: Mapping[str, Chunk], path: Path, *, most_bytes: int) -> None:
    """Check for infinities and NaN, unless the tensors have more than ``most_bytes`` together.

    Raises:
        UserError: naming the first tensor with infinities or NaN.
    """
    if sum(tensor.length for tensor in tensors.values()) > most_bytes:
        return
    for name, tensor in tensors.items():
        if not all(np.isfinite(numbers).all() for numbers in _iter_values(tensor)):
            raise _build_error(
                path, f"{name} holds values that are not finite", "fetch the model again"
            )


def check_weights(path: Path, shape: PolicyShape) -> dict[str, Chunk]:
    """Return the location of a policy's tensors.

    Raises:
        UserError: if a file or tensor is missing, truncated, unexpected, or of another shape or
            type; or if a policy with tied embeddings has a different output layer.
    """
    stored = read_tensor_index(path)
    files = file_tensors(shape)
    found = {
        name: tensor for name, tensor in stored.items() if not name.startswith(shape.family.carried)
    }
    expected = expected_tensors(shape)
    copies = list_redundant_tensors(shape)
    # Experts may be fused in one tensor or separate.
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parts in files.items():
        wanted.update({name: file_shape(name, parts, shape)} if name in found else parts)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if problem := describe_mismatch(shape, wanted, shapes, copies):
        remedy = (
            "take a whole model in Hugging Face's form (no adapter, no quantization) and its "
            "own config.json"
        )
        raise _build_error(path, problem, remedy)
    for name, tensor in found.items():
        if tensor.dtype not in NUMPY:
            problem = f"{name} is stored as {tensor.dtype}, which is none of {', '.join(NUMPY)}"
            raise _build_error(path, problem, "take weights that are not quantized")
    for name in files.keys() & found.keys():
        found |= split_chunk(found[name], files[name])
    for name in copies:
        (embedding,) = Entry(EMBEDDING, shape).tensors
        if name in found and not _are_equal(found[name], found[embedding]):
            problem = (
                f"{name} differs from {embedding}, and config.json makes them one "
                "(tie_word_embeddings = true)"
            )
            remedy = (
                f"set tie_word_embeddings to false in its config.json, or take {name} out of "
                "its files"
            )
            raise _build_error(path, problem, remedy)
    return {name: found[name] for name in expected}


def split_chunk(whole: Chunk, parts: Mapping[str, tuple[int, ...]]) -> dict[str, Chunk]:
    found = {}
    start = whole.start
    for name, size in parts.items():
        found[name] = replace(whole, start=start, shape=size)
        start += found[name].length
    return found


def find_carried_tensors(path: Path, shape: PolicyShape) -> dict[str, Chunk]:
    """Return the directory's tensors that are no part of the policy, such as a vision tower.

    Raises:
        UserError: if the policy's full model requires carried tensors, and the directory has no
            such tensor.
    """
    # The directory may hold only carried tensors.
    if (path / CARRIED).is_file():
        return read_header(path / CARRIED)
    has_weights = (path / INDEX).is_file() or (path / SINGLE).is_file()
    found = read_tensor_index(path) if has_weights and shape.family.carried else {}
    carried = {
        name: tensor for name, tensor in found.items() if name.startswith(shape.family.carried)
    }
    if shape.family.text_config and not carried:
        problem = f"has none of the tensors of {shape.architecture} beside its text model"
        raise _build_error(path, problem, "take the directory of the whole model, with its weights")
    return carried


def _are_equal(one: Chunk, other: Chunk) -> bool:
    """Return whether two tensors of the same shape hold equal numbers, possibly in different
    types."""
    pieces = zip(_iter_values(one), _iter_values(other), strict=True)
    return all(np.array_equal(first, second) for first, second in pieces)


def _iter_values(tensor: Chunk) -> Iterator[NDArray[Any]]:
    """Yield the values, ``ROWS`` rows at a time."""
    values = tensor.map_values()
    for row in range(0, tensor.rows, ROWS):
        numbers = values[row : row + ROWS]
        # BF16 is the upper half of FP32.
        is_bf16 = tensor.dtype == "BF16"
        yield (numbers.astype(np.uint32) << 16).view(np.float32) if is_bf16 else numbers


def _read_weight_map(index: Path) -> Mapping[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        if not (isinstance(files, dict) and all(isinstance(file, str) for file in files.values())):
            raise TypeError("weight_map does not map tensors to files")
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{INDEX} is no index of safetensors files ({error})"
        raise _build_error(index.parent, problem, "fetch it again") from None
    return files


def _build_error(path: Path, problem: str, remedy: str) -> UserError:
    return UserError("model.path", path, problem, remedy)

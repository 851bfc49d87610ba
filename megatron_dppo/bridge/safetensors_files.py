"""The weights of a Hugging Face directory as they are read: where each tensor lies, and whether all are there.

Only headers are read, without torch, so that a bad directory is refused before any rank starts.
The format: eight bytes, the little-endian length of a JSON header; the header, with dtype, shape and ``data_offsets``
of every tensor; the data, to the last byte of the file.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.bridge.mapping import (
    EMBEDDING,
    Entry,
    expected_tensors,
    file_tensors,
    fused_shape,
    redundant_tensors,
)
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARRIED = "model-carried.safetensors"
"""Tensors that are no part of the policy, as they came."""
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The types of weights that can be read, by NumPy's names; for BF16, which it lacks, that of the same size."""
LONGEST_HEADER = 100_000_000
"""The format's own limit, in bytes. A Git LFS pointer, read as a header's length, is far beyond it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Path
    dtype: str
    """As safetensors spells it: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    length: int
    """Number of bytes, from the header, because a carried tensor may have any type."""

    def values(self) -> NDArray[Any]:
        """The file's own bytes, not read yet; BF16 as integers."""
        return np.memmap(self.file, NUMPY[self.dtype], "r", self.start, self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's weights, by name, from an index or a single file.

    Raises:
        UserError: if files are missing or truncated, or the index names a tensor that its file does not have.
    """
    index = path / INDEX
    if not index.is_file():
        if not path.is_dir():
            raise _unreadable(path, "is no directory", "give a Hugging Face model directory")
        if not (path / SINGLE).is_file():
            remedy = "give a Hugging Face model directory with safetensors weights"
            raise _unreadable(path, f"holds neither {SINGLE} nor {INDEX}", remedy)
        return read_header(path / SINGLE)
    files = _weight_map(index)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(files.values())):
        if not (path / name).is_file():
            lost = sum(file == name for file in files.values())
            raise _unreadable(path, f"{name} is missing, which {INDEX} names for {lost} tensors", "fetch it again")
        found |= read_header(path / name)
    for tensor, name in files.items():
        if tensor not in found or found[tensor].file.name != name:
            problem = f"{INDEX} says that {tensor} is in {name}, where it is not{nearest_name(tensor, found)}"
            raise _unreadable(path, problem, f"fetch {INDEX} and {name} again, from one version of the model")
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        UserError: if the file is truncated or is no safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LONGEST_HEADER:
            remedy = "fetch it again (through Git LFS, if it is a pointer)"
            raise _unreadable(file.parent, f"{file.name} is no safetensors file", remedy)
        data = 8 + length
        if size < data:
            raise _truncated(file, size, data)
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            tensors: dict[str, StoredTensor] = {}
            for name, entry in header.items():
                _check_entry(name, entry)
                first, last = entry["data_offsets"]
                tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), data + first, last - first)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _unreadable(file.parent, f"{file.name} is no safetensors file ({error})", "fetch it again") from None
    end = max((tensor.start + tensor.length for tensor in tensors.values()), default=data)
    if size < end:
        raise _truncated(file, size, end)
    return tensors


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: the entry of a tensor in a header contradicts itself.
        TypeError, KeyError: it is no such entry.
    """
    (start, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{name} has sizes that are no counts")
    if not isinstance(dtype, str):
        raise TypeError(f"the type of {name} is no string")
    kind = NUMPY.get(dtype)
    if end < start or (kind is not None and end - start != np.dtype(kind).itemsize * math.prod(shape)):
        raise ValueError(f"{name} of shape {shape} and type {dtype} cannot lie in bytes {start:,} to {end:,}")


def check_finite(tensors: Mapping[str, StoredTensor], path: Path, *, most_bytes: int) -> None:
    """Look for infinities and NaN, unless all tensors together have more than ``most_bytes``.

    Raises:
        UserError: naming the first tensor with such a value.
    """
    if sum(tensor.length for tensor in tensors.values()) > most_bytes:
        return
    for name, tensor in tensors.items():
        if not tensor.length:
            continue
        values = tensor.values()
        finite = (values & 0x7F80) != 0x7F80 if tensor.dtype == "BF16" else np.isfinite(values)
        if not finite.all():
            raise _unreadable(path, f"{name} holds values that are not finite", "fetch the model again")


def check_weights(path: Path, shape: PolicyShape) -> dict[str, StoredTensor]:
    """Where the weights of ``shape`` lie; a directory that does not have them is refused, before anything is started.

    Raises:
        UserError: for a file or tensor that is missing, truncated, unexpected, or of another shape or type; and for an
            output layer of its own in a policy that has none.
    """
    found = _split(path, stored_tensors(path), shape)
    expected = expected_tensors(shape)
    allowed = expected | redundant_tensors(shape)
    missing = [name for name in expected if name not in found]
    found = {name: tensor for name, tensor in found.items() if not name.startswith(shape.family.carried)}
    unexpected = [name for name in found if name not in allowed]
    if missing:
        problem = f"{_some(missing)} missing{nearest_name(missing[0], unexpected)}"
        remedy = "take a directory that holds the whole model, in Hugging Face's form, and its own config.json"
        raise _unreadable(path, problem, remedy)
    if unexpected:
        policy = f"{shape.architecture} of {shape.num_layers} layers{nearest_name(unexpected[0], expected)}"
        remedy = "take a plain model's weights (no adapter, no quantization) and the config.json that belongs to them"
        raise _unreadable(path, f"{_some(unexpected)} no part of a {policy}", remedy)
    for name, tensor in found.items():
        if tensor.shape != allowed[name]:
            problem = f"{name} has shape {list(tensor.shape)}, but config.json makes it {list(allowed[name])}"
            raise _unreadable(path, problem, "use the config.json that belongs to these weights")
        if tensor.dtype not in NUMPY:
            problem = f"{name} is stored as {tensor.dtype}, which is none of {', '.join(NUMPY)}"
            raise _unreadable(path, problem, "take weights that are not quantized")
    for name in redundant_tensors(shape):
        (embedding,) = Entry(EMBEDDING, shape).tensors
        if name in found and not _are_equal(found[name], found[embedding]):
            problem = f"{name} differs from {embedding}, and config.json makes them one (tie_word_embeddings = true)"
            remedy = f"set tie_word_embeddings to false in its config.json, or take {name} out of its files"
            raise _unreadable(path, problem, remedy)
    return found


def _split(path: Path, stored: dict[str, StoredTensor], shape: PolicyShape) -> dict[str, StoredTensor]:
    """The tensors of a policy that are parts of tensors of its files, in the place of these.

    Raises:
        UserError: if such a tensor has not the shape that its parts make.
    """
    for name, parts in file_tensors(shape).items():
        if name in parts or (fused := stored.pop(name, None)) is None:
            continue
        if fused.shape != (whole := fused_shape(parts, shape)):
            problem = f"{name} has shape {list(fused.shape)}, but config.json makes it {list(whole)}"
            raise _unreadable(path, problem, "use the config.json that belongs to these weights")
        start, width = fused.start, np.dtype(NUMPY.get(fused.dtype, "u1")).itemsize
        for part, size in parts.items():
            length = math.prod(size) * width
            stored[part] = replace(fused, shape=size, start=start, length=length)
            start += length
    return stored


def carried_tensors(path: Path, shape: PolicyShape) -> dict[str, StoredTensor]:
    """Tensors of a directory that are no part of the policy, and stay beside it: a vision tower, heads for further
    tokens. The directory may have no weights but these.

    Raises:
        UserError: if there are none, and the model that the policy is a part of requires some.
    """
    if (path / CARRIED).is_file():
        return read_header(path / CARRIED)
    has_weights = (path / INDEX).is_file() or (path / SINGLE).is_file()
    found = stored_tensors(path) if has_weights and shape.family.carried else {}
    carried = {name: tensor for name, tensor in found.items() if name.startswith(shape.family.carried)}
    if shape.family.text_config and not carried:
        problem = f"has none of the tensors of {shape.architecture} beside its text model"
        raise _unreadable(path, problem, "take the directory of the whole model, with its weights")
    return carried


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, be it in different types."""
    pieces = zip(_numbers(one), _numbers(other), strict=True)
    return all(np.array_equal(first, second) for first, second in pieces)


def _numbers(tensor: StoredTensor) -> Iterator[NDArray[Any]]:
    """Some millions at a time."""
    kind, left = np.dtype(NUMPY[tensor.dtype]), math.prod(tensor.shape)
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        while left > 0:
            numbers = np.frombuffer(opened.read(min(left, 2**22) * kind.itemsize), kind)
            left -= len(numbers)
            yield (numbers.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else numbers


def _weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor, by an index."""
    try:
        files = json.loads(index.read_text())["weight_map"]
        if not (isinstance(files, dict) and all(isinstance(file, str) for file in files.values())):
            raise TypeError("weight_map does not map tensors to files")
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{INDEX} is no index of safetensors files ({error})"
        raise _unreadable(index.parent, problem, "fetch it again") from None
    return files


def _truncated(file: Path, size: int, expected: int) -> UserError:
    problem = f"{file.name} is truncated: {size:,} bytes of at least {expected:,}"
    return _unreadable(file.parent, problem, "fetch the file again")


def _unreadable(path: Path, problem: str, remedy: str) -> UserError:
    return UserError("model.path", path, problem, remedy)


def _some(names: list[str]) -> str:
    """One tensor by name, many by the first name and their number."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors are"


def nearest_name(name: str, candidates: Iterable[str]) -> str:
    """The candidate most like ``name``, as the end of a sentence."""
    near = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (nearest name: {near[0]})" if near else ""

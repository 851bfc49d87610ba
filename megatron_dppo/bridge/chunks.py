"""Matrices read from rectangles of them that lie in files, a few rows at a time.

A conversion reads such matrices and writes them elsewhere. A Hugging Face tensor is a rectangle of
its file, and so is what one rank wrote of a parameter. Only one buffer of rows is in memory,
whatever the size of a matrix. A vector is a matrix of one column.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Generic, TypeVar

import torch

from megatron_dppo.bridge.mapping import Entry, Slice, StoredRows, exact_tensors
from megatron_dppo.bridge.safetensors_files import Chunk
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

BUFFER_BYTES = 1 << 18
"""As much as ``cp`` reads at a time: with 4 MiB a conversion took five times the processor time."""


TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights, by their names in safetensors files."""
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


def promote_dtype(dtype: torch.dtype, entry: Entry) -> torch.dtype:
    """The type of a parameter in a policy of type ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if entry.mapping.exact else dtype


def find_stored_dtype(tensors: Mapping[str, Chunk], shape: PolicyShape) -> torch.dtype:
    """The type that holds all weights of a directory but those that are fp32 in every policy."""
    exact = exact_tensors(shape)
    return reduce(
        torch.promote_types,
        {TYPES[each.dtype] for name, each in tensors.items() if name not in exact},
    )


def list_parameter_chunks(part: StoredRows, tensors: Mapping[str, Chunk]) -> list[Chunk]:
    """Chunks of a parameter's rows, without the padding of a vocabulary.

    Args:
        tensors: the Hugging Face tensors of its entry.
    """
    return [
        tensors[rows.name].select_rows(rows.start, rows.length, top)
        for rows, top in _iterate_rows(part)
        if rows.name
    ]


def list_tensor_chunks(name: str, part: StoredRows, chunks: Iterable[Chunk]) -> list[Chunk]:
    """The way back: chunks of a Hugging Face tensor that lie in a parameter's rows.

    Args:
        chunks: of these rows, cut in any way.
    """
    found = []
    for rows, top in _iterate_rows(part):
        for chunk in chunks if rows.name == name else ():
            low = max(top, chunk.row)
            high = min(top + rows.length, chunk.row + chunk.rows)
            if low < high:
                found.append(chunk.select_rows(low - chunk.row, high - low, rows.start + low - top))
    return found


def _iterate_rows(part: StoredRows) -> Iterator[tuple[Slice, int]]:
    """The rows of tensors, and where each begins in the parameter's rows."""
    lengths = [rows.length for rows in part.rows]
    return zip(part.rows, accumulate(lengths, initial=0), strict=False)


def read_rows(
    shape: Sequence[int], chunks: Iterable[Chunk], dtype: torch.dtype
) -> Iterator[memoryview]:
    """The bytes of a matrix from its first row to its last, cast to ``dtype``; what no chunk covers
    is zero.

    Every buffer that is yielded is overwritten by the next.

    Raises:
        UserError: if a file ends before a chunk does.
    """
    rows = shape[0]
    columns = prod(shape[1:])
    row_bytes = columns * dtype.itemsize
    height = min(rows, max(1, BUFFER_BYTES // row_bytes))
    buffer = torch.empty(height, columns, dtype=dtype)
    data = tensor_bytes(buffer)
    chunks = list(chunks)
    padded = sum(prod(chunk.shape) for chunk in chunks) < rows * columns
    with ExitStack() as stack:
        files = {
            chunk.file: stack.enter_context(chunk.file.open("rb", buffering=0)) for chunk in chunks
        }
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            if padded:
                buffer.zero_()
            for chunk in chunks:
                low = max(top, chunk.row)
                high = min(bottom, chunk.row + chunk.rows)
                if low >= high:
                    continue
                wanted = chunk.select_rows(low - chunk.row, high - low, low - top)
                descriptor = files[chunk.file].fileno()
                if chunk.columns == columns and chunk.dtype == TYPE_NAMES[dtype]:
                    _read(
                        descriptor, wanted, data[(low - top) * row_bytes : (high - top) * row_bytes]
                    )
                    continue
                stored = torch.empty(wanted.rows, wanted.columns, dtype=TYPES[wanted.dtype])
                _read(descriptor, wanted, tensor_bytes(stored))
                buffer[low - top : high - top, chunk.column : chunk.column + chunk.columns] = stored
            yield data[: (bottom - top) * row_bytes]


def read_tensor(shape: Sequence[int], chunks: Iterable[Chunk], dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor; see :func:`read_rows`."""
    data = bytearray()
    for rows in read_rows(shape, chunks, dtype):  # in a buffer that the next ones are written into
        data += rows
    return torch.frombuffer(data, dtype=dtype).view(*shape)


def write_at(file: int, start: int, data: Iterable[memoryview | bytes]) -> int:
    """Write to a file descriptor from byte ``start`` on. Returns where that ended.

    Raises:
        OSError: for a full disk.
    """
    for part in data:
        buffer = memoryview(part)
        while buffer:
            written = os.pwrite(file, buffer[:BUFFER_BYTES], start)
            buffer = buffer[written:]
            start = start + written
    return start


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; of a contiguous one in the host's memory not a copy."""
    return memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy())


def _read(file: int, chunk: Chunk, buffer: memoryview) -> None:
    start = chunk.start
    while buffer:
        read = os.preadv(file, [buffer], start)
        if not read:
            raise UserError(
                "file", chunk.file, f"ends at byte {start:,}, within a tensor", "Fetch it again"
            )
        buffer = buffer[read:]
        start = start + read


K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class FilePlan(Generic[K]):
    """Which file each tensor goes to, and where in it; names of files are relative to a directory.

        FilePlan(torch.bfloat16, {"model.norm.weight": chunk}, {"model.safetensors": [(0, head)]})

    writes ``chunk.length`` bytes of weights, behind the header of the only file.
    """

    dtype: torch.dtype
    """Of all tensors but those that are fp32 in every policy."""
    places: dict[K, Chunk] = field(default_factory=dict)
    """In order."""
    frames: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    """What is around the tensors of each file, and where it begins there."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of tensors in each file."""
        sizes = dict.fromkeys(self.frames, 0)
        for place in self.places.values():
            sizes[place.file.name] += place.length
        return sizes

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())


@contextmanager
def create_files(
    plan: FilePlan[K], folder: Path
) -> Iterator[Callable[[K, Iterable[memoryview]], None]]:
    """Make the files of a plan. Within the block each tensor is written once, in any order, from
    any thread.

    Yields:
        A function that writes a tensor's bytes, in the plan's type.

    Raises:
        ValueError: if a tensor has too many or too few, or was not written when the block ends.
        OSError: for a full disk.
    """
    for name, parts in plan.frames.items():
        with (folder / name).open("wb", buffering=0) as file:
            for start, part in parts:
                write_at(file.fileno(), start, [part])
    unwritten = dict(plan.places)

    def write(key: K, data: Iterable[memoryview]) -> None:
        place = unwritten.pop(key)
        with (folder / place.file).open("r+b", buffering=0) as file:
            written = write_at(file.fileno(), place.start, data) - place.start
        if written != place.length:
            raise ValueError(f"{key} has {written} bytes instead of {place.length}")

    yield write
    if unwritten:
        raise ValueError(f"these tensors were not written: {', '.join(map(str, unwritten))}")

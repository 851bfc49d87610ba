"""Read matrices from rectangles stored in files, a few rows at a time.

A conversion reads matrices and writes the rows to another place. A Hugging Face tensor, and a
rank's part of a parameter, is a rectangle of its file. Only one buffer of rows is in memory. A
vector is a matrix with a single column.
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
"""Read size of ``cp``. With 4 MiB a conversion took five times the processor time."""


TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights, by the names in safetensors files."""
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


def promote_dtype(dtype: torch.dtype, entry: Entry) -> torch.dtype:
    """Return the type of a parameter in a policy of type ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if entry.mapping.exact else dtype


def find_stored_dtype(tensors: Mapping[str, Chunk], shape: PolicyShape) -> torch.dtype:
    """Return the common type of weights, except weights that are fp32 in every policy."""
    exact = exact_tensors(shape)
    return reduce(
        torch.promote_types,
        {TYPES[each.dtype] for name, each in tensors.items() if name not in exact},
    )


def list_parameter_chunks(part: StoredRows, tensors: Mapping[str, Chunk]) -> list[Chunk]:
    """Return the chunks of a parameter's rows in Hugging Face tensors, without a vocabulary's
    padding."""
    return [
        tensors[rows.name].select_rows(rows.start, rows.length, top)
        for rows, top in _iter_rows(part)
        if rows.name
    ]


def list_tensor_chunks(name: str, part: StoredRows, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks of a Hugging Face tensor from a parameter's rows: the inverse of
    :func:`list_parameter_chunks`."""
    found = []
    for rows, top in _iter_rows(part):
        for chunk in chunks if rows.name == name else ():
            low = max(top, chunk.row)
            high = min(top + rows.length, chunk.row + chunk.rows)
            if low < high:
                found.append(chunk.select_rows(low - chunk.row, high - low, rows.start + low - top))
    return found


def _iter_rows(part: StoredRows) -> Iterator[tuple[Slice, int]]:
    """Yield the rows of tensors, and the start of each in the parameter."""
    lengths = [rows.length for rows in part.rows]
    return zip(part.rows, accumulate(lengths, initial=0), strict=False)


def read_rows(
    shape: Sequence[int],
    chunks: Iterable[Chunk],
    dtype: torch.dtype,
) -> Iterator[memoryview]:
    """Yield the bytes of a matrix row by row, cast to ``dtype``; parts without a chunk are zero.

    Every yielded buffer is overwritten by the next.

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
                # Read straight into the buffer if full rows need no cast.
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
    data = bytearray()
    # Copy the rows, because the next rows overwrite the buffer.
    for rows in read_rows(shape, chunks, dtype):
        data += rows
    return torch.frombuffer(data, dtype=dtype).view(*shape)


def write_at(file: int, start: int, data: Iterable[memoryview | bytes]) -> int:
    """Write to a file descriptor from byte ``start``, and return the end.

    Raises:
        OSError: if the disk is full.
    """
    for part in data:
        buffer = memoryview(part)
        # pwrite may write fewer bytes than requested.
        while buffer:
            written = os.pwrite(file, buffer[:BUFFER_BYTES], start)
            buffer = buffer[written:]
            start += written
    return start


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor; without a copy for a contiguous tensor in host memory."""
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
        start += read


K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class FilePlan(Generic[K]):
    """File of each tensor, and the position in the file; file names are relative to a directory."""

    dtype: torch.dtype
    """Type of all tensors, except tensors that are fp32 in every policy."""
    places: dict[K, Chunk] = field(default_factory=dict)
    frames: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Bytes around the tensors of each file, with their starts in the file."""

    @property
    def sizes(self) -> dict[str, int]:
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
    """Create the files of a plan. Within the block each tensor is written once, in any order and
    thread.

    Yields:
        Function that writes a tensor's bytes, in the plan's type.

    Raises:
        ValueError: if a tensor has a wrong number of bytes, or was not written by the end of the
            block.
        OSError: if the disk is full.
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

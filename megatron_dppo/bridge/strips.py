"""Matrices put together from rectangles that lie in files, a few rows at a time.

A conversion is nothing else: a Hugging Face tensor is a rectangle of its file, and so is what one rank wrote of a
parameter. Whatever the sizes, a strip of rows is all that is in memory. A vector is a matrix of one column.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dppo.bridge.mapping import Entry, Slice
from megatron_dppo.errors import UserError

STRIP_BYTES = 1 << 18
"""As ``cp`` does it: strips of 4 MiB took five times the processor time of these."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a matrix, stored row by row in one run of a file."""

    file: Path
    start: int
    """Its first byte there."""
    dtype: torch.dtype
    rows: int
    columns: int
    row: int = 0
    """Where it lies in the matrix."""
    column: int = 0

    def cut(self, first: int, rows: int, row: int) -> Part:
        """``rows`` rows of it from its own row ``first`` on, to lie from row ``row`` of the matrix on."""
        skipped = first * self.columns * self.dtype.itemsize
        return replace(self, start=self.start + skipped, rows=rows, row=row)


def parameter_parts(entry: Entry, tensors: Mapping[str, Part]) -> list[Part]:
    """What a whole parameter is put together from; the padding of a vocabulary is left out.

    Args:
        tensors: the entry's Hugging Face tensors.
    """
    parts, row = [], 0
    for band in _bands(entry):
        if band.name:
            parts.append(tensors[band.name].cut(band.start, band.length, row))
        row += band.length
    return parts


def tensor_parts(entry: Entry, chunks: Sequence[Part]) -> dict[str, list[Part]]:
    """The way back: what the entry's Hugging Face tensors are put together from, by name.

    Args:
        chunks: of the parameter, cut in any way.
    """
    parts: dict[str, list[Part]] = {name: [] for name in entry.tensors}
    row = 0
    for band in _bands(entry):
        for chunk in chunks:
            low, high = max(row, chunk.row), min(row + band.length, chunk.row + chunk.rows)
            if band.name and low < high:
                parts[band.name].append(chunk.cut(low - chunk.row, high - low, band.start + low - row))
        row += band.length
    return parts


def _bands(entry: Entry) -> tuple[Slice, ...]:
    """The rows of which tensors lie one below the other in the parameter of a single rank."""
    if entry.axis == 0:
        return entry.slices(0, 1)
    return tuple(Slice(name, 0, shape[0]) for name, shape in entry.tensors.items())


def strips(shape: Sequence[int], parts: Iterable[Part], dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a matrix from its first row to its last, cast to ``dtype``; what no part covers is zero.

    Every strip is overwritten by the next.

    Raises:
        UserError: if a file ends before a part does.
    """
    rows, columns = shape[0], prod(shape[1:])
    row_bytes = columns * dtype.itemsize
    height = min(rows, max(1, STRIP_BYTES // row_bytes))
    buffer = torch.empty(height, columns, dtype=dtype)
    data = memoryview(_bytes(buffer))
    parts = list(parts)
    padded = sum(part.rows * part.columns for part in parts) < rows * columns
    with ExitStack() as stack:
        files = {part.file: stack.enter_context(part.file.open("rb", buffering=0)) for part in parts}
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            if padded:
                buffer.zero_()
            for part in parts:
                low, high = max(top, part.row), min(bottom, part.row + part.rows)
                if low >= high:
                    continue
                asked = part.cut(low - part.row, high - low, low - top)
                descriptor = files[part.file].fileno()
                if part.columns == columns and part.dtype == dtype:
                    _read(descriptor, asked, data[(low - top) * row_bytes : (high - top) * row_bytes])
                    continue
                stored = torch.empty(asked.rows, asked.columns, dtype=asked.dtype)
                _read(descriptor, asked, memoryview(_bytes(stored)))
                buffer[low - top : high - top, part.column : part.column + part.columns] = stored
            yield data[: (bottom - top) * row_bytes]


def write_at(file: int, start: int, data: Iterable[memoryview | bytes]) -> int:
    """Write to a file descriptor from byte ``start`` on. Returns where that ended.

    Raises:
        OSError: for a full disk.
    """
    for piece in data:
        strip = memoryview(piece)
        while strip:
            written = os.pwrite(file, strip[:STRIP_BYTES], start)
            strip, start = strip[written:], start + written
    return start


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.flatten().view(torch.uint8).numpy()


def _read(file: int, part: Part, into: memoryview) -> None:
    start = part.start
    while into:
        read = os.preadv(file, [into], start)
        if not read:
            raise UserError("file", part.file, f"ends at byte {start:,}, within a tensor", "Fetch it again")
        into, start = into[read:], start + read

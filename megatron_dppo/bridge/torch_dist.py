"""Weights in Megatron's distributed format (``torch_dist``), written and read in one process without a process group.

A checkpoint holds, under a key for each parameter, blocks of the parameter as one tensor-parallel rank would have it;
layers and experts are leading dimensions. The layout that wrote a checkpoint decides how its blocks are cut, and any
layout loads them. Each block is an archive of ``torch.save``. A file holds many of them, and ``.metadata`` says where
each one lies.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import IO, cast
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dppo.bridge.checkpoint_folder import FORMAT, METADATA, Checksums, FileChecksum
from megatron_dppo.bridge.chunks import dtype_in, write_at
from megatron_dppo.bridge.mapping import Stored, entries
from megatron_dppo.models.shape import PolicyShape

COMMON = "common.pt"
"""Megatron's file of what is no tensor of a rank's."""
FILE_BYTES = 1 << 30
"""Most bytes in a file, unless a single parameter is larger."""
WRITTEN_BY = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of Megatron's ``metadata.json`` for such a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Which file each parameter goes to, and where in it: all of it that has a key of its own as a single block."""

    dtype: torch.dtype
    storage: Mapping[Stored, _StorageInfo]

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file, by its name."""
        return file_sizes(self.storage.values())

    def metadata(self) -> Metadata:
        """Content of ``.metadata``."""
        tensors: dict[str, TensorStorageMetadata] = {}
        indexed: dict[MetadataIndex, _StorageInfo] = {}
        for part, stored in self.storage.items():
            key, leading, shape = part.key, part.entry.leading, _block_shape(part)
            properties = TensorProperties(dtype=dtype_in(self.dtype, part.entry))
            whole = TensorStorageMetadata(properties, torch.Size(part.stored_shape), [])
            offsets = torch.Size([*leading, *(0 for _ in shape[len(leading) :])])
            tensors.setdefault(key, whole).chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
            indexed[MetadataIndex(key, offsets)] = stored
        return Metadata(dict(tensors), storage_data=indexed)


def plan_checkpoint(shape: PolicyShape, dtype: torch.dtype) -> CheckpointPlan:
    """Parameters in the order of the forward pass, as many to a file as fit."""
    storage: dict[Stored, _StorageInfo] = {}
    file, end = 0, 0
    for part in chain.from_iterable(entry.stored for entry in entries(shape)):
        length = _archive(_block_shape(part), dtype_in(dtype, part.entry)).length
        if end and end + length > FILE_BYTES:
            file, end = file + 1, 0
        storage[part] = _StorageInfo(f"__0_{file}.distcp", end, length)
        end += length
    return CheckpointPlan(dtype, storage)


def write_parameter(folder: Path, plan: CheckpointPlan, part: Stored, data: Iterable[memoryview]) -> None:
    """Write a parameter's bytes, in the plan's type, where the plan says. Threads may write side by side.

    Raises:
        ValueError: the bytes are too many or too few.
        OSError: the disk is full.
    """
    stored, archive = plan.storage[part], _archive(_block_shape(part), dtype_in(plan.dtype, part.entry))
    file = os.open(folder / stored.relative_path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        start = write_at(file, stored.offset, [archive.head])
        end = write_at(file, start, data)
        if end != start + archive.size:
            raise ValueError(f"{part.entry.megatron[0]} has {end - start} bytes instead of {archive.size}")
        write_at(file, end, [archive.tail])
    finally:
        os.close(file)


def write_metadata(folder: Path, plan: CheckpointPlan, checksums: Mapping[str, FileChecksum]) -> None:
    """Write the files that make a checkpoint of a folder with all parameters.

    Args:
        checksums: of the files with the parameters, by name.
    """
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
    (folder / COMMON).write_bytes(common.getbuffer())
    (folder / METADATA).write_bytes(pickle.dumps(plan.metadata()))
    (folder / FORMAT).write_text(json.dumps(WRITTEN_BY))
    Checksums(folder, checksums).write()


@dataclass(frozen=True, slots=True)
class _Archive:
    """A tensor as ``torch.save`` writes it, but for its data (and their CRC-32, which torch never looks at)."""

    head: bytes
    size: int
    """Bytes of the data."""
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.size + len(self.tail)


@lru_cache
def _archive(shape: tuple[int, ...], dtype: torch.dtype) -> _Archive:
    with tempfile.NamedTemporaryFile() as file:
        with torch.serialization.skip_data():  # leaves a hole in the file, and never touches the tensor's memory
            torch.save(torch.empty(shape, dtype=dtype), file)
        length = file.tell()
        start, size = locate_data(Path(file.name), 0, length)
        file.seek(0)
        head = file.read(start)
        file.seek(start + size)
        return _Archive(head, size, file.read())


def locate_data(file: Path, offset: int, length: int) -> tuple[int, int]:
    """Where in the file the data of a saved tensor begins, and how many bytes it has. The data is not read.

    ``torch.save`` writes a tensor as a zip archive with one record of data, uncompressed.

    Args:
        offset: the first byte of the archive in the file.
        length: of the archive, in bytes.
    """
    with open_archive(file, offset, length) as (first, mapped, archive):
        (record,) = (info for info in archive.infolist() if "/data/" in info.filename)
        if record.compress_type != ZIP_STORED:
            raise ValueError(f"a tensor in {file.name} is compressed")
        return first + data_offset(record, mapped), record.file_size


@contextmanager
def open_archive(file: Path, offset: int, length: int) -> Iterator[tuple[int, mmap, ZipFile]]:
    """An archive of ``torch.save``, ``length`` bytes of a file from byte ``offset`` on.

    Yields:
        The byte of the file at which the mapped memory begins, that memory, and the archive.
    """
    first = offset - offset % ALLOCATIONGRANULARITY
    with (
        file.open("rb") as stream,
        mmap(stream.fileno(), offset + length - first, offset=first, access=ACCESS_READ) as mapped,
        ZipFile(cast(IO[bytes], mapped)) as archive,
    ):
        yield first, mapped, archive


def data_offset(record: ZipInfo, mapped: mmap) -> int:
    """Where the data of a record begins in the mapped memory."""
    name, extra = struct.unpack_from("<HH", mapped, record.header_offset + 26)
    return record.header_offset + 30 + int(name) + int(extra)


def _block_shape(part: Stored) -> tuple[int, ...]:
    """The shape of a whole parameter as a block of its key's tensor."""
    return (1,) * len(part.entry.leading) + part.shape


def file_sizes(storage: Iterable[_StorageInfo]) -> dict[str, int]:
    """The bytes that each file must have at least, by its name."""
    sizes: dict[str, int] = {}
    for stored in storage:
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes

"""Weights in Megatron's distributed format (``torch_dist``), written and read in one process without a process group.

A checkpoint holds, under a key for each parameter, blocks of the parameter as one tensor-parallel rank would have it;
layers and experts are leading dimensions. Blocks are cut in whatever way the layout that wrote them did, and any layout
loads them. ``.metadata`` says where each block lies, as an archive of ``torch.save`` in a file of many.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from pickletools import genops
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

from megatron_dppo.bridge.checkpoint_folder import FORMAT, METADATA
from megatron_dppo.bridge.checksums import Block, Checksums, DamagedError
from megatron_dppo.bridge.mapping import Entry, entries
from megatron_dppo.bridge.strips import Part, write_at
from megatron_dppo.bridge.unpickling import read_metadata
from megatron_dppo.models.shape import PolicyShape

COMMON = "common.pt"
"""Megatron's file of what is no tensor of a rank's."""
FILE_BYTES = 1 << 30
"""Most bytes in a file, unless a single parameter is larger."""
_PLAIN = ("torch ", "torch._utils ", "collections ", "_codecs encode", "_io BytesIO")
"""Of what begins so, pickles of tensors and plain values ask for."""
WRITTEN_BY = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron's ``metadata.json`` says of such a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Which file each parameter goes to, and where in it: every one as a single block."""

    dtype: torch.dtype
    places: Mapping[Entry, _StorageInfo]

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file, by its name."""
        return _ends(self.places.values())

    def metadata(self) -> Metadata:
        """What ``.metadata`` holds."""
        tensors: dict[str, TensorStorageMetadata] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for entry, place in self.places.items():
            key, shape = entry.row.key, _block_shape(entry)
            whole = TensorStorageMetadata(TensorProperties(dtype=self.dtype), torch.Size(entry.stored_shape), [])
            offsets = torch.Size([*entry.leading, *(0 for _ in shape[len(entry.leading) :])])
            tensors.setdefault(key, whole).chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
            storage[MetadataIndex(key, offsets)] = place
        return Metadata(dict(tensors), storage_data=storage)


def plan_checkpoint(shape: PolicyShape, dtype: torch.dtype) -> CheckpointPlan:
    """Parameters in the order of the forward pass, as many to a file as fit."""
    places: dict[Entry, _StorageInfo] = {}
    file, end = 0, 0
    for entry in entries(shape):
        length = _archive(_block_shape(entry), dtype).length
        if end and end + length > FILE_BYTES:
            file, end = file + 1, 0
        places[entry] = _StorageInfo(f"__0_{file}.distcp", end, length)
        end += length
    return CheckpointPlan(dtype, places)


def write_parameter(folder: Path, plan: CheckpointPlan, entry: Entry, data: Iterable[memoryview]) -> int:
    """Write a parameter's bytes, in the plan's type, where the plan says. Threads may write side by side.

    Returns:
        The CRC-32 of all that stands there.

    Raises:
        ValueError: if they are too many or too few.
        OSError: for a full disk.
    """
    place, archive = plan.places[entry], _archive(_block_shape(entry), plan.dtype)
    crc = 0

    def counted(data: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
        nonlocal crc
        for strip in data:
            crc = zlib.crc32(strip, crc)
            yield strip

    file = os.open(folder / place.relative_path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        start = write_at(file, place.offset, counted([archive.head]))
        end = write_at(file, start, counted(data))
        if end != start + archive.size:
            raise ValueError(f"{entry.megatron[0]} has {end - start} bytes instead of {archive.size}")
        write_at(file, end, counted([archive.tail]))
    finally:
        os.close(file)
    return crc


def write_metadata(folder: Path, plan: CheckpointPlan, checksums: Mapping[Entry, int]) -> None:
    """Write what makes a checkpoint of a folder in which every parameter is.

    Args:
        checksums: what :func:`write_parameter` returned.
    """
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
    (folder / COMMON).write_bytes(common.getbuffer())
    (folder / METADATA).write_bytes(pickle.dumps(plan.metadata()))
    (folder / FORMAT).write_text(json.dumps(WRITTEN_BY))
    blocks: dict[str, list[Block]] = {}
    for entry, place in plan.places.items():  # in the order in which they lie
        blocks.setdefault(place.relative_path, []).append(Block(place.offset + place.length, checksums[entry]))
    Checksums(folder, blocks).write()


class StoredCheckpoint:
    """The tensors of a checkpoint on disk, by key.

    Args:
        folder: the directory of one iteration.

    Raises:
        DamagedError: if its index or its checksums cannot be read, or are not what was written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.checksums = Checksums.read(folder)
        """None for a checkpoint of an earlier version."""
        if self.checksums is not None:
            self.checksums.check_file(METADATA)
        try:
            metadata = read_metadata(folder)
        except Exception as error:  # whatever unpickling a damaged file raises
            raise DamagedError(f"{METADATA} cannot be read ({error})") from error
        self._places: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.files = _ends(self._places.values())
        """The bytes that each file must have, by its name."""

    def check(self, key: str, chunk: ChunkStorageMetadata) -> None:
        """Read a stored block of the tensor and hold it against its checksum, if there is one.

        Raises:
            DamagedError: if it differs.
        """
        if self.checksums is not None:
            place = self._places[MetadataIndex(key, chunk.offsets)]
            self.checksums.check_block(place.relative_path, place.offset)

    def part(self, key: str, chunk: ChunkStorageMetadata, leading: int) -> Part:
        """A stored block of the tensor, whose ``leading`` dimensions are one, as a part of what comes after them.

        Raises:
            DamagedError: if it differs from its checksum.
            ValueError: if it is not stored as Megatron does, or not at all.
        """
        self.check(key, chunk)
        place = self._places[MetadataIndex(key, chunk.offsets)]
        file, dtype = self._folder / place.relative_path, self.tensors[key].properties.dtype
        start, size = _only_record(file, place.offset, place.length)
        # Megatron writes contiguous tensors only, so the record is the block.
        if size != prod(chunk.sizes) * dtype.itemsize:
            raise ValueError(f"{size} bytes in {file.name} do not fit the shape {list(chunk.sizes)}")
        (row, column), (rows, columns) = (
            (*values, fill)[:2] for values, fill in ((chunk.offsets[leading:], 0), (chunk.sizes[leading:], 1))
        )
        return Part(file, start, dtype, rows, columns, row, column)


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
        start, size = _only_record(Path(file.name), 0, length)
        file.seek(0)
        head = file.read(start)
        file.seek(start + size)
        return _Archive(head, size, file.read())


def _only_record(file: Path, offset: int, length: int) -> tuple[int, int]:
    """Where in the file the data of a saved tensor begins, and its bytes. Data are not read.

    A tensor is saved as a zip archive with one record of data, uncompressed; here from byte ``offset`` of a file on.
    """
    with _opened(file, offset, length) as (first, mapped, archive):
        (record,) = (info for info in archive.infolist() if "/data/" in info.filename)
        if record.compress_type != ZIP_STORED:
            raise ValueError(f"a tensor in {file.name} is compressed")
        return first + _data_of(record, mapped), record.file_size


@contextmanager
def _opened(file: Path, offset: int, length: int) -> Iterator[tuple[int, mmap, ZipFile]]:
    """What ``torch.save`` wrote there, with the bytes that it is mapped to, which begin at a byte of the file."""
    first = offset - offset % ALLOCATIONGRANULARITY
    with (
        file.open("rb") as opened,
        mmap(opened.fileno(), offset + length - first, offset=first, access=ACCESS_READ) as mapped,
        ZipFile(cast(IO[bytes], mapped)) as archive,
    ):
        yield first, mapped, archive


def _data_of(record: ZipInfo, mapped: mmap) -> int:
    """Where in what is mapped the data of a record begins."""
    name, extra = struct.unpack_from("<HH", mapped, record.header_offset + 26)
    return record.header_offset + 30 + int(name) + int(extra)


def foreign_pickle(folder: Path) -> str | None:
    """The first part of a checkpoint that asks for what no tensor or plain value needs, or that is no archive."""
    for index, place in read_metadata(folder).storage_data.items():
        name = f"{index.fqn} in {place.relative_path}"
        try:
            with _opened(folder / place.relative_path, place.offset, place.length) as (_, mapped, archive):
                pickles = [record for record in archive.infolist() if record.filename.endswith(".pkl")]
                data = [mapped[(at := _data_of(record, mapped)) : at + record.file_size] for record in pickles]
            asked = [argument for one in data for code, argument, _ in genops(one) if "GLOBAL" in code.name]
        except Exception:  # whatever a damaged archive makes of it
            return name
        if not all(str(thing).startswith(_PLAIN) for thing in asked):
            return name
    return None


def _block_shape(entry: Entry) -> tuple[int, ...]:
    """Of a whole parameter as a block of its key's tensor."""
    return (1,) * len(entry.leading) + entry.shard_shape(1)


def _ends(places: Iterable[_StorageInfo]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends

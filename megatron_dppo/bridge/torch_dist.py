"""Write and read weights in Megatron's distributed format (``torch_dist``), in a single process
without a process group.

A checkpoint has a key per parameter. A key holds blocks, each in the form of a tensor-parallel
rank's shard; layers and experts are leading dimensions. The writer's layout decides the division
into blocks, and any layout loads the blocks. Each block is an archive of ``torch.save``. A file
holds many archives, and ``.metadata`` has their locations.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from megatron_dppo.bridge.chunks import TYPE_NAMES, TYPES, FilePlan, promote_dtype
from megatron_dppo.bridge.mapping import StoredRows, list_entries
from megatron_dppo.bridge.safetensors_files import Chunk
from megatron_dppo.models.shape import PolicyShape

COMMON = "common.pt"
"""Megatron's file of state other than ranks' tensors."""
FILE_BYTES = 1 << 30
"""Maximum bytes of a file, unless a single parameter is larger."""
WRITTEN_BY = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of Megatron's ``metadata.json`` for this format."""


def plan_checkpoint(shape: PolicyShape, dtype: torch.dtype) -> FilePlan[StoredRows]:
    """Plan full files: parameters in order of the forward pass, each a single block."""
    plan: FilePlan[StoredRows] = FilePlan(dtype)
    file = ""
    end = FILE_BYTES
    for part in chain.from_iterable(entry.stored_rows for entry in list_entries(shape)):
        kind = promote_dtype(dtype, part.entry)
        head, size, tail = _build_archive(part.block_shape, kind)
        length = len(head) + size + len(tail)
        if end and end + length > FILE_BYTES:
            file = f"__0_{len(plan.frames)}.distcp"
            end = 0
            plan.frames[file] = []
        start = end + len(head)
        plan.places[part] = Chunk(Path(file), start, TYPE_NAMES[kind], part.shape)
        plan.frames[file] += (end, head), (start + size, tail)
        end += length
    return plan


def write_metadata(
    folder: Path,
    plan: FilePlan[StoredRows],
    checksums: Mapping[str, FileChecksum],
) -> None:
    """Write the files that turn a folder with all parameters into a checkpoint."""
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
    (folder / COMMON).write_bytes(common.getbuffer())
    (folder / METADATA).write_bytes(pickle.dumps(_build_metadata(plan)))
    (folder / FORMAT).write_text(json.dumps(WRITTEN_BY))
    Checksums(folder, checksums).write()


def _build_metadata(plan: FilePlan[StoredRows]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    indexed: dict[MetadataIndex, _StorageInfo] = {}
    for part, place in plan.places.items():
        dtype = TYPES[place.dtype]
        shape = part.block_shape
        leading = part.entry.leading_indices
        head, size, tail = _build_archive(shape, dtype)
        whole = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(part.stored_shape), []
        )
        offsets = torch.Size([*leading, *(0 for _ in part.shape)])
        tensors.setdefault(part.key, whole).chunks.append(
            ChunkStorageMetadata(offsets, torch.Size(shape))
        )
        start = place.start - len(head)
        length = len(head) + size + len(tail)
        indexed[MetadataIndex(part.key, offsets)] = _StorageInfo(place.file.name, start, length)
    return Metadata(dict(tensors), storage_data=indexed)


@lru_cache
def _build_archive(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, int, bytes]:
    """Return the bytes before, the size, and the bytes after a tensor's data in ``torch.save``."""
    with tempfile.NamedTemporaryFile() as file:
        # skip_data leaves a hole in the file, and never touches the tensor's memory. The archive
        # then lacks the CRC-32 of the data, which torch never reads.
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), file)
        start, size = find_data(Path(file.name), 0, file.tell())
        file.seek(0)
        head = file.read(start)
        file.seek(start + size)
        return head, size, file.read()


def find_data(file: Path, offset: int, length: int) -> tuple[int, int]:
    """Return the start in the file, and the number of bytes, of a saved tensor's data, without
    reading the data.

    Args:
        offset: first byte of the archive in the file.
        length: bytes of the archive.
    """
    with open_archive(file, offset, length) as (first, mapped, archive):
        # ``torch.save`` writes a tensor as a zip archive with a single uncompressed data record.
        (record,) = (info for info in archive.infolist() if "/data/" in info.filename)
        if record.compress_type != ZIP_STORED:
            raise ValueError(f"a tensor in {file.name} is compressed")
        return first + data_offset(record, mapped), record.file_size


@contextmanager
def open_archive(file: Path, offset: int, length: int) -> Iterator[tuple[int, mmap, ZipFile]]:
    """Open an archive of ``torch.save``: ``length`` bytes of a file from byte ``offset``.

    Yields:
        First mapped byte of the file, mapped memory, and archive.
    """
    # mmap requires an aligned offset.
    first = offset - offset % ALLOCATIONGRANULARITY
    with (
        file.open("rb") as stream,
        mmap(stream.fileno(), offset + length - first, offset=first, access=ACCESS_READ) as mapped,
        ZipFile(cast(IO[bytes], mapped)) as archive,
    ):
        yield first, mapped, archive


def data_offset(record: ZipInfo, mapped: mmap) -> int:
    """Return the start of a record's data in the mapped memory."""
    # A zip record has a header of 30 bytes, then a name and an extra field of variable length.
    name, extra = struct.unpack_from("<HH", mapped, record.header_offset + 26)
    return record.header_offset + 30 + int(name) + int(extra)

"""Weights in Megatron's distributed format (``torch_dist``), written and read in one process
without a process group.

A checkpoint holds, under a key for each parameter, blocks of the parameter as one tensor-parallel
rank would have it; layers and experts are leading dimensions. The layout that wrote a checkpoint
decides how its blocks are cut, and any layout loads them. Each block is an archive of
``torch.save``. A file holds many of them, and ``.metadata`` says where each one lies.
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


def plan_checkpoint(shape: PolicyShape, dtype: torch.dtype) -> FilePlan[StoredRows]:
    """Parameters in the order of the forward pass, as many to a file as fit, each a single
    block."""
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
    folder: Path, plan: FilePlan[StoredRows], checksums: Mapping[str, FileChecksum]
) -> None:
    """Write the files that make a checkpoint of a folder with all parameters.

    Args:
        checksums: of the files with the parameters, by name.
    """
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
    (folder / COMMON).write_bytes(common.getbuffer())
    (folder / METADATA).write_bytes(pickle.dumps(_build_metadata(plan)))
    (folder / FORMAT).write_text(json.dumps(WRITTEN_BY))
    Checksums(folder, checksums).write()


def _build_metadata(plan: FilePlan[StoredRows]) -> Metadata:
    """Torch's index of a checkpoint."""
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
    """A tensor as ``torch.save`` writes it, but for its data (and their CRC-32, which torch never
    looks at).

    Returns:
        What is before the data, the number of their bytes, and what is behind them.
    """
    with tempfile.NamedTemporaryFile() as file:
        with (
            torch.serialization.skip_data()
        ):  # leaves a hole in the file, and never touches the tensor's memory
            torch.save(torch.empty(shape, dtype=dtype), file)
        start, size = find_data(Path(file.name), 0, file.tell())
        file.seek(0)
        head = file.read(start)
        file.seek(start + size)
        return head, size, file.read()


def find_data(file: Path, offset: int, length: int) -> tuple[int, int]:
    """Where in the file the data of a saved tensor begins, and how many bytes it has. The data is
    not read.

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

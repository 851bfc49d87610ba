"""The policy in a Megatron checkpoint: where each parameter lies. Nothing that the checkpoint asks for is run.

A pickle may call any function that can be imported, and a checkpoint may come from anyone. Torch's index of a
checkpoint, ``.metadata``, is made of a dozen plain classes, which are the only ones that are allowed here.
Everything else that is pickled is read by torch, which is told to accept tensors and plain values only.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_dppo.bridge.checkpoint_folder import METADATA, damaged, refusing_damage
from megatron_dppo.bridge.checksums import Checksums, DamagedError
from megatron_dppo.bridge.mapping import UNTIED_OUTPUT, Entry, Split, entries
from megatron_dppo.bridge.safetensors_files import nearest_name
from megatron_dppo.bridge.strips import Part, tensor_parts
from megatron_dppo.bridge.torch_dist import data_of, ends, only_record, opened
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

_CLASSES = (
    *(Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata, ChunkStorageMetadata),
    *(TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, _StoragePrefix),
    *(SavePlan, WriteItem, TensorWriteData, WriteItemType),  # Megatron keeps what each rank wrote
)
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(thing.__module__, thing.__qualname__): thing for thing in (*_CLASSES, torch.Size, OrderedDict)},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(module, "PosixPath"): lambda *parts: "/".join(parts) for module in ("pathlib", "pathlib._local")},
}
"""Of these a pickle may ask for, and of torch's types. A path stays text: nothing depends on where it was written."""

_ONLY, _ANYTHING = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs; that was not run")


@contextmanager
def _classes_unchanged() -> Iterator[None]:
    """A pickle can set attributes of the classes themselves, which the whole process would meet."""
    before = {of: dict(vars(of)) for of in _CLASSES}
    try:
        yield
    finally:
        now = {of: dict(vars(of)) for of in _CLASSES}
        changed = [(of, name) for of in _CLASSES for name in now[of] if before[of].get(name) is not now[of][name]]
        for of, name in changed:
            setattr(of, name, before[of][name]) if name in before[of] else delattr(of, name)
    if changed:
        raise pickle.UnpicklingError(f"it changes {changed[0][0].__name__}, as no checkpoint does")


def read_metadata(folder: Path) -> Metadata:
    """Torch's index of the checkpoint in ``folder``.

    Raises:
        Exception: whatever a damaged pickle makes of it; UnpicklingError if it asks for anything that no index needs.
        ValueError: if it is no index of a checkpoint whose files lie in this folder.
    """
    with (folder / METADATA).open("rb") as file, _classes_unchanged():
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it is no index of a checkpoint")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo) or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names {place}, which is no file of this folder")
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"it names {place}, which is no part of a file")
    return metadata


@contextmanager
def plain_values_only() -> Iterator[None]:
    """Within it ``torch.load`` reads tensors and plain values, and fails for anything else, whatever it is told.

    Torch's own reader of checkpoints tells it to read anything.
    """
    before = {name: os.environ.pop(name, None) for name in (_ONLY, _ANYTHING)}
    os.environ[_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


_PLAIN = ("torch ", "torch._utils ", "collections ", "_codecs encode", "_io BytesIO")
"""Of what begins so, pickles of tensors and plain values ask for."""


def foreign_pickle(folder: Path) -> str | None:
    """The first part of a checkpoint that asks for what no tensor or plain value needs, or that is no archive."""
    for index, place in read_metadata(folder).storage_data.items():
        name = f"{index.fqn} in {place.relative_path}"
        try:
            with opened(folder / place.relative_path, place.offset, place.length) as (_, mapped, archive):
                pickles = [record for record in archive.infolist() if record.filename.endswith(".pkl")]
                data = [mapped[(at := data_of(record, mapped)) : at + record.file_size] for record in pickles]
            asked = [argument for one in data for code, argument, _ in genops(one) if "GLOBAL" in code.name]
        except Exception:  # whatever a damaged archive makes of it
            return name
        if not all(str(thing).startswith(_PLAIN) for thing in asked):
            return name
    return None


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
        self.files = ends(self._places.values())
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
        start, size = only_record(file, place.offset, place.length)
        # Megatron writes contiguous tensors only, so the record is the block.
        if size != prod(chunk.sizes) * dtype.itemsize:
            raise ValueError(f"{size} bytes in {file.name} do not fit the shape {list(chunk.sizes)}")
        (row, column), (rows, columns) = (
            (*values, fill)[:2] for values, fill in ((chunk.offsets[leading:], 0), (chunk.sizes[leading:], 1))
        )
        return Part(file, start, dtype, rows, columns, row, column)


Chunks = Sequence[ChunkStorageMetadata]


class StoredPolicy:
    """The weights of a checkpoint, whatever layout wrote it. Checked when built; nothing else of it is read.

    Args:
        folder: the directory of one iteration, ``metadata.json`` in it.
        shape: of the policy that it should hold.

    Raises:
        UserError: naming ``setting``, if it is no such checkpoint, or a file or parameter is missing, truncated,
            unexpected, or of another shape.
    """

    def __init__(self, folder: Path, shape: PolicyShape, setting: str) -> None:
        self._folder, self._setting = folder, setting
        if not (folder / METADATA).is_file():
            problem = f"has no {METADATA}, as checkpoints in Megatron's torch_dist format do"
            raise damaged(folder, setting, problem)
        with refusing_damage(folder, setting):
            self._checkpoint = StoredCheckpoint(folder)
        self._check_files()
        self.parameters: Mapping[Entry, Chunks] = self._find(shape)

    @property
    def checked(self) -> bool:
        """Whether what is read of it is held against checksums, which an earlier version did not write."""
        return self._checkpoint.checksums is not None

    def check(self, *, share: int = 0, of: int = 1) -> None:
        """Read weights and hold them against their checksums.

        Args:
            share: take every ``of``-th block, from this one on.

        Raises:
            UserError: naming the first file that is damaged.
        """
        blocks = [(entry.row.key, chunk) for entry, chunks in self.parameters.items() for chunk in chunks]
        with refusing_damage(self._folder, self._setting):
            for key, chunk in blocks[share::of]:
                self._checkpoint.check(key, chunk)

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every stored weight."""
        dtypes = {self._checkpoint.tensors[entry.row.key].properties.dtype for entry in self.parameters}
        return reduce(torch.promote_types, dtypes)

    def tensors(self, entry: Entry) -> dict[str, list[Part]]:
        """What the Hugging Face tensors of a parameter are put together from, by name.

        Raises:
            UserError: if a file is damaged there.
        """
        key, leading = entry.row.key, len(entry.leading)
        try:
            chunks = [self._checkpoint.part(key, chunk, leading) for chunk in self.parameters[entry]]
        except DamagedError as error:
            raise damaged(self._folder, self._setting, str(error)) from error
        except Exception as error:  # whatever reading a damaged archive raises
            raise self._unreadable(f"{key} cannot be read ({error})", "Fetch the checkpoint again") from error
        return tensor_parts(entry, chunks)

    def _check_files(self) -> None:
        for name, end in self._checkpoint.files.items():
            file = self._folder / name
            if not file.is_file():
                raise damaged(self._folder, self._setting, f"{name} is missing")
            if file.stat().st_size < end:
                problem = f"{name} is truncated: {file.stat().st_size:,} bytes of at least {end:,}"
                raise damaged(self._folder, self._setting, problem)

    def _find(self, shape: PolicyShape) -> dict[Entry, Chunks]:
        tensors = self._checkpoint.tensors
        wanted = list(entries(shape))
        keys = {entry.row.key: len(entry.leading) for entry in wanted}
        roots = {key.partition(".")[0] for key in (*keys, UNTIED_OUTPUT.key)}  # beside these are an optimizer's
        unexpected = [key for key in tensors if key.partition(".")[0] in roots and key not in keys]
        if missing := [key for key in keys if key not in tensors]:
            raise self._other_policy(f"{missing[0]} is missing{nearest_name(missing[0], unexpected)}")
        if unexpected:
            near = nearest_name(unexpected[0], keys)
            raise self._other_policy(f"{unexpected[0]} is no part of a {shape.architecture}{near}")
        places: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = {}
        for key, leading in keys.items():
            for chunk in tensors[key].chunks:
                places.setdefault((key, tuple(chunk.offsets[:leading])), []).append(chunk)
        found: dict[Entry, Chunks] = {entry: places.get((entry.row.key, entry.leading), []) for entry in wanted}
        for entry, chunks in found.items():
            self._check_parameter(entry, tuple(tensors[entry.row.key].size), chunks)
        return found

    def _check_parameter(self, entry: Entry, stored: tuple[int, ...], chunks: Chunks) -> None:
        expected = list(entry.stored_shape)
        if entry.row.split is Split.VOCABULARY and stored[:1] >= (entry.shape.vocab_size,):
            expected[0] = stored[0]  # the padding depends on who wrote it
        if stored != tuple(expected):
            raise self._other_policy(f"{entry.row.key} has shape {list(stored)}, but config.json makes it {expected}")
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(expected[len(entry.leading) :]):
            place = f" of layer {entry.layer}" if entry.leading else ""
            raise self._unreadable(f"{entry.row.key}{place} is there in part only", "Fetch the checkpoint again")

    def _other_policy(self, problem: str) -> UserError:
        return self._unreadable(problem, "Give the config.json of the policy that it was written of")

    def _unreadable(self, problem: str, remedy: str) -> UserError:
        return UserError(self._setting, self._folder, problem, remedy)

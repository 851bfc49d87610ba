"""The policy in a Megatron checkpoint: where each parameter lies. Nothing that the checkpoint asks
for is run.

A pickle may call any function that can be imported, and a checkpoint may come from anyone. Torch's
index of a checkpoint, ``.metadata``, is made of a dozen plain classes, which are the only ones that
are allowed here. Everything else that is pickled is read by torch, which is told to accept tensors
and plain values only.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
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

from megatron_dppo.bridge.checkpoint_folder import (
    METADATA,
    Checksums,
    CorruptCheckpointError,
    build_corruption_error,
    convert_corruption_errors,
)
from megatron_dppo.bridge.chunks import TYPE_NAMES, list_tensor_chunks, promote_dtype, read_rows
from megatron_dppo.bridge.mapping import (
    UNTIED_OUTPUT,
    StoredRows,
    describe_mismatch,
    list_adapter_entries,
    list_entries,
)
from megatron_dppo.bridge.safetensors_files import Chunk
from megatron_dppo.bridge.torch_dist import data_offset, find_data, open_archive
from megatron_dppo.config import LoraConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.family import Split
from megatron_dppo.models.shape import PolicyShape

_CLASSES = (
    *(Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata, ChunkStorageMetadata),
    *(TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, _StoragePrefix),
    *(SavePlan, WriteItem, TensorWriteData, WriteItemType),  # Megatron keeps what each rank wrote
)
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (thing.__module__, thing.__qualname__): thing
        for thing in (*_CLASSES, torch.Size, OrderedDict)
    },
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        (module, "PosixPath"): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")
    },
}
"""Globals that a pickle may load, besides torch's types. A path stays text: nothing depends on
where it was written."""

_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_ANYTHING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no checkpoint needs; that was not run"
        )


@contextmanager
def _restore_classes() -> Iterator[None]:
    """A pickle can set attributes of the classes themselves, which the whole process would meet."""
    before = {of: dict(vars(of)) for of in _CLASSES}
    try:
        yield
    finally:
        now = {of: dict(vars(of)) for of in _CLASSES}
        changed = [
            (of, name)
            for of in _CLASSES
            for name in now[of]
            if before[of].get(name) is not now[of][name]
        ]
        for of, name in changed:
            setattr(of, name, before[of][name]) if name in before[of] else delattr(of, name)
    if changed:
        raise pickle.UnpicklingError(f"it changes {changed[0][0].__name__}, as no checkpoint does")


def read_metadata(folder: Path) -> Metadata:
    """Torch's index of the checkpoint in ``folder``.

    Raises:
        Exception: whatever a damaged pickle makes of it; UnpicklingError if it asks for anything
            that no index needs.
        ValueError: if it is no index of a checkpoint whose files lie in this folder.
    """
    with (folder / METADATA).open("rb") as file, _restore_classes():
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it is no index of a checkpoint")
    for stored in metadata.storage_data.values():
        if (
            not isinstance(stored, _StorageInfo)
            or Path(stored.relative_path).name != stored.relative_path
        ):
            raise ValueError(f"it names {stored}, which is no file of this folder")
        if stored.offset < 0 or stored.length < 0:
            raise ValueError(f"it names {stored}, which is no part of a file")
    return metadata


@contextmanager
def disable_unsafe_pickles() -> Iterator[None]:
    """Within this block ``torch.load`` fails for whatever is no tensor or plain value.

    It does so with ``weights_only=False`` too, which is what torch's own reader of checkpoints asks
    for.
    """
    before = {name: os.environ.pop(name, None) for name in (_ONLY, _ANYTHING)}
    os.environ[_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


_PLAIN = ("torch ", "torch._utils ", "collections ", "_codecs encode", "_io BytesIO")
"""Prefixes of the globals in pickles of tensors and plain values."""


def find_unsafe_pickle(folder: Path) -> str | None:
    """The first stored value whose pickle asks for what no tensor or plain value needs, or that is
    no archive."""
    for index, stored in read_metadata(folder).storage_data.items():
        name = f"{index.fqn} in {stored.relative_path}"
        try:
            with open_archive(folder / stored.relative_path, stored.offset, stored.length) as (
                _,
                mapped,
                archive,
            ):
                pickles = [
                    record for record in archive.infolist() if record.filename.endswith(".pkl")
                ]
                data = [
                    mapped[(at := data_offset(record, mapped)) : at + record.file_size]
                    for record in pickles
                ]
            asked = [
                argument
                for one in data
                for code, argument, _ in genops(one)
                if "GLOBAL" in code.name
            ]
        except Exception:  # whatever a damaged archive makes of it
            return name
        if not all(str(thing).startswith(_PLAIN) for thing in asked):
            return name
    return None


class StoredPolicy:
    """The weights of a checkpoint, whatever layout wrote it. Checked when built; nothing else of it
    is read.

    Args:
        folder: the directory of one iteration, ``metadata.json`` in it.
        shape: of the policy that it should hold.
        lora: whose adapters it should hold instead of the policy's own weights.

    Raises:
        UserError: naming ``setting``, if it is no such checkpoint, or a file or parameter is
            missing, truncated, unexpected, or of another shape.
    """

    def __init__(
        self, folder: Path, shape: PolicyShape, setting: str, lora: LoraConfig | None = None
    ) -> None:
        self._folder = folder
        self._setting = setting
        if not (folder / METADATA).is_file():
            raise build_corruption_error(
                folder,
                setting,
                f"has no {METADATA}, as checkpoints in Megatron's torch_dist format do",
            )
        with convert_corruption_errors(folder, setting):
            self.checksums = Checksums.read(folder)
            """None for a checkpoint without checksums that this version can check."""
            if self.checksums is not None:
                self.checksums.check([METADATA])
            try:
                metadata = read_metadata(folder)
            except Exception as error:  # whatever unpickling a damaged file raises
                raise CorruptCheckpointError(f"{METADATA} cannot be read ({error})") from error
            self._storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
            self._check_files()
        stored = metadata.state_dict_metadata
        self._tensors = {
            key: found for key, found in stored.items() if isinstance(found, TensorStorageMetadata)
        }
        wanted = list(list_adapter_entries(shape, lora) if lora else list_entries(shape))
        self._blocks: dict[StoredRows, list[ChunkStorageMetadata]] = {}
        self._find_blocks([part for entry in wanted for part in entry.stored_rows], shape)
        self.entries = {name: entry for entry in wanted for name in entry.tensors}
        """The parameter that each Hugging Face tensor is a part of."""
        # Tensors of a parameter are asked for one after another.
        self._located = lru_cache(maxsize=64)(self._find_chunks)

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every stored weight, but for those that are fp32 in every policy."""
        kept = {part.key for part in self._blocks if not part.entry.mapping.exact}
        return reduce(torch.promote_types, (self._tensors[key].properties.dtype for key in kept))

    def check(self, *, share: int = 0, num_shares: int = 1, all_files: bool = False) -> None:
        """Compare the files that hold the weights with their checksums.

        Args:
            share: take every ``num_shares``-th file, from this one on.
            all_files: file of the checkpoint, whatever it holds.

        Raises:
            UserError: naming the first file that is damaged.
        """
        if self.checksums is None:
            return
        places = (
            self._get_storage(part, block)
            for part, blocks in self._blocks.items()
            for block in blocks
        )
        files = {place.relative_path for place in places}
        with convert_corruption_errors(self._folder, self._setting):
            self.checksums.check(
                None if all_files else sorted(files), share=share, num_shares=num_shares
            )

    def read_tensor_rows(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """The bytes of a Hugging Face tensor in a policy of type ``dtype``, as :func:`read_rows`
        gives them.

        Raises:
            UserError: if a file cannot be read there.
        """
        entry = self.entries[name]
        return read_rows(entry.tensors[name], self.list_chunks(name), promote_dtype(dtype, entry))

    def list_chunks(self, name: str) -> list[Chunk]:
        """Chunks of a Hugging Face tensor.

        Raises:
            UserError: if a file cannot be read there.
        """
        entry = self.entries[name]
        with convert_corruption_errors(self._folder, self._setting):
            try:
                blocks = {part: self._located(part) for part in entry.stored_rows}
            except Exception as error:  # whatever reading a damaged archive raises
                raise CorruptCheckpointError(f"{entry.key} cannot be read ({error})") from error
        return [
            chunk
            for part, chunks in blocks.items()
            for chunk in list_tensor_chunks(name, part, chunks)
        ]

    def _find_chunks(self, part: StoredRows) -> list[Chunk]:
        return [self._build_chunk(part, block) for block in self._blocks[part]]

    def _get_storage(self, part: StoredRows, block: ChunkStorageMetadata) -> _StorageInfo:
        return self._storage[MetadataIndex(part.key, block.offsets)]

    def _build_chunk(self, part: StoredRows, block: ChunkStorageMetadata) -> Chunk:
        """A block, whose leading dimensions are one, as a chunk of what comes after these.

        Raises:
            ValueError: if it is not stored as Megatron does, or not at all.
        """
        place = self._get_storage(part, block)
        leading = len(part.entry.leading_indices)
        file = self._folder / place.relative_path
        dtype = self._tensors[part.key].properties.dtype
        start, size = find_data(file, place.offset, place.length)
        # Megatron writes contiguous tensors only, so the record is the block.
        if size != prod(block.sizes) * dtype.itemsize:
            raise ValueError(
                f"{size} bytes in {file.name} do not fit the shape {list(block.sizes)}"
            )
        row, column = (*block.offsets[leading:], 0)[:2]
        return Chunk(file, start, TYPE_NAMES[dtype], (*block.sizes[leading:],), row, column)

    def _check_files(self) -> None:
        sizes: dict[str, int] = defaultdict(int)
        for place in self._storage.values():
            sizes[place.relative_path] = max(
                sizes[place.relative_path], place.offset + place.length
            )
        for name, size in sizes.items():
            file = self._folder / name
            if not file.is_file():
                raise CorruptCheckpointError(f"{name} is missing")
            if (found := file.stat().st_size) < size:
                raise CorruptCheckpointError(
                    f"{name} is truncated: {found:,} bytes of at least {size:,}"
                )

    def _find_blocks(self, parts: Sequence[StoredRows], shape: PolicyShape) -> None:
        if not parts[0].entry.mapping.lora_rank and any(".lora." in key for key in self._tensors):
            problem = (
                "holds the adapters of a run with model.lora, and not the policy that they "
                "belong to"
            )
            remedy = (
                "Give the run's export, RUN/hf, or what `megatron-dppo export RUN --merge` makes"
            )
            raise UserError(self._setting, self._folder, problem, remedy)
        expected = {part.key: part.stored_shape for part in parts}
        roots = {
            key.partition(".")[0] for key in (*expected, UNTIED_OUTPUT.key)
        }  # beside these are an optimizer's
        found = {
            key: (*each.size,)
            for key, each in self._tensors.items()
            if key.partition(".")[0] in roots
        }
        for key in {part.key for part in parts if part.entry.mapping.split is Split.VOCABULARY}:
            if found.get(key, ())[:1] >= (shape.vocab_size,):
                expected[key] = (
                    found[key][0],
                    *expected[key][1:],
                )  # the padding depends on who wrote it
        if problem := describe_mismatch(shape, expected, found):
            remedy = "Give the config.json of the policy that it was written of"
            raise UserError(self._setting, self._folder, problem, remedy)
        leading = {part.key: len(part.entry.leading_indices) for part in parts}
        blocks = defaultdict(list)
        for key, count in leading.items():
            for block in self._tensors[key].chunks:
                blocks[key, (*block.offsets[:count],)].append(block)
        for part in parts:
            held = self._blocks[part] = blocks[part.key, part.entry.leading_indices]
            if sum(prod(block.sizes) for block in held) != prod(
                expected[part.key][leading[part.key] :]
            ):
                layer = f" of layer {part.entry.layer}" if part.entry.leading_indices else ""
                raise build_corruption_error(
                    self._folder, self._setting, f"{part.key}{layer} is there in part only"
                )

"""The policy in a Megatron checkpoint: location of each parameter. No code from it is run.

A pickle may call any importable function, and a checkpoint may come from anyone. Torch's index of a
checkpoint, ``.metadata``, consists of a dozen plain classes, and only these are allowed here. Torch
reads all other pickles, restricted to tensors and plain values.
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
    # Megatron stores the plan of each rank.
    *(SavePlan, WriteItem, TensorWriteData, WriteItemType),
)
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (thing.__module__, thing.__qualname__): thing
        for thing in (*_CLASSES, torch.Size, OrderedDict)
    },
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # A path is loaded as text, because no result depends on the place of writing.
    **{
        (module, "PosixPath"): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")
    },
}
"""Globals that a pickle may load, in addition to torch's types."""

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
    """Restore the classes of the index and raise, if a pickle set attributes of the classes."""
    before = {cls: dict(vars(cls)) for cls in _CLASSES}
    try:
        yield
    finally:
        now = {cls: dict(vars(cls)) for cls in _CLASSES}
        changed = [
            (cls, name)
            for cls in _CLASSES
            for name in now[cls]
            if before[cls].get(name) is not now[cls][name]
        ]
        # Changed attributes would affect the whole process.
        for cls, name in changed:
            setattr(cls, name, before[cls][name]) if name in before[cls] else delattr(cls, name)
    if changed:
        raise pickle.UnpicklingError(f"it changes {changed[0][0].__name__}, as no checkpoint does")


def read_metadata(folder: Path) -> Metadata:
    """Return torch's index of the checkpoint in ``folder``.

    Raises:
        Exception: any exception from a damaged pickle; UnpicklingError for a global that no index
            needs.
        ValueError: if the file is no index of a checkpoint whose files are in this folder.
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
    """Make ``torch.load`` fail within the block for objects other than tensors and plain values."""
    # Also with ``weights_only=False``, the argument of torch's own reader of checkpoints.
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
    """Return the first stored value that is no archive, or needs more than tensors and plain
    values."""
    for index, stored in read_metadata(folder).storage_data.items():
        name = f"{index.fqn} in {stored.relative_path}"
        try:
            file = folder / stored.relative_path
            with open_archive(file, stored.offset, stored.length) as (_, mapped, archive):
                pickles = [
                    record for record in archive.infolist() if record.filename.endswith(".pkl")
                ]
                data = []
                for record in pickles:
                    start = data_offset(record, mapped)
                    data.append(mapped[start : start + record.file_size])
            # genops only parses the opcodes, and runs no pickle.
            requested = [
                argument
                for content in data
                for code, argument, _ in genops(content)
                if "GLOBAL" in code.name
            ]
        # A damaged archive can raise any exception.
        except Exception:
            return name
        if not all(str(thing).startswith(_PLAIN) for thing in requested):
            return name
    return None


class StoredPolicy:
    """The weights of a checkpoint, written by any layout, checked on construction.

    Args:
        folder: directory of an iteration, with ``metadata.json``.
        shape: expected shape of the policy.
        setting: setting that errors name.
        lora: adapters to expect instead of the policy's own weights.

    Raises:
        UserError: if the folder is no checkpoint of this kind, or a file or parameter is missing,
            truncated, unexpected, or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        shape: PolicyShape,
        setting: str,
        lora: LoraConfig | None = None,
    ) -> None:
        self._folder = folder
        self._setting = setting
        if not (folder / METADATA).is_file():
            problem = f"has no {METADATA}, as checkpoints in Megatron's torch_dist format do"
            raise build_corruption_error(folder, setting, problem)
        with convert_corruption_errors(folder, setting):
            self.checksums = Checksums.read(folder)
            """``None``: no checksums that this version can check."""
            if self.checksums is not None:
                self.checksums.check([METADATA])
            try:
                metadata = read_metadata(folder)
            # Unpickling a damaged file can raise any exception.
            except Exception as error:
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
        """Parameter of each Hugging Face tensor, by name."""
        # The cache is small, because the tensors of a parameter are read in succession.
        self._find_chunks_cached = lru_cache(maxsize=64)(self._find_chunks)

    @property
    def dtype(self) -> torch.dtype:
        """Common type of all weights, except weights that are fp32 in every policy."""
        kept = {part.key for part in self._blocks if not part.entry.mapping.exact}
        return reduce(torch.promote_types, (self._tensors[key].properties.dtype for key in kept))

    def check(self, *, share: int = 0, num_shares: int = 1, all_files: bool = False) -> None:
        """Compare the files of the weights with the checksums.

        Args:
            share: index of the first checked file; every ``num_shares``-th file from there is
                checked.
            all_files: check every file of the checkpoint, not only files with weights.

        Raises:
            UserError: naming the first damaged file.
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
        """Yield the bytes of a Hugging Face tensor in a policy of type ``dtype``, like
        :func:`read_rows`.

        Raises:
            UserError: if a file cannot be read there.
        """
        entry = self.entries[name]
        return read_rows(entry.tensors[name], self.list_chunks(name), promote_dtype(dtype, entry))

    def list_chunks(self, name: str) -> list[Chunk]:
        """Return the chunks of a Hugging Face tensor.

        Raises:
            UserError: if a file cannot be read there.
        """
        entry = self.entries[name]
        with convert_corruption_errors(self._folder, self._setting):
            try:
                blocks = {part: self._find_chunks_cached(part) for part in entry.stored_rows}
            # Reading a damaged archive can raise any exception.
            except Exception as error:
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
        """Return a block as a chunk.

        Raises:
            ValueError: if the block is missing, or not stored in Megatron's way.
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
        # Leading dimensions have size 1 in a block.
        row, column = (*block.offsets[leading:], 0)[:2]
        return Chunk(file, start, TYPE_NAMES[dtype], (*block.sizes[leading:],), row, column)

    def _check_files(self) -> None:
        sizes: dict[str, int] = defaultdict(int)
        for place in self._storage.values():
            end = place.offset + place.length
            sizes[place.relative_path] = max(sizes[place.relative_path], end)
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
        # Compare only keys of the policy, because a checkpoint may also have an optimizer's keys.
        roots = {key.partition(".")[0] for key in (*expected, UNTIED_OUTPUT.key)}
        found = {
            key: (*each.size,)
            for key, each in self._tensors.items()
            if key.partition(".")[0] in roots
        }
        for key in {part.key for part in parts if part.entry.mapping.split is Split.VOCABULARY}:
            # Accept any padding of the vocabulary, because the padding depends on the writer.
            if found.get(key, ())[:1] >= (shape.vocab_size,):
                expected[key] = (found[key][0], *expected[key][1:])
        if problem := describe_mismatch(shape, expected, found):
            remedy = "Give the config.json of the policy in the checkpoint"
            raise UserError(self._setting, self._folder, problem, remedy)
        leading = {part.key: len(part.entry.leading_indices) for part in parts}
        blocks = defaultdict(list)
        for key, count in leading.items():
            for block in self._tensors[key].chunks:
                blocks[key, (*block.offsets[:count],)].append(block)
        for part in parts:
            held = self._blocks[part] = blocks[part.key, part.entry.leading_indices]
            # The index lists every written block: with a smaller sum a rank's part is missing.
            stored_elements = sum(prod(block.sizes) for block in held)
            if stored_elements != prod(expected[part.key][leading[part.key] :]):
                layer = f" of layer {part.entry.layer}" if part.entry.leading_indices else ""
                raise build_corruption_error(
                    self._folder, self._setting, f"{part.key}{layer} is there in part only"
                )

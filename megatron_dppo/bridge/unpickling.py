"""What a checkpoint holds in pickled form, read without running what it asks for.

A pickle may call any function that can be imported, and a checkpoint may come from anyone. Torch's index of one,
``.metadata``, is made of a dozen plain classes; of all else that is pickled torch itself reads tensors and plain values
only, where it is told to.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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

from megatron_dppo.bridge.checkpoint_folder import METADATA

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

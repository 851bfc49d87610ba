"""Pinned host memory, which the rehearsal only marks."""

from __future__ import annotations

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_dppo.rehearse.booking import Book, place

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_registered: dict[int, int] = {}


def mark_pinned(tensor: torch.Tensor, book: Book) -> torch.Tensor:
    """Mark the storage of a host tensor and book its memory, which torch rounds up; return the tensor."""
    storage = tensor.untyped_storage()
    book.pinned[place()] += 1 << max(storage.nbytes() - 1, 0).bit_length()
    key = storage._cdata
    _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return tensor


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """Whether the host memory is pinned, by torch or by ``cudaHostRegister``."""
    host = tensor.__dict__.get("_moved_to_host", tensor)
    if isinstance(host, FakeTensor) or host.device.type != "cpu":
        return False
    storage = host.untyped_storage()
    begin = storage.data_ptr()
    return storage._cdata in _pinned or any(at <= begin < at + size for at, size in _registered.items())


class CudaRuntime:
    """The calls of ``torch.cuda.cudart()`` that the trainer makes."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        _registered[address] = size
        self._book.pinned[place()] += size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        _registered.pop(address, None)
        return 0

"""The book of a rehearsal: kernels, memory, pinned host memory, collectives and host waits."""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch
from torch._subclasses.fake_tensor import FakeTensor

OUR_CODE = ("megatron_dppo/", "megatron/core/", "transformer_engine/")
"""Path parts of code that a place names. Frames of torch and of the rehearsal are skipped."""

COMPREHENSION = re.compile(r"\.<locals>\.<(list|set|dict)comp>")
"""Since Python 3.12 a comprehension is no function of its own."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel launch."""

    name: str
    flops: float
    bytes: float
    """Bytes read and written."""
    dtype: torch.dtype
    """Type of the operands; for products the type of the matrix units' input."""
    output: torch.dtype
    place: str
    """Innermost function of the trainer, Megatron or Transformer Engine that launched the
    kernel."""
    product: tuple[int, int] | None
    """Rows and columns of a matrix product."""


@dataclass(slots=True)
class Allocation:
    """Memory of one storage on the device."""

    bytes: int
    place: str
    alive: weakref.ref[torch.UntypedStorage]


@dataclass
class Book:
    """Counts since the last call of :meth:`clear`; allocations since the start."""

    kernels: list[KernelLaunch] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """Host waits for the device by reason and place."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collectives on device tensors by operator and number of ranks."""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the full tensor (all ranks' parts) by operator and number of ranks."""
    pinned: Counter[str] = field(default_factory=Counter)
    """Bytes of host memory that were pinned by place, as torch or CUDA takes them. :meth:`clear`
    leaves them."""
    allocations: dict[int, Allocation] = field(default_factory=dict)
    bytes_now: int = 0
    bytes_peak: int = 0
    at_peak: dict[int, Allocation] = field(default_factory=dict)
    """Allocations alive at 99% of the peak or more."""
    bytes_noted: int = 0
    """Memory in use when ``at_peak`` was noted."""
    muted: int = 0
    """Above 0 inside of a fused function, which books one kernel and keeps no memory of its own."""

    def clear(self) -> None:
        """Forget the counts. The peak restarts from the memory in use."""
        for counts in (self.waits, self.collectives, self.collective_bytes):
            counts.clear()
        self.kernels.clear()
        self.bytes_peak, self.bytes_noted = self.bytes_now, 0

    def launch(
        self, name: str, flops: float, size: float, dtype: torch.dtype, output: torch.dtype,
        product: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Book a kernel."""
        if not self.muted:
            self.kernels.append(KernelLaunch(name, flops, size, dtype, output, place(), product))

    def wait(self, reason: str) -> None:
        """Book a host wait."""
        self.waits[f"{reason} in {place()}"] += 1

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Book the memory of a storage until the storage is freed. A storage in the book is not
        booked twice."""
        key, size = storage._cdata, storage.nbytes()
        if self.muted or key in self.allocations or not size:
            return
        alive = weakref.ref(storage, lambda _: self._free(key))
        self.allocations[key] = Allocation(size, place(), alive)
        self._grow(size)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Follow ``storage.resize_``."""
        if (found := self.allocations.get(storage._cdata)) is not None:
            self._grow(size - found.bytes)
            found.bytes = size

    def _grow(self, size: int) -> None:
        self.bytes_now += size
        if self.bytes_now > self.bytes_peak:
            self.bytes_peak = self.bytes_now
            if self.bytes_now > 1.01 * self.bytes_noted:
                self.bytes_noted, self.at_peak = self.bytes_now, dict(self.allocations)

    def _free(self, key: int) -> None:
        if (found := self.allocations.pop(key, None)) is not None:
            self.bytes_now -= found.bytes


def place() -> str:
    """``file:function`` of the innermost frame of :data:`OUR_CODE`, without line numbers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (name := _name_of(frame.f_code)) is not None:
            return name
        frame = frame.f_back
    return "elsewhere"


@functools.cache
def _name_of(code: CodeType) -> str | None:
    path = code.co_filename
    start = max(path.rfind(part) for part in OUR_CODE)
    if start < 0 or "tests/rehearsal/" in path:
        return None
    function = COMPREHENSION.sub("", code.co_qualname)
    return f"{path[start:]}:{function}"


def tensor_bytes(*tensors: object) -> int:
    """Bytes of the distinct tensors among the arguments."""
    distinct = {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_registered: dict[int, int] = {}


def mark_pinned(tensor: torch.Tensor, book: Book) -> torch.Tensor:
    """Mark the storage of a host tensor and book its memory, which torch rounds up; return the
    tensor."""
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
    return storage._cdata in _pinned or any(
        at <= begin < at + size for at, size in _registered.items()
    )


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

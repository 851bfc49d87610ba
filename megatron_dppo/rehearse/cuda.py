"""Answers of ``torch.cuda`` on the rehearsal's device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_dppo.rehearse.booking import Book
from megatron_dppo.rehearse.pinning import CudaRuntime, is_pinned, mark_pinned

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (rehearsed)", major=9, minor=0, total_memory=int(79.2 * 2**30),
    multi_processor_count=132, warp_size=32, gcnArchName="",
)  # fmt: skip

NO_EFFECT = (
    "_lazy_init", "init", "set_device", "set_stream", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all",
    "set_rng_state", "set_sync_debug_mode",
)  # fmt: skip
"""Functions of ``torch.cuda`` that do nothing here."""


class Event:
    """An event that has always happened. ``synchronize`` is a host wait."""

    book: Book

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.book.wait(f"{type(self).__name__.lower()}.synchronize")


class Stream(Event):
    """A stream that is always empty. ``synchronize`` is a host wait."""

    cuda_stream = stream_id = device_index = 0
    device = None

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


def _constant(value: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def install(book: Book) -> None:
    """Patch ``torch.cuda`` and the tensor methods of streams and pinned memory, for the rest of the process."""
    Event.book = book
    stream = Stream()
    answers: dict[str, Any] = dict.fromkeys(NO_EFFECT, _constant(None))
    answers |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _constant(True))
    answers |= dict.fromkeys(("current_stream", "default_stream"), _constant(stream))
    answers |= dict.fromkeys(("stream", "device", "_DeviceGuard", "StreamContext"), contextlib.nullcontext)
    answers |= {"Event": Event, "Stream": Stream, "ExternalStream": Stream}
    answers |= {
        "device_count": _constant(8),
        "current_device": _constant(0),
        "get_device_capability": _constant((H100.major, H100.minor)),
        "get_device_name": _constant(H100.name),
        "get_device_properties": _constant(H100),
        "mem_get_info": _constant((H100.total_memory, H100.total_memory)),
        "is_current_stream_capturing": _constant(False),
        "synchronize": lambda device=None: book.wait("cuda.synchronize"),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "cudart": lambda: CudaRuntime(book),
    }
    answers |= dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: book.bytes_now)
    answers |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: book.bytes_peak)
    answers["reset_peak_memory_stats"] = lambda device=None: setattr(book, "bytes_peak", book.bytes_now)
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, value)
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
    _patch_tensors(book)


def _patch_tensors(book: Book) -> None:
    plain_list, plain_resize = torch.Tensor.tolist, torch.UntypedStorage.resize_

    def tolist(self: torch.Tensor) -> Any:  # one copy, as on a GPU, where torch's Python would read each element
        return plain_list(self.cpu() if self.device.type == "cuda" else self)

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        book.resize(self, size)
        return plain_resize(self, size)

    methods: dict[str, Any] = {
        "tolist": tolist,
        "is_pinned": is_pinned,
        "pin_memory": lambda self, device=None: mark_pinned(self.clone(), book),
        "record_stream": lambda self, stream: None,
    }
    for kind in (torch.Tensor, FakeTensor):
        for name, method in methods.items():
            setattr(kind, name, method)
    setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
    FakeTensor.data = property(_get_data, _set_data)  # type: ignore[assignment]


_DATA: Any = torch._C.TensorBase.data


def _get_data(self: FakeTensor) -> torch.Tensor:
    moved: torch.Tensor | None = self.__dict__.get("_moved_to_host")
    return _DATA.__get__(self) if moved is None else moved


def _set_data(self: FakeTensor, value: torch.Tensor) -> None:
    """Support ``parameter.data = host_tensor``: the parameter becomes a fake host tensor that keeps the real one."""
    self.__dict__.pop("_moved_to_host", None)
    if isinstance(value, FakeTensor):
        _DATA.__set__(self, value)
        self.fake_device = value.fake_device
        return
    self.__dict__["_moved_to_host"] = value
    with self.fake_mode:
        shape = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    _DATA.__set__(self, shape)
    self.fake_device = torch.device("cpu")

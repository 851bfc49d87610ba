"""Patches of torch, Triton and Megatron that a rehearsal requires, and one rank of a process
group."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tests.rehearsal.booking import Book, CudaRuntime, is_pinned, mark_pinned, tensor_bytes
from tests.rehearsal.dispatch import RehearsalMode, check_on_device
from tests.rehearsal.fla_kernels import import_linear_attention
from tests.rehearsal.transformer_engine import import_transformer_engine


def prepare(te_folder: Path) -> RehearsalMode:
    """Patch torch, Triton, Transformer Engine and Megatron for the rest of the process.

    Args:
        te_folder: contains Transformer Engine's Python.

    Raises:
        RuntimeError: Megatron is already imported.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "Megatron reads torch.compile and torch.cuda as it is imported: prepare the rehearsal "
            "first"
        )
    import torch._dynamo

    mode = RehearsalMode(Book())
    patch_cuda(mode.book)
    torch.compile = functools.partial(_fused, mode.book)
    torch._dynamo.config.disable = True
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    _patch_triton(mode.book)
    import_transformer_engine(te_folder, mode)  # before Megatron, which looks for it once
    import_linear_attention()
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    return mode


@contextlib.contextmanager
def one_rank(size: int, rank: int) -> Iterator[None]:
    """A process group of ``size`` ranks. Only ``rank`` runs; every other rank sends the same
    objects."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dppo.parallel.world import World

    new_group = dist.new_group

    def group(
        ranks: list[int] | None = None, timeout: object = None, backend: object = None, **more: Any
    ) -> Any:
        rest = {
            name: value for name, value in more.items() if name not in ("pg_options", "device_id")
        }
        return new_group(ranks=ranks, backend="fake", **rest)

    # The parameters have torch's names: torch's checkpoint code passes them by name.
    def gather(object_list: list[Any], obj: Any, group: object = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_on_one(
        obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if object_gather_list is not None:
            gather(object_gather_list, obj)

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: Any,
        **kw: Any,
    ) -> None:
        scatter_object_output_list[0] = (
            scatter_object_input_list[0] if scatter_object_input_list else None
        )

    def alone(world: object, make: Callable[[], Any]) -> Any:
        return make()

    silent = ("broadcast_object_list", "barrier", "monitored_barrier")
    answers: dict[str, Any] = dict.fromkeys(silent, lambda *args, **kwargs: None)
    answers |= {
        "all_gather_object": gather,
        "gather_object": gather_on_one,
        "scatter_object_list": scatter,
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            mock.patch.multiple(dist, new_group=group, **answers),
            mock.patch.object(World, "broadcast", alone),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _fused(book: Book, function: Callable[..., Any] | None = None, **options: object) -> Any:
    """``torch.compile`` as one kernel: reads the function's inputs once and writes its outputs
    once."""
    if function is None:
        return functools.partial(_fused, book)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        book.muted += 1
        try:
            out = function(*args, **kwargs)
        finally:
            book.muted -= 1
        inputs = [
            leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, FakeTensor)
        ]
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        if outputs:
            name, dtype = f"fused::{function.__name__}", outputs[0].dtype
            book.launch(
                name,
                0.0,
                tensor_bytes(*inputs, *outputs),
                inputs[0].dtype if inputs else dtype,
                dtype,
            )
            for tensor in outputs:
                book.allocate(tensor.untyped_storage())
        return out

    return run


def _patch_triton(book: Book) -> None:
    """Book a Triton kernel by the bytes of its tensors, and do not run it."""
    from triton.runtime import autotuner, jit

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = self
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        check_on_device(f"triton::{kernel.__name__}", *tensors)
        book.launch(
            f"triton::{kernel.__name__}",
            0.0,
            tensor_bytes(*tensors),
            tensors[0].dtype,
            tensors[-1].dtype,
        )

    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        kind.run = run


def _apply(
    self: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """``Module._apply`` without torch's swap of parameters, which rejects a fake tensor in the
    place of a real one."""
    for child in self.children():
        child._apply(function)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        made = function(parameter.detach())
        if isinstance(made, FakeTensor) and not isinstance(parameter, FakeTensor):
            moved = torch.nn.Parameter(made, parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            self._parameters[name] = moved
        elif made.dtype != parameter.dtype or made.device != parameter.device:
            parameter.data = made
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (rehearsed)", major=9, minor=0, total_memory=int(79.2 * 2**30),
    multi_processor_count=132, warp_size=32, gcnArchName="",
)  # fmt: skip

NO_EFFECT = (
    "_lazy_init", "init", "set_device", "set_stream", "empty_cache", "ipc_collect", "manual_seed",
    "manual_seed_all",
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


def patch_cuda(book: Book) -> None:
    """Patch ``torch.cuda`` and the tensor methods of streams and pinned memory, for the rest of the
    process."""
    Event.book = book
    stream = Stream()
    answers: dict[str, Any] = dict.fromkeys(NO_EFFECT, _constant(None))
    answers |= dict.fromkeys(
        ("is_available", "is_initialized", "is_bf16_supported"), _constant(True)
    )
    answers |= dict.fromkeys(("current_stream", "default_stream"), _constant(stream))
    answers |= dict.fromkeys(
        ("stream", "device", "_DeviceGuard", "StreamContext"), contextlib.nullcontext
    )
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
    answers |= dict.fromkeys(
        ("memory_allocated", "memory_reserved"), lambda device=None: book.bytes_now
    )
    answers |= dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved"), lambda device=None: book.bytes_peak
    )
    answers["reset_peak_memory_stats"] = lambda device=None: setattr(
        book, "bytes_peak", book.bytes_now
    )
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, value)
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
    _patch_tensors(book)


def _patch_tensors(book: Book) -> None:
    plain_list, plain_resize = torch.Tensor.tolist, torch.UntypedStorage.resize_

    def tolist(
        self: torch.Tensor,
    ) -> Any:  # one copy, as on a GPU, where torch's Python would read each element
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
    """Support ``parameter.data = host_tensor``: the parameter becomes a fake host tensor that keeps
    the real one."""
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

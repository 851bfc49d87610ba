"""One rank of a process group, and patches of torch, Triton and Megatron that a rehearsal requires."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from megatron_dppo.rehearse import cuda, transformer_engine
from megatron_dppo.rehearse.booking import Book, tensor_bytes
from megatron_dppo.rehearse.dispatch import RehearsalMode, check_on_device


def prepare(te_folder: Path) -> RehearsalMode:
    """Patch torch, Triton, Transformer Engine and Megatron for the rest of the process.

    Args:
        te_folder: contains Transformer Engine's Python.

    Raises:
        RuntimeError: Megatron is already imported.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("Megatron reads torch.compile and torch.cuda as it is imported: prepare the rehearsal first")
    import torch._dynamo

    mode = RehearsalMode(Book())
    cuda.install(mode.book)
    torch.compile = functools.partial(_fused, mode.book)
    torch._dynamo.config.disable = True
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    _patch_triton(mode.book)
    transformer_engine.install(te_folder, mode)  # before Megatron, which looks for it once
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    return mode


@contextlib.contextmanager
def one_rank(size: int, rank: int) -> Iterator[None]:
    """A process group of ``size`` ranks. Only ``rank`` runs; every other rank sends the same objects."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group

    def group(ranks: list[int] | None = None, timeout: object = None, backend: object = None, **more: Any) -> Any:
        rest = {name: value for name, value in more.items() if name not in ("pg_options", "device_id")}
        return new_group(ranks=ranks, backend="fake", **rest)

    # The parameters have torch's names: torch's checkpoint code passes them by name.
    def gather(object_list: list[Any], obj: Any, group: object = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_on_one(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if object_gather_list is not None:
            gather(object_gather_list, obj)

    def scatter(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *args: Any, **kw: Any
    ) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[0] if scatter_object_input_list else None

    silent = ("broadcast_object_list", "barrier", "monitored_barrier")
    answers: dict[str, Any] = dict.fromkeys(silent, lambda *args, **kwargs: None)
    answers |= {"all_gather_object": gather, "gather_object": gather_on_one, "scatter_object_list": scatter}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.multiple(dist, new_group=group, **answers):
            yield
    finally:
        dist.destroy_process_group()


def _fused(book: Book, function: Callable[..., Any] | None = None, **options: object) -> Any:
    """``torch.compile`` as one kernel: reads the function's inputs once and writes its outputs once."""
    if function is None:
        return functools.partial(_fused, book)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        book.muted += 1
        try:
            out = function(*args, **kwargs)
        finally:
            book.muted -= 1
        inputs = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, FakeTensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        if outputs:
            name, dtype = f"fused::{function.__name__}", outputs[0].dtype
            book.launch(name, 0.0, tensor_bytes(*inputs, *outputs), inputs[0].dtype if inputs else dtype, dtype)
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
        book.launch(f"triton::{kernel.__name__}", 0.0, tensor_bytes(*tensors), tensors[0].dtype, tensors[-1].dtype)

    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        kind.run = run


def _apply(self: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """``Module._apply`` without torch's swap of parameters, which rejects a fake tensor in the place of a real one."""
    for child in self.children():
        _apply(child, function)
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

"""Collectives of a process group in which only one rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from megatron_dppo.rehearse.booking import Book, tensor_bytes


def answer(book: Book, func: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Book a collective of device tensors, or fill host tensors as if all ranks sent the same; return finished work."""
    name = func.name().removeprefix("c10d::").removesuffix("_")
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        key = f"{name} over {ProcessGroup.unbox(named['process_group']).size()}"
        book.collectives[key] += 1
        size = max(tensor_bytes(*pytree.tree_leaves(argument)) for argument in args)
        book.collective_bytes[key] += size
        first = tensors[0].dtype
        book.launch(f"c10d::{key}", 0.0, size, first, first)
    else:
        _repeat_own_part(name, args)
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _repeat_own_part(name: str, args: Sequence[Any]) -> None:
    if name == "allgather":
        for outputs, mine in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(mine)
    elif name == "_allgather_base":
        args[0].view(-1, args[1].numel()).copy_(args[1].reshape(1, -1).expand(args[0].numel() // args[1].numel(), -1))
    elif name == "alltoall_base" and args[0].numel() == args[1].numel():
        args[0].copy_(args[1])

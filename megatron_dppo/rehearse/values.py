"""Values that the host can know of a device tensor: copies of small host tensors, and results computed from only them.

The trainer reads lengths and offsets back from the device. Zeros instead would lead the trainer into other branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

LARGEST = 1 << 21
"""Elements of the largest integer tensor that is remembered."""
LARGEST_FLOAT = 64
"""Elements of the largest floating-point tensor that is remembered."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The known value on the host, or None."""
    value: torch.Tensor | None = getattr(tensor, "_host_value", None)
    return value


def remember(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the known value by this one, if it is small."""
    forget(tensor)
    if value.numel() <= (LARGEST_FLOAT if value.is_floating_point() else LARGEST):
        tensor.__dict__["_host_value"] = value


def forget(tensor: torch.Tensor) -> None:
    """Drop the value of an overwritten tensor."""
    tensor.__dict__.pop("_host_value", None)


def follow(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> None:
    """Compute an operator on the host, if all of its tensors are known; otherwise forget the written tensors."""
    fakes = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, FakeTensor)]
    outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
    known = fakes and all(value_of(fake) is not None for fake in fakes) and "rand" not in func.name()
    made: object = None
    if known:
        on_host = {"device": torch.device("cpu")} if "device" in kwargs else {}
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        plain_args, plain_kwargs = pytree.tree_map_only(FakeTensor, value_of, (tuple(args), {**rest, **on_host}))
        try:
            made = func(*plain_args, **plain_kwargs)
        except (RuntimeError, IndexError):  # a shape that depends on an unknown value
            made = None
    values = pytree.tree_leaves(made) if made is not None else [None] * len(outputs)
    for tensor, value in zip(outputs, values, strict=False):
        if isinstance(value, torch.Tensor):
            remember(tensor, value)
        else:
            forget(tensor)

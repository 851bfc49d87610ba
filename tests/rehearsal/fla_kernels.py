"""Stand-ins for the functions of flash-linear-attention that Megatron's gated delta networks call.

Each books its forward pass and its backward pass as one kernel. Each of these passes is really a
few kernels.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from tests.rehearsal.te_kernels import Tensor, _empty, _like, _run

CHUNK = 64
"""Tokens of a chunk."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _run("causal_conv1d_fwd", (x, weight), _like(x))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        return tuple(_run("causal_conv1d_bwd", (grad, x, weight), _like(x, weight)))


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = _empty(x.shape[:-1], torch.float32)
        out, _ = _run("l2norm_fwd", (x,), (*_like(x), scale))
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out, scale = ctx.saved_tensors
        return _run("l2norm_bwd", (grad, out, scale), _like(out))[0]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        solved = _empty(
            (*q.shape[:3], CHUNK), q.dtype
        )  # the inverse of each chunk's triangular system
        out, *_ = _run(
            "delta_rule_fwd",
            (q, k, v, g, beta),
            (*_like(v), solved, *_states(q, v)),
            flops=_flops(q, v),
        )
        ctx.save_for_backward(q, k, v, g, beta, solved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, solved = ctx.saved_tensors
        made = _like(q, k, v, g, beta)
        states = [*_states(q, v), *_states(q, v)]  # made again, and their gradients
        reads = (grad, q, k, v, g, beta, solved)
        return tuple(_run("delta_rule_bwd", reads, (*made, *states), flops=3 * _flops(q, v))[:5])


def _states(q: Tensor, v: Tensor) -> list[Tensor]:
    """The state before each chunk."""
    _, tokens, heads, key = q.shape
    return [_empty((-(-tokens // CHUNK), heads, key, v.shape[-1]), q.dtype)]


def _flops(q: Tensor, v: Tensor) -> float:
    _, tokens, heads, key = q.shape
    return 2.0 * tokens * heads * (CHUNK * (key + v.shape[-1]) + 3 * key * v.shape[-1])


def causal_conv1d(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Convolution.apply(x, weight), None


def l2norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = _UnitLength.apply(x)
    return out


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    return _DeltaRule.apply(q, k, v, g, beta), None


def import_linear_attention() -> None:
    """Have ``fla`` and its modules be these functions, for the rest of the process; before Megatron
    looks for it."""
    functions = {"fla.modules.convolution": causal_conv1d, "fla.modules.l2norm": l2norm}
    for name in ("fla", "fla.modules", "fla.ops"):
        sys.modules[name] = ModuleType(name)
    for name, function in (
        *functions.items(),
        ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    ):
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], function.__name__, function)

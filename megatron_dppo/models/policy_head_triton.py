"""The two functions of :mod:`policy_head_torch` as Triton kernels: each reads the logits once.

Importing this needs Triton. Without CUDA its interpreter runs them (``TRITON_INTERPRET=1`` before
the import), which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BUFFERS = 1
"""fp32 tensors of the chunk's size that :func:`compute_summary` works in."""
SUMMARY_BLOCK = 4096
"""Columns that a program takes at a time: 16 of a thread, whose sums stay in registers."""
GRADIENT_BLOCK = 2048
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Below every logit. Finite, so that 0 · it is 0."""
# What varies with packs and chunks is kept out of what Triton compiles a kernel for: compiling anew
# takes a second. The kernels see all their arguments but the constants as tl.tensor. Triton passes
# what is annotated as int in 32 bits.


def reduce_logits(
    buffers: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float,
    peak: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """As :func:`policy_head_torch.summarise`; leaves the logits as they are."""
    (logits,) = buffers
    rows, columns = logits.shape
    _reduce_logits[(rows,)](
        logits,
        targets,
        peak,
        sums,
        logits.stride(0),
        sums.stride(0),
        columns,
        1.0 / temperature,
        BLOCK=SUMMARY_BLOCK,
        num_warps=8,
    )


def compute_logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As :func:`policy_head_torch.slope`; overwrites the logits only if they are ``out``."""
    rows, columns = logits.shape
    _compute_logit_gradient[(rows, triton.cdiv(columns, GRADIENT_BLOCK))](
        logits,
        targets,
        normaliser,
        gradient,
        out,
        logits.stride(0),
        out.stride(0),
        columns,
        1.0 / temperature,
        BLOCK=GRADIENT_BLOCK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["sum_stride"], do_not_specialize_on_alignment=["targets", "peak", "sums"]
)
def _reduce_logits(
    logits: tl.tensor,
    targets: tl.tensor,
    peak: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    sum_stride: tl.tensor,
    columns: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row. Each lane has sums of its own, from the largest logit that it has seen,
    until the last one."""
    row = tl.program_id(0).to(tl.int64)  # a chunk may have more than 2³¹ logits
    logits += row * row_stride
    most = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.where(
            inside, tl.load(logits + column, mask=inside, other=0.0) * inverse_temperature, LOWEST
        )
        higher = tl.maximum(most, z)
        shift = most - higher
        factor = tl.exp(shift)
        e = tl.exp(z - higher)  # 1 in a lane beyond a short row, but its factor is 0 in the end
        cross = factor * (cross + shift * total) + e * (z - higher)
        total = factor * total + e
        most = higher
    highest = tl.max(most, axis=0)
    shift = most - highest
    factor = tl.exp(shift)
    tl.store(peak + row, highest)
    tl.store(sums + row, tl.sum(factor * total, axis=0))
    tl.store(sums + sum_stride + row, tl.sum(factor * (cross + shift * total), axis=0))
    target = tl.load(targets + row)
    held = (target >= 0) & (target < columns)
    tl.store(
        sums + 2 * sum_stride + row,
        tl.load(logits + target, mask=held, other=0.0) * inverse_temperature,
    )


@triton.jit(do_not_specialize_on_alignment=["targets", "normaliser", "gradient"])
def _compute_logit_gradient(
    logits: tl.tensor,
    targets: tl.tensor,
    normaliser: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + row * row_stride + column, mask=inside, other=0.0) * inverse_temperature
    p = tl.exp(z - tl.load(normaliser + row))
    at_target = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    value = (at_target - p) * (tl.load(gradient + row) * inverse_temperature)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)

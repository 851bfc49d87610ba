"""Triton kernels for the functions of :mod:`policy_head_torch`; each reads the logits once.

Without CUDA, Triton's interpreter runs the kernels for tests (set ``TRITON_INTERPRET=1`` before the
import).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BUFFERS = 1
"""Number of fp32 buffers of :func:`reduce_logits`, each of a chunk's size."""
SUMMARY_BLOCK = 4096
"""Columns per program and iteration: 16 for each thread; sums stay in registers."""
GRADIENT_BLOCK = 2048
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Lower bound of every logit. Finite, so that 0 · LOWEST is 0."""
# Values that vary with packs and chunks are excluded from kernel specialization, because another
# compilation takes a second. Arguments are annotated as tl.tensor, because Triton would pass int in
# 32 bits.


def reduce_logits(
    buffers: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float,
    peak: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Compute :func:`policy_head_torch.reduce_logits`; the logits stay unchanged."""
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
    bonus: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute :func:`policy_head_torch.compute_logit_gradient`; the logits stay unchanged unless
    ``out``."""
    # The kernel reads the two pointers only with a bonus.
    entropy, entropy_gradient = bonus or (gradient, gradient)
    rows, columns = logits.shape
    _compute_logit_gradient[(rows, triton.cdiv(columns, GRADIENT_BLOCK))](
        logits,
        targets,
        normaliser,
        gradient,
        entropy,
        entropy_gradient,
        out,
        logits.stride(0),
        out.stride(0),
        columns,
        1.0 / temperature,
        BLOCK=GRADIENT_BLOCK,
        HAS_BONUS=bonus is not None,
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
    """Reduce one row per program. Each lane has its own sums and peak, combined at the end."""
    # A chunk may have more than 2³¹ logits.
    row = tl.program_id(0).to(tl.int64)
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
        # In a lane beyond a short row e is 1, but the final factor of the lane is 0.
        e = tl.exp(z - higher)
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


@triton.jit(
    do_not_specialize_on_alignment=[
        "targets",
        "normaliser",
        "gradient",
        "entropy",
        "entropy_gradient",
    ]
)
def _compute_logit_gradient(
    logits: tl.tensor,
    targets: tl.tensor,
    normaliser: tl.tensor,
    gradient: tl.tensor,
    entropy: tl.tensor,
    entropy_gradient: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_BONUS: tl.constexpr,  # noqa: N803
) -> None:
    """Compute the gradient of one block of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + row * row_stride + column, mask=inside, other=0.0) * inverse_temperature
    log_p = z - tl.load(normaliser + row)
    p = tl.exp(log_p)
    at_target = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    value = (at_target - p) * (tl.load(gradient + row) * inverse_temperature)
    if HAS_BONUS:
        factor = tl.load(entropy_gradient + row) * inverse_temperature
        value -= factor * p * (log_p + tl.load(entropy + row))
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)

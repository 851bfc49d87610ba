"""Divergence of the policy from a teacher, over the whole vocabulary, without full logits.

On-policy distillation (GKD, arXiv:2306.13649, with λ = 1) trains a student on its own rollouts: at
each token the student's distribution is drawn toward a teacher's after the same tokens. With the
student's logits z and the teacher's y, temperature τ, p = softmax(z/τ) and q = softmax(y/τ):

* ``reverse``: KL(p ‖ q) = Σ_v p_v log(p_v/q_v), with gradient p_v·(log(p_v/q_v) − KL) by z/τ;
* ``forward``: KL(q ‖ p) = Σ_v q_v log(q_v/p_v), with gradient p_v − q_v by z/τ.

As in :mod:`policy_head`, the logits of both models are computed for one chunk of positions at a
time, in the forward and in the backward pass. The sum over the vocabulary is exact:
log-probabilities of sampled tokens would give only a noisy estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_dppo.models.policy_head import (
    LOWEST,
    add_weight_gradient,
    compute_hidden_gradient,
    compute_logits,
    get_autograd_gradient,
    get_local_rows,
    get_main_grad,
    gradient_types,
    split_positions,
)


class TeacherHead(NamedTuple):
    """A teacher's states and output rows for the r tokens of a pack that this rank scores.

        TeacherHead(hidden=[[0.3, -1.2]], weight=[[1.0, 0.0], [0.0, 1.0]], direction="reverse")

    is a teacher of width 2 with a vocabulary of two tokens, at one position. (Lists replace
    tensors.)
    """

    hidden: torch.Tensor
    """[r, h_teacher], the teacher's final hidden states at the predictors."""
    weight: torch.Tensor
    """[V_local, h_teacher], the teacher's output layer for the tokens of this rank's rows."""
    direction: Literal["reverse", "forward"]
    rows: torch.Tensor | None = None
    """[r] int64, places among the positions scored by this rank; None: all positions."""


def compute_divergence(
    teachers: Sequence[TeacherHead],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    **settings: Any,
) -> torch.Tensor:
    """Return the divergence from several teachers, [R], at most one per position; 0 without a
    teacher. See :func:`compute_teacher_divergence`."""
    whole = torch.zeros(len(hidden), device=hidden.device)
    for teacher in teachers:
        if teacher.rows is None:
            whole = whole + compute_teacher_divergence(teacher, hidden, weight, **settings)
        else:
            part = compute_teacher_divergence(
                teacher, hidden.index_select(0, teacher.rows), weight, **settings
            )
            whole = whole.index_add(0, teacher.rows, part)
    return whole


def compute_teacher_divergence(
    teacher: TeacherHead,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    chunk_mib: int,
) -> torch.Tensor:
    """Return the divergence at each position, [R] fp32, in nats, with gradients for ``hidden`` and
    ``weight``.

    Arguments are as in ``policy_head.score_responses``. Collective over ``tp_group`` in the forward
    pass.

    Args:
        teacher: frozen teacher at the same R positions.
        chunk_mib: size of a chunk's buffers, including the logits of both models, in MiB.
    """
    group, _, rows = get_local_rows(weight, vocab_size, tp_group)
    divergence: torch.Tensor = _Divergence.apply(
        hidden, weight, teacher, rows, temperature, group, chunk_mib
    )
    return divergence


class _Divergence(torch.autograd.Function):
    """Divergence over the first ``rows`` of both weights."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: TeacherHead,
        rows: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_mib: int,
    ) -> torch.Tensor:
        reverse = teacher.direction == "reverse"
        ctx.rows = rows
        ctx.temperature = temperature
        ctx.chunk_mib = chunk_mib
        ctx.reverse = reverse
        peaks = torch.full((2, len(hidden)), LOWEST, device=hidden.device)
        totals = torch.zeros_like(peaks)
        cross = torch.zeros_like(peaks[0])
        for chunk, (own, other, spare) in _iter_logits(
            ctx, hidden, weight, *teacher[:2], [torch.float32]
        ):
            for logits, peak, total in zip(
                (own, other), peaks[:, chunk], totals[:, chunk], strict=True
            ):
                torch.amax(logits, dim=1, out=peak)
                total.copy_(torch.exp(logits.sub_(peak[:, None]), out=spare).sum(dim=1))
            expected, ratio = (own, other) if reverse else (other, own)
            # Log ratio without the normalisers, which ``divergence`` adds below.
            ratio.sub_(expected).neg_()
            cross[chunk] = torch.bmm(expected.exp_()[:, None, :], ratio[:, :, None])[:, 0, 0]
        if group is not None and len(hidden):
            _combine(peaks, totals, cross, group, reverse=reverse)
        logs = totals.log()
        # KL(first ‖ second), with the student at index 0 and the teacher at index 1.
        first, second = (0, 1) if reverse else (1, 0)
        divergence = cross / totals[first] + (logs[second] - logs[first])
        ctx.save_for_backward(hidden, weight, *teacher[:2], peaks + logs, divergence)
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, normalisers, divergence = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = get_main_grad(ctx, weight)
        more = gradient_types(weight)
        scale = grad / ctx.temperature
        for chunk, (own, other, *spare) in _iter_logits(
            ctx, hidden, weight, teacher_hidden, teacher_weight, more
        ):
            # Subtract the normalisers: both buffers then hold log-probabilities.
            own.sub_(normalisers[0, chunk, None])
            other.sub_(normalisers[1, chunk, None])
            if ctx.reverse:
                torch.exp(own, out=spare[0])
                own.sub_(other).sub_(divergence[chunk, None]).mul_(spare[0])
            else:
                own.exp_().sub_(other.exp_())
            own.mul_(scale[chunk, None])
            logit_gradient = own if len(spare) == 1 else spare[1].copy_(own)
            compute_hidden_gradient(logit_gradient, weight[: ctx.rows], out=hidden_grad[chunk])
            if weight_grad is not None:
                add_weight_gradient(weight_grad[: ctx.rows], logit_gradient, hidden[chunk])
        return hidden_grad, get_autograd_gradient(weight, weight_grad), None, None, None, None, None


def _iter_logits(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    extra_types: Sequence[torch.dtype],
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Yield slices of c positions, each with buffers [c, rows]: both models' logits over the
    temperature, fp32, then one buffer for each of ``extra_types``."""
    types = [torch.float32, torch.float32, *extra_types]
    for chunk, buffers in split_positions(
        len(hidden), ctx.rows, types, ctx.chunk_mib, hidden.device
    ):
        compute_logits(hidden[chunk], weight[: ctx.rows], out=buffers[0])
        compute_logits(teacher_hidden[chunk], teacher_weight[: ctx.rows], out=buffers[1])
        for logits in buffers[:2]:
            logits.div_(ctx.temperature)
        yield chunk, buffers


def _combine(
    peaks: torch.Tensor,
    totals: torch.Tensor,
    cross: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    reverse: bool,
) -> None:
    """Reduce the ranks' sums in place, from each rank's own peaks to the common peaks."""
    shift = peaks.clone()
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    shift.sub_(peaks)
    factor = shift.exp()
    first, second = (0, 1) if reverse else (1, 0)
    cross.add_((shift[first] - shift[second]) * totals[first]).mul_(factor[first])
    totals.mul_(factor)
    sums = torch.cat([totals, cross[None]])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    totals.copy_(sums[:2])
    cross.copy_(sums[2])

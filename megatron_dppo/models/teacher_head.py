"""The divergence of the policy from a teacher, over the whole vocabulary, without the logits of
either.

On-policy distillation (GKD, arXiv:2306.13649, with λ = 1) trains a student on its own rollouts: at
each of their tokens its distribution is drawn toward that of a teacher, which has read the same
tokens. With the student's logits z and the teacher's y, temperature τ, p = softmax(z/τ) and q =
softmax(y/τ):

* ``reverse``: KL(p ‖ q) = Σ_v p_v log(p_v/q_v), whose gradient by z/τ is p_v·(log(p_v/q_v) − KL);
* ``forward``: KL(q ‖ p) = Σ_v q_v log(q_v/p_v), whose gradient by z/τ is p_v − q_v.

Of a teacher the head needs final hidden states, [tokens, its width], and its output layer. As in
:mod:`policy_head` the logits, here of both models, are made of a chunk of positions at a time, in
either pass. Which tokens were sampled does not matter: the sum over the vocabulary is exact, where
the log-probabilities of sampled tokens give one noisy term of it.
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

    is a teacher of width 2 with a vocabulary of two tokens, at one position. The lists stand for
    tensors.
    """

    hidden: torch.Tensor
    """[r, h_teacher], its final hidden states at the predictors."""
    weight: torch.Tensor
    """[V_local, h_teacher], this rank's rows of its output layer: of the same tokens as the
    student's."""
    direction: Literal["reverse", "forward"]
    rows: torch.Tensor | None = None
    """[r] int64, their places among the positions that the rank scores; None: they are all of
    them."""


def compute_divergence(
    teachers: Sequence[TeacherHead], hidden: torch.Tensor, weight: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """:func:`compute_teacher_divergence`, [R], where each position has one of several teachers, or
    none and the divergence 0."""
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
    """[R] fp32, nats: the divergence at each position, with a gradient for the student's hidden
    states and weight.

    Collective over ``tp_group`` in the forward pass, as ``policy_head.score_responses``, whose
    arguments these are.

    Args:
        teacher: at the same R positions, frozen.
        hidden: [R, h], the student's final hidden states.
        weight: [V_local, h], this rank's rows of its output layer. vocab_size, temperature,
        tp_group, chunk_mib: as there; the chunk's memory is that of both models' logits.
    """
    group, _, rows = get_local_rows(weight, vocab_size, tp_group)
    divergence: torch.Tensor = _Divergence.apply(
        hidden, weight, teacher, rows, temperature, group, chunk_mib
    )
    return divergence


class _Divergence(torch.autograd.Function):
    """Works on the first ``rows`` of both weights. Of a pair the student's half comes
    first."""

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
        for chunk, (own, other, spare) in _iterate_logits(
            ctx, hidden, weight, *teacher[:2], [torch.float32]
        ):
            for logits, peak, total in zip(
                (own, other), peaks[:, chunk], totals[:, chunk], strict=True
            ):
                torch.amax(logits, dim=1, out=peak)
                total.copy_(torch.exp(logits.sub_(peak[:, None]), out=spare).sum(dim=1))
            expected, ratio = (own, other) if reverse else (other, own)
            ratio.sub_(expected).neg_()
            cross[chunk] = torch.bmm(expected.exp_()[:, None, :], ratio[:, :, None])[:, 0, 0]
        if group is not None and len(hidden):
            _combine(peaks, totals, cross, group, reverse=reverse)
        logs = totals.log()
        of, to = (0, 1) if reverse else (1, 0)
        divergence = cross / totals[of] + (logs[to] - logs[of])
        ctx.save_for_backward(hidden, weight, *teacher[:2], peaks + logs, divergence)
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, normalisers, divergence = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = get_main_grad(ctx, weight)
        more = gradient_types(weight)
        scale = grad / ctx.temperature
        for chunk, (own, other, *spare) in _iterate_logits(
            ctx, hidden, weight, teacher_hidden, teacher_weight, more
        ):
            own.sub_(normalisers[0, chunk, None])
            other.sub_(normalisers[1, chunk, None])
            if ctx.reverse:
                torch.exp(own, out=spare[0])
                own.sub_(other).sub_(divergence[chunk, None]).mul_(spare[0])
            else:
                own.exp_().sub_(other.exp_())
            own.mul_(scale[chunk, None])
            slope = own if len(spare) == 1 else spare[1].copy_(own)
            compute_hidden_gradient(slope, weight[: ctx.rows], out=hidden_grad[chunk])
            if weight_grad is not None:
                add_weight_gradient(weight_grad[: ctx.rows], slope, hidden[chunk])
        return hidden_grad, get_autograd_gradient(weight, weight_grad), None, None, None, None, None


def _iterate_logits(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    extra_types: Sequence[torch.dtype],
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Slices of the positions, each with both models' logits over the temperature, [c, rows] fp32,
    and as large buffers of the types ``extra_types``."""
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
    """Make one rank's part of the sums, taken from its own peaks, into the sums of all ranks from
    the common peaks."""
    shift = peaks.clone()
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    shift.sub_(peaks)
    factor = shift.exp()
    of, to = (0, 1) if reverse else (1, 0)
    cross.add_((shift[of] - shift[to]) * totals[of]).mul_(factor[of])
    totals.mul_(factor)
    sums = torch.cat([totals, cross[None]])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    totals.copy_(sums[:2])
    cross.copy_(sums[2])

"""From hidden states to log-probabilities without the logits: in chunks, vocabulary-parallel, recomputed for gradients.

An fp32 ``[tokens, vocabulary]`` tensor is the largest of a training step: 5 GB for 8,192 tokens of Qwen3's vocabulary,
and several of them. Here it never exists. Logits live in one buffer of a set size, a chunk of positions at a time, in
the forward pass and again in the backward pass.

With logits z over the whole vocabulary, temperature τ, p = softmax(z/τ) and target t:

* log-probability ``log p_t``, which is what engines report: of the distribution that was sampled from;
* entropy ``−Σ_v p_v log p_v``;
* score norm ``‖e_t − p‖₂ = √((1 − p_t)² + Σ_{v≠t} p_v²)``, the norm of the gradient of log p_t by z/τ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_dppo.models import wide_products

_LOWEST = torch.finfo(torch.float32).min
"""The largest logit of a rank that has no token of the vocabulary. Finite, so that 0 · it is 0."""


class HeadOutput(NamedTuple):
    """What the policy says of R response tokens, in fp32. Only ``logprobs`` carries a gradient."""

    logprobs: torch.Tensor
    """[R]"""
    entropy: torch.Tensor
    """[R], nats."""
    score_norm: torch.Tensor
    """[R], from 0 to √2."""


def score_responses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    chunk_mib: int,
) -> HeadOutput:
    """Score target tokens under the policy's head.

    Collective over ``tp_group``, whose ranks pass the same positions: one maximum and one sum over the ranks in the
    forward pass, for all chunks together, and nothing in the backward pass. The gradient of ``hidden`` is this rank's
    part of a sum; adding up the parts is the caller's (``copy_to_tensor_model_parallel_region``, or the gather of a
    sequence-parallel region).

    Args:
        hidden: [R, h], final hidden states at the positions that predict the targets. R may be 0.
        weight: [V_local, h], this rank's rows of the output layer: equal shares by rank, the padding last.
        targets: [R] int64, token ids below ``vocab_size``.
        vocab_size: tokens without padding; rows of the weight past it take no part and get no gradient.
        temperature: τ.
        tp_group: the tensor-parallel ranks; None for one.
        chunk_mib: size of the buffer that holds logits, in MiB. Large chunks read the weight less often.
    """
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    rows = min(max(vocab_size - first, 0), len(weight))
    return HeadOutput(*_Score.apply(hidden, weight, targets - first, rows, temperature, group, chunk_mib))


class _Score(torch.autograd.Function):
    """Works on the first ``rows`` of the weight; ``targets`` count from its first row, others' lie outside."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_mib: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        peak = torch.full((len(targets),), _LOWEST, device=hidden.device)
        sums = torch.zeros((4, len(targets)), device=hidden.device)
        for chunk, (logits, spare) in _chunks(len(targets), rows, 2, chunk_mib, hidden.device):
            wide_products.logits(hidden[chunk], weight[:rows], out=logits)
            _summarise(logits.div_(temperature), spare, targets[chunk], peak[chunk], sums[:, chunk])
        if group is not None and len(targets):
            _combine(peak, sums, group)
        total, cross, squares, at_target = sums
        logprobs = (at_target - peak) - total.log()
        entropy = total.log() - cross / total
        score_norm = (torch.expm1(logprobs).square() + squares / total.square()).sqrt()
        ctx.save_for_backward(hidden, weight, targets, peak + total.log())
        ctx.rows, ctx.temperature, ctx.chunk_mib = rows, temperature, chunk_mib
        ctx.mark_non_differentiable(entropy, score_norm)
        return logprobs, entropy, score_norm

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        vocabulary = weight[: ctx.rows]
        for chunk, (slope,) in _chunks(len(targets), ctx.rows, 1, ctx.chunk_mib, hidden.device):
            wide_products.logits(hidden[chunk], vocabulary, out=slope)
            slope.div_(ctx.temperature).sub_(normaliser[chunk, None]).exp_()  # p
            slope.mul_(-grad[chunk, None])
            here, column = _own(targets[chunk], ctx.rows)
            slope[here, column] += grad[chunk][here]
            slope.div_(ctx.temperature)
            hidden_grad[chunk] = wide_products.back_to_hidden(slope, vocabulary)
            if weight_grad is not None:
                wide_products.add_back_to_vocabulary(weight_grad[: ctx.rows], slope, hidden[chunk])
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def _chunks(
    positions: int, rows: int, buffers: int, chunk_mib: int, device: torch.device
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Slices of the positions, each with ``buffers`` fp32 tensors [c, rows], reused, that all take ``chunk_mib``."""
    if rows == 0:
        return
    size = max(1, min(positions, (chunk_mib << 20) // (4 * rows * buffers)))
    storage = torch.empty((buffers, size, rows), device=device)
    for start in range(0, positions, size):
        stop = min(start + size, positions)
        yield slice(start, stop), tuple(buffer[: stop - start] for buffer in storage)


def _own(targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions whose target is one of this rank's rows, and those rows."""
    here = ((targets >= 0) & (targets < rows)).nonzero()[:, 0]
    return here, targets[here]


def _summarise(
    logits: torch.Tensor, spare: torch.Tensor, targets: torch.Tensor, peak: torch.Tensor, sums: torch.Tensor
) -> None:
    """Fill ``peak`` [c] = max z and ``sums`` [4, c] = Σ e, Σ e·(z − peak), Σ_{v≠t} e², z_t, with e = exp(z − peak).

    Overwrites both buffers. The target's own square is left out rather than subtracted later, which would cancel where
    p_t is close to 1.
    """
    here, column = _own(targets, logits.shape[1])
    sums[3, here] = logits[here, column]
    torch.amax(logits, dim=1, out=peak)
    torch.exp(logits.sub_(peak[:, None]), out=spare)
    sums[0] = spare.sum(dim=1)
    sums[1] = _row_products(spare, logits)
    spare[here, column] = 0.0
    sums[2] = _row_products(spare, spare)


def _row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Σ_v left·right of each row, without a third tensor of their size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]


def _combine(peak: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make one rank's part of the sums, taken from its own peak, into the sums of all ranks from the common peak."""
    shift = -peak
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shift = -(shift + peak)
    factor = shift.exp()
    total, cross, squares, _ = sums
    cross.add_(shift * total).mul_(factor)
    total.mul_(factor)
    squares.mul_(factor.square())
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)

"""The policy head's operations on a chunk of logits, in torch's operators: they run anywhere, and
are the reference of :mod:`policy_head_triton`, which on CUDA does each of the two with one pass
over the logits instead of up to ten."""

from __future__ import annotations

import torch

BUFFERS = 2
"""fp32 tensors of the chunk's size that :func:`compute_summary` works in."""


def reduce_logits(
    buffers: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float,
    peak: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Fill ``peak`` and ``sums`` from logits; with z = logits / temperature and e = exp(z − peak)
    they are max z and Σ e, Σ e·(z − peak) and z_t.

    Args:
        buffers: ``BUFFERS`` times [c, v], the logits the first; all are overwritten.
        targets: [c], columns; those outside are other ranks', and add nothing to the third row.
        temperature: τ.
        peak: [c]
        sums: [3, c]
    """
    logits, spare = buffers
    column, held = _find_local_targets(targets, logits.shape[1])
    logits.div_(temperature)
    sums[2] = torch.where(held, logits.gather(1, column)[:, 0], 0.0)
    torch.amax(logits, dim=1, out=peak)
    torch.exp(logits.sub_(peak[:, None]), out=spare)
    sums[0] = spare.sum(dim=1)
    sums[1] = _row_products(spare, logits)


def compute_logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """``out = gradient · (e_t − p) / τ`` with p = exp(logits / τ − normaliser): a loss's gradient
    by the logits.

    Args:
        logits: [c, v] fp32; overwritten.
        targets: [c], columns, or outside.
        temperature: τ.
        normaliser: [c], log Σ exp(logits / τ) over the whole vocabulary.
        gradient: [c], of the loss by the log-probabilities.
        out: [c, v], of any type; may be ``logits``.
    """
    column, held = _find_local_targets(targets, logits.shape[1])
    scale = gradient[:, None] / temperature
    logits.div_(temperature).sub_(normaliser[:, None]).exp_().mul_(-scale)
    logits.scatter_add_(1, column, torch.where(held[:, None], scale, 0.0))
    if out is not logits:
        out.copy_(logits)


def _find_local_targets(targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[c, 1], each row's target, or any column if it lies outside; [c], whether it does not.

    Which rows these are is never asked: the host would have to wait for the answer.
    """
    return targets.clamp(0, columns - 1)[:, None], (targets >= 0) & (targets < columns)


def _row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Σ_v left·right of each row, without a third tensor of their size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]

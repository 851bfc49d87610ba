"""Policy head's operations on a chunk of logits in torch's operators, which run anywhere.

Reference of :mod:`policy_head_triton`. On CUDA, each function there reads the logits once, here up
to ten times.
"""

from __future__ import annotations

import torch

BUFFERS = 2
"""Number of fp32 buffers, each of a chunk's size, used by :func:`reduce_logits`."""


def reduce_logits(
    buffers: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    temperature: float,
    peak: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Fill ``peak`` with max z and ``sums`` with Σ e, Σ e·(z − peak) and z_t.

    Here z = logits / temperature and e = exp(z − peak).

    Args:
        buffers: ``BUFFERS`` tensors [c, v], the logits first; all are overwritten.
        targets: [c], columns; targets of another rank are out of range and add 0 to the third row
            of ``sums``.
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
    """Compute a loss's gradient with respect to the logits, ``out = gradient · (e_t − p) / τ``.

    Here p = exp(logits / τ − normaliser).

    Args:
        logits: [c, v] fp32; overwritten.
        targets: [c], columns, or out of range.
        temperature: τ.
        normaliser: [c], log Σ exp(logits / τ) over the whole vocabulary.
        gradient: [c], gradient of the loss with respect to the log-probabilities.
        out: [c, v], any type; may be ``logits``.
    """
    column, held = _find_local_targets(targets, logits.shape[1])
    scale = gradient[:, None] / temperature
    logits.div_(temperature).sub_(normaliser[:, None]).exp_().mul_(-scale)
    logits.scatter_add_(1, column, torch.where(held[:, None], scale, 0.0))
    if out is not logits:
        out.copy_(logits)


def _find_local_targets(targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's target, or any column if out of range, [c, 1], and whether it is in
    range, [c]."""
    # Use masks instead of indices of local rows, because the host would have to wait for indices.
    return targets.clamp(0, columns - 1)[:, None], (targets >= 0) & (targets < columns)


def _row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return Σ_v left·right of each row, without allocating a third tensor of the same size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]

"""Policy head's operations on a chunk of logits, in torch's operators for any device.

Reference of :mod:`policy_head_triton`, whose functions read the logits once instead of up to ten
times.
"""

from __future__ import annotations

import torch

BUFFERS = 2
"""Number of fp32 buffers of :func:`reduce_logits`, each of a chunk's size."""


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
        targets: [c], columns; a target of another rank is out of range and has z_t = 0.
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
    bonus: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute a loss's gradient with respect to the logits, ``out = (gradient · (e_t − p) −
    entropy_gradient · p · (log p + H)) / τ``.

    Here log p = logits / τ − normaliser, and e_t is 1 in column t and 0 elsewhere.

    Args:
        logits: [c, v] fp32; overwritten.
        targets: [c], columns, or out of range: e_t = 0.
        normaliser: [c], log Σ exp(logits / τ) over the whole vocabulary.
        gradient: [c], gradient of the loss with respect to the log-probabilities.
        out: [c, v], any type; may be ``logits``.
        bonus: entropy H and the loss's gradient with respect to H, both [c]; None: gradient 0.
    """
    column, held = _find_local_targets(targets, logits.shape[1])
    scale = gradient[:, None] / temperature
    logits.div_(temperature).sub_(normaliser[:, None])
    if bonus is None:
        logits.exp_().mul_(-scale)
    else:
        entropy, entropy_gradient = (values[:, None] for values in bonus)
        factor = entropy_gradient / temperature
        probabilities = logits.exp()
        logits.add_(entropy).mul_(-factor).sub_(scale).mul_(probabilities)
    logits.scatter_add_(1, column, torch.where(held[:, None], scale, 0.0))
    if out is not logits:
        out.copy_(logits)


def _find_local_targets(targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's column, [c, 1], and whether the target is in range, [c]; if not, the column
    is arbitrary."""
    # Use masks instead of indices of local rows, because the host would have to wait for indices.
    return targets.clamp(0, columns - 1)[:, None], (targets >= 0) & (targets < columns)


def _row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # A product of matrices, because ``(left * right).sum(1)`` would allocate a third [c, v].
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]

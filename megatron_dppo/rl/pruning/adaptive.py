"""A kept share that follows the step's own numbers: as little as leaves the variance inflation under a bound.

Scores, costs and probabilities are all known before the draw. The share can therefore be solved for at every step,
rather than steered from step to step by what has happened: there is no state to resume, and the draw stays unbiased,
for its probabilities depend on nothing that it decides.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_dppo.rl.types import Floats

HALVINGS = 24
"""Of the interval in which the share is looked for: past the seventh digit no draw can tell."""


def inflation(squares: Floats, inclusion: Floats) -> float:
    """Σ s²/π over Σ s², by which independent draws multiply the sum of squares of the terms; 1 without pruning.

    Args:
        squares: s², of any shape. Where it is 0 nothing is asked of π.
        inclusion: π, in the same shape.
    """
    total = squares.sum()
    ever = (squares > 0.0) & (inclusion > 0.0)
    return float((squares[ever] / inclusion[ever]).sum() / total) if total > 0.0 else 1.0


def least_share(inflation_at: Callable[[float], float], keep: float, most: float) -> float:
    """The least share in [keep, 1] whose inflation is at most ``most``; inflation falls as the share grows."""
    if inflation_at(keep) <= most:
        return keep
    low, high = keep, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if inflation_at(middle) <= most else (middle, high)
    return high

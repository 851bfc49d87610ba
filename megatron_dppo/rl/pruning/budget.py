"""How a budget is shared out: inclusion probabilities from scores and costs."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Floats


def capped_proportional(scores: Floats, costs: Floats, budget: float, floor: Floats | float) -> Floats:
    """Neyman allocation: π = clip(c·s/√cost, floor, 1), with c such that Σ π·cost is the budget.

    With s the norm of a unit's term these probabilities minimise the variance Σ s²(1/π − 1) of independent draws that
    cost the budget in expectation; floor and cap are the constraints that bound the weights 1/π.

    Args:
        scores: [n], not negative.
        costs: [n], positive, in the budget's unit (tokens, or prompts).
        budget: what Σ π·cost is to be. Where all fit into it, π is 1; where the floors alone exceed it, they stand.
        floor: least probability, for all or for each.

    Returns:
        [n], in [floor, 1]. Units of score 0 get their floor, and what units of positive score leave over (each being at
        1), shared as if their scores were equal.
    """
    least: Floats = np.minimum(np.broadcast_to(floor, scores.shape), 1.0)
    if costs.sum() <= budget:
        return np.ones_like(costs)
    if costs @ least >= budget:
        return least
    scored = scores > 0.0
    inclusion = np.ones_like(costs)
    left = budget - float(costs[scored].sum())
    if left >= costs[~scored] @ least[~scored]:
        rest = ~scored
        inclusion[rest] = capped_proportional(inclusion[rest], costs[rest], left, least[rest])
        return inclusion
    inclusion[~scored] = least[~scored]
    left = budget - float(costs[~scored] @ least[~scored])
    inclusion[scored] = _proportional(scores[scored] / np.sqrt(costs[scored]), costs[scored], left, least[scored])
    return inclusion


def _proportional(rate: Floats, costs: Floats, budget: float, floor: Floats) -> Floats:
    """clip(c·rate, floor, 1) for positive rates and a budget between what the floors and what all of them cost.

    What is spent grows with c and is linear between the values of c at which a unit leaves its floor or meets its cap.
    A bisection over these finds the stretch in which the budget is met, and there c has a closed form.
    """
    rate = np.maximum(rate / rate.max(), 1e-300)  # keeps the breakpoints finite

    def spent(c: float) -> float:
        return float(costs @ np.clip(c * rate, floor, 1.0))

    leaves_floor, meets_cap = floor / rate, 1.0 / rate
    breakpoints: NDArray[np.float64] = np.unique(np.concatenate([leaves_floor, meets_cap]))
    stretch = min(bisect_right(breakpoints, budget, key=spent), len(breakpoints) - 1)
    start = breakpoints[max(stretch - 1, 0)]
    capped, floored = meets_cap <= start, leaves_floor > start
    between = ~capped & ~floored
    free = budget - costs[capped].sum() - costs[floored] @ floor[floored]
    c = free / (costs[between] @ rate[between]) if between.any() else start
    inclusion: Floats = np.clip(c * rate, floor, 1.0)
    return inclusion

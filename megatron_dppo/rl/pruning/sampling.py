"""Sample with unequal probabilities: from scores and a budget to probabilities and a draw."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Bools, Floats

Draw = Callable[[Floats, np.random.Generator], Bools]
"""Function from inclusion probabilities [n] to kept units [n]."""

GRID = 1 << 43
"""Probabilities are rounded to multiples of 1/GRID (1e-13), so that sums over a million units are
exact in 64 bits."""


def select_systematic(inclusion: Floats, offset: float) -> Bools:
    """Draw systematically (Madow): lay the probabilities end to end, keep the units that contain
    offset, offset + 1, …

    - Every unit is kept with its probability: never for 0, always for 1.
    - The number kept is the sum of the probabilities to within one; exactly, if integer.
    - Neighbours are seldom kept together: the order of the units stratifies the draw.

    Args:
        inclusion: [n], in [0, 1].
        offset: uniform on [0, 1).

    Returns:
        [n], True for kept units.
    """
    # Sums of integers are exact. Rounding would move the end of the last interval, and could miss a
    # unit of probability 1.
    shares = np.rint(inclusion * GRID).astype(np.int64)
    _adjust_total(shares)
    start = int(offset * GRID)
    # The count of start, start + GRID, … below each unit's end.
    below = -((start - np.cumsum(shares)) // GRID)
    return np.diff(below, prepend=0) > 0


def _adjust_total(shares: NDArray[np.int64]) -> None:
    """Make the shares add up to a multiple of GRID, in place, if only rounding is missing."""
    fractional = np.flatnonzero((shares > 0) & (shares < GRID))
    total = int(shares.sum())
    missing = (total + GRID // 2) // GRID * GRID - total
    if 0 < abs(missing) <= len(fractional):
        shares[fractional[: abs(missing)]] += np.sign(missing)


def draw_systematic(inclusion: Floats, rng: np.random.Generator) -> Bools:
    return select_systematic(inclusion, rng.random())


def draw_bernoulli(inclusion: Floats, rng: np.random.Generator) -> Bools:
    return rng.random(inclusion.shape) < inclusion


DRAWS: Mapping[str, Draw] = {"systematic": draw_systematic, "bernoulli": draw_bernoulli}

Candidates = TypeVar("Candidates")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Candidates]):
    """Pruning rule: an entry of ``PROMPT_RULES`` or ``COMPLETION_RULES``.

    ``Rule(apply_threshold, draw_bernoulli)`` keeps each unit independently with the probability
    from ``apply_threshold``, and is unbiased.
    """

    inclusion: Callable[[Candidates, float], Floats]
    """Function from candidates and the fraction to keep, to inclusion probabilities in their shape.
    For completions the caller applies floors, and drops zero advantages."""
    draw: Draw = draw_systematic
    """Draw of units, unless ``pruning.….draw`` names another."""
    biased: str = ""
    """Reason of the expected gradient's bias, written to the log. Empty for an unbiased rule, whose
    kept units have weight 1/π."""
    weight: Callable[[Candidates, float], Floats] | None = None
    """Weights of the units that a biased rule keeps; None: 1."""


def wrap_user_rule(
    setting: str,
    name: str,
    function: Callable[[Candidates, float], ArrayLike],
    shape: Callable[[Candidates], Sequence[int]],
) -> Rule[Candidates]:
    """Wrap a user's function as an unbiased rule, which raises UserError if ``function`` fails or
    does not return inclusion probabilities.

    Args:
        setting: setting that names the function.
        function: see :class:`Rule`.
        shape: function from candidates to the shape of the probabilities.
    """

    def inclusion(candidates: Candidates, keep: float) -> Floats:
        try:
            found = np.asarray(function(candidates, keep), np.float64)
        except (Exception, SystemExit) as error:
            problem = f"failed ({type(error).__name__}: {error})"
            raise UserError(
                setting, name, problem, "Correct it; its arguments are candidates and a fraction"
            ) from error
        if found.shape != tuple(shape(candidates)) or not ((found >= 0.0) & (found <= 1.0)).all():
            problem = f"returned {found!r:.100} for candidates of shape {tuple(shape(candidates))}"
            raise UserError(
                setting, name, problem, "Return an inclusion probability between 0 and 1 for each"
            )
        return found

    return Rule(inclusion)


def allocate_proportional(
    scores: Floats,
    costs: Floats,
    budget: float,
    floor: Floats | float,
) -> Floats:
    """Allocate by Neyman: π = clip(c·s/√cost, floor, 1), with c such that Σ π·cost is the budget.

    If s is the norm of a unit's term, π minimises the variance Σ s²(1/π − 1) of independent draws
    that cost the budget in expectation.

    Args:
        scores: [n], not negative.
        costs: [n], positive, in the budget's unit (tokens, or prompts).
        budget: target of Σ π·cost. π is 1 if all units fit, the floor if the floors alone exceed
            the budget.
        floor: least probability of all units, or per unit; bounds the weights 1/π.

    Returns:
        [n], in [floor, 1]. Units of score 0 get their floor, or share the budget left by all
        other units at π = 1, as units of equal score.
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
        inclusion[rest] = allocate_proportional(inclusion[rest], costs[rest], left, least[rest])
        return inclusion
    inclusion[~scored] = least[~scored]
    left = budget - float(costs[~scored] @ least[~scored])
    inclusion[scored] = _allocate(
        scores[scored] / np.sqrt(costs[scored]), costs[scored], left, least[scored]
    )
    return inclusion


def _allocate(rate: Floats, costs: Floats, budget: float, floor: Floats) -> Floats:
    """Return clip(c·rate, floor, 1) for a budget between the costs of the floors and all units."""
    # Keep the breakpoints finite.
    rate = np.maximum(rate / rate.max(), 1e-300)

    def compute_cost(c: float) -> float:
        return float(costs @ np.clip(c * rate, floor, 1.0))

    # The cost grows with c, linear between breakpoints: the end of a unit's floor, the start
    # of its cap. A bisection finds the budget's interval; inside, c has a closed form.
    leaves_floor = floor / rate
    meets_cap = 1.0 / rate
    breakpoints: NDArray[np.float64] = np.unique(np.concatenate([leaves_floor, meets_cap]))
    stretch = min(bisect_right(breakpoints, budget, key=compute_cost), len(breakpoints) - 1)
    start = breakpoints[max(stretch - 1, 0)]
    capped = meets_cap <= start
    floored = leaves_floor > start
    between = ~capped & ~floored
    free = budget - costs[capped].sum() - costs[floored] @ floor[floored]
    c = free / (costs[between] @ rate[between]) if between.any() else start
    inclusion: Floats = np.clip(c * rate, floor, 1.0)
    return inclusion


ROUNDING = 1e-9
"""Relative difference below which two scores are the same number, computed in two ways."""


def is_below_mean(scores: Floats, mean: Floats | float) -> Bools:
    """Return whether scores (not negative) are below their mean by more than rounding; False for
    NaN."""
    return scores < mean * (1.0 - ROUNDING)

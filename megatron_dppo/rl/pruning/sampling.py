"""Sampling with unequal probabilities: from scores and a budget to inclusion probabilities, and
from them to a draw."""

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
"""From inclusion probabilities [n] to what is kept [n]."""

GRID = 1 << 43
"""Probabilities are rounded to multiples of 1/GRID (1e-13), whose sums are exact in 64 bits for a
million units."""


def select_systematic(inclusion: Floats, offset: float) -> Bools:
    """Madow's systematic draw: lay the probabilities end to end, keep the units that contain
    offset, offset + 1, …

    Every unit is kept with its own probability. The number kept is the sum of the probabilities to
    within one, and the sum itself if that is a whole number. Neighbours are seldom kept together,
    so the order of the units stratifies the draw. The sums are sums of integers, which are exact.
    In floating point the last interval would end a little early or late, and a unit of probability
    1 could be missed.

    Args:
        inclusion: [n], in [0, 1].
        offset: uniform on [0, 1).

    Returns:
        [n], True where the unit is kept: never for probability 0, always for probability 1.
    """
    shares = np.rint(inclusion * GRID).astype(np.int64)
    _adjust_total(shares)
    start = int(offset * GRID)
    below = -(
        (start - np.cumsum(shares)) // GRID
    )  # how many of start, start + GRID, … lie below each unit's end
    return np.diff(below, prepend=0) > 0


def _adjust_total(shares: NDArray[np.int64]) -> None:
    """If the shares miss a multiple of GRID by no more than rounding, make them add up to it, in
    place."""
    fractional = np.flatnonzero((shares > 0) & (shares < GRID))
    total = int(shares.sum())
    missing = (total + GRID // 2) // GRID * GRID - total
    if 0 < abs(missing) <= len(fractional):
        shares[fractional[: abs(missing)]] += np.sign(missing)


def draw_systematic(inclusion: Floats, rng: np.random.Generator) -> Bools:
    """``select_systematic`` with a random offset."""
    return select_systematic(inclusion, rng.random())


def draw_bernoulli(inclusion: Floats, rng: np.random.Generator) -> Bools:
    """Independent draws, one uniform number in [0, 1) for each unit."""
    return rng.random(inclusion.shape) < inclusion


DRAWS: Mapping[str, Draw] = {"systematic": draw_systematic, "bernoulli": draw_bernoulli}

Candidates = TypeVar("Candidates")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Candidates]):
    """Pruning rule: an entry of ``PROMPT_RULES`` or ``COMPLETION_RULES``.

        Rule(threshold, draw_bernoulli)

    keeps each unit by itself with the probability that ``threshold`` gives it, and is
    unbiased.
    """

    inclusion: Callable[[Candidates, float], Floats]
    """From candidates and ``keep`` to inclusion probabilities, in the candidates' shape. For
    completions the caller applies the floors, and drops what has zero advantage."""
    draw: Draw = draw_systematic
    """How units are drawn, unless ``pruning.….draw`` names another way."""
    biased: str = ""
    """Why the expected gradient is not the full batch's, for the log. Empty for an unbiased rule,
    whose kept units are weighted with 1/π."""
    weight: Callable[[Candidates, float], Floats] | None = None
    """The weights of what a biased rule keeps; None: 1."""


def wrap_user_rule(
    setting: str,
    name: str,
    function: Callable[[Candidates, float], ArrayLike],
    shape: Callable[[Candidates], Sequence[int]],
) -> Rule[Candidates]:
    """A user's function as an unbiased rule, which raises UserError for what cannot be inclusion
    probabilities.

    Args:
        setting: that names the function, and ``name``, its value.
        function: from candidates and ``keep`` to inclusion probabilities.
        shape: that these are to have.
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
    scores: Floats, costs: Floats, budget: float, floor: Floats | float
) -> Floats:
    """Neyman allocation: π = clip(c·s/√cost, floor, 1), with c such that Σ π·cost is the budget.

    If s is the norm of a unit's term, these probabilities minimise the variance Σ s²(1/π − 1) of
    independent draws that cost the budget in expectation. The floor bounds the weights 1/π.

    Args:
        scores: [n], not negative.
        costs: [n], positive, in the budget's unit (tokens, or prompts).
        budget: what Σ π·cost is to be. If all fit into it, π is 1. If the floors alone exceed it, π
            is the floor.
        floor: least probability, for all or for each.

    Returns:
        [n], in [floor, 1]. Units of score 0 get their floor. If units of positive score, each at 1,
        leave some of the budget over, units of score 0 share that as if their scores were equal.
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
    """clip(c·rate, floor, 1) for positive rates and a budget between what the floors and what all
    of them cost.

    The cost grows with c and is linear between the values of c at which a unit leaves its floor or
    meets its cap. A bisection over these finds the stretch in which the budget is met, and there c
    has a closed form.
    """
    rate = np.maximum(rate / rate.max(), 1e-300)  # keeps the breakpoints finite

    def compute_cost(c: float) -> float:
        return float(costs @ np.clip(c * rate, floor, 1.0))

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
"""Two scores that differ by less than this share are the same number, computed in two ways."""


def is_below_mean(scores: Floats, mean: Floats | float) -> Bools:
    """Whether scores (not negative) are below their mean by more than rounding; False for NaN."""
    return scores < mean * (1.0 - ROUNDING)

"""Equality of rewards in floating point.

The processes that score completions load this file. They do without NumPy, so that it is imported where arrays come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.rl.types import Bools, Floats

ROUNDING = 2.0**-21
"""The largest difference between equal rewards, as a fraction of the largest |reward| of their group: 4.8e-7. The
docstring of :func:`without_rounding` derives it."""


def without_rounding(rewards: Floats, present: Bools | None = None) -> Floats:
    """Give rewards that differ by rounding alone one value, so that ``==`` compares them from here on.

    Rewards are sums of fractions: 0.1 + 0.2, 0.3 and 0.15 + 0.15 are three different numbers. Divided by their standard
    deviation, such differences would be advantages of size one.

    The tolerance is a bound on the rounding of sums. A term that is rounded to u, relative to its size, and added up
    with n − 1 others whose sums are rounded to u as well, contributes an error of at most n·u of its size. For terms
    whose sizes add up to S, two sums of the same value differ by at most 2·n·u·S. Reward functions that use torch
    compute in single precision, u = 2⁻²⁴. Four terms then differ by 8·u·S = 2⁻²¹·S, where S is the largest |reward| of
    the group if no terms cancel. In double precision, u = 2⁻⁵³, the same tolerance allows S to be 10⁸ times the largest
    |reward|. Smaller differences between rewards are not trained on.

    Rewards are sorted, and equal to the next lower one if they exceed it by no more than the tolerance. The lowest of
    several equal ones replaces them, or 0 or 1, if it is equal to that.

    Args:
        rewards: [Q, G], of Q groups.
        present: [Q, G], False for padding; None: there is none.

    Returns:
        [Q, G]; padding is left as it is.
    """
    import numpy as np

    known = np.where(np.ones_like(rewards, dtype=bool) if present is None else present, rewards, np.inf)
    tolerance = ROUNDING * np.where(np.isinf(known), 0.0, np.abs(rewards)).max(axis=1, keepdims=True, initial=0.0)
    order = np.argsort(known, axis=1, kind="stable")
    ascending = np.take_along_axis(rewards, order, axis=1)
    higher = np.diff(ascending, axis=1, prepend=-np.inf) > tolerance
    lowest = np.maximum.accumulate(np.where(higher, np.arange(rewards.shape[1]), 0), axis=1)
    equal = np.take_along_axis(ascending, lowest, axis=1)
    equal[np.abs(equal) <= tolerance] = 0.0
    equal[np.abs(equal - 1.0) <= ROUNDING] = 1.0
    result = np.empty_like(rewards)
    np.put_along_axis(result, order, equal, axis=1)
    return np.where(np.isinf(known), rewards, result)


def is_right(reward: float) -> bool:
    """Whether a reward is 1 or more, but for rounding."""
    return reward >= 1.0 - ROUNDING

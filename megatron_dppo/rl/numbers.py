"""Checks and rounding of numbers from reward functions, data files, servers and engines.

Scoring processes import this file without NumPy. Functions of arrays import NumPy themselves.
"""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from megatron_dppo.rl.types import Bools, Floats

LOGPROB_ROUNDING = 1e-4
"""Largest excess of a log-probability over 0, by rounding in single precision."""


def as_number(value: object) -> float | None:
    """Return a number as a float; None for any other value.

    An integer beyond the range of floats becomes ±infinity, and a signalling NaN becomes NaN.
    """
    # NumPy and torch: scalars, and arrays without dimensions.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except ValueError:
        return math.nan


def as_truth(value: object) -> bool | None:
    """Return True for True or 1, False for False or 0, else None, as for 0.5 or ``"false"``."""
    number = as_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def as_mask(values: ArrayLike) -> Bools:
    """Return values as a mask.

    Raises:
        ValueError: a value is not true, false, 1 or 0.
    """
    import numpy as np

    mask = np.asarray(values)
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("a loss_mask with values other than true and false")
    return mask.astype(np.bool_)


def as_logprobs(values: ArrayLike, mask: Bools | None = None) -> NDArray[np.float32]:
    """Return log-probabilities of tokens, with 0 for values above 0 by rounding.

    Args:
        values: [T]; None (JSON's null) becomes NaN.
        mask: [T], True for tokens whose value is read; other values are not changed.

    Raises:
        ValueError: a value that is read is not finite, or above 0.
    """
    import numpy as np

    try:
        logprobs = np.array(values, np.float32)
    except (TypeError, ValueError):
        raise ValueError("log-probabilities that are no numbers") from None
    read = np.ones_like(logprobs, np.bool_) if mask is None else mask
    if not (np.isfinite(logprobs) & (logprobs <= LOGPROB_ROUNDING))[read].all():
        raise ValueError("log-probabilities that are above 0, null or not finite")
    return np.where(read, np.minimum(logprobs, np.float32(0.0)), logprobs)


ROUNDING = 2.0**-21
"""Largest difference between equal rewards, as a fraction of the group's largest |reward|: 4.8e-7,
derived in :func:`round_rewards`."""


def round_rewards(rewards: Floats, present: Bools | None = None) -> Floats:
    """Replace rewards that differ by rounding only with one value, so that ``==`` compares rewards.

    Rewards are sums of fractions: 0.1 + 0.2, 0.3 and 0.15 + 0.15 are three different numbers. After
    a division by the standard deviation, these differences would be advantages of size one.

    The tolerance bounds the rounding of sums. In a sum of n terms, a term with the relative
    rounding error u contributes an error of at most n·u of its size. For terms of total size S, two
    sums of the same value differ by at most 2·n·u·S. Reward functions in torch compute in single
    precision, u = 2⁻²⁴, so that two sums of four terms differ by at most 8·u·S = 2⁻²¹·S. S is the
    group's largest |reward| if terms do not cancel. In double precision, u = 2⁻⁵³, S may be 10⁸
    times as large. Differences within the tolerance are not trained on.

    A reward equals the next lower reward of the group if both differ by at most the tolerance. The
    lowest reward replaces all rewards equal to the lowest, directly or by a chain of equal rewards;
    0 or 1 replaces a reward that equals 0 or 1.

    Args:
        rewards: [Q, G].
        present: [Q, G], False for padding, which is not changed; None: no padding.
    """
    import numpy as np

    known = np.where(
        np.ones_like(rewards, dtype=bool) if present is None else present, rewards, np.inf
    )
    tolerance = ROUNDING * np.where(np.isinf(known), 0.0, np.abs(rewards)).max(
        axis=1, keepdims=True, initial=0.0
    )
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


def find_equal_groups(rewards: Floats) -> Bools:
    """Return True [Q] for groups of equal rewards [Q, G], from ``round_rewards``."""
    equal: Bools = (rewards == rewards[:, :1]).all(axis=1)
    return equal


def is_right(reward: float) -> bool:
    """Return whether a reward is at least 1, with a tolerance for rounding."""
    return reward >= 1.0 - ROUNDING

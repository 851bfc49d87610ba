"""Numbers from outside of the package, from reward functions, data files, servers and engines:
checks and rounding.

The processes that score completions load this file. They do without NumPy, so that it is imported
where arrays come.
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
"""A log-probability may be above 0 by so much: software that subtracts two numbers of single
precision rounds them."""


def as_number(value: object) -> float | None:
    """A number as a float, also a NumPy or torch scalar or array of no dimensions; None for
    anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of 400 digits
        return math.inf
    except ValueError:  # a signalling NaN
        return math.nan


def as_truth(value: object) -> bool | None:
    """True or 1 and False or 0 as a truth value; None for anything else: half is not true, and
    ``"false"`` is text."""
    number = as_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def as_mask(values: ArrayLike) -> Bools:
    """
    Raises:
        ValueError: a value is neither true nor false, 1 nor 0.
    """
    import numpy as np

    mask = np.asarray(values)
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("a loss_mask of other values than true and false")
    return mask.astype(np.bool_)


def as_logprobs(values: ArrayLike, mask: Bools | None = None) -> NDArray[np.float32]:
    """Log-probabilities of tokens; those above 0 by rounding are 0.

    Args:
        values: [T]; None, as JSON's null, is no number.
        mask: [T], True for tokens whose value is read; None: all. The value of other tokens is as
            given.

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
"""The largest difference between equal rewards, as a fraction of the largest |reward| of their
group: 4.8e-7. The docstring of :func:`round_rewards` derives it."""


def round_rewards(rewards: Floats, present: Bools | None = None) -> Floats:
    """Give rewards that differ by rounding alone one value, so that ``==`` compares them from here
    on.

    Rewards are sums of fractions: 0.1 + 0.2, 0.3 and 0.15 + 0.15 are three different numbers.
    Divided by their standard deviation, such differences would be advantages of size one.

    The tolerance is a bound on the rounding of sums. A term that is rounded to u, relative to its
    size, and added up with n − 1 others whose sums are rounded to u as well, contributes an error
    of at most n·u of its size. For terms whose sizes add up to S, two sums of the same value differ
    by at most 2·n·u·S. Reward functions that use torch compute in single precision, u = 2⁻²⁴. Four
    terms then differ by 8·u·S = 2⁻²¹·S, where S is the largest |reward| of the group if no terms
    cancel. In double precision, u = 2⁻⁵³, the same tolerance allows S to be 10⁸ times the largest
    |reward|. Smaller differences between rewards are not trained on.

    Rewards are sorted, and equal to the next lower one if they exceed it by no more than the
    tolerance. The lowest of several equal ones replaces them, or 0 or 1, if it is equal to that.

    Args:
        rewards: [Q, G], of Q groups.
        present: [Q, G], False for padding; None: there is none.

    Returns:
        [Q, G]; padding is left as it is.
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


def is_right(reward: float) -> bool:
    """Whether a reward is 1 or more, but for rounding."""
    return reward >= 1.0 - ROUNDING

"""Numbers from outside of the package: from reward functions, data files, servers and engines of users.

The processes that score completions load this file. They do without NumPy, so that it is imported where arrays come.
"""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from megatron_dppo.rl.types import Bools

LOGPROB_ROUNDING = 1e-4
"""A log-probability may be above 0 by so much: software that subtracts two numbers of single precision rounds them."""


def as_number(value: object) -> float | None:
    """A number as a float, also a NumPy or torch scalar or array of no dimensions; None for anything else."""
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
    """True or 1 and False or 0 as a truth value; None for anything else: half is not true, and ``"false"`` is text."""
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
        mask: [T], True for tokens whose value is read; None: all. The value of other tokens is as given.

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

"""Group-relative advantages, always of whole groups: pruning comes afterwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.rl.types import Floats


def advantages(rewards: Floats, *, normalise: bool) -> Floats:
    """How much better each completion was than its group: r − mean, over the group's standard deviation if wanted.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2; without the division, Dr.GRPO (arXiv:2503.20783). Whether a group is
    mixed is asked of the rewards themselves: the mean of equal numbers need not equal them in floating point, and a
    deviation of rounding errors divided by its own standard deviation is of size one.

    Args:
        rewards: [Q, G], one row per group.
        normalise: divide by the population standard deviation of the group.

    Returns:
        [Q, G]; exactly 0.0 in every group whose rewards are all equal.
    """
    mixed = (rewards != rewards[:, :1]).any(axis=1, keepdims=True)
    deviation = np.where(mixed, rewards - rewards.mean(axis=1, keepdims=True), 0.0)
    if not normalise:
        return deviation
    deviation /= np.where(mixed, np.abs(deviation).max(axis=1, keepdims=True), 1.0)  # squares of tiny ones would vanish
    return deviation / np.where(mixed, np.sqrt(np.mean(deviation**2, axis=1, keepdims=True)), 1.0)


def soft_overlong_penalty(lengths: ArrayLike, *, limit: int, buffer: int) -> Floats:
    """DAPO's soft punishment of overlong responses (arXiv:2503.14476, equation 13), to be added to the reward.

    Args:
        lengths: response lengths in tokens, of any shape.
        limit: longest response allowed, in tokens.
        buffer: over the last so many tokens below the limit the penalty falls linearly from 0 to −1; 0: no penalty.

    Returns:
        Values in [−1, 0], of the shape of ``lengths``.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if buffer == 0:
        return np.zeros_like(lengths)
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)

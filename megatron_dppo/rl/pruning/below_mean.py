"""What the DPPO paper's rule (arXiv:2603.04135) asks at both levels: is this score below the mean of its like?"""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.draw import Bools
from megatron_dppo.rl.types import Floats

ROUNDING = 1e-9
"""Relative difference below which two scores are the same number, computed along two ways."""


def below_mean(scores: Floats, mean: Floats | float) -> Bools:
    """Whether scores (not negative) are strictly below their mean, rounding apart; False for NaN."""
    return scores < mean * (1.0 - ROUNDING)


def all_alike(scores: Floats) -> Bools:
    """[Q, 1], whether each row of the scores [Q, G] holds one number only, rounding apart."""
    alike: Bools = np.ptp(scores, axis=1, keepdims=True) <= ROUNDING * scores.max(axis=1, keepdims=True)
    return alike

"""``threshold``: the DPPO paper's rule for prompts (arXiv:2603.04135)."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.below_mean import below_mean
from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.draw import draw_bernoulli
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: PromptCandidates, keep: float) -> Floats:
    """``keep`` (1 − r) for scores below the mean of the window, else 1.

    The paper gives no formula for the history score; here it is the mean |A| of the last visit. A prompt never seen has
    none, is left out of the mean, and is always kept.
    """
    seen = ~np.isnan(candidates.last_magnitude)
    if not seen.any():
        return np.ones_like(candidates.last_magnitude)
    low = below_mean(candidates.last_magnitude, candidates.last_magnitude[seen].mean())
    return np.where(low, keep, 1.0)


RULE = Rule(inclusion, draw_bernoulli)

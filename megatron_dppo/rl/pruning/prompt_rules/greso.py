"""``greso``: prompts that gave equal rewards again and again are skipped more and more often (arXiv:2506.02177).

A skipped prompt is not made up for: what is kept has weight 1, and the objective drifts toward prompts of mixed reward.
"""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.draw import draw_bernoulli
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats

LEAST = 0.01
"""No prompt is skipped with a higher chance than 1 less this."""


def inclusion(candidates: PromptCandidates, keep: float) -> Floats:
    """max(p^z, 0.01), z the trailing visits with equal rewards; ``keep`` only turns the rule off, where it is 1."""
    if keep == 1.0:
        return np.ones_like(candidates.explore)
    return np.maximum(candidates.explore**candidates.equal_visits, LEAST)


RULE = Rule(inclusion, draw_bernoulli, biased="prompts that it keeps seldom are not weighted up")

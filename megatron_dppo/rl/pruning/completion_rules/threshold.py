"""``threshold``: the DPPO paper's rule for completions (arXiv:2603.04135)."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.below_mean import all_alike, below_mean
from megatron_dppo.rl.pruning.candidates import CompletionCandidates
from megatron_dppo.rl.pruning.draw import Bools, draw_bernoulli
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def prunable(advantage: Floats) -> Bools:
    """[Q, G], where |A| is strictly below its group's mean |A|; all of a group whose |A| are all equal.

    For rewards of 0 and 1 that is the majority outcome of each group.
    """
    magnitude = np.abs(advantage)
    low: Bools = below_mean(magnitude, magnitude.mean(axis=1, keepdims=True)) | all_alike(magnitude)
    return low


def inclusion(candidates: CompletionCandidates, keep: float) -> Floats:
    """``keep``, the paper's 1 − r, for the prunable, else 1. The share kept follows from the rewards: no budget."""
    return np.where(prunable(candidates.advantage), keep, 1.0)


RULE = Rule(inclusion, draw_bernoulli)

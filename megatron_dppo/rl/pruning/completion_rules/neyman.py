"""``neyman``: the least variance at a budget of tokens."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.budget import capped_proportional
from megatron_dppo.rl.pruning.candidates import CompletionCandidates
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: CompletionCandidates, keep: float) -> Floats:
    """min(1, c·score/√cost), spending ``keep`` of the tokens of all rows that were rolled out."""
    live = ~candidates.idle
    probabilities = np.zeros_like(candidates.score)
    probabilities[live] = capped_proportional(
        candidates.score[live], candidates.cost[live], keep * candidates.cost.sum(), candidates.floor[live]
    )
    return probabilities


RULE = Rule(inclusion)

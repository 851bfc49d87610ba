"""``neyman``: the least variance at a number of prompts."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.budget import capped_proportional
from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: PromptCandidates, keep: float) -> Floats:
    """∝ √E[Σ A²] between the floor and 1. Σ π is the whole number nearest to keep·N, and at least 1.

    A systematic draw then keeps exactly so many, and every step rolls out the same number of prompts.
    """
    budget = max(1, round(keep * len(candidates.expected_square)))
    score = np.sqrt(candidates.expected_square)
    return capped_proportional(score, np.ones_like(score), budget, candidates.floor)


RULE = Rule(inclusion)

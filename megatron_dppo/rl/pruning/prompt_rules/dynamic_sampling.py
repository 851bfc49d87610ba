"""``dynamic_sampling``: DAPO's rule (arXiv:2503.14476, section 3.2): groups of equal reward are dropped and replaced.

All prompts of a window are rolled out, and only groups of mixed reward are trained on; ``megatron_dppo.rl.refill`` says
how many more prompts are rolled out until there are as many of them as the step wants.
"""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: PromptCandidates, keep: float) -> Floats:
    """1: what is dropped is dropped after its rollouts."""
    return np.ones_like(candidates.expected_square)


RULE = Rule(inclusion, biased="groups of equal reward are replaced by others, so that the mean is over mixed ones only")

"""Which prompts of a window are rolled out, chosen from earlier visits: what is pruned here is not even generated.

A new rule is a function from candidates and a share to keep to inclusion probabilities, and a row of ``PROMPT_RULES``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.prompt_rules import dynamic_sampling, greso, neyman, threshold
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats

__all__ = ["PROMPT_RULES", "PromptCandidates"]


def keep_all(candidates: PromptCandidates, keep: float) -> Floats:
    """``none``: probability 1, whatever the share."""
    return np.ones_like(candidates.expected_square)


PROMPT_RULES: Mapping[str, Rule[PromptCandidates]] = {
    "none": Rule(keep_all),
    "threshold": threshold.RULE,
    "neyman": neyman.RULE,
    "greso": greso.RULE,
    "dynamic_sampling": dynamic_sampling.RULE,
}

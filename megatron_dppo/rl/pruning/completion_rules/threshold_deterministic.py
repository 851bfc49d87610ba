"""``threshold_deterministic``: what the DPPO paper's Appendix A prunes, by rank and not by chance."""

from __future__ import annotations

import math

import numpy as np

from megatron_dppo.rl.pruning.candidates import CompletionCandidates
from megatron_dppo.rl.pruning.completion_rules.threshold import prunable
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: CompletionCandidates, keep: float) -> Floats:
    """0 for the lowest |A| among each group's prunable, floor((1 − keep)·their number) of them; 1 for all others.

    Equal |A| go in the order of sampling.
    """
    kept = np.ones_like(candidates.advantage)
    low = prunable(candidates.advantage)
    for row, group in enumerate(np.abs(candidates.advantage)):
        (members,) = np.nonzero(low[row])
        dropped = math.floor((1.0 - keep) * len(members) + 1e-9)
        kept[row, members[np.argsort(group[members], kind="stable")[:dropped]]] = 0.0
    return kept


def weight(candidates: CompletionCandidates, keep: float) -> Floats:
    """The weights that the paper's draw would have had, 1/keep for the prunable; their share is another one here."""
    return np.where(prunable(candidates.advantage), 1.0 / keep, 1.0)


RULE = Rule(inclusion, biased="it drops the lowest |A| by rank, whose inclusion probability is 0", weight=weight)

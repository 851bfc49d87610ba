"""``top_k``: CPPO's rule (arXiv:2503.22342): the largest |A| of the minibatch, and no weights."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.pruning.candidates import CompletionCandidates
from megatron_dppo.rl.pruning.rule import Rule
from megatron_dppo.rl.types import Floats


def inclusion(candidates: CompletionCandidates, keep: float) -> Floats:
    """1 for the ``keep`` of the completions with the largest |A|, else 0.

    Of equal |A|, which binary rewards have many of, first samples go before second ones: no prompt is preferred by more
    than one completion. Equal is what differs by rounding alone, or the order of a group's rewards would decide.
    """
    magnitude = np.abs(candidates.advantage)
    magnitude = np.round(magnitude / max(magnitude.max(initial=0.0), np.finfo(float).tiny), 9)
    sample = np.broadcast_to(np.arange(magnitude.shape[1]), magnitude.shape)
    order = np.lexsort((sample.ravel(), -magnitude.ravel()))
    kept = np.zeros(magnitude.size)
    kept[order[: max(1, round(keep * magnitude.size))]] = 1.0
    return kept.reshape(magnitude.shape)


RULE = Rule(inclusion, biased="it drops the lowest |A|, whose inclusion probability is 0, and weighs nothing up")

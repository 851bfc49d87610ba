"""Which prompts of a window are rolled out, chosen from earlier visits: what is pruned here is not even generated.

A rule maps what is known of the window's prompts, and a share to keep, to inclusion probabilities. A new rule is a
function and a row of ``PROMPT_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_dppo.rl.pruning.budget import capped_proportional
from megatron_dppo.rl.pruning.draw import Draw, draw_bernoulli, draw_systematic
from megatron_dppo.rl.pruning.threshold import below_mean
from megatron_dppo.rl.types import Floats


@dataclass(frozen=True, slots=True)
class PromptCandidates:
    """The N prompts of a window, as earlier visits left them."""

    last_magnitude: Floats
    """[N], mean |A| of the last visit; NaN for prompts never seen."""
    expected_square: Floats
    """[N], E[Σ_i A_i²] of the next group, up to a common factor; the prior's for prompts never seen."""
    floor: float
    """Least inclusion probability."""


PromptRule = Callable[[PromptCandidates, float], Floats]
"""From candidates and the share to keep to inclusion probabilities [N]."""


def keep_all(candidates: PromptCandidates, keep: float) -> Floats:
    """``none``: probability 1, whatever the share."""
    return np.ones_like(candidates.expected_square)


def threshold(candidates: PromptCandidates, keep: float) -> Floats:
    """``threshold``, the paper's: ``keep`` (1 − r) for scores below the mean of the window, else 1.

    The paper gives no formula for the history score; here it is the mean |A| of the last visit. A prompt never seen has
    none, is left out of the mean, and is always kept.
    """
    seen = ~np.isnan(candidates.last_magnitude)
    if not seen.any():
        return np.ones_like(candidates.last_magnitude)
    low = below_mean(candidates.last_magnitude, candidates.last_magnitude[seen].mean())
    return np.where(low, keep, 1.0)


def neyman(candidates: PromptCandidates, keep: float) -> Floats:
    """``neyman``: ∝ √E[Σ A²] between the floor and 1. Σ π is the whole number nearest to keep·N, and at least 1.

    A systematic draw then keeps exactly so many, and every step rolls out the same number of prompts.
    """
    budget = max(1, round(keep * len(candidates.expected_square)))
    score = np.sqrt(candidates.expected_square)
    return capped_proportional(score, np.ones_like(score), budget, candidates.floor)


PROMPT_RULES: dict[str, tuple[PromptRule, Draw]] = {
    "none": (keep_all, draw_systematic),
    "threshold": (threshold, draw_bernoulli),
    "neyman": (neyman, draw_systematic),
}

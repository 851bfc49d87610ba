"""Which completions are trained on, chosen after rewards and before the backward pass.

A rule maps what is known of a minibatch's completions, and a share to keep, to inclusion probabilities. A new rule is a
function and a row of ``COMPLETION_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_dppo.rl.pruning.budget import capped_proportional
from megatron_dppo.rl.pruning.draw import Bools, Draw, draw_bernoulli, draw_systematic
from megatron_dppo.rl.pruning.threshold import all_alike, below_mean
from megatron_dppo.rl.types import Floats


@dataclass(frozen=True, slots=True)
class CompletionCandidates:
    """The completions of one minibatch, whole groups. All [Q, G], all known before the draw."""

    advantage: Floats
    score: Floats
    """|A|·c·√Σ_t(1−p_t)²/π_prompt, a proxy of the norm of the term that enters the sum. It carries the first draw's
    1/π: without that, too little would be kept of what is already heavy."""
    cost: Floats
    """Tokens of the row that a pack needs for it, prompt and response."""
    floor: Floats
    """Least inclusion probability, so that the weight 1/(π_prompt·π_completion) stays bounded."""
    idle: Bools
    """Whose gradient is exactly 0: they are dropped under every rule, and nothing is weighted up for them."""


CompletionRule = Callable[[CompletionCandidates, float], Floats]
"""From candidates and the share to keep to inclusion probabilities [Q, G], floors and idle ones not yet seen to."""


def keep_all(candidates: CompletionCandidates, keep: float) -> Floats:
    """``none``: probability 1, whatever the share."""
    return np.ones_like(candidates.advantage)


def threshold(candidates: CompletionCandidates, keep: float) -> Floats:
    """``threshold``, the paper's: ``keep`` (1 − r) where |A| is strictly below its group's mean |A|, else 1.

    In a group whose |A| are all equal none is below the mean; there each is kept with 1 − r. For rewards of 0 and 1 the
    rule prunes the majority outcome of each group. The share kept follows from the rewards; it is no budget.
    """
    magnitude = np.abs(candidates.advantage)
    low = below_mean(magnitude, magnitude.mean(axis=1, keepdims=True)) | all_alike(magnitude)
    return np.where(low, keep, 1.0)


def neyman(candidates: CompletionCandidates, keep: float) -> Floats:
    """``neyman``: min(1, c·score/√cost), spending ``keep`` of the tokens of all rows that were rolled out."""
    live = ~candidates.idle
    inclusion = np.zeros_like(candidates.score)
    inclusion[live] = capped_proportional(
        candidates.score[live], candidates.cost[live], keep * candidates.cost.sum(), candidates.floor[live]
    )
    return inclusion


COMPLETION_RULES: dict[str, tuple[CompletionRule, Draw]] = {
    "none": (keep_all, draw_systematic),
    "threshold": (threshold, draw_bernoulli),
    "neyman": (neyman, draw_systematic),
}


def completion_inclusion(rule: str, candidates: CompletionCandidates, keep: float) -> Floats:
    """Inclusion probabilities [Q, G] under ``pruning.completions.rule``: 0 for idle rows, else at least the floor."""
    probabilities, _ = COMPLETION_RULES[rule]
    return np.where(candidates.idle, 0.0, np.maximum(probabilities(candidates, keep), candidates.floor))


def draw_completions(rule: str, candidates: CompletionCandidates, inclusion: Floats, rng: np.random.Generator) -> Bools:
    """What is kept [Q, G], given the inclusion probabilities [Q, G].

    Units go through the draw sorted by (prompt, A): a systematic draw then spreads what it keeps over the prompts, and
    within each over bad and good completions.
    """
    _, draw = COMPLETION_RULES[rule]
    group = np.repeat(np.arange(len(inclusion)), inclusion.shape[1])
    order = np.lexsort((candidates.advantage.ravel(), group))
    kept = np.empty(inclusion.size, dtype=np.bool_)
    kept[order] = draw(inclusion.ravel()[order], rng)
    return kept.reshape(inclusion.shape)

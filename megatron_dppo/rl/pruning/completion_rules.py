"""Rules that choose completions to train on, between rewards and backward pass.

A new rule is a function for :class:`Rule`, and an entry of ``COMPLETION_RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.rl.pruning.sampling import (
    DRAWS,
    ROUNDING,
    Rule,
    allocate_proportional,
    draw_bernoulli,
    is_below_mean,
    wrap_user_rule,
)
from megatron_dppo.rl.types import Bools, Floats

FUNCTION = "pruning.completions.function"
SHARES = 32
"""Number of candidate fractions, from the floors' to all completions with a gradient. The product
is flat around its minimum."""


@dataclass(frozen=True, slots=True)
class CompletionCandidates:
    """Input of a completion rule: whole groups of a minibatch, without any result of the draw.
    Arrays are [Q, G].

    A group of one right and three wrong answers of 100 tokens, at ``pruning.max_weight`` 5, has
    ``advantage`` [[1.73, −0.58, −0.58, −0.58]], and 100 as each ``cost`` and 0.2 as each ``floor``.
    """

    advantage: Floats
    score: Floats
    """Proxy of the norm of a completion's term in the sum, |A|·c·√Σ_t(1−p_t)²/π_prompt.
    ``pruning.completions.score`` chooses another; with a teacher or an entropy bonus,
    ``compute_magnitudes`` replaces |A|."""
    cost: Floats
    """Tokens of prompt and response."""
    floor: Floats
    """Least inclusion probability, which bounds the weight 1/(π_prompt·π_completion)."""
    zero_advantage: Bools
    """The gradient is exactly 0: A = 0, no KL term, entropy bonus or teacher; or masked by
    ``loss.mask_truncated``. Every rule drops these completions, without weighting up the rest."""


def keep_all(candidates: CompletionCandidates, keep: float) -> Floats:
    return np.ones_like(candidates.advantage)


def find_prunable(candidates: CompletionCandidates) -> Bools:
    """Return True [Q, G] if |A| is strictly below its group's mean |A|, or if a group's |A| are all
    equal.

    For rewards of 0 and 1 this is each group's majority outcome.
    """
    magnitude = np.abs(candidates.advantage)
    least = magnitude.min(axis=1, keepdims=True)
    most = magnitude.max(axis=1, keepdims=True)
    low: Bools = is_below_mean(magnitude, magnitude.mean(axis=1, keepdims=True)) | (
        most - least <= ROUNDING * most
    )
    return low


def apply_threshold(candidates: CompletionCandidates, keep: float) -> Floats:
    """Apply the DPPO paper's rule (arXiv:2603.04135): ``keep``, the paper's 1 − r, for prunable
    completions, else 1. The kept fraction follows from the rewards.
    """
    return np.where(find_prunable(candidates), keep, 1.0)


def apply_neyman(candidates: CompletionCandidates, keep: float) -> Floats:
    """Minimise variance at a budget of tokens: min(1, c·score/√cost), with c such that Σ π·cost is
    keep·Σ cost."""
    live = ~candidates.zero_advantage
    probabilities = np.zeros_like(candidates.score)
    probabilities[live] = allocate_proportional(
        candidates.score[live],
        candidates.cost[live],
        keep * candidates.cost.sum(),
        candidates.floor[live],
    )
    return probabilities


def apply_threshold_deterministic(candidates: CompletionCandidates, keep: float) -> Floats:
    """Apply the rule of the DPPO paper's Appendix A, which drops by rank, not at random.

    Per group, 0 for the floor((1 − keep)·n) lowest |A| of n prunable (the first of equal |A|), else
    1.
    """
    kept = np.ones_like(candidates.advantage)
    low = find_prunable(candidates)
    for row, group in enumerate(np.abs(candidates.advantage)):
        (members,) = np.nonzero(low[row])
        # Rounding may leave the product just below an integer.
        dropped = math.floor((1.0 - keep) * len(members) + 1e-9)
        kept[row, members[np.argsort(group[members], kind="stable")[:dropped]]] = 0.0
    return kept


def compute_threshold_weights(candidates: CompletionCandidates, keep: float) -> Floats:
    # The weights of the paper's random draw, although this rule keeps another fraction.
    return np.where(find_prunable(candidates), 1.0 / keep, 1.0)


def apply_top_k(candidates: CompletionCandidates, keep: float) -> Floats:
    """Apply CPPO's rule (arXiv:2503.22342): 1 for the fraction ``keep`` of the minibatch with the
    largest |A|, else 0; weights are 1.
    """
    magnitude = np.abs(candidates.advantage)
    # Differences by rounding alone must not break ties, which are frequent with binary rewards.
    # Among equal |A|, each group's first completion precedes any second, so that no prompt is
    # preferred by more than one completion.
    magnitude = np.round(magnitude / max(magnitude.max(initial=0.0), np.finfo(float).tiny), 9)
    turn = np.broadcast_to(np.arange(magnitude.shape[1]), magnitude.shape)
    order = np.lexsort((turn.ravel(), -magnitude.ravel()))
    kept = np.zeros(magnitude.size)
    kept[order[: max(1, round(keep * magnitude.size))]] = 1.0
    return kept.reshape(magnitude.shape)


def apply_extremes(candidates: CompletionCandidates, keep: float) -> Floats:
    """Apply BranchGRPO's pruning in width (arXiv:2509.06040): 1 for the best and the worst of each
    group, else 0; weights are 1.

    Each side is half of ``keep`` of a group, at least one. The first of equal A are the worst.
    """
    samples = candidates.advantage.shape[1]
    count = max(1, round(keep * samples / 2))
    rank = np.argsort(np.argsort(candidates.advantage, axis=1, kind="stable"), axis=1)
    return ((rank < count) | (rank >= samples - count)).astype(np.float64)


COMPLETION_RULES: Mapping[str, Rule[CompletionCandidates]] = {
    "none": Rule(keep_all),
    "threshold": Rule(apply_threshold, draw_bernoulli),
    "neyman": Rule(apply_neyman),
    "threshold_deterministic": Rule(
        apply_threshold_deterministic,
        biased="it drops the lowest |A| by rank, whose inclusion probability is 0",
        weight=compute_threshold_weights,
    ),
    "top_k": Rule(
        apply_top_k,
        biased="it drops the lowest |A|, whose inclusion probability is 0, without weights",
    ),
    "extremes": Rule(
        apply_extremes,
        biased="it drops what is neither best nor worst in its group, without weights",
    ),
}


_REGISTERED: dict[str, Rule[CompletionCandidates]] = {}


def register(name: str, function: Callable[[CompletionCandidates, float], ArrayLike]) -> None:
    """Register a user's function as a rule in this process."""
    _REGISTERED[name] = wrap_user_rule(
        FUNCTION, name, function, lambda candidates: candidates.advantage.shape
    )


def find_completion_rule(name: str) -> Rule[CompletionCandidates]:
    return COMPLETION_RULES.get(name) or _REGISTERED[name]


def compute_completion_inclusion(
    rule: str,
    candidates: CompletionCandidates,
    keep: float,
) -> Floats:
    """Return a rule's inclusion probabilities [Q, G]: 0 for zero advantage, else at least the
    floor."""
    chosen = find_completion_rule(rule)
    probabilities = chosen.inclusion(candidates, keep)
    # A floor would turn the 0 and 1 of a biased rule into another rule.
    if not chosen.biased:
        probabilities = np.maximum(probabilities, candidates.floor)
    return np.where(candidates.zero_advantage, 0.0, probabilities)


def find_efficient_keep(rule: str, candidates: CompletionCandidates, generated: float) -> float:
    """Return the fraction of tokens, of ``SHARES``, with the least variance × cost; 1 if no other
    is better.

    - Variance: estimated by Σ s²/π.
    - Cost: generated tokens + Σ π·tokens, whose relative weight hardly changes the best fraction.

    Args:
        rule: an unbiased rule with a fraction to keep.
        generated: tokens of the candidates' responses.
    """
    # Scores and tokens are known before the draw, and do not depend on its result.
    live = ~candidates.zero_advantage
    squares = candidates.score[live] ** 2
    tokens = candidates.cost[live]
    total = candidates.cost.sum()
    # Every group may have lost a completion to a failed scoring.
    if total == 0.0:
        return 1.0

    # A step of fewer random prompts has the same product, which therefore compares pruning with a
    # smaller batch.
    def compute_product(share: float) -> float:
        inclusion = compute_completion_inclusion(rule, candidates, share)[live]
        return float((squares / inclusion).sum() * (generated + inclusion @ tokens))

    least = tokens @ candidates.floor[live] / total
    most = tokens.sum() / total
    return min([1.0, *np.linspace(most, least, SHARES).tolist()], key=compute_product)


def compute_completion_weights(
    rule: str,
    candidates: CompletionCandidates,
    inclusion: Floats,
    keep: float,
) -> Floats:
    """Return each completion's factor [Q, G] if kept, given its prompt: 1/π, or a biased rule's own
    weight; 0 if never kept."""
    chosen = find_completion_rule(rule)
    ever = inclusion > 0.0
    if chosen.biased:
        own = chosen.weight(candidates, keep) if chosen.weight else np.ones_like(inclusion)
        return np.where(ever, own, 0.0)
    return np.divide(1.0, inclusion, out=np.zeros_like(inclusion), where=ever)


def draw_completions(
    rule: str,
    candidates: CompletionCandidates,
    inclusion: Floats,
    rng: np.random.Generator,
    *,
    draw: str | None = None,
) -> Bools:
    """Draw completions [Q, G] by inclusion probabilities [Q, G]."""
    decide = DRAWS[draw] if draw else find_completion_rule(rule).draw
    group, sample = map(np.ravel, np.indices(inclusion.shape))
    # In order of (prompt, A), a systematic draw spreads the kept completions over prompts, and over
    # bad and good completions of each.
    order = np.lexsort((candidates.advantage[group, sample], group))
    group = group[order]
    sample = sample[order]
    kept = np.zeros(inclusion.shape, dtype=np.bool_)
    kept[group, sample] = decide(inclusion[group, sample], rng)
    return kept

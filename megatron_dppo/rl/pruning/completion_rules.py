"""The rules by which completions are kept, after their rewards are known and before the backward
pass.

A new rule is a function from candidates and a share to keep to inclusion probabilities, and an
entry of ``COMPLETION_RULES``.
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
"""From the share of the floors to that of all that has a gradient. The product is flat where it is
least."""


@dataclass(frozen=True, slots=True)
class CompletionCandidates:
    """A minibatch's completions as a rule sees them: whole groups, nothing that depends on the
    draw. [Q, G].

    A group of one right and three wrong answers has ``advantage`` [[1.73, −0.58, −0.58, −0.58]].
    With 100 tokens each ``cost`` is [[100, 100, 100, 100]]. At
    ``make_pruning_section.max_weight`` 5 ``floor`` is [[0.2, 0.2, 0.2, 0.2]].
    """

    advantage: Floats
    score: Floats
    """A proxy of the norm of the term that enters the sum, |A|·c·√Σ_t(1−p_t)²/π_prompt
    (``pruning.completions.score`` chooses another; with a teacher ``magnitudes`` takes the
    place of
    |A|). It has the first draw's 1/π, since the completions of seldom kept prompts weigh more."""
    cost: Floats
    """Tokens that it takes up in a pack, prompt and response."""
    floor: Floats
    """Least inclusion probability. It bounds the weight 1/(π_prompt·π_completion)."""
    zero_advantage: Bools
    """A = 0, no KL term and no teacher, or masked by ``loss.mask_truncated``: the gradient is
    exactly 0. Every rule drops these, and weighs nothing up for them."""


def keep_all(candidates: CompletionCandidates, keep: float) -> Floats:
    """``none``: probability 1, whatever the share."""
    return np.ones_like(candidates.advantage)


def find_prunable(candidates: CompletionCandidates) -> Bools:
    """[Q, G], True if |A| is strictly below its group's mean |A|, and for all of a group whose |A|
    are all equal.

    For rewards of 0 and 1 that is the majority outcome of each group.
    """
    magnitude = np.abs(candidates.advantage)
    least = magnitude.min(axis=1, keepdims=True)
    most = magnitude.max(axis=1, keepdims=True)
    low: Bools = is_below_mean(magnitude, magnitude.mean(axis=1, keepdims=True)) | (
        most - least <= ROUNDING * most
    )
    return low


def apply_threshold(candidates: CompletionCandidates, keep: float) -> Floats:
    """The DPPO paper's rule (arXiv:2603.04135): ``keep``, which is its 1 − r, for the prunable,
    else 1.

    It meets no budget: the share kept follows from the rewards.
    """
    return np.where(find_prunable(candidates), keep, 1.0)


def apply_neyman(candidates: CompletionCandidates, keep: float) -> Floats:
    """The least variance at a budget of tokens: min(1, c·score/√cost), with c such that Σ π·cost is
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
    """The rule of the DPPO paper's Appendix A, which drops by rank and not by chance.

    0 for the lowest |A| among each group's prunable, floor((1 − keep)·their number) of them; 1 for
    all others. Among equal |A| the first sampled are dropped first.
    """
    kept = np.ones_like(candidates.advantage)
    low = find_prunable(candidates)
    for row, group in enumerate(np.abs(candidates.advantage)):
        (members,) = np.nonzero(low[row])
        dropped = math.floor((1.0 - keep) * len(members) + 1e-9)
        kept[row, members[np.argsort(group[members], kind="stable")[:dropped]]] = 0.0
    return kept


def compute_threshold_weights(candidates: CompletionCandidates, keep: float) -> Floats:
    """1/keep for the prunable, else 1: the weights of the paper's draw, although this rule keeps
    another share."""
    return np.where(find_prunable(candidates), 1.0 / keep, 1.0)


def apply_top_k(candidates: CompletionCandidates, keep: float) -> Floats:
    """CPPO's rule (arXiv:2503.22342): 1 for the ``keep`` of the minibatch with the largest |A|,
    else 0, and no weights.

    Among equal |A|, frequent with binary rewards, each group's first completions are kept before
    its second ones, so that no prompt is preferred by more than one. |A| that differ by rounding
    alone count as equal.
    """
    magnitude = np.abs(candidates.advantage)
    magnitude = np.round(magnitude / max(magnitude.max(initial=0.0), np.finfo(float).tiny), 9)
    turn = np.broadcast_to(np.arange(magnitude.shape[1]), magnitude.shape)
    order = np.lexsort((turn.ravel(), -magnitude.ravel()))
    kept = np.zeros(magnitude.size)
    kept[order[: max(1, round(keep * magnitude.size))]] = 1.0
    return kept.reshape(magnitude.shape)


def apply_extremes(candidates: CompletionCandidates, keep: float) -> Floats:
    """BranchGRPO's pruning in width (arXiv:2509.06040): of each group the best and as many of the
    worst, else 0.

    Half of ``keep`` of a group, one at least, on either side, and no weights. Among equal A the
    first are the worst.
    """
    samples = candidates.advantage.shape[1]
    each = max(1, round(keep * samples / 2))
    rank = np.argsort(np.argsort(candidates.advantage, axis=1, kind="stable"), axis=1)
    return ((rank < each) | (rank >= samples - each)).astype(np.float64)


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
    """Have a user's function be the rule of this name, in this process."""
    _REGISTERED[name] = wrap_user_rule(
        FUNCTION, name, function, lambda candidates: candidates.advantage.shape
    )


def find_completion_rule(name: str) -> Rule[CompletionCandidates]:
    """A rule of the table, or one that was adopted."""
    return COMPLETION_RULES.get(name) or _REGISTERED[name]


def compute_completion_inclusion(
    rule: str, candidates: CompletionCandidates, keep: float
) -> Floats:
    """Inclusion probabilities [Q, G] under a rule, by its name: 0 for zero advantage, else at least
    the floor.

    The 0 and 1 of a biased rule have no floor, which would make another rule of it.
    """
    chosen = find_completion_rule(rule)
    probabilities = chosen.inclusion(candidates, keep)
    if not chosen.biased:
        probabilities = np.maximum(probabilities, candidates.floor)
    return np.where(candidates.zero_advantage, 0.0, probabilities)


def find_efficient_keep(rule: str, candidates: CompletionCandidates, generated: float) -> float:
    """The share of the tokens, of ``SHARES``, at which variance × cost is least; 1 where none has
    less than that.

    A step of fewer prompts, taken at random, leaves this product as it is. So it says what pruning
    is worth beside a smaller batch. The variance is estimated by Σ s²/π. The cost is the tokens
    generated and Σ π·tokens: one as much as another, since the best share hardly depends on it.
    Scores and tokens are all known before the draw, so that the probabilities depend on no outcome
    of it.

    Args:
        rule: its name; with a share to keep, and unbiased.
        candidates: of a minibatch.
        generated: tokens of their responses.
    """
    live = ~candidates.zero_advantage
    squares = candidates.score[live] ** 2
    tokens = candidates.cost[live]
    total = candidates.cost.sum()
    if (
        total == 0.0
    ):  # nothing is left to train on, as where each group lost a completion to a failed scoring
        return 1.0

    def compute_product(share: float) -> float:
        inclusion = compute_completion_inclusion(rule, candidates, share)[live]
        return float((squares / inclusion).sum() * (generated + inclusion @ tokens))

    least = tokens @ candidates.floor[live] / total
    most = tokens.sum() / total
    return min([1.0, *np.linspace(most, least, SHARES).tolist()], key=compute_product)


def compute_completion_weights(
    rule: str, candidates: CompletionCandidates, inclusion: Floats, keep: float
) -> Floats:
    """The factor [Q, G] of each completion that is kept, given its prompt: 1/π, or a biased rule's
    own weight; 0 for those that are never kept."""
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
    """Draw completions [Q, G] by inclusion probabilities [Q, G] and the rule's draw, or the draw
    named.

    Completions are sorted by (prompt, A). A systematic draw then spreads what it keeps over the
    prompts, and within each over bad and good completions.
    """
    decide = DRAWS[draw] if draw else find_completion_rule(rule).draw
    group, sample = map(np.ravel, np.indices(inclusion.shape))
    order = np.lexsort((candidates.advantage[group, sample], group))
    group = group[order]
    sample = sample[order]
    kept = np.zeros(inclusion.shape, dtype=np.bool_)
    kept[group, sample] = decide(inclusion[group, sample], rng)
    return kept

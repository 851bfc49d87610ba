"""Rules that choose the prompts of a window to roll out, and their draw.

A new rule is a function for :class:`Rule`, and an entry of ``PROMPT_RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.config import PromptPruningConfig
from megatron_dppo.rl.pruning.forecast import PromptForecast
from megatron_dppo.rl.pruning.sampling import (
    DRAWS,
    Rule,
    allocate_proportional,
    draw_bernoulli,
    is_below_mean,
    wrap_user_rule,
)
from megatron_dppo.rl.types import Floats, Ints, Selection

FUNCTION = "pruning.prompts.function"


@dataclass(frozen=True, slots=True)
class PromptCandidates:
    """Input of a prompt rule: a window's N prompts with their visits before this step.

    For a prompt seen once with one right answer of four and a prompt never seen,
    ``last_magnitude`` is [0.87, nan] and ``equal_visits`` [0, 0].
    """

    last_magnitude: Floats
    """[N], mean |A| of the last visit; NaN without a visit."""
    expected_square: Floats
    """[N], E[Σ_i h_i²] of the next group, up to a common factor; h: proxy of the norm of a
    completion's term."""
    expected_tokens: Floats
    """[N], positive: generated tokens per completion, up to a common factor."""
    equal_visits: Ints
    """[N], latest consecutive visits with equal rewards."""
    explore: Floats
    """[N], GRESO's p, see ``get_exploration``."""
    floor: float
    """Least inclusion probability."""


def keep_all(candidates: PromptCandidates, keep: float) -> Floats:
    return np.ones_like(candidates.expected_square)


def apply_threshold(candidates: PromptCandidates, keep: float) -> Floats:
    """Apply the DPPO paper's rule (arXiv:2603.04135): ``keep``, the paper's 1 − r, for scores below
    the window's mean, else 1.
    """
    # The paper gives no formula for the history score: use mean |A| of the last visit. A prompt
    # never seen has no score: excluded from the mean, and always kept.
    seen = ~np.isnan(candidates.last_magnitude)
    if not seen.any():
        return np.ones_like(candidates.last_magnitude)
    low = is_below_mean(candidates.last_magnitude, candidates.last_magnitude[seen].mean())
    return np.where(low, keep, 1.0)


def apply_threshold_deterministic(candidates: PromptCandidates, keep: float) -> Floats:
    """Apply the DPPO paper's Appendix A to prompts, which drops by rank, not at random.

    0 for the floor((1 − keep)·n) lowest scores of the n prompts that ``threshold`` may drop (the
    first of equal scores), else 1. Kept prompts have weight 1.
    """
    kept = np.ones_like(candidates.last_magnitude)
    (low,) = np.nonzero(apply_threshold(candidates, keep) < 1.0)
    # Rounding may leave the product just below an integer.
    dropped = math.floor((1.0 - keep) * len(low) + 1e-9)
    order = np.argsort(candidates.last_magnitude[low], kind="stable")
    kept[low[order[:dropped]]] = 0.0
    return kept


def apply_neyman(candidates: PromptCandidates, keep: float) -> Floats:
    """Minimise variance at a budget of generated tokens: probabilities proportional to √(E[Σ
    h²]/E[tokens]), between floor and 1.

    The budget is round(keep·N), at least 1, times the mean prompt's tokens. If expected tokens are
    equal, a systematic draw keeps exactly round(keep·N) prompts.
    """
    budget = max(1, round(keep * len(candidates.expected_square)))
    cost = candidates.expected_tokens / candidates.expected_tokens.mean()
    return allocate_proportional(
        np.sqrt(candidates.expected_square), cost, budget, candidates.floor
    )


def apply_greso(candidates: PromptCandidates, keep: float) -> Floats:
    """Apply GRESO's rule (arXiv:2506.02177): max(p^z, 0.01), with z latest consecutive visits of
    equal rewards; ``keep`` = 1 disables the rule.

    Kept prompts have weight 1: the objective drifts toward prompts of non-zero variance.
    """
    if keep == 1.0:
        return np.ones_like(candidates.explore)
    return np.maximum(candidates.explore**candidates.equal_visits, 0.01)


def apply_dynamic_sampling(candidates: PromptCandidates, keep: float) -> Floats:
    """Apply DAPO's rule (arXiv:2503.14476, section 3.2): 1; groups of equal reward are dropped
    after their rollouts, and replaced by ``compute_resample_size`` prompts (``schedule.py``).
    """
    return np.ones_like(candidates.expected_square)


PROMPT_RULES: Mapping[str, Rule[PromptCandidates]] = {
    "none": Rule(keep_all),
    "threshold": Rule(apply_threshold, draw_bernoulli),
    "neyman": Rule(apply_neyman),
    "threshold_deterministic": Rule(
        apply_threshold_deterministic,
        biased="it drops the lowest scores by rank, whose inclusion probability is 0",
    ),
    "greso": Rule(apply_greso, draw_bernoulli, biased="rarely kept prompts get no larger weight"),
    "dynamic_sampling": Rule(
        apply_dynamic_sampling,
        biased=(
            "groups of equal reward are replaced, so that the mean is over groups of non-zero "
            "variance only"
        ),
    ),
}


_REGISTERED: dict[str, Rule[PromptCandidates]] = {}


def register(name: str, function: Callable[[PromptCandidates, float], ArrayLike]) -> None:
    """Register a user's function as a rule in this process; its probabilities are raised to the
    floor."""
    own = wrap_user_rule(
        FUNCTION, name, function, lambda candidates: candidates.expected_square.shape
    )
    _REGISTERED[name] = Rule(
        lambda candidates, keep: np.maximum(own.inclusion(candidates, keep), candidates.floor)
    )


def find_prompt_rule(name: str) -> Rule[PromptCandidates]:
    return PROMPT_RULES.get(name) or _REGISTERED[name]


def select(
    window: Ints,
    history: PromptForecast,
    config: PromptPruningConfig,
    *,
    group_size: int,
    keep: float,
    rng: np.random.Generator,
    longest_first: bool = True,
) -> Selection:
    """Draw the prompts of a step.

    Args:
        window: [N], ids of the candidate prompts, in the epoch's order.
        history: earlier visits, without this step's.
        group_size: G.
        keep: ``config.keep`` under its schedule.
        rng: the step's generator for ``Purpose.PROMPTS``.
        longest_first: whether to request prompts in descending order of expected tokens.

    Returns:
        Kept prompts in the order of their requests, with inclusion probabilities; all 1 under a
        biased rule, whose kept prompts have weight 1. The draw does not depend on the order.
    """
    rule = find_prompt_rule(config.named)
    candidates = PromptCandidates(
        last_magnitude=history.get_last_magnitude(window),
        expected_square=history.expected_square(window, group_size=group_size),
        expected_tokens=history.expected_tokens(window),
        equal_visits=history.count_equal_visits(window),
        explore=history.get_exploration(window),
        floor=config.floor,
    )
    inclusion = rule.inclusion(candidates, keep)
    draw = DRAWS[config.draw] if config.draw else rule.draw
    kept = draw(inclusion, rng)
    weighted = np.ones_like(inclusion) if rule.biased else inclusion
    # Longest processing time first (Graham, 1969): no long prompt may begin last.
    order = np.arange(len(window))
    if longest_first:
        order = np.argsort(-candidates.expected_tokens, kind="stable")
    selected = order[kept[order]]
    return Selection(prompt_ids=window[selected], inclusion=weighted[selected], window=len(window))

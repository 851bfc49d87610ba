"""The rules by which prompts of a window are rolled out, and their draw. Nothing is generated for
the others.

A new rule is a function from candidates and a share to keep to inclusion probabilities, and an
entry of ``PROMPT_RULES``.
"""

from __future__ import annotations

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
    """The N prompts of a window as a rule sees them: earlier visits, and nothing of this step.

    For two prompts, the first seen once with one right answer of four and the second never,
    ``last_magnitude`` is [0.87, nan] and ``equal_visits`` [0, 0].
    """

    last_magnitude: Floats
    """[N], mean |A| of the last visit; NaN for prompts never seen."""
    expected_square: Floats
    """[N], E[Σ_i h_i²] of the next group, up to a common factor, h a proxy of the norm of a
    completion's term."""
    expected_tokens: Floats
    """[N], positive: what a completion takes to generate, up to a common factor."""
    equal_visits: Ints
    """[N], how many of the latest visits, without a break, gave equal rewards."""
    explore: Floats
    """[N], GRESO's p: that of easy prompts if the last visit's rewards were all 1, else that of
    hard ones."""
    floor: float
    """Least inclusion probability."""


def keep_all(candidates: PromptCandidates, keep: float) -> Floats:
    """``none``: probability 1, whatever the share."""
    return np.ones_like(candidates.expected_square)


def apply_threshold(candidates: PromptCandidates, keep: float) -> Floats:
    """The DPPO paper's rule (arXiv:2603.04135): ``keep``, its 1 − r, for scores below the window's
    mean, else 1.

    The paper gives no formula for the history score. Here it is the mean |A| of the last visit. A
    prompt never seen has none: it is left out of the mean, and always kept.
    """
    seen = ~np.isnan(candidates.last_magnitude)
    if not seen.any():
        return np.ones_like(candidates.last_magnitude)
    low = is_below_mean(candidates.last_magnitude, candidates.last_magnitude[seen].mean())
    return np.where(low, keep, 1.0)


def apply_neyman(candidates: PromptCandidates, keep: float) -> Floats:
    """The least variance at a budget of generated tokens: proportional to √(E[Σ h²]/E[tokens]),
    between floor and 1.

    In units of a prompt of mean length, the budget is the whole number nearest to keep·N, and at
    least 1. Where all are expected to take as many tokens, a systematic draw keeps exactly that
    number.
    """
    budget = max(1, round(keep * len(candidates.expected_square)))
    cost = candidates.expected_tokens / candidates.expected_tokens.mean()
    return allocate_proportional(
        np.sqrt(candidates.expected_square), cost, budget, candidates.floor
    )


def apply_greso(candidates: PromptCandidates, keep: float) -> Floats:
    """GRESO's rule (arXiv:2506.02177): max(p^z, 0.01), where the latest z visits, without a break,
    gave equal rewards.

    The more often a prompt gave equal rewards, the more often it is skipped. Kept prompts have
    weight 1, so that the objective drifts toward prompts of mixed reward. ``keep`` has one use: the
    rule is off if it is 1.
    """
    if keep == 1.0:
        return np.ones_like(candidates.explore)
    return np.maximum(candidates.explore**candidates.equal_visits, 0.01)


def apply_dynamic_sampling(candidates: PromptCandidates, keep: float) -> Floats:
    """DAPO's rule (arXiv:2503.14476, section 3.2): 1, since groups of equal reward are dropped
    after their rollouts.

    ``compute_resample_size`` in ``schedule.py`` says how many more prompts are rolled out in their
    place.
    """
    return np.ones_like(candidates.expected_square)


PROMPT_RULES: Mapping[str, Rule[PromptCandidates]] = {
    "none": Rule(keep_all),
    "threshold": Rule(apply_threshold, draw_bernoulli),
    "neyman": Rule(apply_neyman),
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
    """Have a user's function be the rule of this name, in this process. Below the floor its
    probabilities are that."""
    own = wrap_user_rule(
        FUNCTION, name, function, lambda candidates: candidates.expected_square.shape
    )
    _REGISTERED[name] = Rule(
        lambda candidates, keep: np.maximum(own.inclusion(candidates, keep), candidates.floor)
    )


def find_prompt_rule(name: str) -> Rule[PromptCandidates]:
    """A rule of the table, or one that was adopted."""
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
        history: of earlier visits, without this step's.
        config: names the rule and its floor.
        group_size: G, completions per prompt.
        keep: the share to keep at this step, that is ``config.keep`` under its schedule.
        rng: the step's generator for ``Purpose.PROMPTS``.
        longest_first: whether the prompts that are expected to take longest are asked first, so
            that no long one begins when the others are done (longest processing time first; Graham,
            1969).

    Returns:
        The prompts kept in the order in which they are asked, that of the window unless longest
        first, each with its inclusion probability. The draw does not depend on the order. Under a
        biased rule, which weighs nothing up, the probabilities are given as 1.
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
    kept = (DRAWS[config.draw] if config.draw else rule.draw)(inclusion, rng)
    weighted = np.ones_like(inclusion) if rule.biased else inclusion
    order = (
        np.argsort(-candidates.expected_tokens, kind="stable")
        if longest_first
        else np.arange(len(window))
    )
    selected = order[kept[order]]
    return Selection(prompt_ids=window[selected], inclusion=weighted[selected], window=len(window))

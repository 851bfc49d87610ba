"""The first word of a step: which prompts of the window are rolled out."""

from __future__ import annotations

import numpy as np

from megatron_dppo.config import PromptPruningConfig
from megatron_dppo.rl.pruning.adaptive import inflation, least_share
from megatron_dppo.rl.pruning.candidates import PromptCandidates
from megatron_dppo.rl.pruning.draw import DRAWS
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompts import PROMPT_RULES
from megatron_dppo.rl.types import Ints, Selection


def select(
    window: Ints,
    history: PromptHistory,
    config: PromptPruningConfig,
    *,
    group_size: int,
    normalised: bool,
    keep: float,
    rng: np.random.Generator,
) -> Selection:
    """Draw the prompts of a step.

    Args:
        window: [N], ids of the candidate prompts, in the epoch's order.
        history: of earlier visits, and of them only.
        config: names the rule and its floor.
        group_size: G, completions per prompt.
        normalised: whether the host divides advantages by their standard deviation.
        keep: the share to keep at this step, that is ``config.keep`` under its schedule.
        rng: the step's generator for ``Purpose.PROMPTS``.

    Returns:
        The prompts kept, in the window's order, each with its inclusion probability; 1 under a biased rule, which
        weighs nothing up.
    """
    rule = PROMPT_RULES[config.rule]
    candidates = PromptCandidates(
        last_magnitude=history.last_magnitude(window),
        expected_square=history.expected_square(window, group_size=group_size, normalised=normalised),
        equal_visits=history.equal_visits(window),
        explore=history.explore(window),
        floor=config.floor,
    )
    if config.schedule.shape == "adaptive":
        keep = least_share(
            lambda share: inflation(candidates.expected_square, rule.inclusion(candidates, share)),
            keep,
            config.schedule.max_inflation,
        )
    inclusion = rule.inclusion(candidates, keep)
    kept = (DRAWS[config.draw] if config.draw else rule.draw)(inclusion, rng)
    weighted = np.ones_like(inclusion) if rule.biased else inclusion
    return Selection(prompt_ids=window[kept], inclusion=weighted[kept], window=len(window))

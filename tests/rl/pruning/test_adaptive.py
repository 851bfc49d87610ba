"""A share that adapts is the least one whose variance stays under the bound, at both levels."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.config import PromptPruningConfig, ScheduleConfig
from megatron_dppo.rl.hosts import host_for
from megatron_dppo.rl.pruning.adaptive import inflation
from megatron_dppo.rl.pruning.minibatch import completion_candidates, prune_minibatch
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.select import select
from tests.rl.steps import step_config, step_metadata
from tests.rl.test_select import seen_history


def completion_inflation(rule: str, keep: float, bound: float | None) -> tuple[float, float]:
    """The inflation of this level's draw, and the share of the tokens that it keeps in expectation."""
    part, config = step_metadata(64, prompt_inclusion=np.random.default_rng(1).uniform(0.3, 1.0, 64)), step_config()
    schedule = ScheduleConfig() if bound is None else ScheduleConfig(shape="adaptive", max_inflation=bound)
    completions = replace(config.pruning.completions, rule=rule, schedule=schedule)
    config = replace(config, pruning=replace(config.pruning, completions=completions))
    host = host_for(config.loss)
    pruned = prune_minibatch(part, config, host, keep=keep, rng=np.random.default_rng(0))
    candidates = completion_candidates(part, config, host)
    kept = (pruned.inclusion * candidates.cost).sum() / candidates.cost.sum()
    return inflation(candidates.score**2, pruned.inclusion), float(kept)


@pytest.mark.parametrize("rule", ["neyman", "threshold"])
def test_completions_are_pruned_up_to_the_bound(rule: str):
    assert completion_inflation(rule, 0.3, None)[0] > 1.1
    inflated, kept = completion_inflation(rule, 0.3, 1.1)
    assert inflated == pytest.approx(1.1, abs=1e-4)
    assert kept > completion_inflation(rule, 0.3, None)[1]


def test_where_the_bound_is_far_the_share_asked_for_is_kept():
    assert completion_inflation("neyman", 0.5, 100.0) == completion_inflation("neyman", 0.5, None)


def test_at_equal_inflation_neyman_keeps_less_than_the_papers_rule():
    assert completion_inflation("neyman", 0.2, 1.1)[1] < 0.8 * completion_inflation("threshold", 0.2, 1.1)[1]


@pytest.mark.parametrize("bound", [1.05, 1.2])
def test_prompts_are_pruned_up_to_the_bound(bound: float):
    history, window = seen_history(100), np.arange(100)
    config = PromptPruningConfig(
        rule="neyman", floor=0.05, schedule=ScheduleConfig(shape="adaptive", max_inflation=bound)
    )
    given = {"group_size": 8, "normalised": True, "rng": generator(1, 0, Purpose.PROMPTS)}
    adapted = select(window, history, config, keep=0.1, **given)
    fixed = select(window, history, replace(config, schedule=ScheduleConfig()), keep=0.1, **given)
    assert len(fixed.prompt_ids) == 10 < len(adapted.prompt_ids) < 100


def test_nothing_to_learn_inflates_nothing():
    assert inflation(np.zeros(3), np.full(3, 0.5)) == 1.0

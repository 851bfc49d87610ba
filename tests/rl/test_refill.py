"""How many prompts a step looks at, and which groups it trains on."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.config import CompletionPruningConfig, Config, PromptPruningConfig, PruningConfig, ScheduleConfig
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.refill import next_round, window_size
from tests.rl.steps import step_config, step_metadata

SETTINGS = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}


def config(refill: str, rule: str = "neyman", keep: float = 0.25, **schedule: object) -> Config:
    completions = CompletionPruningConfig(rule=rule, keep=keep, schedule=ScheduleConfig(**schedule))
    return Config(pruning=PruningConfig(completions=completions, refill=refill))


def test_the_window_grows_by_what_completion_pruning_saves():
    assert window_size(config("none"), 0) == 64
    assert window_size(config("prompts"), 0) == 256
    assert window_size(config("prompts", rule="none"), 0) == 64
    ramp = config("prompts", shape="linear", ramp=0.5)  # of a hundred steps
    assert [window_size(ramp, step) for step in (0, 25, 50)] == [64, round(64 / 0.625), 256]


@pytest.mark.parametrize(
    ("found", "looked_at", "more"), [(64, 80, 0), (70, 80, 0), (32, 64, 64), (48, 64, 22), (60, 64, 5), (0, 64, 64)]
)
def test_the_next_round_is_what_is_missing_over_what_was_of_use(found: int, looked_at: int, more: int):
    assert next_round(64, found, looked_at) == more


@pytest.mark.parametrize("updates", [1, 2])
def test_groups_of_equal_reward_are_left_out_and_not_divided_by(updates: int):
    rewards = np.array([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]])
    metadata = step_metadata(5, 4, rewards=rewards)
    base = step_config(rule="none", updates_per_rollout=updates)
    pruning = replace(base.pruning, prompts=PromptPruningConfig(rule="dynamic_sampling"))
    plan = plan_step(metadata, replace(base, pruning=pruning), **SETTINGS)
    assert sorted({int(g) for m in plan.minibatches for g in m.rows.group}) == [1, 3, 4]
    assert sum(m.normaliser for m in plan.minibatches) == 3 * 4
    assert plan.metrics["prune/discarded_groups"] == 2.0
    assert any("dynamic_sampling is biased" in note for note in plan.notes)


def test_a_step_without_any_mixed_group_trains_on_nothing():
    metadata = step_metadata(3, 4, rewards=np.ones((3, 4)))
    base = step_config(rule="none")
    pruning = replace(base.pruning, prompts=PromptPruningConfig(rule="dynamic_sampling"))
    plan = plan_step(metadata, replace(base, pruning=pruning), **SETTINGS)
    assert [m.capacity for m in plan.minibatches] == [0]
    assert any("nothing was kept" in note for note in plan.notes)
    assert any("pruning.max_rounds" in note for note in plan.notes)


def test_greso_divides_by_what_it_rolled_out():
    metadata = step_metadata(4, 4, window=9.0)
    base = step_config(rule="none")
    for rule, z in (("none", 9.0 * 4), ("greso", 4.0 * 4)):
        pruning = replace(base.pruning, prompts=PromptPruningConfig(rule=rule))
        plan = plan_step(metadata, replace(base, pruning=pruning), **SETTINGS)
        assert plan.minibatches[0].normaliser == z


def test_top_k_divides_by_all_or_as_cppo_has_it_by_what_is_kept():
    metadata = step_metadata(8, 4, rewards=np.tile([1.0, 0, 0, 0], (8, 1)))
    base = step_config(rule="top_k", keep=0.5)
    z = {}
    for normaliser in ("full", "kept"):
        completions = replace(base.pruning.completions, normaliser=normaliser)
        plan = plan_step(metadata, replace(base, pruning=replace(base.pruning, completions=completions)), **SETTINGS)
        z[normaliser] = plan.minibatches[0].normaliser
        assert (plan.minibatches[0].rows.weight == 1.0).all()
        assert any("top_k is biased" in note for note in plan.notes)
    assert z == {"full": 32.0, "kept": 16.0}

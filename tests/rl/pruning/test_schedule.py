"""The share that is kept follows its schedule, or is the most efficient one."""

import numpy as np
import pytest

from megatron_dppo.config import (
    Config,
    PromptPruningConfig,
    PruningConfig,
    ScheduleConfig,
    replace,
)
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.pruning.draw import completion_candidates, prune_minibatch
from megatron_dppo.rl.pruning.schedule import next_round, scheduled_keep, window_size
from tests.rl.plans import step_config, step_metadata


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(), [0.4] * 10),
        (ScheduleConfig(shape="linear", ramp=0.4), [1.0, 0.85, 0.7, 0.55] + [0.4] * 6),
        (ScheduleConfig(shape="cosine", ramp=0.4), [1.0, 0.912132, 0.7, 0.487868] + [0.4] * 6),
        (ScheduleConfig(shape="linear", ramp=0.0), [0.4] * 10),
        (ScheduleConfig(off_last=0.3), [0.4] * 7 + [1.0] * 3),
        (ScheduleConfig(shape="linear", ramp=1.0, off_last=1.0), [1.0] * 10),
    ],
)
def test_the_kept_share_follows_the_schedule(schedule: ScheduleConfig, expected: list[float]):
    assert [scheduled_keep(0.4, schedule, step, 10) for step in range(10)] == pytest.approx(expected, abs=1e-6)


def test_a_share_that_is_chosen_anew_has_no_schedule_but_its_end():
    assert [scheduled_keep("auto", ScheduleConfig(off_last=0.5), step, 2) for step in (0, 1)] == ["auto", 1.0]


def efficiency(keep: Keep, **settings: float) -> float:
    """Variance × tokens unpruned over that of the draw."""
    part = step_metadata(64, prompt_inclusion=np.random.default_rng(1).uniform(0.3, 1.0, 64))
    config = step_config(**settings)
    pruned = prune_minibatch(part, config, objective_for(config.loss), keep=keep, rng=np.random.default_rng(0))
    candidates = completion_candidates(part, config, objective_for(config.loss), pruned.segments)
    live, generated = ~candidates.zero_advantage, part.response_lengths.sum()
    squares, tokens, inclusion = candidates.score[live] ** 2, candidates.cost[live], pruned.inclusion[live]
    unpruned = squares.sum() * (generated + tokens.sum())
    return float(unpruned / (squares / inclusion).sum() / (generated + inclusion @ tokens))


@pytest.mark.parametrize("max_weight", [5.0, 50.0])
def test_no_other_share_is_more_efficient(max_weight: float):
    best = efficiency("auto", max_weight=max_weight)
    others = [efficiency(keep, max_weight=max_weight) for keep in np.linspace(0.05, 1.0, 96)]
    assert best == pytest.approx(max(others), abs=1e-3)
    assert best > 1.02


SETTINGS = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}


def test_a_step_considers_as_many_more_prompts_as_pruning_made_earlier_ones_noisier():
    equal, twice = (Config(pruning=PruningConfig(noise=noise)) for noise in (1.0, 2.0))
    assert [window_size(equal, inflation) for inflation in (1.0, 1.25, 2.0)] == [64, 80, 128]
    assert [window_size(twice, inflation) for inflation in (1.0, 1.25, 2.0)] == [32, 40, 64]
    assert window_size(Config(), 2.0) == 64


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
    assert sorted({int(g) for m in plan.minibatches for g in m.samples.group}) == [1, 3, 4]
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
        assert (plan.minibatches[0].samples.weight == 1.0).all()
        assert any("top_k is biased" in note for note in plan.notes)
    assert z == {"full": 32.0, "kept": 16.0}

"""A share that adapts is the least one whose variance stays under the bound, at both levels."""

import numpy as np
import pytest

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    PromptPruningConfig,
    PruningConfig,
    ScheduleConfig,
    replace,
)
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.pruning.draw import completion_candidates, prune_minibatch
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.pruning.schedule import inflation, next_round, scheduled_keep, window_size
from megatron_dppo.rl.seeds import Purpose, generator
from tests.rl.pruning.test_prompt_rules import seen_history
from tests.rl.steps import step_config, step_metadata


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(), [0.4] * 10),
        (ScheduleConfig(shape="adaptive", off_last=0.1), [0.4] * 9 + [1.0]),
        (ScheduleConfig(shape="linear", ramp=0.4), [1.0, 0.85, 0.7, 0.55] + [0.4] * 6),
        (ScheduleConfig(shape="cosine", ramp=0.4), [1.0, 0.912132, 0.7, 0.487868] + [0.4] * 6),
        (ScheduleConfig(shape="linear", ramp=0.0), [0.4] * 10),
        (ScheduleConfig(off_last=0.3), [0.4] * 7 + [1.0] * 3),
        (ScheduleConfig(shape="linear", ramp=1.0, off_last=1.0), [1.0] * 10),
    ],
)
def test_the_kept_share_follows_the_schedule(schedule: ScheduleConfig, expected: list[float]):
    assert [scheduled_keep(0.4, schedule, step, 10) for step in range(10)] == pytest.approx(expected, abs=1e-6)


def completion_inflation(rule: str, keep: float, bound: float | None) -> tuple[float, float]:
    """The inflation of this level's draw, and the share of the tokens that it keeps in expectation."""
    part, config = step_metadata(64, prompt_inclusion=np.random.default_rng(1).uniform(0.3, 1.0, 64)), step_config()
    schedule = ScheduleConfig() if bound is None else ScheduleConfig(shape="adaptive", max_inflation=bound)
    completions = replace(config.pruning.completions, rule=rule, schedule=schedule)
    config = replace(config, pruning=replace(config.pruning, completions=completions))
    objective = objective_for(config.loss)
    pruned = prune_minibatch(part, config, objective, keep=keep, rng=np.random.default_rng(0))
    candidates = completion_candidates(part, config, objective, pruned.segments)
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


SETTINGS = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}


def config(refill: str, rule: str = "neyman", keep: float = 0.25, **schedule: object) -> Config:
    completions = CompletionPruningConfig(rule=rule, keep=keep, schedule=ScheduleConfig(**schedule))
    return Config(pruning=PruningConfig(completions=completions, refill=refill))


def test_a_step_considers_as_many_more_prompts_as_pruning_made_earlier_ones_noisier():
    equal, twice = (replace(config("none"), pruning=PruningConfig(noise=noise)) for noise in (1.0, 2.0))
    assert [window_size(equal, 0, inflation) for inflation in (1.0, 1.25, 2.0)] == [64, 80, 128]
    assert [window_size(twice, 0, inflation) for inflation in (1.0, 1.25, 2.0)] == [32, 40, 64]


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

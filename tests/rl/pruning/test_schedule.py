"""The kept share follows its schedule or is the most efficient one; rules differ in their
divisor."""

import numpy as np
import pytest

from megatron_dppo.config import Config, PruningConfig, ScheduleConfig
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.draw import compute_completion_terms, prune_minibatch
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES
from megatron_dppo.rl.pruning.schedule import (
    compute_resample_size,
    compute_window_size,
    scheduled_keep,
)
from megatron_dppo.rl.types import StepMetadata, StepPlan
from megatron_dppo.settings import load_config
from tests.rl.plans import plan, step_config, step_metadata


@pytest.mark.parametrize(
    ("keep", "schedule", "expected"),
    [
        (0.4, ScheduleConfig(shape="linear", ramp=0.4), [1.0, 0.85, 0.7, 0.55] + [0.4] * 6),
        (0.4, ScheduleConfig(shape="cosine", ramp=0.4), [1.0, 0.912132, 0.7, 0.487868] + [0.4] * 6),
        (0.4, ScheduleConfig(shape="linear", ramp=0.0), [0.4] * 10),
        (0.4, ScheduleConfig(off_last=0.3), [0.4] * 7 + [1.0] * 3),
        (0.4, ScheduleConfig(shape="linear", ramp=1.0, off_last=1.0), [1.0] * 10),
        ("auto", ScheduleConfig(off_last=0.5), ["auto"] * 5 + [1.0] * 5),
    ],
)
def test_kept_share_follows_the_schedule(keep, schedule, expected):
    shares = [scheduled_keep(keep, schedule, step, 10) for step in range(10)]
    assert shares == (expected if keep == "auto" else pytest.approx(expected, abs=1e-6))


def efficiency(keep, **settings) -> float:
    """Return variance × tokens of the unpruned step over the same of the draw."""
    part = step_metadata(64, prompt_inclusion=np.random.default_rng(1).uniform(0.3, 1.0, 64))
    config = step_config(**settings)
    objective = resolve_objective(config.loss)
    pruned = prune_minibatch(part, config, objective, keep=keep, rng=np.random.default_rng(0))
    candidates, *_ = compute_completion_terms(part, config, objective)
    live, generated = ~candidates.zero_advantage, part.response_lengths.sum()
    tokens = (part.prompt_lengths[:, None] + part.response_lengths)[live]
    squares, inclusion = candidates.score[live] ** 2, pruned.inclusion[live]
    unpruned = squares.sum() * (generated + tokens.sum())
    return float(unpruned / (squares / inclusion).sum() / (generated + inclusion @ tokens))


@pytest.mark.parametrize("max_weight", [5.0, 50.0])
def test_no_other_share_is_more_efficient(max_weight):
    best = efficiency("auto", max_weight=max_weight)
    others = [efficiency(keep, max_weight=max_weight) for keep in np.linspace(0.05, 1.0, 96)]
    assert best == pytest.approx(max(others), abs=1e-3)
    assert best > 1.02


@pytest.mark.parametrize(("noise", "sizes"), [(None, [64, 64]), (1.0, [80, 128]), (2.0, [40, 64])])
def test_window_grows_with_the_noise_of_earlier_steps(noise, sizes):
    config = Config(pruning=PruningConfig(target_noise=noise))
    assert [compute_window_size(config, inflation) for inflation in (1.25, 2.0)] == sizes


@pytest.mark.parametrize(
    ("found", "seen", "more"), [(70, 80, 0), (32, 64, 64), (48, 64, 22), (0, 64, 64)]
)
def test_next_round_is_the_missing_number_over_the_useful_share(found, seen, more):
    assert compute_resample_size(64, found, seen) == more


def plan_with(metadata: StepMetadata, *settings: str) -> StepPlan:
    defaults = ["pruning.prompts.rule=none", "pruning.completions.rule=none"]
    return plan(metadata, load_config(None, [*defaults, *settings]))


def test_groups_of_equal_reward_are_left_out_and_not_divided_by():
    rewards = np.array([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]])
    words = ("pruning.prompts.rule=dynamic_sampling", "loss.updates_per_rollout=2")
    found = plan_with(step_metadata(5, 4, rewards=rewards), *words)
    assert sorted({int(g) for m in found.minibatches for g in m.group}) == [1, 3, 4]
    assert sum(m.normaliser for m in found.minibatches) == 3 * 4
    assert found.metrics["prune/discarded_groups"] == 2.0
    assert any("dynamic_sampling is biased" in note for note in found.notes)


def test_step_without_mixed_groups_trains_on_nothing():
    found = plan_with(
        step_metadata(3, 4, rewards=np.ones((3, 4))), "pruning.prompts.rule=dynamic_sampling"
    )
    assert [m.capacity for m in found.minibatches] == [0]
    assert any("nothing was kept" in note for note in found.notes)
    assert any("pruning.max_rounds" in note for note in found.notes)


@pytest.mark.parametrize(
    ("rule", "z"),
    [
        ("", 9 * 4),
        ("prompts.rule=greso", 8 * 4),
        ("completions.rule=top_k", 9 * 4),
        ("completions.rule=top_k completions.normaliser=kept", 9 * 2),
    ],
    ids=[
        "none",
        "greso divides by rolled-out prompts",
        "top_k",
        "CPPO divides by kept completions",
    ],
)
def test_divisor_and_weights_of_a_rule(rule, z):
    """Eight of nine prompts were rolled out, with probability 1."""
    metadata = step_metadata(8, 4, rewards=np.tile([1.0, 0, 0, 0], (8, 1)), window=9.0)
    words = [f"pruning.{word}" for word in rule.split()]
    found = plan_with(metadata, "pruning.completions.keep=0.5", *words)
    assert found.minibatches[0].normaliser == z
    assert (found.minibatches[0].weight == 1.0).all()
    assert any("is biased" in note for note in found.notes) == bool(rule)


@pytest.mark.parametrize("prompts", sorted(PROMPT_RULES))
@pytest.mark.parametrize("completions", sorted(COMPLETION_RULES))
def test_step_whose_groups_all_failed_trains_on_nothing(prompts, completions):
    """Each group lost a completion to a failed scoring, or all rewards are equal."""
    words = [f"pruning.prompts.rule={prompts}", f"pruning.completions.rule={completions}"]
    for rewards in (np.ones((0, 4)), np.ones((3, 4))):
        found = plan_with(step_metadata(len(rewards), 4, rewards=rewards), *words)
        assert [m.capacity for m in found.minibatches] == [0]
        assert not found.updates

"""REINFORCE++'s advantages: moments of the whole minibatch, which no draw of completions moves, and whose estimate from
fewer prompts has a bias that vanishes with their number."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.advantages import minibatch_advantages
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Floats, StepMetadata
from tests.rl.plans import step_config, step_metadata

NAMES = ["reinforce_pp", "reinforce_pp_baseline"]


def advantages_of(name: str, part: StepMetadata) -> Floats:
    return minibatch_advantages(part.rewards, part.prompt_inclusion, objective_for(LossConfig(name=name)))


@pytest.mark.parametrize("name", NAMES)
def test_advantages_have_mean_zero_and_deviation_one_over_the_minibatch(name: str) -> None:
    rewards = np.random.default_rng(0).random((5, 8)) * 1e-200
    found = advantages_of(name, step_metadata(5, rewards=rewards))
    assert found.mean() == pytest.approx(0.0, abs=1e-14)
    assert (found**2).mean() == pytest.approx(1.0, rel=1e-12)
    assert (np.abs(found.mean(axis=1)).max() < 1e-14) == (name == "reinforce_pp_baseline")


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_have_no_advantage(name: str) -> None:
    """Of all groups, or of one; seven tenths do not sum to seven times a tenth."""
    rewards = np.full((3, 7), 0.1)
    assert not advantages_of(name, step_metadata(3, 7, rewards=rewards)).any()
    rewards[0] = np.arange(7)
    found = advantages_of(name, step_metadata(3, 7, rewards=rewards))
    assert found[0].any() and found[1:].any() == (name == "reinforce_pp")


@pytest.mark.parametrize("name", NAMES)
def test_prompts_count_alike_whatever_their_group_has_and_by_how_many_they_stand_for(name: str) -> None:
    """The same prompts, one of them twice, or once with a chance of one half; and one with its answers repeated."""
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    whole = advantages_of(name, step_metadata(4, 4, rewards=rewards[[0, 0, 1, 2]]))
    weighted = step_metadata(3, 4, rewards=rewards, prompt_inclusion=np.array([0.5, 1.0, 1.0]))
    np.testing.assert_allclose(advantages_of(name, weighted), whole[1:], rtol=1e-12)
    once = advantages_of(name, step_metadata(3, 4, rewards=rewards))
    present = np.array([[True] * 8, [True] * 4 + [False] * 4, [True] * 4 + [False] * 4])
    objective = objective_for(LossConfig(name=name))
    found = minibatch_advantages(np.tile(rewards, 2), np.ones(3), objective, present)
    np.testing.assert_allclose(found[:, :4], once, rtol=1e-12)
    assert not found[1:, 4:].any()


@pytest.mark.parametrize(("name", "said"), [("reinforce_pp", True), ("reinforce_pp_baseline", True), ("rloo", False)])
def test_the_log_says_where_moments_are_estimated(name: str, said: bool) -> None:
    metadata, config = step_metadata(4, prompt_inclusion=np.full(4, 0.5)), step_config(name=name)
    step = plan_step(metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)
    assert any("moments" in note for note in step.notes) == said

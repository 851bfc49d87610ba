"""Advantages of groups, of minibatches and of roles, by hand and by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron_dppo import config as cfg
from megatron_dppo.config import Config, LossConfig, RolloutConfig
from megatron_dppo.rl.advantages import (
    group_advantages,
    minibatch_advantages,
)
from megatron_dppo.rl.objectives import OBJECTIVES, objective_for
from megatron_dppo.rl.types import SEGMENT, StepMetadata
from tests.rl.integration import all_plans
from tests.rl.plans import step_config, step_metadata
from tests.rl.tree_toy import LONGEST, PREFIXES, plan_gradient, toy


def test_binary_rewards_give_the_textbook_advantages() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    expected = [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [1, 1, -1, -1]]
    np.testing.assert_allclose(group_advantages(rewards, normalise=True), expected, rtol=1e-15)
    expected = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    np.testing.assert_array_equal(group_advantages(rewards, normalise=False), expected)


def test_sample_deviation_divides_by_one_less() -> None:
    """Of three rewards; the fourth is no part of its group."""
    objective = objective_for(LossConfig(deviation="sample"))
    rewards, present = np.array([[1.0, 0.0, 0.5, 7.0]]), np.array([[True, True, True, False]])
    found = minibatch_advantages(rewards, np.ones(1), objective, present)
    np.testing.assert_allclose(found, [[1.0, -1.0, 0.0, 0.0]], rtol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_moments_count_each_prompt_once(name: str) -> None:
    """A prompt with its answers repeated is one prompt; the weights 1/π are those of the objectives' formulas."""
    rewards, inclusion = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]), np.ones(3)
    present = np.arange(8) < np.array([[8], [4], [4]])
    found = minibatch_advantages(np.tile(rewards, 2), inclusion, OBJECTIVES[name], present)
    expected = minibatch_advantages(rewards, inclusion, OBJECTIVES[name])
    np.testing.assert_allclose(found[:, :4], expected, rtol=1e-12)
    assert not found[1:, 4:].any()


SAMPLES = 3
POLICY = toy((0,), (1, 0))
PROBABILITY, PATHS = zip(*POLICY.responses(), strict=True)
ROLE = ([0], [0, 1], [0, 1, 0], [0, 1, 0])
"""The role of each token of a path: the solver first, after a 1 the critic, after another 1 the solver again."""
REWARDS = np.array([[0.3, 0.0], [1.0, -0.5], [-0.4, 2.0], [0.8, 1.1]])
"""[paths, roles]"""


def role_metadata(chosen: tuple[int, ...]) -> StepMetadata:
    """Return one prompt, whose conversations take these paths."""
    segments = np.zeros((1, len(chosen), 2), SEGMENT)
    segments["reward"] = REWARDS[list(chosen)]
    for row, each in zip(segments[0], chosen, strict=True):
        path = PATHS[each]
        for at, role in enumerate(ROLE[each]):
            row["tokens"][role] += 1
            row["square"][role] += (1.0 - POLICY.probability(path[:at], path[at])) ** 2
    return step_metadata(
        1,
        len(chosen),
        response_lengths=np.array([[len(PATHS[each]) for each in chosen]]),
        score_norms=np.sqrt(segments["square"].sum(axis=-1)),
        segments=segments,
    )


def role_config() -> Config:
    rollout = RolloutConfig(max_response_tokens=LONGEST, samples_per_prompt=SAMPLES, roles=("solver", "critic"))
    return cfg.replace(step_config(name="rloo"), rollout=rollout)


def test_each_role_has_the_gradient_of_its_own_reward() -> None:
    """By its own words, over all conversations and draws. Where the critic speaks in one conversation alone, nothing is
    left to compare its reward with: its part is that of the other groups."""
    total, pruned, config = np.zeros(len(PREFIXES)), False, role_config()
    for chosen in itertools.product(range(len(PATHS)), repeat=SAMPLES):
        probability = np.prod([PROBABILITY[each] for each in chosen])
        for step, drawn in all_plans(role_metadata(chosen), config):
            pruned |= drawn < 1.0
            paths, roles = ([table[each] for each in chosen] for table in (PATHS, ROLE))
            total += probability * drawn * plan_gradient(POLICY, step, paths, roles)
    alone = PROBABILITY[0] ** (SAMPLES - 1)
    expected = np.zeros(len(PREFIXES))
    for path, said_by, rewards, chance in zip(PATHS, ROLE, REWARDS * [1.0, 1.0 - alone], PROBABILITY, strict=True):
        expected += chance * rewards[said_by] @ POLICY.scores(path)[: len(path)]
    assert pruned
    np.testing.assert_allclose(total * LONGEST, expected, rtol=1e-9)

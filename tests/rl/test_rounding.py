"""Rewards that differ by rounding are equal, wherever it matters whether rewards are."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo import prune
from megatron_dppo.config import TreeConfig
from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.advantages import group_advantages, minibatch_advantages
from megatron_dppo.rl.numbers import ROUNDING, is_right, without_rounding
from megatron_dppo.rl.objectives import OBJECTIVES, objective_for
from megatron_dppo.rl.pruning.draw import census, prune_minibatch
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptFeatures, PromptForecast
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.schedule import mixed
from megatron_dppo.rl.trees import tree_advantages
from megatron_dppo.rl.types import SEGMENT
from tests.rl.plans import made_up_pool, step_config, step_metadata

ALIKE = np.array([[0.1 + 0.2, 0.3, 0.15 + 0.15, 0.6 / 2.0]])
RIGHT = np.array([[0.7 + 0.2 + 0.1, 1.0, 0.1 * 3 + 0.7, 0.8 + 0.1 + 0.1]])
SINGLE = np.float32(0.1) * np.array([[3, 1, 2, 1]], np.float32) + np.float32(0.1) * np.array([[4, 6, 5, 6]], np.float32)
"""0.7 in single precision, added up in three ways."""


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, -1.0, 1e9])
@pytest.mark.parametrize("rewards", [ALIKE, RIGHT, SINGLE.astype(float)], ids=["thirds", "ones", "single"])
def test_rounding_is_no_advantage_at_any_scale(rewards: np.ndarray, scale: float):
    assert len(np.unique(rewards)) > 1, "the case is meant to be one of rounding"
    for normalise in (True, False):
        assert (group_advantages(scale * rewards, normalise=normalise) == 0.0).all()
    assert not prune([[9, 9, 9, 9]], scale * rewards).mask.any()


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e9])
@pytest.mark.parametrize("step", [1e-6, 1e-3])
def test_what_differs_by_more_than_rounding_has_an_advantage(scale: float, step: float):
    rewards = scale * np.array([[1.0, 1.0 - step, 1.0, 1.0]])
    found = group_advantages(rewards, normalise=True)
    np.testing.assert_allclose(found, [[3**-0.5, -(3**0.5), 3**-0.5, 3**-0.5]], rtol=1e-6)
    assert prune([[9, 9, 9, 9]], rewards, budget=1.0).mask.all()


def test_equal_rewards_beside_others_have_equal_advantages():
    rewards = np.array([[1.0, *ALIKE[0]], [0.3, 0.3, 0.0, *SINGLE[0, :2]]])
    one, two = group_advantages(rewards, normalise=True)
    assert len(set(one[1:])) == 1 and one[0] > 0.0
    assert len(set(two)) == 3 and two[0] == two[1] and two[3] == two[4]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_has_an_advantage_of_rounding(name: str):
    rewards = np.array([[*ALIKE[0], 7.0], [*ALIKE[0, ::-1], -7.0]])
    found = minibatch_advantages(rewards, np.ones(2), OBJECTIVES[name], np.arange(5) < np.array([[4], [4]]))
    assert (found == 0.0).all(), "the last column takes no part"


def test_rounding_makes_no_mixed_group():
    rewards = np.array([ALIKE[0], RIGHT[0], [1.0, 0.0, 1.0, 1.0]])
    assert mixed(step_metadata(3, 4, rewards=rewards)).tolist() == [2]


def test_a_reward_history_takes_rounding_for_equality():
    history, ids = PromptHistory(0.5), np.array([1, 2])
    rewards = np.concatenate([RIGHT, np.array([[1.0, 0.0, 1.0 - 2**-53, 2.0**-60]])])
    history.update(ids, rewards, group_advantages(rewards, normalise=True))
    assert history.binary
    assert history.equal_visits(ids).tolist() == [1, 0]
    alpha, beta = history.posterior(ids)
    assert (alpha - beta) - (alpha - beta)[1] == pytest.approx([4.0, 0.0]), "four right; two right and two wrong"
    history.update(ids[:1], ALIKE, group_advantages(ALIKE, normalise=True))
    assert not history.binary
    assert history.equal_visits(ids[:1]).tolist() == [2]


def test_so_does_a_forecast():
    known = PromptForecast(0.9, PromptFeatures(made_up_pool(4)), "auto")
    one = np.ones(2)

    def learn(*groups: np.ndarray) -> None:
        rewards = np.concatenate(groups)
        values = np.zeros_like(rewards)
        known.judge_and_learn(Outcomes(np.array([0, 1]), rewards, values, squares=one, tokens=one))

    learn(RIGHT, 1.0 - RIGHT + np.array([[1.0, 0.0, 0.0, 0.0]]))
    assert known.binary
    assert known.pool_mean == (5 + 1) / (8 + 2)
    learn(ALIKE, ALIKE + np.array([[1.0, 0.0, 0.0, 0.0]]))
    assert not known.binary
    assert known.equal_visits(np.array([0, 1])).tolist() == [2, 0]


def test_a_census_counts_two_rewards():
    config = step_config(kl_coef=0.1)
    rewards = np.array([[*ALIKE[0], 1.0], [*RIGHT[0], 0.0], [0.1, 0.1, 0.1, 0.1, 0.1]])
    metadata = step_metadata(3, 5, rewards=rewards)
    draw = prune_minibatch(metadata, config, objective_for(config.loss), keep=0.5, rng=np.random.default_rng(0))
    found = census([(metadata, draw)])
    assert found.binary
    assert [cell[2] for cell in found.by_reward] == [1, 4, 4, 1], "five of equal reward have no advantage"


@pytest.mark.parametrize("baseline", ["mixed", "siblings", "roots", "depth"])
def test_a_tree_has_no_advantage_of_rounding(baseline: str):
    tree = TreeConfig(branches=(BranchConfig(at=1, children=2),), baseline=baseline)
    segments = np.zeros((1, 4, 2), SEGMENT)
    segments["tokens"], segments["weight"] = (1, 2), 1.0
    assert (tree_advantages(ALIKE, segments, tree) == 0.0).all()
    assert tree_advantages(ALIKE + np.eye(4)[:1], segments, tree).any()


def test_rounding_of_four_terms_in_single_precision_is_within_the_tolerance():
    """The bound of the docstring, over random sums of four terms in all orders of addition of one of them."""
    terms = np.random.default_rng(0).random((20_000, 4))
    sums = [np.zeros(len(terms), np.float32) for _ in range(4)]
    for shift, total in enumerate(sums):
        for term in np.roll(terms, shift, axis=1).T:
            total += term.astype(np.float32)
    rewards = np.stack(sums, axis=1).astype(float)
    differ = rewards.max(axis=1) / rewards.min(axis=1) - 1.0
    assert 0.1 * ROUNDING < differ.max() < ROUNDING
    assert (np.ptp(without_rounding(rewards), axis=1) == 0.0).all()
    np.testing.assert_allclose(without_rounding(rewards), rewards, rtol=ROUNDING)


def test_ones_and_zeros_are_exact_and_padding_stays():
    rewards = np.array([[1.0 - 2**-53, 2.0**-60, 0.5, 3.0], [-0.0, 0.0, 0.0, np.nan]])
    present = np.array([[True, True, True, False]] * 2)
    np.testing.assert_array_equal(without_rounding(rewards, present), [[1.0, 0.0, 0.5, 3.0], [0.0, 0.0, 0.0, np.nan]])


def test_one_is_right_however_it_was_added_up():
    assert all(map(is_right, RIGHT[0].tolist()))
    assert is_right(1.5) and not is_right(1.0 - 1e-6) and not is_right(float("nan"))

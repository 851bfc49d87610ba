import numpy as np
import pytest
import torch

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.advantages import group_advantages, minibatch_advantages
from megatron_dppo.rl.objectives import (
    OBJECTIVES,
    Aggregation,
    coefficient,
    kept_share,
    normaliser,
    objective_for,
    soft_overlong_penalty,
)


def test_rewards_of_zero_and_one_give_the_textbook_advantages():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    expected = [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [1, 1, -1, -1]]
    np.testing.assert_allclose(group_advantages(rewards, normalise=True), expected, rtol=1e-15)
    expected = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    np.testing.assert_array_equal(group_advantages(rewards, normalise=False), expected)


def test_seven_times_a_tenth_is_not_mistaken_for_a_mixed_group():
    rewards = np.full((1, 7), 0.1)
    assert rewards.mean() != 0.1, "the case is meant to have a rounding error in its mean"
    assert (group_advantages(rewards, normalise=True) == 0.0).all()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_the_overlong_penalty_falls_linearly_over_the_buffer(length: int, penalty: float):
    assert soft_overlong_penalty(np.array([[length]]), limit=100, buffer=20) == np.array([[penalty]])


def test_no_buffer_means_no_penalty():
    assert (soft_overlong_penalty([1, 100, 200], limit=100, buffer=0) == 0.0).all()


LENGTHS = np.array([[2, 4], [5, 10]])


@pytest.mark.parametrize(
    ("aggregation", "c", "z"),
    [
        ("seq_mean", [[0.5, 0.25], [0.2, 0.1]], 4.0),
        ("token_mean", [[1, 1], [1, 1]], 21.0),
        ("constant", [[1, 1], [1, 1]], 4.0 * 16),
    ],
)
def test_coefficients_and_normalisers_are_those_of_the_table(aggregation: Aggregation, c: list[list[float]], z: float):
    np.testing.assert_array_equal(coefficient(aggregation, LENGTHS), c)
    whole = normaliser(
        aggregation,
        sampled_lengths=LENGTHS,
        prompt_inclusion=np.ones(2),
        prompts=2,
        max_response_tokens=16,
    )
    assert whole == z


@pytest.mark.parametrize(("aggregation", "share"), [("seq_mean", 3 / 4), ("token_mean", 17 / 21), ("constant", 3 / 4)])
def test_the_kept_normaliser_counts_what_is_kept(aggregation: Aggregation, share: float):
    kept = np.array([[True, False], [True, True]])
    given = {"sampled_lengths": LENGTHS, "prompt_inclusion": np.ones(2)}
    assert kept_share(aggregation, **given, kept=kept) == pytest.approx(share)


def test_the_kept_normaliser_counts_a_pruned_prompt_for_those_it_stands_for():
    kept = np.array([[True, False], [True, True]])
    seldom = {"sampled_lengths": LENGTHS, "prompt_inclusion": np.array([0.5, 1.0])}
    assert kept_share("seq_mean", **seldom, kept=kept) == pytest.approx((2 + 2) / (4 + 2))


def test_unrolled_prompts_count_in_every_normaliser():
    """Of ten prompts two were rolled out, with probabilities 0.5 and 0.1."""
    z = {
        aggregation: normaliser(
            aggregation,
            sampled_lengths=LENGTHS,
            prompt_inclusion=np.array([0.5, 0.1]),
            prompts=10,
            max_response_tokens=16,
        )
        for aggregation in ("seq_mean", "token_mean", "constant")
    }
    assert z == {"seq_mean": 20.0, "token_mean": pytest.approx(6 / 0.5 + 15 / 0.1), "constant": 320.0}


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_the_sample_deviation_is_that_of_the_other_trainers(name: str):
    """torch's, which divides by one less than the rewards of a group; where advantages are divided by a group's."""
    rewards = np.array([[1.0, 0.0, 0.0, 0.5, 0.0], [0.2, 0.9, 0.4, 0.0, 0.0]])
    present = np.array([[True] * 5, [True] * 3 + [False] * 2])
    population, sample = (
        minibatch_advantages(rewards, np.ones(2), objective_for(LossConfig(name=name, **given)), present)
        for given in ({}, {"deviation": "sample"})
    )
    if not OBJECTIVES[name].normalise:
        np.testing.assert_array_equal(population, sample)
        return
    for row, size in enumerate((5, 3)):
        group = torch.from_numpy(rewards[row, :size])
        np.testing.assert_allclose(sample[row, :size], (group - group.mean()) / group.std(), rtol=1e-12)
        np.testing.assert_allclose(population[row, :size], (group - group.mean()) / group.std(correction=0), rtol=1e-12)

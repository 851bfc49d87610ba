"""Completions go where they take most variance away for their tokens, and never more than the budget pays for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.group_sizes import allocate


def variance_left(variance: np.ndarray, samples: np.ndarray) -> float:
    return float((variance / samples).sum())


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=4), st.integers(2, 3), st.integers(3, 4), st.integers(4, 7))
def test_no_other_numbers_of_the_same_sum_leave_less_variance(given, least, mean, most):
    variance = np.array(given)
    found = allocate(variance, np.ones(len(variance)), mean=mean, least=least, most=most)
    others = itertools.product(range(least, most + 1), repeat=len(variance))
    best = min(variance_left(variance, np.array(n)) for n in others if sum(n) == mean * len(variance))
    assert found.sum() == mean * len(variance)
    assert variance_left(variance, found) == pytest.approx(best, rel=1e-9)


@given(st.integers(0, 1000))
def test_the_tokens_are_those_of_equal_groups_to_within_one_completion(seed):
    rng = np.random.default_rng(seed)
    variance, tokens = rng.exponential(size=30), rng.lognormal(5.0, 1.0, 30)
    found = allocate(variance, tokens, mean=8, least=2, most=64)
    assert found.min() >= 2 and found.max() <= 64
    left = 8 * tokens.sum() - found @ tokens
    assert -1e-6 * tokens.sum() <= left <= tokens.max()


def test_numbers_follow_the_deviation_and_the_inverse_root_of_the_tokens():
    variance, tokens = np.array([1.0, 4.0, 4.0]), np.array([100.0, 100.0, 400.0])
    found = allocate(variance, tokens, mean=400, least=2, most=10_000)
    np.testing.assert_allclose(found / found[0], [1.0, 2.0, 1.0], rtol=0.01)


def test_prompts_alike_are_given_as_many():
    for variance in (0.0, 3.0):
        np.testing.assert_array_equal(allocate(np.full(7, variance), np.ones(7), mean=8, least=4, most=16), 8)
    found = allocate(np.array([0.0, 0.0, 5.0]), np.ones(3), mean=8, least=4, most=10)
    assert found.tolist() == [7, 7, 10], "what the third may not have, the others share"


def test_a_step_of_no_prompts_has_no_numbers():
    assert allocate(np.zeros(0), np.zeros(0), mean=8, least=4, most=16).shape == (0,)

"""Samplers keep what they say with the probability they say: integrated or enumerated, never sampled."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.sampling import capped_proportional, draw_bernoulli, systematic
from tests.rl.integration import outcomes

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
offsets = st.floats(0.0, ALMOST_ONE)
dyadic = st.lists(st.integers(0, 64).map(lambda k: k / 64), min_size=1, max_size=40).map(np.array)
anything = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).map(np.array)


@given(dyadic)
def test_systematic_inclusion_is_exact_integrated_over_the_offset(inclusion):
    kept = sum(length * systematic(inclusion, offset) for offset, length in outcomes(inclusion))
    np.testing.assert_array_equal(kept, inclusion)


@settings(max_examples=20)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12).map(np.array), st.data())
def test_systematic_inclusion_of_any_probability_is_exact_to_1e_12(inclusion, data):
    """Measured on the draw itself: a unit is kept between two offsets, each found by bisection."""
    unit = data.draw(st.integers(0, len(inclusion) - 1))
    end = float(np.cumsum(inclusion)[unit]) % 1.0
    start = (end - inclusion[unit]) % 1.0
    assume(1e-6 < start < 1 - 1e-6 and 1e-6 < end < 1 - 1e-6)

    def flip(guess: float, kept_after: bool) -> float:
        low, high = guess - 1e-7, guess + 1e-7
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if systematic(inclusion, middle)[unit] == kept_after else (middle, high)
        return high

    measured = (flip(end, kept_after=False) - flip(start, kept_after=True)) % 1.0
    assert measured == pytest.approx(inclusion[unit], abs=1e-12)


@given(anything, offsets)
def test_systematic_keeps_the_sum_of_the_probabilities_to_within_one(inclusion, offset):
    kept = systematic(inclusion, offset)
    assert abs(int(kept.sum()) - inclusion.sum()) < 1 + 1e-9
    assert kept[inclusion == 1.0].all()
    assert not kept[inclusion == 0.0].any()


@given(st.integers(1, 200), st.integers(0, 2**32), st.one_of(offsets, st.sampled_from([0.0, ALMOST_ONE])), st.data())
def test_systematic_keeps_exactly_n_where_probabilities_add_up_to_n_up_to_rounding(size, seed, offset, data):
    count = data.draw(st.integers(1, size))
    scores = np.random.default_rng(seed).lognormal(0.0, 2.0, size)
    inclusion = capped_proportional(scores, np.ones(size), count, 0.0)
    assert systematic(inclusion, offset).sum() == count


@pytest.mark.parametrize("offset", [0.0, 1e-16, 0.5, ALMOST_ONE])
def test_systematic_ends_where_it_should_for_sums_that_float_gets_wrong(offset: float):
    tenths = np.full(1000, 0.1)
    assert np.cumsum(tenths)[-1] != 100.0, "the case is meant to be one that float gets wrong"
    assert systematic(tenths, offset).sum() == 100


def test_systematic_handles_a_hundred_thousand_units():
    inclusion = np.full(100_000, 0.3)
    inclusion[::7] = 1.0
    kept = systematic(inclusion, 0.123)
    assert kept[::7].all()
    assert abs(kept.sum() - inclusion.sum()) <= 1


def test_systematic_spreads_what_it_keeps_over_neighbours():
    kept = systematic(np.full(40, 0.25), 0.6)
    assert (kept.reshape(10, 4).sum(axis=1) == 1).all()


class Fixed:
    """Stands in for a random generator whose next numbers are known."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self.uniforms = np.array(uniforms)

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.uniforms.reshape(shape)


def test_bernoulli_draws_are_independent_with_the_given_probabilities():
    inclusion = np.array([0.25, 0.5, 1.0, 0.0])
    grid = (np.arange(4) + 0.5) / 4  # every uniform number takes four values, of which floor(4π) keep
    draws = np.array([draw_bernoulli(inclusion, Fixed(u)) for u in itertools.product(grid, repeat=4)])
    np.testing.assert_array_equal(draws.mean(axis=0), inclusion)
    assert (draws[:, 0] & draws[:, 1]).mean() == 0.25 * 0.5
    assert draw_bernoulli(np.array([0.0, 1.0]), Fixed([0.0, ALMOST_ONE])).tolist() == [False, True]


@st.composite
def problems(draw):
    size = draw(st.integers(1, 40))
    of = lambda values: np.array(draw(st.lists(values, min_size=size, max_size=size)))  # noqa: E731
    scores = of(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)))
    costs = of(st.integers(1, 10_000)).astype(float)
    floor = of(st.floats(0.0, 1.0)) if draw(st.booleans()) else draw(st.floats(0.0, 0.5))
    return scores, costs, draw(st.floats(0.0, 1.2)) * costs.sum(), floor


@given(problems())
def test_the_budget_is_met_wherever_floors_and_caps_allow(problem):
    scores, costs, budget, floor = problem
    inclusion = capped_proportional(scores, costs, budget, floor)
    lowest, highest = (costs * floor).sum(), costs.sum()
    assert inclusion @ costs == pytest.approx(np.clip(budget, lowest, highest), rel=1e-11)
    assert (inclusion >= np.minimum(floor, 1.0)).all()
    assert (inclusion <= 1.0).all()


@given(problems())
def test_probabilities_are_proportional_to_score_over_root_cost_between_floor_and_cap(problem):
    scores, costs, budget, floor = problem
    inclusion = capped_proportional(scores, costs, budget, floor)
    between = (inclusion > floor * (1 + 1e-9)) & (inclusion < 1.0 - 1e-9) & (scores > 0)
    c = inclusion[between] / (scores / np.sqrt(costs))[between]
    if len(c):
        np.testing.assert_allclose(c, c[0], rtol=1e-9, atol=1e-300)
        rate = scores / np.sqrt(costs)
        np.testing.assert_allclose(
            inclusion[scores > 0], np.clip(c[0] * rate, floor, 1.0)[scores > 0], rtol=1e-9, atol=1e-300
        )


def test_a_worked_example():
    inclusion = capped_proportional(np.array([1.0, 2.0, 3.0, 40.0]), np.ones(4), 2.0, 0.2)
    np.testing.assert_allclose(inclusion, [0.2, 0.32, 0.48, 1.0])


def test_costly_units_are_kept_less():
    inclusion = capped_proportional(np.ones(2), np.array([100.0, 400.0]), 100.0, 0.0)
    assert inclusion[0] == pytest.approx(2 * inclusion[1])


def test_what_positive_scores_leave_over_is_shared_by_the_rest():
    inclusion = capped_proportional(np.array([1.0, 0.0, 0.0]), np.ones(3), 2.0, 0.1)
    np.testing.assert_allclose(inclusion, [1.0, 0.5, 0.5])


def test_scores_that_are_all_zero_are_equal_scores():
    np.testing.assert_allclose(capped_proportional(np.zeros(4), np.ones(4), 3.0, 0.1), 0.75)


def test_no_other_feasible_probabilities_have_a_lower_variance():
    rng = np.random.default_rng(0)
    scores, costs = rng.lognormal(0, 1, 20), rng.integers(10, 100, 20).astype(float)
    inclusion = capped_proportional(scores, costs, 0.4 * costs.sum(), 0.2)
    best = (scores**2 / inclusion).sum()
    for _ in range(500):
        i, j = rng.choice(20, 2, replace=False)
        other = inclusion.copy()
        moved = 0.02 * rng.random() * min(costs[i], costs[j])
        other[i] += moved / costs[i]
        other[j] -= moved / costs[j]
        if other[j] >= 0.2 and other[i] <= 1.0:
            assert (scores**2 / other).sum() >= best


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_only_the_ratios_of_scores_matter(scale: float):
    scores = np.array([1.0, 2.0, 5.0, 1e-9])
    expected = capped_proportional(scores, np.ones(4), 2.0, 0.1)
    np.testing.assert_allclose(capped_proportional(scores * scale, np.ones(4), 2.0, 0.1), expected)


def test_nothing_to_share_is_no_error():
    assert capped_proportional(np.zeros(0), np.zeros(0), 0.0, 0.2).shape == (0,)

"""Samplers keep what they say with the probability they say: integrated or enumerated, never sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.sampling import capped_proportional, systematic
from tests.rl.integration import outcomes

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
offsets = st.floats(0.0, ALMOST_ONE)
dyadic = st.lists(st.integers(0, 64).map(lambda k: k / 64), min_size=1, max_size=40).map(np.array)
anything = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).map(np.array)


@given(dyadic)
def test_systematic_inclusion_is_exact_integrated_over_the_offset(inclusion):
    kept = sum(length * systematic(inclusion, offset) for offset, length in outcomes(inclusion))
    np.testing.assert_array_equal(kept, inclusion)


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


def test_systematic_handles_a_hundred_thousand_units():
    inclusion = np.full(100_000, 0.3)
    inclusion[::7] = 1.0
    kept = systematic(inclusion, 0.123)
    assert kept[::7].all()
    assert abs(kept.sum() - inclusion.sum()) <= 1


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


def test_what_positive_scores_leave_over_is_shared_by_the_rest():
    inclusion = capped_proportional(np.array([1.0, 0.0, 0.0]), np.ones(3), 2.0, 0.1)
    np.testing.assert_allclose(inclusion, [1.0, 0.5, 0.5])


def test_scores_that_are_all_zero_are_equal_scores():
    np.testing.assert_allclose(capped_proportional(np.zeros(4), np.ones(4), 3.0, 0.1), 0.75)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_only_the_ratios_of_scores_matter(scale: float):
    scores = np.array([1.0, 2.0, 5.0, 1e-9])
    expected = capped_proportional(scores, np.ones(4), 2.0, 0.1)
    np.testing.assert_allclose(capped_proportional(scores * scale, np.ones(4), 2.0, 0.1), expected)


def test_nothing_to_share_is_no_error():
    assert capped_proportional(np.zeros(0), np.zeros(0), 0.0, 0.2).shape == (0,)

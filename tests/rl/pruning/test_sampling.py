"""Samplers keep units with their inclusion probabilities: integrated, never sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.sampling import allocate_proportional, select_systematic
from tests.rl.integration import outcomes

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
offsets = st.floats(0.0, ALMOST_ONE)
dyadic = st.lists(st.integers(0, 64).map(lambda k: k / 64), min_size=1, max_size=40).map(np.array)
anything = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).map(np.array)


@given(dyadic)
def test_systematic_inclusion_is_exact(inclusion):
    kept = sum(
        length * select_systematic(inclusion, offset) for offset, length in outcomes(inclusion)
    )
    np.testing.assert_array_equal(kept, inclusion)


@given(anything, offsets)
def test_systematic_keeps_the_sum_to_within_one(inclusion, offset):
    kept = select_systematic(inclusion, offset)
    assert abs(int(kept.sum()) - inclusion.sum()) < 1 + 1e-9
    assert kept[inclusion == 1.0].all()
    assert not kept[inclusion == 0.0].any()


@given(
    st.integers(1, 200),
    st.integers(0, 2**32),
    st.one_of(offsets, st.sampled_from([0.0, ALMOST_ONE])),
    st.data(),
)
def test_systematic_keeps_n_if_probabilities_add_up_to_n(size, seed, offset, data):
    count = data.draw(st.integers(1, size))
    scores = np.random.default_rng(seed).lognormal(0.0, 2.0, size)
    inclusion = allocate_proportional(scores, np.ones(size), count, 0.0)
    assert select_systematic(inclusion, offset).sum() == count


@pytest.mark.parametrize("offset", [1e-16, ALMOST_ONE])
def test_systematic_sums_of_many_units_are_exact(offset):
    tenths = np.full(100_000, 0.1)
    assert np.cumsum(tenths)[-1] != 10_000.0, "floating point is exact here"
    assert select_systematic(tenths, offset).sum() == 10_000


@st.composite
def problems(draw):
    size = draw(st.integers(1, 40))
    of = lambda values: np.array(draw(st.lists(values, min_size=size, max_size=size)))  # noqa: E731
    scores = of(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)))
    costs = of(st.integers(1, 10_000)).astype(float)
    floor = of(st.floats(0.0, 1.0)) if draw(st.booleans()) else draw(st.floats(0.0, 0.5))
    return scores, costs, draw(st.floats(0.0, 1.2)) * costs.sum(), floor


@given(problems())
def test_budget_is_met_where_floors_and_caps_allow(problem):
    scores, costs, budget, floor = problem
    inclusion = allocate_proportional(scores, costs, budget, floor)
    assert inclusion @ costs == pytest.approx(
        np.clip(budget, (costs * floor).sum(), costs.sum()), rel=1e-11
    )
    assert (inclusion >= np.minimum(floor, 1.0)).all()
    assert (inclusion <= 1.0).all()


@given(problems())
def test_probabilities_are_proportional_to_score_over_root_cost(problem):
    scores, costs, budget, floor = problem
    inclusion = allocate_proportional(scores, costs, budget, floor)
    rate, scored = scores / np.sqrt(costs), scores > 0
    between = (inclusion > floor * (1 + 1e-9)) & (inclusion < 1.0 - 1e-9) & scored
    for c in (inclusion[between] / rate[between])[:1]:
        expected = np.clip(c * rate, floor, 1.0)
        np.testing.assert_allclose(inclusion[scored], expected[scored], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(
    ("scores", "expected"), [([1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.5, 0.5]), ([0.0] * 4, [0.625] * 4)]
)
def test_units_of_score_zero_share_the_rest(scores, expected):
    np.testing.assert_allclose(
        allocate_proportional(np.array(scores), np.ones(4), 2.5, 0.1), expected
    )


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_only_ratios_of_scores_matter(scale):
    scores = np.array([1.0, 2.0, 5.0, 1e-9])
    expected = allocate_proportional(scores, np.ones(4), 2.0, 0.1)
    np.testing.assert_allclose(
        allocate_proportional(scores * scale, np.ones(4), 2.0, 0.1), expected
    )


def test_no_units_need_no_budget():
    assert allocate_proportional(np.zeros(0), np.zeros(0), 0.0, 0.2).shape == (0,)

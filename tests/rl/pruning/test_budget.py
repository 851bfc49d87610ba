import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.budget import capped_proportional


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

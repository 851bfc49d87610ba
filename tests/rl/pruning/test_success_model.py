"""The regression learns chances from features and visits, and its variance is true."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_dppo.rl.pruning.success_model import (
    INTERCEPT_KEPT,
    SPREADS,
    SizeModel,
    SuccessModel,
    SuccessProbability,
    Weights,
    _shift,
    sigmoid,
)
from megatron_dppo.rl.types import Floats, Ints

FEATURES, GROUP = 6, 8


class Prompts:
    """Made-up pool: a logit is a weighted sum of the features and an intercept of the prompt's
    own."""

    def __init__(self, count: int, *, slope: float, spread: float) -> None:
        self.rng = np.random.default_rng(0)
        self.features = np.column_stack(
            [np.ones(count), self.rng.standard_normal((count, FEATURES - 1))]
        )
        self.logits = (
            slope * self.features[:, 1] - 0.5 + np.sqrt(spread) * self.rng.standard_normal(count)
        )
        self.chance = sigmoid(self.logits)

    def train(self, ids: Ints, steps: int) -> SuccessModel:
        model = SuccessModel(FEATURES)
        for part in np.array_split(ids, steps):
            right = self.rng.binomial(GROUP, self.chance[part]).astype(float)
            model.update(part, self.features[part], right, np.full(len(part), float(GROUP)))
        return model

    def error(self, model: SuccessModel, ids: Ints) -> float:
        """Return the mean squared error of predictions over the variance of the chances."""
        predicted = model.predict(ids, self.features[ids]).mean()
        return float(np.mean((predicted - self.chance[ids]) ** 2) / self.chance[ids].var())


def test_features_predict_unseen_prompts_with_a_true_variance():
    prompts, unseen = Prompts(1000, slope=1.5, spread=0.1), np.arange(400, 1000)
    assert prompts.error(prompts.train(np.arange(400), 10), unseen) < 0.15

    prompts = Prompts(1000, slope=1.0, spread=0.8)
    chance = prompts.train(np.arange(600), 10).predict(
        ids := np.arange(600, 1000), prompts.features[ids]
    )
    assert 0.7 < np.mean((prompts.logits[ids] - chance.logit) ** 2 / chance.variance) < 1.4


def test_visits_predict_where_features_do_not():
    prompts = Prompts(300, slope=0.0, spread=2.0)
    assert prompts.error(prompts.train(np.arange(300), 6), np.arange(250, 300)) < 0.35


@pytest.mark.parametrize("spread", [0.1, 1.6])
def test_spread_of_intercepts_is_estimated(spread):
    model = Prompts(2000, slope=1.0, spread=spread).train(np.arange(2000), 20)
    assert spread / 2.1 <= model.spread <= spread * 2.1
    assert model.spread in SPREADS


def test_visits_fade_with_updates_of_the_policy():
    features, one, none = np.ones((1, FEATURES)), np.array([0]), np.array([])
    model = SuccessModel(FEATURES)
    model.update(one, features, np.array([8.0]), np.array([8.0]))
    before = model._get_intercepts(one)
    for _ in range(10):
        model.update(none.astype(np.int64), features[:0], none, none)
    after = model._get_intercepts(one)
    assert after[0] == pytest.approx(before[0] * INTERCEPT_KEPT**10)
    assert 1.0 > after[1] > before[1]


def test_expectations_are_those_of_the_logits_distribution():
    p = sigmoid(0.4 + np.sqrt(1.7) * np.random.default_rng(0).standard_normal(400_000))
    chance = SuccessProbability(np.array([0.4]), np.array([1.7]))
    assert chance.mean()[0] == pytest.approx(p.mean(), abs=2e-3)
    expected = [(math.comb(4, k) * p**k * (1 - p) ** (4 - k)).mean() for k in range(5)]
    np.testing.assert_allclose(chance.compute_count_probabilities(4)[0], expected, atol=2e-3)
    seen = chance.log_likelihood(np.array([3.0]), np.array([8.0]))[0]
    assert seen == pytest.approx(np.log((p**3 * (1 - p) ** 5).mean()), abs=1e-2)


def test_more_answers_leave_less_unknown():
    features, one = np.ones((1, FEATURES)), np.array([0])
    left = []
    for trials in (8.0, 80.0):
        model = SuccessModel(FEATURES)
        model.update(one, features, np.array([trials / 2]), np.array([trials]))
        left.append(model._get_intercepts(one)[1].item())
    assert left[1] < left[0] < 1.0


def test_shifted_intercept_is_the_mode_of_its_belief():
    right, trials, prior = np.array([8.0, 0.0, 3.0]), np.full(3, 8.0), np.full(3, 2.0)
    moved, _ = _shift(np.full(3, 3.0), prior, right, trials)
    np.testing.assert_allclose(right - trials * sigmoid(3.0 + moved), moved / prior, atol=1e-6)


def test_certain_answers_have_a_finite_likelihood():
    certain = SuccessProbability(np.array([60.0, -60.0]), np.zeros(2))
    found = certain.log_likelihood(np.array([8.0, 0.0]), np.array([8.0, 8.0]))
    np.testing.assert_allclose(found, 0.0, atol=1e-9)


def normal_features(count: int) -> tuple[np.random.Generator, Floats]:
    rng = np.random.default_rng(1)
    return rng, np.column_stack([np.ones(count), rng.standard_normal((count, 3))])


def test_weights_are_those_of_ridge_regression():
    rng, features = normal_features(50)
    values = features @ [1.0, 2.0, 0.0, -1.0] + 0.1 * rng.standard_normal(50)
    weights = Weights(4)
    prior = np.linalg.inv(weights.covariance)
    for part in (slice(20), slice(20, 50)):
        weights.update(features[part], values[part], np.full(len(values[part]), 0.01))
    expected = np.linalg.solve(prior + features.T @ features / 0.01, features.T @ values / 0.01)
    np.testing.assert_allclose(weights.mean, expected, rtol=1e-8)


def test_sizes_are_predicted_without_bias():
    """The exponential of a mean of logarithms would miss 22% of the sum."""
    rng, features = normal_features(3000)
    sizes = np.exp(3.0 + 0.5 * features[:, 1] + 0.7 * rng.standard_normal(3000))
    model = SizeModel(4)
    np.testing.assert_array_equal(model.predict(features), 1.0)
    for part in np.array_split(np.arange(2000), 10):
        model.update(features[part], sizes[part])
    predicted = model.predict(features[2000:])
    assert predicted.sum() == pytest.approx(sizes[2000:].sum(), rel=0.12)
    assert np.corrcoef(np.log(predicted), features[2000:, 1])[0, 1] > 0.98

"""The regression learns who is easy, by features and by visits, and what it says of its own doubt is true."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.rl.pruning.success_model import (
    INTERCEPT_KEPT,
    SPREADS,
    Chance,
    SizeModel,
    SuccessModel,
    Weights,
    sigmoid,
)

FEATURES, GROUP = 6, 8


class Prompts:
    """A made-up pool: logits are a weighted sum of the features, and an intercept of each prompt's own."""

    def __init__(self, count: int, *, slope: float, spread: float, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.features = np.column_stack([np.ones(count), self.rng.standard_normal((count, FEATURES - 1))])
        logits = slope * self.features[:, 1] - 0.5 + np.sqrt(spread) * self.rng.standard_normal(count)
        self.chance = sigmoid(logits)

    def visit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.rng.binomial(GROUP, self.chance[ids]).astype(float), np.full(len(ids), float(GROUP))


def trained(prompts: Prompts, ids: np.ndarray, steps: int) -> SuccessModel:
    model = SuccessModel(FEATURES)
    for part in np.array_split(ids, steps):
        model.learn(part, prompts.features[part], *prompts.visit(part))
    return model


def test_prompts_never_seen_are_told_apart_by_their_features() -> None:
    prompts = Prompts(600, slope=1.5, spread=0.1)
    model = trained(prompts, np.arange(400), 10)
    unseen = np.arange(400, 600)
    predicted = model.predict(unseen, prompts.features[unseen]).mean()
    error = np.mean((predicted - prompts.chance[unseen]) ** 2)
    assert error < 0.15 * prompts.chance[unseen].var()


def test_visits_tell_apart_what_features_do_not() -> None:
    prompts = Prompts(300, slope=0.0, spread=2.0)
    model = trained(prompts, np.arange(300), 6)
    ids = np.arange(250, 300)
    error = np.mean((model.predict(ids, prompts.features[ids]).mean() - prompts.chance[ids]) ** 2)
    assert error < 0.35 * prompts.chance[ids].var()


@pytest.mark.parametrize("spread", [0.1, 1.6])
def test_how_much_prompts_of_like_features_differ_is_estimated(spread: float) -> None:
    model = trained(Prompts(2000, slope=1.0, spread=spread), np.arange(2000), 20)
    assert spread / 2.1 <= model.spread <= spread * 2.1
    assert model.spread in SPREADS


def test_its_doubt_is_true() -> None:
    """The logits of prompts never seen lie as far from the predicted ones as the predicted variance says."""
    prompts = Prompts(1000, slope=1.0, spread=0.8)
    model = trained(prompts, np.arange(600), 10)
    ids = np.arange(600, 1000)
    chance = model.predict(ids, prompts.features[ids])
    logits = np.log(prompts.chance[ids] / (1.0 - prompts.chance[ids]))
    assert 0.7 < np.mean((logits - chance.logit) ** 2 / chance.variance) < 1.4


def test_a_visit_counts_less_the_more_the_policy_was_updated() -> None:
    """Updates in which other prompts were visited count, as the policy moved on in them."""
    prompts = Prompts(200, slope=0.0, spread=1.0)
    one = np.array([0])
    model = SuccessModel(FEATURES)
    model.learn(one, prompts.features[one], np.array([8.0]), np.array([8.0]))
    before = model._intercepts_of(one)
    for _ in range(10):
        model.learn(np.array([], np.int64), prompts.features[:0], np.array([]), np.array([]))
    after = model._intercepts_of(one)
    assert after[0] == pytest.approx(before[0] * INTERCEPT_KEPT**10)
    assert 1.0 > after[1] > before[1]


def test_expectations_are_those_of_the_logits_distribution() -> None:
    logits = 0.4 + np.sqrt(1.7) * np.random.default_rng(0).standard_normal(400_000)
    p = sigmoid(logits)
    chance = Chance(np.array([0.4]), np.array([1.7]))
    assert chance.mean()[0] == pytest.approx(p.mean(), abs=2e-3)
    assert chance.mixed(8)[0] == pytest.approx((1 - p**8 - (1 - p) ** 8).mean(), abs=2e-3)
    seen = chance.log_likelihood(np.array([3.0]), np.array([8.0]))[0]
    assert seen == pytest.approx(np.log((p**3 * (1 - p) ** 5).mean()), abs=1e-2)


def test_weights_are_those_of_ridge_regression() -> None:
    rng = np.random.default_rng(1)
    features = np.column_stack([np.ones(50), rng.standard_normal((50, 3))])
    values = features @ [1.0, 2.0, 0.0, -1.0] + 0.1 * rng.standard_normal(50)
    weights = Weights(4)
    prior = np.linalg.inv(weights.covariance)
    weights.condition(features[:20], values[:20], np.full(20, 0.01))
    weights.condition(features[20:], values[20:], np.full(30, 0.01))
    expected = np.linalg.solve(prior + features.T @ features / 0.01, features.T @ values / 0.01)
    np.testing.assert_allclose(weights.mean, expected, rtol=1e-8)


def test_sizes_are_predicted_in_their_own_unit() -> None:
    """Sums of predictions are those of what is seen; the exponential of a mean of logarithms would miss 22% of them."""
    rng = np.random.default_rng(2)
    features = np.column_stack([np.ones(3000), rng.standard_normal((3000, 3))])
    sizes = np.exp(3.0 + 0.5 * features[:, 1] + 0.7 * rng.standard_normal(3000))
    model = SizeModel(4)
    np.testing.assert_array_equal(model.predict(features), 1.0)
    for part in np.array_split(np.arange(2000), 10):
        model.learn(features[part], sizes[part])
    predicted = model.predict(features[2000:])
    assert predicted.sum() == pytest.approx(sizes[2000:].sum(), rel=0.12)
    assert np.corrcoef(np.log(predicted), features[2000:, 1])[0, 1] > 0.98

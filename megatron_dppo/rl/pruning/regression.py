"""Linear models that learn from step to step: a Gaussian belief about weights, which fades as the policy moves on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dppo.rl.types import Floats

PRIOR_VARIANCE = 0.05
"""Of a feature's weight, where features have deviation 1: 59 of them give a logit the deviation 1.7 before any data."""
CONSTANT_VARIANCE = 4.0
"""The same of the constant."""
WEIGHTS_KEPT = 0.999
"""What a weight's mean keeps from one update of the policy to the next. Its variance goes back to the prior's as fast,
so that what was learned 700 updates ago counts half."""


class Weights:
    """A Gaussian belief about D weights, the first of them that of the constant.

    Between updates the weights are taken to move as an Ornstein-Uhlenbeck process: w' = c·w + noise, whose stationary
    variance is the prior's. So means fade, and without data the covariance ends where it began.
    """

    def __init__(self, size: int) -> None:
        self._prior = np.full(size, PRIOR_VARIANCE)
        self._prior[0] = CONSTANT_VARIANCE
        self.mean = np.zeros(size)
        self.covariance = np.diag(self._prior)

    def fade(self) -> None:
        """One update of the policy goes by."""
        self.mean = WEIGHTS_KEPT * self.mean
        self.covariance = WEIGHTS_KEPT**2 * self.covariance + np.diag((1.0 - WEIGHTS_KEPT**2) * self._prior)

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """[N] and [N]: mean and variance of the weighted sum of each row of features [N, D]."""
        return features @ self.mean, ((features @ self.covariance) * features).sum(axis=1)

    def condition(self, features: Floats, values: Floats, variance: Floats) -> None:
        """Learn that the weighted sums of features [Q, D] were seen as values [Q] with noise of this variance [Q]."""
        told = features.T / variance
        precision = np.linalg.inv(self.covariance)
        covariance = np.linalg.inv(precision + told @ features)
        self.covariance = (covariance + covariance.T) / 2.0  # rounding would let it drift away from symmetry
        self.mean = self.mean + self.covariance @ (told @ (values - features @ self.mean))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"mean": self.mean.tolist(), "covariance": self.covariance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.covariance = np.array(state["mean"]), np.array(state["covariance"])


class SizeModel:
    """Predicts something positive, such as a length: a Bayesian linear regression of its logarithm on the features.

    A mean of logarithms is not the logarithm of a mean. So predictions are multiplied by what was seen over what had
    been predicted, both as decayed sums.
    """

    NOISE_VARIANCE = 0.5
    DECAY = 0.9

    def __init__(self, size: int) -> None:
        self._weights = Weights(size)
        self._seen = self._predicted = 0.0

    def predict(self, features: Floats) -> Floats:
        """[N], for features [N, D]; 1 for all before anything is known."""
        correction = self._seen / self._predicted if self._predicted else 1.0
        expected: Floats = correction * np.exp(self._weights.predict(features)[0])
        return expected

    def learn(self, features: Floats, sizes: Floats) -> None:
        """What was seen of Q prompts with features [Q, D]: positive sizes [Q]. One update of the policy follows."""
        if len(sizes):
            self._weights.condition(features, np.log(sizes), np.full(len(sizes), self.NOISE_VARIANCE))
            fitted = np.exp(self._weights.predict(features)[0])
            self._seen = self.DECAY * self._seen + float(sizes.sum())
            self._predicted = self.DECAY * self._predicted + float(fitted.sum())
        self._weights.fade()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"weights": self._weights.state_dict(), "seen": self._seen, "predicted": self._predicted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state["weights"])
        self._seen, self._predicted = state["seen"], state["predicted"]

"""Predictions for a prompt from its features and its own visits, by models that learn from step to
step.

An online Bayesian logistic regression, with a random intercept for each prompt (a generalised
linear mixed model), predicts whether answers are right. Approximations are Laplace's; expectations
are taken by Gauss-Hermite quadrature. A linear model predicts gradient sizes and answer lengths.
Both have a Gaussian belief about weights, which fades as the policy moves on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.rl.pruning.history import PromptTable
from megatron_dppo.rl.types import Floats, Ints

INTERCEPT_KEPT = 0.97
"""Factor of a prompt's intercept from one update of the policy to the next: a visit 23 updates ago
counts half."""
SPREADS = 0.05 * 2.0 ** np.arange(8)
"""τ², from 0.05 to 6.4: candidates for the variance of intercepts, that is how much prompts of like
features differ."""
USUAL_SPREAD = 0.4
"""τ² before anything is known."""
EVIDENCE_DECAY = 0.95
"""Per update, of the evidence for each τ²."""
NEWTON_STEPS = 8
NODES, _HERMITE = np.polynomial.hermite_e.hermegauss(24)
SHARES = _HERMITE / _HERMITE.sum()


def sigmoid(logits: Floats) -> Floats:
    clipped: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return clipped


@dataclass(frozen=True, slots=True)
class SuccessProbability:
    """Belief about N probabilities, whose logits are Gaussian.

        Chance(logit=np.array([0.0]), variance=np.array([1.0]))

    has the mean 0.5; of four answers all are right with a probability of 0.13, not 0.06.
    """

    logit: Floats
    """[N], mean of the logit."""
    variance: Floats
    """[N], of the logit."""

    def mean(self) -> Floats:
        """[N], E[p]"""
        expected: Floats = self._nodes() @ SHARES
        return expected

    def compute_count_probabilities(self, answers: int) -> Floats:
        """[N, answers + 1], the probability that of so many answers 0, 1, … are right."""
        p = self._nodes()[..., None]
        right = np.arange(answers + 1)
        ways = np.array([math.comb(answers, k) for k in right.tolist()], np.float64)
        expected: Floats = SHARES @ (ways * p**right * (1.0 - p) ** (answers - right))
        return expected

    def log_likelihood(self, right: Floats, trials: Floats) -> Floats:
        """Log-likelihood [N] of one ordering of ``right`` successes among ``trials``, both [N]."""
        p = self._nodes()
        each = right[:, None] * np.log(p) + (trials - right)[:, None] * np.log1p(-p)
        largest = each.max(axis=1)
        total: Floats = largest + np.log(np.exp(each - largest[:, None]) @ SHARES)
        return total

    def _nodes(self) -> Floats:
        """[N, nodes]"""
        return sigmoid(self.logit[:, None] + np.sqrt(self.variance)[:, None] * NODES)


INTERCEPT = {"mean": 0.0, "share": 1.0, "update": 0.0}
"""Intercept of a prompt never seen. With mean = 0.6, share = 0.4 and update = 12 it was last
updated before the policy's 13th update. The prompt is easier than its features predict; 0.4 of τ²
is unknown."""


class SuccessModel:
    """logit P(right) = weights · features + the prompt's own intercept. Weights and intercepts fade
    with the policy's updates, and not with visits: a policy that has moved on has made all of them
    uncertain.

    An intercept is N(0, τ²) before the prompt's first visit, and goes back there. τ² is the
    candidate under which the groups had the highest likelihood when they were predicted.
    """

    def __init__(self, size: int) -> None:
        """``size`` is D, the number of features."""
        self._weights = Weights(size)
        self._evidence = -0.5 * np.log(SPREADS / USUAL_SPREAD) ** 2
        self._intercepts = PromptTable(INTERCEPT)
        self._update = 0

    @property
    def spread(self) -> float:
        """τ²"""
        return float(SPREADS[self._evidence.argmax()])

    def predict(self, prompt_ids: Ints, features: Floats) -> SuccessProbability:
        """Predict N prompts with features [N, D]."""
        logit, variance = self._weights.predict(features)
        mean, share = self._get_intercepts(prompt_ids)
        return SuccessProbability(logit + mean, variance + share * self.spread)

    def update(self, prompt_ids: Ints, features: Floats, right: Floats, trials: Floats) -> None:
        """Learn from Q prompts with features [Q, D]: ``right`` of ``trials`` answers, both [Q]. One
        update of the policy follows."""
        if len(prompt_ids):
            mean, share = self._get_intercepts(prompt_ids)
            self._update_evidence(features, mean, share, right, trials)
            prior = share * self.spread
            self._update_weights(features, mean, prior, right, trials)
            offset = features @ self._weights.mean + mean
            moved, information = _shift(offset, prior, right, trials)
            left = 1.0 / (1.0 + prior * information)
            update = np.full(len(prompt_ids), float(self._update))
            self._intercepts.put(prompt_ids, mean=mean + moved, share=share * left, update=update)
        self._weights.apply_forgetting()
        self._update += 1

    def _update_evidence(
        self, features: Floats, mean: Floats, share: Floats, right: Floats, trials: Floats
    ) -> None:
        logit, variance = self._weights.predict(features)
        chances = [
            SuccessProbability(logit + mean, variance + share * spread) for spread in SPREADS
        ]
        likelihood = [chance.log_likelihood(right, trials).sum() for chance in chances]
        self._evidence = EVIDENCE_DECAY * self._evidence + np.array(likelihood)

    def _update_weights(
        self, features: Floats, mean: Floats, prior: Floats, right: Floats, trials: Floats
    ) -> None:
        """Newton's steps to the weights' mode, intercepts integrated out by Laplace's
        approximation.

        Near the present weights a group says as much as a Gaussian observation of its logit, whose
        variance is that of the intercept and that of the answers. Each step starts from the belief
        before these groups.
        """
        mean_before = self._weights.mean
        covariance_before = self._weights.covariance
        for _ in range(NEWTON_STEPS):
            offset = features @ self._weights.mean + mean
            moved, information = _shift(offset, prior, right, trials)
            variance = prior + 1.0 / np.maximum(information, 1e-3)
            seen = (
                offset - mean + moved * variance / prior
            )  # moved / prior is the slope of the group's likelihood
            self._weights.mean = mean_before
            self._weights.covariance = covariance_before
            self._weights.update(features, seen, variance)

    def _get_intercepts(self, prompt_ids: Ints) -> tuple[Floats, Floats]:
        """[N] and [N]: mean, and the variance as a share of τ², as of now."""
        found = self._intercepts.get(prompt_ids)
        kept = INTERCEPT_KEPT ** (self._update - found["update"])
        return kept * found["mean"], 1.0 - kept**2 * (1.0 - found["share"])

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {
            "weights": self._weights.state_dict(),
            "evidence": self._evidence.tolist(),
            "intercepts": self._intercepts.state_dict(),
            "update": self._update,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state["weights"])
        self._evidence = np.array(state["evidence"])
        self._update = int(state["update"])
        self._intercepts.load_state_dict(state["intercepts"])


def _shift(offset: Floats, prior: Floats, right: Floats, trials: Floats) -> tuple[Floats, Floats]:
    """[Q] and [Q]: by how much each group moves its intercept, N(0, prior), from the logit
    ``offset``; and the information of its answers there."""
    moved = np.zeros_like(offset)
    for _ in range(2 * NEWTON_STEPS):
        p = sigmoid(offset + moved)
        slope = right - trials * p - moved / prior
        information = trials * p * (1.0 - p)
        moved = moved + np.clip(
            slope / (information + 1.0 / prior), -2.0, 2.0
        )  # an unbounded step can diverge
    p = sigmoid(offset + moved)
    return moved, trials * p * (1.0 - p)


PRIOR_VARIANCE = 0.05
"""Prior variance of a feature's weight, at deviation 1: 59 features give a logit the deviation 1.7
before any data."""
CONSTANT_VARIANCE = 4.0
"""The same of the constant."""
WEIGHTS_KEPT = 0.999
"""Factor of a weight's mean from one update of the policy to the next. Its variance goes back to
the prior's as fast, so that an observation 700 updates ago counts half."""


class Weights:
    """A Gaussian belief about D weights, the first of them that of the constant.

    Between updates the weights are taken to move as an Ornstein-Uhlenbeck process: w' = c·w +
    noise, whose stationary variance is the prior's. So means fade, and without data the covariance
    ends where it began.
    """

    def __init__(self, size: int) -> None:
        self._prior = np.full(size, PRIOR_VARIANCE)
        self._prior[0] = CONSTANT_VARIANCE
        self.mean = np.zeros(size)
        self.covariance = np.diag(self._prior)

    def apply_forgetting(self) -> None:
        """One update of the policy goes by."""
        self.mean = WEIGHTS_KEPT * self.mean
        self.covariance = WEIGHTS_KEPT**2 * self.covariance + np.diag(
            (1.0 - WEIGHTS_KEPT**2) * self._prior
        )

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """[N] and [N]: mean and variance of the weighted sum of each row of features [N, D]."""
        return features @ self.mean, ((features @ self.covariance) * features).sum(axis=1)

    def update(self, features: Floats, values: Floats, variance: Floats) -> None:
        """Learn that the weighted sums of features [Q, D] were seen as values [Q] with noise of
        this variance [Q]."""
        weighted = features.T / variance
        precision = np.linalg.inv(self.covariance)
        covariance = np.linalg.inv(precision + weighted @ features)
        self.covariance = (
            covariance + covariance.T
        ) / 2.0  # rounding would let it drift away from symmetry
        self.mean = self.mean + self.covariance @ (weighted @ (values - features @ self.mean))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"mean": self.mean.tolist(), "covariance": self.covariance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = np.array(state["mean"])
        self.covariance = np.array(state["covariance"])


class SizeModel:
    """Predicts something positive, such as a length: a Bayesian linear regression of its logarithm
    on the features.

    A mean of logarithms is not the logarithm of a mean. So predictions are multiplied by what was
    seen over what had been predicted, both as decayed sums.
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

    def update(self, features: Floats, sizes: Floats) -> None:
        """Learn from Q prompts with features [Q, D]: positive sizes [Q]. One update of the policy
        follows."""
        if len(sizes):
            self._weights.update(features, np.log(sizes), np.full(len(sizes), self.NOISE_VARIANCE))
            fitted = np.exp(self._weights.predict(features)[0])
            self._seen = self.DECAY * self._seen + float(sizes.sum())
            self._predicted = self.DECAY * self._predicted + float(fitted.sum())
        self._weights.apply_forgetting()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "weights": self._weights.state_dict(),
            "seen": self._seen,
            "predicted": self._predicted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state["weights"])
        self._seen = state["seen"]
        self._predicted = state["predicted"]

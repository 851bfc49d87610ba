"""Predict a prompt from features and earlier visits, by models updated every step.

- Right answers: online Bayesian logistic regression with a random intercept per prompt (a
  generalised linear mixed model), by Laplace's approximations and Gauss-Hermite quadrature.
- Gradient sizes and answer lengths: a linear model.

Both have a Gaussian belief about weights, which fades as the policy changes.
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
"""Factor of a prompt's intercept per update of the policy: a visit 23 updates ago counts half."""
SPREADS = 0.05 * 2.0 ** np.arange(8)
"""τ², from 0.05 to 6.4: candidates for the variance of intercepts, the differences between prompts
of similar features."""
USUAL_SPREAD = 0.4
"""τ² before the first update."""
EVIDENCE_DECAY = 0.95
"""Factor of the evidence for each τ², per update."""
NEWTON_STEPS = 8
NODES, _HERMITE = np.polynomial.hermite_e.hermegauss(24)
SHARES = _HERMITE / _HERMITE.sum()


def sigmoid(logits: Floats) -> Floats:
    clipped: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return clipped


@dataclass(frozen=True, slots=True)
class SuccessProbability:
    """Belief about N probabilities with Gaussian logits.

        SuccessProbability(logit=np.array([0.0]), variance=np.array([1.0]))

    has mean 0.5; all of four answers are right with a probability of 0.13, not 0.06.
    """

    logit: Floats
    """[N]"""
    variance: Floats
    """[N]"""

    def mean(self) -> Floats:
        """E[p], [N]."""
        expected: Floats = self._nodes() @ SHARES
        return expected

    def compute_count_probabilities(self, answers: int) -> Floats:
        """Return the probabilities of 0, 1, …, ``answers`` right answers, [N, answers + 1]."""
        p = self._nodes()[..., None]
        right = np.arange(answers + 1)
        ways = np.array([math.comb(answers, k) for k in right.tolist()], np.float64)
        expected: Floats = SHARES @ (ways * p**right * (1.0 - p) ** (answers - right))
        return expected

    def log_likelihood(self, right: Floats, trials: Floats) -> Floats:
        """Return the log-likelihood [N] of one ordering of ``right`` successes among ``trials``,
        both [N]."""
        p = self._nodes()
        log_probs = right[:, None] * np.log(p) + (trials - right)[:, None] * np.log1p(-p)
        # Log-sum-exp: the likelihood of many trials underflows.
        largest = log_probs.max(axis=1)
        total: Floats = largest + np.log(np.exp(log_probs - largest[:, None]) @ SHARES)
        return total

    def _nodes(self) -> Floats:
        """[N, nodes]"""
        return sigmoid(self.logit[:, None] + np.sqrt(self.variance)[:, None] * NODES)


INTERCEPT = {"mean": 0.0, "share": 1.0, "update": 0.0}
"""Intercept of a prompt never seen. With mean = 0.6, share = 0.4 and update = 12, last updated
before the policy's 13th update, the prompt is easier than its features predict, and 0.4 of τ² is
unknown."""


class SuccessModel:
    """logit P(right) = weights · features + the prompt's intercept.

    - An intercept is N(0, τ²) before the prompt's first visit, and decays to N(0, τ²).
    - τ² is the candidate with the highest likelihood of the groups at their prediction.
    """

    # Weights and intercepts fade with the policy's updates, not with visits: a changed policy makes
    # all of them uncertain.
    def __init__(self, size: int) -> None:
        """``size``: number of features, D."""
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
        """Update with Q prompts of features [Q, D]: ``right`` of ``trials`` answers, both [Q]. Call
        once before each update of the policy, even without prompts."""
        if len(prompt_ids):
            mean, share = self._get_intercepts(prompt_ids)
            # The evidence compares predictions, made before the weights have seen these groups.
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
        self,
        features: Floats,
        mean: Floats,
        share: Floats,
        right: Floats,
        trials: Floats,
    ) -> None:
        logit, variance = self._weights.predict(features)
        chances = [
            SuccessProbability(logit + mean, variance + share * spread) for spread in SPREADS
        ]
        likelihood = [chance.log_likelihood(right, trials).sum() for chance in chances]
        self._evidence = EVIDENCE_DECAY * self._evidence + np.array(likelihood)

    def _update_weights(
        self,
        features: Floats,
        mean: Floats,
        prior: Floats,
        right: Floats,
        trials: Floats,
    ) -> None:
        """Move the weights to their mode by Newton's steps, intercepts integrated out by Laplace's
        approximation."""
        mean_before = self._weights.mean
        covariance_before = self._weights.covariance
        for _ in range(NEWTON_STEPS):
            offset = features @ self._weights.mean + mean
            moved, information = _shift(offset, prior, right, trials)
            # Near the present weights a group equals a Gaussian observation of its logit, with the
            # variances of intercept and answers.
            variance = prior + 1.0 / np.maximum(information, 1e-3)
            # moved / prior is the slope of the group's likelihood.
            seen = offset - mean + moved * variance / prior
            # Start from the belief before these groups, or they would count repeatedly.
            self._weights.mean = mean_before
            self._weights.covariance = covariance_before
            self._weights.update(features, seen, variance)

    def _get_intercepts(self, prompt_ids: Ints) -> tuple[Floats, Floats]:
        """Return the present means [N], and variances as fractions of τ² [N]."""
        found = self._intercepts.get(prompt_ids)
        kept = INTERCEPT_KEPT ** (self._update - found["update"])
        return kept * found["mean"], 1.0 - kept**2 * (1.0 - found["share"])

    def state_dict(self) -> dict[str, Any]:
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
    """Return each group's shift of its intercept, N(0, prior), from the logit ``offset``, and the
    information of its answers there, both [Q]."""
    moved = np.zeros_like(offset)
    for _ in range(2 * NEWTON_STEPS):
        p = sigmoid(offset + moved)
        slope = right - trials * p - moved / prior
        information = trials * p * (1.0 - p)
        # An unbounded step can diverge.
        moved = moved + np.clip(slope / (information + 1.0 / prior), -2.0, 2.0)
    p = sigmoid(offset + moved)
    return moved, trials * p * (1.0 - p)


PRIOR_VARIANCE = 0.05
"""Prior variance of a feature's weight: 59 features of deviation 1 give a logit the deviation 1.7
before any data."""
CONSTANT_VARIANCE = 4.0
"""Prior variance of the constant's weight."""
WEIGHTS_KEPT = 0.999
"""Factor of a weight's mean per update of the policy. The variance returns to the prior's at the
same rate: an observation 700 updates ago counts half."""


class Weights:
    """Gaussian belief about D weights; the first is the constant's.

    Between updates the weights follow an Ornstein-Uhlenbeck process, w' = c·w + noise, with the
    prior's variance as stationary variance: without data, means fade and the covariance returns to
    the prior's.
    """

    def __init__(self, size: int) -> None:
        self._prior = np.full(size, PRIOR_VARIANCE)
        self._prior[0] = CONSTANT_VARIANCE
        self.mean = np.zeros(size)
        self.covariance = np.diag(self._prior)

    def apply_forgetting(self) -> None:
        self.mean = WEIGHTS_KEPT * self.mean
        self.covariance = WEIGHTS_KEPT**2 * self.covariance + np.diag(
            (1.0 - WEIGHTS_KEPT**2) * self._prior
        )

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """Return mean [N] and variance [N] of weighted sums of features [N, D]."""
        return features @ self.mean, ((features @ self.covariance) * features).sum(axis=1)

    def update(self, features: Floats, values: Floats, variance: Floats) -> None:
        """Update with observed weighted sums of features [Q, D]: ``values`` [Q] with noise of
        ``variance`` [Q]."""
        scaled = features.T / variance
        precision = np.linalg.inv(self.covariance)
        covariance = np.linalg.inv(precision + scaled @ features)
        # Rounding would make the covariance drift away from symmetry.
        self.covariance = (covariance + covariance.T) / 2.0
        self.mean = self.mean + self.covariance @ (scaled @ (values - features @ self.mean))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.tolist(), "covariance": self.covariance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = np.array(state["mean"])
        self.covariance = np.array(state["covariance"])


class SizeModel:
    """Bayesian linear regression of the logarithm of a positive size, such as a length."""

    NOISE_VARIANCE = 0.5
    DECAY = 0.9

    def __init__(self, size: int) -> None:
        self._weights = Weights(size)
        self._seen = self._predicted = 0.0

    def predict(self, features: Floats) -> Floats:
        """Return predictions [N] for features [N, D]; 1 before the first update."""
        # A mean of logarithms is not the logarithm of a mean: correct by observed / predicted sums,
        # both decayed.
        correction = self._seen / self._predicted if self._predicted else 1.0
        expected: Floats = correction * np.exp(self._weights.predict(features)[0])
        return expected

    def update(self, features: Floats, sizes: Floats) -> None:
        """Update with Q prompts of features [Q, D]: positive ``sizes`` [Q]. Call once per update,
        as :meth:`SuccessModel.update`."""
        if len(sizes):
            self._weights.update(features, np.log(sizes), np.full(len(sizes), self.NOISE_VARIANCE))
            fitted = np.exp(self._weights.predict(features)[0])
            self._seen = self.DECAY * self._seen + float(sizes.sum())
            self._predicted = self.DECAY * self._predicted + float(fitted.sum())
        self._weights.apply_forgetting()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self._weights.state_dict(),
            "seen": self._seen,
            "predicted": self._predicted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state["weights"])
        self._seen = state["seen"]
        self._predicted = state["predicted"]

"""Predict a prompt's next group by regressions on features, also for prompts never seen.

Any predictor that has not seen a step's rollouts may set the inclusion probabilities: the gradient
stays unbiased, and better predictions lower its variance. Every group is therefore predicted before
it updates the regressions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_dppo.rl.advantages import compute_mean_squares, find_estimator
from megatron_dppo.rl.pruning.history import PromptHistory, is_binary
from megatron_dppo.rl.pruning.success_model import SizeModel, SuccessModel
from megatron_dppo.rl.types import Bools, Floats, Ints, Prompt


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Q groups of a step, for comparison with their predictions.

        Outcomes(prompt_ids=[7], rewards=[[1, 0]], advantages=[[1, -1]], squares=[0.3],
        tokens=[2.5], equal=[False])

    is one group with a right and a wrong answer (lists instead of arrays).
    """

    prompt_ids: Ints
    """[Q]"""
    rewards: Floats
    """[Q, G]"""
    advantages: Floats
    """[Q, G], of full groups."""
    squares: Floats
    """[Q], Σ_i h_i² without any 1/π; h: proxy of the norm of a completion's term."""
    tokens: Floats
    """[Q], mean generated tokens per completion."""
    equal: Bools
    """[Q], False in ``find_nonzero_variance_groups``."""


class PromptForecast(PromptHistory):
    """Reward history of prompts, and models that predict a prompt from its features.

    E[Σ h²] of a prompt's next group is E[Σ A²] · (Σ h²/Σ A²).

    - First factor, rewards 0 and 1: Σ_k P(k of G right) · Σ A² of a group with k right answers, by
      the estimator.
    - First factor, other rewards: the predicted probability of unequal rewards in the group, or the
      prompt's mean Σ A² if groups of equal reward also have advantages.
    - Second factor, and tokens: regressions of logarithms on the features.

    Args:
        has_teacher: whether a teacher gives every group a gradient, even of equal reward. Then
            E[Σ h²] is the regression alone, over all groups.
        entropy_coef: weight β of an entropy bonus, which makes each A² in these formulas A² + β².
    """

    def __init__(
        self,
        features: PromptFeatures,
        estimator: str = "grpo",
        *,
        has_teacher: bool = False,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__()
        # A count of right answers does not give the advantages of several rewards.
        self.binary = estimator != "gdpo"
        self._features = features
        self._estimator = estimator
        self._has_teacher = has_teacher
        self._bonus = entropy_coef**2
        self._success = SuccessModel(features.size)
        # No intercept per prompt for sizes and tokens: measured on two visits to a prompt, the
        # residuals beyond the features had no common part.
        self._size = SizeModel(features.size)
        self._tokens = SizeModel(features.size)

    def expected_square(self, prompt_ids: Ints, *, group_size: int) -> Floats:
        """Return E[Σ_i h_i²] of each prompt's next group, [N], up to a common factor."""
        features = self._features.get(prompt_ids)
        if self._has_teacher:
            return self._size.predict(features)
        chance = self._success.predict(prompt_ids, features)
        if self.binary:
            probabilities = chance.compute_count_probabilities(group_size)
            by_count = compute_mean_squares(self._estimator, probabilities.mean(axis=0))
            square = probabilities @ by_count
        elif find_estimator(self._estimator).zero_if_equal:
            square = chance.mean()
        else:
            square = self.compute_mean_square(prompt_ids) / group_size
        return (square + self._bonus) * self._size.predict(features)

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        """Return expected generated tokens per completion, [N]; 1 before the first update."""
        return self._tokens.predict(self._features.get(prompt_ids))

    def evaluate_and_update(self, visits: Outcomes) -> dict[str, float]:
        """Compare the predictions with a step's groups, then update the models.

        Returns:
            Brier scores of the regression and of the pool's mean; empty without groups.
        """
        if not len(visits.prompt_ids):
            return {}
        if self.binary and not is_binary(visits.rewards):
            # The prediction's target changes to unequal rewards in a group, which a model of right
            # answers does not predict.
            self.binary = False
            self._success = SuccessModel(self._features.size)
        scores = self._evaluate(visits)
        self._update_models(visits)
        return scores

    def _evaluate(self, visits: Outcomes) -> dict[str, float]:
        right, trials = self._count_successes(visits)
        observed = right / trials
        features = self._features.get(visits.prompt_ids)
        predicted = self._success.predict(visits.prompt_ids, features).mean()
        return {
            "prune/brier_model": float(((predicted - observed) ** 2).mean()),
            "prune/brier_pool": float(((self.pool_mean - observed) ** 2).mean()),
        }

    def _update_models(self, visits: Outcomes) -> None:
        features = self._features.get(visits.prompt_ids)
        # Sizes enter as logarithms and, without a teacher, divided by mean A²: both must be
        # positive.
        has_gradient = (visits.advantages != 0.0).any(axis=1)
        has_gradient |= self._has_teacher or self._bonus > 0.0
        sized = has_gradient & (visits.squares > 0.0)
        self._success.update(visits.prompt_ids, features, *self._count_successes(visits))
        squares = visits.squares[sized]
        if not self._has_teacher:
            squares /= (visits.advantages[sized] ** 2).mean(axis=1) + self._bonus
        self._size.update(features[sized], squares)
        self._tokens.update(features, visits.tokens)
        self.update(visits.prompt_ids, visits.rewards, visits.advantages, visits.equal)

    def _count_successes(self, visits: Outcomes) -> tuple[Floats, Floats]:
        """Return successes and trials, both [Q]: right answers of all answers; if not ``binary``,
        one trial per group, for unequal rewards."""
        if self.binary:
            right = (visits.rewards == 1.0).sum(axis=1)
            return right.astype(np.float64), np.full(len(right), float(visits.rewards.shape[1]))
        return (~visits.equal).astype(np.float64), np.ones(len(visits.equal))

    def state_dict(self) -> dict[str, Any]:
        """Return a resumed run's state for JSON: floats read back bit for bit."""
        return super().state_dict() | {
            "models": {name: model.state_dict() for name, model in self._get_models().items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, model in self._get_models().items():
            model.load_state_dict(state["models"][name])

    def _get_models(self) -> dict[str, SuccessModel | SizeModel]:
        return {"success": self._success, "size": self._size, "tokens": self._tokens}


NUMBER = re.compile(r"\d+(?:\.\d+)?")
LONGEST_NUMBER = 15
"""Digits read of a number; more hardly change the logarithm or a sum."""
PLAIN = 9
"""Number of lengths and numbers; their squares are features as well."""
SOURCES = 8
TOKENS = 16
PAIRS = 16
"""``SOURCES``, ``TOKENS``, ``PAIRS``: buckets for data source, tokens and pairs of neighbouring
tokens."""
SAMPLE = 1024
"""Evenly spaced prompts of the pool that set each feature's scale."""
KEPT = 1 << 15
"""Maximum number of prompts whose features are cached; a full cache is emptied."""
WIDEST = 4.0
"""Limit of a scaled feature, in deviations: one odd prompt must not move a model."""


class PromptFeatures:
    """Features of a pool's prompts, D = 59 each: a 1, and 58 features of mean 0 and deviation 1
    over the pool.

    - Lengths.
    - Numbers in the text: count, sum and largest; plain, as logarithm and squared.
    - Data source, tokens and pairs of tokens, hashed.

    Before scaling, the plain features of "2+3=" are [4, 1.61, 1.61, 2, 1.10, 5, 1.79, 3, 1.39]: 4
    tokens, two numbers of sum 5, the largest 3. A prompt is read at its first use.
    """

    size = 1 + PLAIN + SOURCES + TOKENS + PAIRS + PLAIN
    """D"""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        """Create the features of ``pool``, with ``pool[i].id == i``."""
        self._pool = pool
        self._known: dict[int, Floats] = {}

    def get(self, prompt_ids: Ints) -> Floats:
        rows = [self._get_row(prompt_id) for prompt_id in prompt_ids.tolist()]
        return np.array(rows).reshape(-1, self.size)

    def _get_row(self, prompt_id: int) -> Floats:
        if prompt_id not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            raw = _read_features(self._pool[prompt_id])
            scaled = _scale_features(raw, self._scale[0], self._scale[1])
            squares = scaled[:PLAIN] ** 2 - self._scale[2][:PLAIN]
            self._known[prompt_id] = np.concatenate([[1.0], scaled, squares])
        return self._known[prompt_id]

    @cached_property
    def _scale(self) -> Floats:
        """Means, deviations, and mean squares of the scaled features, [3, raw features]. Computed
        on rank 0 only."""
        # Only the pool sets the scale: a resumed run has the same features without any state.
        positions = np.linspace(0, len(self._pool) - 1, min(len(self._pool), SAMPLE))
        sample = positions.round().astype(np.int64)
        raw = np.array([_read_features(self._pool[i]) for i in sample.tolist()])
        mean = raw.mean(axis=0)
        spread = raw.std(axis=0)
        return np.array([mean, spread, (_scale_features(raw, mean, spread) ** 2).mean(axis=0)])


def _scale_features(raw: Floats, mean: Floats, spread: Floats) -> Floats:
    # A feature constant over the pool becomes 0: a deviation of 0 cannot divide.
    varies = spread > 1e-9
    scaled = np.divide(raw - mean, spread, out=np.zeros_like(raw), where=varies)
    return np.clip(scaled, -WIDEST, WIDEST)


def _read_features(prompt: Prompt) -> Floats:
    numbers = np.array([float(text[:LONGEST_NUMBER]) for text in NUMBER.findall(prompt.text)])
    tokens = prompt.token_ids.tolist()
    sizes = np.array([len(tokens), len(numbers), numbers.sum(), numbers.max(initial=0.0)])
    length, count, total, largest = np.log1p(sizes)
    plain = [
        sizes[0],
        length,
        np.log1p(len(prompt.text)),
        sizes[1],
        count,
        sizes[2],
        total,
        sizes[3],
        largest,
    ]
    source = _count_hashed([prompt.data_source], SOURCES)
    return np.concatenate(
        [
            plain,
            source,
            np.sqrt(_count_hashed(tokens, TOKENS)),
            np.sqrt(_count_hashed(pairwise(tokens), PAIRS)),
        ]
    )


def _count_hashed(items: Iterable[object], buckets: int) -> Floats:
    counts = np.zeros(buckets)
    for item in items:
        # Python's own hash differs between processes.
        counts[zlib.crc32(repr(item).encode()) % buckets] += 1.0
    return counts

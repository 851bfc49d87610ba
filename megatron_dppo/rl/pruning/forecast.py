"""Predictions of a prompt's next group, by regressions on its features, also for prompts never
seen.

Any predictor that has not seen a step's rollouts may set its inclusion probabilities: the gradient
stays unbiased, and the better the prediction, the less its variance. So every group is predicted
before the regressions learn of it.
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
from megatron_dppo.rl.types import Floats, Ints, Prompt


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A step's Q groups, as its predictions are compared with them.

        Outcomes(prompt_ids=[7], rewards=[[1, 0]], advantages=[[1, -1]], squares=[0.3],
        tokens=[2.5])

    is one group with a right and a wrong answer. The lists stand for arrays.
    """

    prompt_ids: Ints
    """[Q]"""
    rewards: Floats
    """[Q, G]"""
    advantages: Floats
    """[Q, G], of the full groups."""
    squares: Floats
    """[Q], Σ_i h_i², h a proxy of the norm of a completion's term in the sum, without any 1/π."""
    tokens: Floats
    """[Q], mean tokens generated for a completion."""


class PromptForecast(PromptHistory):
    """The records of prompts, and models that know a prompt by its features.

    E[Σ h²] of a prompt's next group is E[Σ A²] · (Σ h²/Σ A²). Where rewards are 0 and 1, the first
    factor is Σ_k P(k of G are right) · Σ A² of such a group, for which the estimator is tried out.
    Where they are not, the chance that the group's rewards differ stands for it, which is predicted
    itself; or the prompt's mean Σ A², if groups of equal reward have advantages, too. The second
    factor, and the tokens, are regressions of their logarithms on the features: what two visits to
    a prompt have in common beyond these was measured to be nothing.

    Args:
        features: of the pool.
        estimator: of advantages, by its name.
        has_teacher: whether a teacher gives every group a gradient, also those whose rewards are
            equal. Then E[Σ h²] is the regression alone, over all groups.
    """

    def __init__(
        self, features: PromptFeatures, estimator: str = "grpo", *, has_teacher: bool = False
    ) -> None:
        super().__init__()
        self._features = features
        self._estimator = estimator
        self._taught = has_teacher
        self._success = SuccessModel(features.size)
        self._size = SizeModel(features.size)
        self._tokens = SizeModel(features.size)

    def expected_square(self, prompt_ids: Ints, *, group_size: int) -> Floats:
        """Return E[Σ_i h_i²] of the next group of each prompt, [N], up to a factor common to
        all."""
        features = self._features.get(prompt_ids)
        if self._taught:
            return self._size.predict(features)
        chance = self._success.predict(prompt_ids, features)
        if self.binary:
            of_right = chance.compute_count_probabilities(group_size)
            square = of_right @ compute_mean_squares(self._estimator, of_right.mean(axis=0))
        elif find_estimator(self._estimator).zero_if_equal:
            square = chance.mean()
        else:
            square = self.compute_mean_square(prompt_ids)
        return square * self._size.predict(features)

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        """Return the tokens that a completion of each prompt takes to generate, [N]; 1 for all
        before anything is known."""
        return self._tokens.predict(self._features.get(prompt_ids))

    def evaluate_and_update(self, visits: Outcomes) -> dict[str, float]:
        """Compare the predictions with a step's groups, then learn from the groups.

        Returns:
            Brier scores of the regression and of the pool's mean; empty without groups.
        """
        if not len(visits.prompt_ids):
            return {}
        if self.binary and not is_binary(visits.rewards):
            self.binary = False  # from now on what is predicted is whether a group's rewards differ
            self._success = SuccessModel(self._features.size)
        scores = self._evaluate(visits)
        self._update_models(visits)
        return scores

    def _evaluate(self, visits: Outcomes) -> dict[str, float]:
        right, trials = self._count_successes(visits)
        observed = right / trials
        predicted = self._success.predict(
            visits.prompt_ids, self._features.get(visits.prompt_ids)
        ).mean()
        return {
            "prune/brier_model": float(((predicted - observed) ** 2).mean()),
            "prune/brier_pool": float(((self.pool_mean - observed) ** 2).mean()),
        }

    def _update_models(self, visits: Outcomes) -> None:
        features = self._features.get(visits.prompt_ids)
        sized = ((visits.advantages != 0.0).any(axis=1) | self._taught) & (visits.squares > 0.0)
        self._success.update(visits.prompt_ids, features, *self._count_successes(visits))
        squares = visits.squares[sized]
        if not self._taught:
            squares /= (visits.advantages[sized] ** 2).mean(axis=1)
        self._size.update(features[sized], squares)
        self._tokens.update(features, visits.tokens)
        self.update(visits.prompt_ids, visits.rewards, visits.advantages)

    def _count_successes(self, visits: Outcomes) -> tuple[Floats, Floats]:
        """[Q] and [Q]: successes and trials: right answers of all, or whether the rewards of the
        group differ."""
        if self.binary:
            right = (visits.rewards == 1.0).sum(axis=1)
            return right.astype(np.float64), np.full(len(right), float(visits.rewards.shape[1]))
        differ = (visits.rewards != visits.rewards[:, :1]).any(axis=1)
        return differ.astype(np.float64), np.ones(len(differ))

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, for JSON: Python writes floats so that they read back bit
        for bit."""
        return super().state_dict() | {
            "models": {name: model.state_dict() for name, model in self._get_models().items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, before or after it was written as JSON."""
        super().load_state_dict(state)
        for name, model in self._get_models().items():
            model.load_state_dict(state["models"][name])

    def _get_models(self) -> dict[str, SuccessModel | SizeModel]:
        return {"success": self._success, "size": self._size, "tokens": self._tokens}


NUMBER = re.compile(r"\d+(?:\.\d+)?")
LONGEST_NUMBER = 15
"""Digits that are read of a number: more are beyond what its logarithm or a sum can show."""
PLAIN = 9
"""Lengths and numbers, which come with their squares as well."""
SOURCES = 8
TOKENS = 16
PAIRS = 16
"""Buckets for the data source, for tokens and for pairs of neighbouring tokens."""
SAMPLE = 1024
"""How many prompts of the pool, evenly spaced, set the scale of each feature."""
KEPT = 1 << 15
"""Most prompts whose features are kept: what comes back in between is read again."""
WIDEST = 4.0
"""Deviations from the mean at which a feature is cut off, so that one odd prompt moves no model."""


class PromptFeatures:
    """The features of a pool's prompts, D = 59 for each: a 1, and others of mean 0 and deviation 1
    over the pool.

    They are lengths, the numbers in the text (how many, their sum, the largest; plain, as logarithm
    and squared), the data source, and hashed tokens and pairs of tokens. A prompt is read when it
    is first asked for. The scale comes from the pool alone, so that a resumed run has the same
    features without any state.

    The plain features of "2+3=" are, before they are scaled, [4, 1.61, 1.61, 2, 1.10, 5, 1.79, 3,
    1.39]: 4 tokens, two numbers of sum 5, the largest 3.
    """

    size = 1 + PLAIN + SOURCES + TOKENS + PAIRS + PLAIN
    """D"""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        """``pool[i].id == i``."""
        self._pool = pool
        self._known: dict[int, Floats] = {}

    def get(self, prompt_ids: Ints) -> Floats:
        """[N, D]"""
        return np.array([self._get_row(prompt_id) for prompt_id in prompt_ids.tolist()]).reshape(
            -1, self.size
        )

    def _get_row(self, prompt_id: int) -> Floats:
        if prompt_id not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            scaled = _scale_features(
                _read_features(self._pool[prompt_id]), self._scale[0], self._scale[1]
            )
            squares = scaled[:PLAIN] ** 2 - self._scale[2][:PLAIN]
            self._known[prompt_id] = np.concatenate([[1.0], scaled, squares])
        return self._known[prompt_id]

    @cached_property
    def _scale(self) -> Floats:
        """[3, raw features]: means, deviations, and mean squares of what is scaled by these. Only
        the leader asks."""
        sample = (
            np.linspace(0, len(self._pool) - 1, min(len(self._pool), SAMPLE))
            .round()
            .astype(np.int64)
        )
        raw = np.array([_read_features(self._pool[i]) for i in sample.tolist()])
        mean = raw.mean(axis=0)
        spread = raw.std(axis=0)
        return np.array([mean, spread, (_scale_features(raw, mean, spread) ** 2).mean(axis=0)])


def _scale_features(raw: Floats, mean: Floats, spread: Floats) -> Floats:
    varies = spread > 1e-9
    return np.clip(
        np.divide(raw - mean, spread, out=np.zeros_like(raw), where=varies), -WIDEST, WIDEST
    )


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
    """[buckets], how many of the items fall into each. Python's own hash differs from process to
    process."""
    counts = np.zeros(buckets)
    for item in items:
        counts[zlib.crc32(repr(item).encode()) % buckets] += 1.0
    return counts

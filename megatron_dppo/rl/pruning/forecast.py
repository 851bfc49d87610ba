"""Predictions of a prompt's next group, by a model of its features or by its record.

The model also predicts prompts never seen.

Any predictor that has not seen a step's rollouts may set its inclusion probabilities: the gradient stays unbiased, and
the better the prediction, the less its variance. So both predict every group before they learn of it, and the better
predictor sets the next step's probabilities.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from megatron_dppo.rl.numbers import without_rounding
from megatron_dppo.rl.objectives import Baseline
from megatron_dppo.rl.pruning.history import PromptHistory, is_binary
from megatron_dppo.rl.pruning.success_model import SizeModel, SuccessModel
from megatron_dppo.rl.types import Floats, Ints, Prompt, StepPlan

Predictor = Literal["auto", "record", "model"]
LOSS_DECAY = 0.9
"""Per step, of the losses by which ``auto`` chooses."""
BINS = 10
"""Intervals of predicted probabilities in the reliability curve."""
CalibrationBin = tuple[str, int, int, float, float]
"""Who predicted (``model``, ``record``), the tenth of [0, 1] in which the predictions lie, how many groups are there,
the sum of their predicted chances, and the sum of the shares that turned out right. Where rewards are not 0 and 1, a
chance is that of a group whose rewards differ."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A step's Q groups, as its predictions are held against them.

        Outcomes(prompt_ids=[7], rewards=[[1, 0]], advantages=[[1, -1]], squares=[0.3], tokens=[2.5])

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


@dataclass(frozen=True, slots=True)
class PredictorMetrics:
    """How well a step was predicted.

        PredictorMetrics({"prune/brier_model": 0.05, ...}, notes=(), reliability=(("model", 3, 12, 4.1, 4.4), ...))

    gave 12 groups chances between 0.3 and 0.4, of which 4.4 groups' worth of answers turned out right.
    """

    metrics: Mapping[str, float]
    notes: tuple[str, ...]
    reliability: tuple[CalibrationBin, ...]

    def added_to(self, plan: StepPlan) -> StepPlan:
        """The step's plan, with what its log and its census have of this."""
        census = plan.census and replace(plan.census, by_prediction=self.reliability)
        return replace(plan, metrics={**plan.metrics, **self.metrics}, notes=plan.notes + self.notes, census=census)


class PromptForecast(PromptHistory):
    """The records of prompts, and models that know a prompt by its features.

    E[Σ h²] of a prompt's next group is P(its rewards differ) · E[Σ h² | they do]. The first factor comes from the
    chance of a right answer where rewards are 0 and 1, else it is predicted itself. The second, and the tokens, are
    regressions of their logarithms on the features: what two visits to a prompt have in common beyond these was
    measured to be nothing.

    Args:
        decay: ``pruning.prompts.decay``, of the records.
        features: of the pool.
        predictor: ``pruning.prompts.predictor``.
        baseline: see ``PromptHistory``. With ``batch`` the first factor is E[Σ A²], and the second E[Σ h²]/E[Σ A²].
        taught: whether a teacher gives every group a gradient, also those whose rewards are equal. Then E[Σ h²] is the
            regression alone, over all groups.
    """

    def __init__(
        self,
        decay: float,
        features: PromptFeatures,
        predictor: Predictor,
        baseline: Baseline = "group",
        *,
        taught: bool = False,
    ) -> None:
        super().__init__(decay, baseline)
        self._features, self._predictor, self._taught = features, predictor, taught
        self._size, self._tokens = SizeModel(features.size), SizeModel(features.size)
        self._start()

    def _start(self) -> None:
        self._success = SuccessModel(self._features.size)
        self._losses = {"model": 0.0, "record": 0.0}

    @property
    def used(self) -> Literal["record", "model"]:
        """Predictor of the next step's probabilities."""
        if self._taught:
            return "model"
        if self._predictor != "auto":
            return self._predictor
        return "model" if self._losses["model"] < self._losses["record"] else "record"

    def expected_square(self, prompt_ids: Ints, *, group_size: int, normalised: bool) -> Floats:
        """E[Σ_i h_i²] of the next group of each prompt by the model, or E[Σ_i A_i²] by its record; [N], up to a factor
        common to all."""
        if self._taught:
            return self._size.predict(self._features.of(prompt_ids))
        if self.used == "record":
            return super().expected_square(prompt_ids, group_size=group_size, normalised=normalised)
        features = self._features.of(prompt_ids)
        chance = self._success.predict(prompt_ids, features)
        if self.baseline == "batch":
            by_record = super().expected_square(prompt_ids, group_size=group_size, normalised=normalised)
            return self._size.predict(features) * (self.off_mean(chance.mean()) if self.binary else by_record)
        mixed = chance.mixed(group_size) if self.binary else chance.mean()
        return mixed * self._size.predict(features)

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        """[N], the tokens that a completion of each prompt takes to generate, by its features; 1 for all before
        anything is known, and where records alone were asked for."""
        if self._predictor == "record":
            return super().expected_tokens(prompt_ids)
        return self._tokens.predict(self._features.of(prompt_ids))

    def judge_and_learn(self, visits: Outcomes) -> PredictorMetrics:
        """Hold the predictions against a step's groups; only then learn of them."""
        if not len(visits.prompt_ids):
            return PredictorMetrics({}, (), ())
        visits = replace(visits, rewards=without_rounding(visits.rewards))
        if self.binary and not is_binary(visits.rewards):
            self.binary = False  # from now on what is predicted is whether a group's rewards differ
            self._start()
        judgement = self._judge(visits)
        self._learn(visits)
        return judgement

    def _judge(self, visits: Outcomes) -> PredictorMetrics:
        right, trials = self._outcomes(visits)
        chance = self._success.predict(visits.prompt_ids, self._features.of(visits.prompt_ids))
        alpha, beta = self.posterior(visits.prompt_ids)
        losses = {
            "model": -float(chance.log_likelihood(right, trials).mean()),
            "record": -float(beta_log_likelihood(right, trials, alpha, beta).mean()),
        }
        before = self.used
        self._losses = {name: LOSS_DECAY * self._losses[name] + loss for name, loss in losses.items()}
        observed = right / trials
        predicted = {"model": chance.mean(), "record": alpha / (alpha + beta)}
        metrics = {
            "prune/brier_model": float(((predicted["model"] - observed) ** 2).mean()),
            "prune/brier_record": float(((predicted["record"] - observed) ** 2).mean()),
            "prune/brier_pool": float(((self.pool_mean - observed) ** 2).mean()),
            "prune/log_loss_model": losses["model"],
            "prune/log_loss_record": losses["record"],
            "prune/predicted_by_model": float(before == "model"),
        }
        curves = [row for name, said in predicted.items() for row in _reliability(name, said, observed)]
        return PredictorMetrics(metrics, self._change(before), tuple(curves))

    def _learn(self, visits: Outcomes) -> None:
        features = self._features.of(visits.prompt_ids)
        sized = ((visits.advantages != 0.0).any(axis=1) | self._taught) & (visits.squares > 0.0)
        self._success.learn(visits.prompt_ids, features, *self._outcomes(visits))
        squares = visits.squares[sized]
        if self.baseline == "batch" and not self._taught:
            squares /= (visits.advantages[sized] ** 2).sum(axis=1)
        self._size.learn(features[sized], squares)
        self._tokens.learn(features, visits.tokens)
        self.update(visits.prompt_ids, visits.rewards, visits.advantages)

    def _outcomes(self, visits: Outcomes) -> tuple[Floats, Floats]:
        """[Q] and [Q]: successes and trials: right answers of all, or whether the rewards of the group differ."""
        if self.binary:
            right = (visits.rewards == 1.0).sum(axis=1)
            return right.astype(np.float64), np.full(len(right), float(visits.rewards.shape[1]))
        differ = (visits.rewards != visits.rewards[:, :1]).any(axis=1)
        return differ.astype(np.float64), np.ones(len(differ))

    def _change(self, before: str) -> tuple[str, ...]:
        if self.used == before:
            return ()
        other = "record" if self.used == "model" else "model"
        won, lost = self._losses[self.used], self._losses[other]
        change = f"pruning.prompts.predictor = auto: the {self.used} predicts prompts from now on"
        return (f"{change}; its recent log-loss is {100 * (1.0 - won / lost):.1f}% below that of the {other}",)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, for JSON: Python writes floats so that they read back bit for bit."""
        models = {name: model.state_dict() for name, model in self._models().items()}
        return super().state_dict() | {"models": models, "losses": dict(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, before or after it was written as JSON. From a checkpoint that has
        records only, models begin anew."""
        super().load_state_dict(state)
        for name, model in self._models().items() if "models" in state else ():
            model.load_state_dict(state["models"][name])
        self._losses = dict(state.get("losses", self._losses))

    def _models(self) -> dict[str, SuccessModel | SizeModel]:
        return {"success": self._success, "size": self._size, "tokens": self._tokens}


def beta_log_likelihood(right: Floats, trials: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Log-likelihood [N] of one ordering of ``right`` successes among ``trials``; the probability has a Beta
    distribution."""
    before = np.arange(int(trials.max(initial=0.0)))

    def rising(start: Floats, length: Floats) -> Floats:
        """log of start·(start + 1)·…, so many factors."""
        logs = np.log(start[:, None] + before)
        total: Floats = np.where(before < length[:, None], logs, 0.0).sum(axis=1)
        return total

    return rising(alpha, right) + rising(beta, trials - right) - rising(alpha + beta, trials)


def _reliability(name: str, predicted: Floats, observed: Floats) -> list[CalibrationBin]:
    """A row for each bin of predictions that has groups."""
    bins = np.minimum((BINS * predicted).astype(np.int64), BINS - 1)
    counts, said, seen = (np.bincount(bins, weights, BINS) for weights in (None, predicted, observed))
    return [(name, int(b), int(counts[b]), round(said[b], 6), round(seen[b], 6)) for b in np.flatnonzero(counts)]


NUMBER = re.compile(r"\d+(?:\.\d+)?")
LONGEST_NUMBER = 15
"""Digits that are read of a number: more are beyond what its logarithm or a sum can show."""
PLAIN = 9
"""Lengths and numbers, which come with their squares as well."""
SOURCES, TOKENS, PAIRS = 8, 16, 16
"""Buckets for the data source, for tokens and for pairs of neighbouring tokens."""
SAMPLE = 1024
"""How many prompts of the pool, evenly spaced, set the scale of each feature."""
KEPT = 1 << 15
"""Most prompts whose features are kept: what comes back in between is read again."""
WIDEST = 4.0
"""Deviations from the mean at which a feature is cut off, so that one odd prompt moves no model."""


class PromptFeatures:
    """The features of a pool's prompts, D = 59 for each: a 1, and others of mean 0 and deviation 1 over the pool.

    They are lengths, the numbers in the text (how many, their sum, the largest; plain, as logarithm and squared), the
    data source, and hashed tokens and pairs of tokens. A prompt is read when it is first asked for. The scale comes
    from the pool alone, so that a resumed run has the same features without any state.

    The plain features of "2+3=" are, before they are scaled, [4, 1.61, 1.61, 2, 1.10, 5, 1.79, 3, 1.39]: 4 tokens, two
    numbers of sum 5, the largest 3.
    """

    size = 1 + PLAIN + SOURCES + TOKENS + PAIRS + PLAIN
    """D"""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        """``pool[i].id == i``."""
        self._pool = pool
        self._known: dict[int, Floats] = {}

    def of(self, prompt_ids: Ints) -> Floats:
        """[N, D]"""
        return np.array([self._of(prompt_id) for prompt_id in prompt_ids.tolist()]).reshape(-1, self.size)

    def _of(self, prompt_id: int) -> Floats:
        if prompt_id not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            scaled = _scaled(_read(self._pool[prompt_id]), self._scale[0], self._scale[1])
            squares = scaled[:PLAIN] ** 2 - self._scale[2][:PLAIN]
            self._known[prompt_id] = np.concatenate([[1.0], scaled, squares])
        return self._known[prompt_id]

    @cached_property
    def _scale(self) -> Floats:
        """[3, raw features]: means, deviations, and mean squares of what is scaled by these. Only the leader asks."""
        sample = np.linspace(0, len(self._pool) - 1, min(len(self._pool), SAMPLE)).round().astype(np.int64)
        raw = np.array([_read(self._pool[i]) for i in sample.tolist()])
        mean, spread = raw.mean(axis=0), raw.std(axis=0)
        return np.array([mean, spread, (_scaled(raw, mean, spread) ** 2).mean(axis=0)])


def _scaled(raw: Floats, mean: Floats, spread: Floats) -> Floats:
    varies = spread > 1e-9
    return np.clip(np.divide(raw - mean, spread, out=np.zeros_like(raw), where=varies), -WIDEST, WIDEST)


def _read(prompt: Prompt) -> Floats:
    numbers = np.array([float(text[:LONGEST_NUMBER]) for text in NUMBER.findall(prompt.text)])
    tokens = prompt.token_ids.tolist()
    sizes = np.array([len(tokens), len(numbers), numbers.sum(), numbers.max(initial=0.0)])
    length, count, total, largest = np.log1p(sizes)
    plain = [sizes[0], length, np.log1p(len(prompt.text)), sizes[1], count, sizes[2], total, sizes[3], largest]
    source = _hashed([prompt.data_source], SOURCES)
    return np.concatenate([plain, source, np.sqrt(_hashed(tokens, TOKENS)), np.sqrt(_hashed(pairwise(tokens), PAIRS))])


def _hashed(items: Iterable[object], buckets: int) -> Floats:
    """[buckets], how many of the items fall into each. Python's own hash differs from process to process."""
    counts = np.zeros(buckets)
    for item in items:
        counts[zlib.crc32(repr(item).encode()) % buckets] += 1.0
    return counts

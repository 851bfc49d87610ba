"""What is known of each prompt from earlier visits. The rules for prompts may use this and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import numpy as np

from megatron_dppo.rl.objectives import Baseline
from megatron_dppo.rl.types import Floats, Ints

PRIOR_COUNT = 2.0
"""How many rollouts the prior of a prompt's accuracy counts as: as many as a uniform prior. Its mean is the pool's."""


@dataclass(slots=True)
class Record:
    """The decayed evidence of one prompt. A visit counts 1 when made, and ``decay`` times as much at each later one.

        Record(right=3.0, wrong=1.0, visits=1.0, square=4.0, magnitude=0.87)

    was visited once, with three right and one wrong answer.
    """

    right: float = 0.0
    """Completions of reward 1."""
    wrong: float = 0.0
    """All others."""
    visits: float = 0.0
    square: float = 0.0
    """Σ over visits of Σ_i A_i²."""
    magnitude: float = math.nan
    """Mean |A| of the last visit; NaN where there was none."""
    equal_visits: float = 0.0
    """Latest visits, without a break, whose rewards were all equal."""
    easy: float = 0.0
    """1 where the last visit's rewards were all 1."""
    mixed: float = 0.0
    """Visits whose rewards were not all equal."""


@dataclass(slots=True)
class Exploration:
    """GRESO's p of easy and of hard prompts (arXiv:2506.02177): how often prompts of equal reward are visited again.

    At every step each moves a little, so that its share of the rolled-out groups approaches its target.
    """

    easy: float = 0.5
    hard: float = 0.5

    EASY_TARGET: ClassVar[float] = 0.25 / 3
    HARD_TARGET: ClassVar[float] = 0.5 / 3
    STEP: ClassVar[float] = 0.01
    LIMITS: ClassVar[tuple[float, float]] = (0.05, 0.95)

    def follow(self, easy: float, hard: float) -> None:
        """Move by a step's groups: the share whose rewards were all 1, and the share that were equal but not 1."""
        self.easy = self._moved(self.easy, easy < self.EASY_TARGET)
        self.hard = self._moved(self.hard, hard < self.HARD_TARGET)

    def _moved(self, p: float, up: bool) -> float:
        low, high = self.LIMITS
        return min(max(p + (self.STEP if up else -self.STEP), low), high)


def is_binary(rewards: Floats) -> bool:
    """Whether all are 0 or 1, so that answers are right or wrong."""
    return bool(np.isin(rewards, (0.0, 1.0)).all())


class PromptHistory:
    """A record for each prompt that has been rolled out.

    A step selects its prompts first, and updates the history with their rewards afterwards. If the history included the
    step's own rollouts, inclusion probabilities would depend on what was drawn, and the weights would be wrong.

    Args:
        decay: ``pruning.prompts.decay``, what a visit's evidence is worth at the prompt's next visit.
        baseline: the objective's. With ``batch`` a group of equal rewards has advantages, too.
    """

    def __init__(self, decay: float, baseline: Baseline = "group") -> None:
        self.decay, self.baseline = decay, baseline
        self.binary = True
        self._exploration = Exploration()
        self._records: dict[int, Record] = {}

    def __len__(self) -> int:
        """Prompts seen so far."""
        return len(self._records)

    def update(self, prompt_ids: Ints, rewards: Floats, advantages: Floats, counts_as: int | None = None) -> None:
        """Add one visit of each of Q prompts.

        Args:
            prompt_ids: [Q].
            rewards: [Q, G]. Once any reward is neither 0 nor 1, prompts are judged by Σ A² instead of by accuracy.
            advantages: [Q, G], of the full groups.
            counts_as: G of the group that Σ A² is to be that of; None: of these.
        """
        self.binary = self.binary and is_binary(rewards)
        right = (rewards == 1.0).sum(axis=1)
        square, magnitude = (advantages**2).sum(axis=1), np.abs(advantages).mean(axis=1)
        square *= (counts_as or rewards.shape[1]) / rewards.shape[1]
        equal, easy = (rewards == rewards[:, :1]).all(axis=1), right == rewards.shape[1]
        if len(prompt_ids):
            self._exploration.follow(float(easy.mean()), float((equal & ~easy).mean()))
        for row, prompt_id in enumerate(prompt_ids.tolist()):
            old = self._records.get(prompt_id, Record())
            self._records[prompt_id] = Record(
                right=self.decay * old.right + float(right[row]),
                wrong=self.decay * old.wrong + float(rewards.shape[1] - right[row]),
                visits=self.decay * old.visits + 1.0,
                square=self.decay * old.square + float(square[row]),
                magnitude=float(magnitude[row]),
                equal_visits=old.equal_visits + 1.0 if equal[row] else 0.0,
                easy=float(easy[row]),
                mixed=self.decay * old.mixed + float(not equal[row]),
            )

    def last_magnitude(self, prompt_ids: Ints) -> Floats:
        """[N], mean |A| of each prompt's last visit; NaN where there was none."""
        return np.array([record.magnitude for record in self._of(prompt_ids)])

    def equal_visits(self, prompt_ids: Ints) -> Ints:
        """[N], how many of each prompt's latest visits, without a break, gave equal rewards."""
        return np.array([record.equal_visits for record in self._of(prompt_ids)], np.int64)

    def explore(self, prompt_ids: Ints) -> Floats:
        """[N], GRESO's p: that of easy prompts where the last visit's rewards were all 1, else that of hard ones."""
        easy = np.array([record.easy for record in self._of(prompt_ids)], np.bool_)
        return np.where(easy, self._exploration.easy, self._exploration.hard)

    def expected_square(self, prompt_ids: Ints, *, group_size: int, normalised: bool) -> Floats:
        """E[Σ_i A_i²] of the next group of each prompt, up to a factor common to all: the square of ``neyman``'s score.

        For rewards of 0 and 1 a prompt's accuracy p has a Beta posterior around the pool's mean accuracy. A mixed
        group's std-normalised advantages have Σ A² = G, so that the expectation is G·P(mixed); without the
        normalisation it is, up to that factor, G·E[p(1−p)]. Against the whole minibatch, whose mean is taken for the
        pool's mean μ, it is G·E[p(1−μ)² + (1−p)μ²].
        For other rewards it is the decayed mean of Σ A² over the prompt's visits, or the pool's where there were none.

        Args:
            prompt_ids: [N], seen or not: an unseen prompt has the prior's value.
            group_size: G.
            normalised: whether advantages are divided by the group's standard deviation.

        Returns:
            [N], not negative.
        """
        if not self.binary:
            pool = self._sum(lambda r: r.square) / self._sum(lambda r: r.visits)
            return np.array([r.square / r.visits if r.visits else pool for r in self._of(prompt_ids)])

        alpha, beta = self.posterior(prompt_ids)
        if self.baseline == "batch":
            return group_size * self.off_mean(alpha / (alpha + beta))
        if not normalised:
            return group_size * alpha * beta / ((alpha + beta) * (alpha + beta + 1.0))
        later = np.arange(group_size)
        seen = (alpha + beta)[:, None] + later
        all_right = ((alpha[:, None] + later) / seen).prod(axis=1)
        all_wrong = ((beta[:, None] + later) / seen).prod(axis=1)
        mixed: Floats = np.maximum(1.0 - all_right - all_wrong, 0.0)
        return group_size * mixed

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        """[N], the tokens that a completion of each prompt takes to generate, up to a factor common to all. Records
        say nothing of it: all are alike."""
        return np.ones(len(prompt_ids))

    def off_mean(self, accuracy: Floats) -> Floats:
        """E[(r − μ)²] of rewards of 0 and 1 with the mean ``accuracy``, μ being the pool's; of any shape."""
        mean = self.pool_mean
        return accuracy * (1.0 - mean) ** 2 + (1.0 - accuracy) * mean**2

    def posterior(self, prompt_ids: Ints) -> tuple[Floats, Floats]:
        """[N] and [N]: α and β of each prompt's Beta distribution, around the pool's mean. It is that of the chance of
        a right answer; where rewards are not 0 and 1, of a group whose rewards differ."""
        right = [r.right if self.binary else r.mixed for r in self._of(prompt_ids)]
        wrong = [r.wrong if self.binary else r.visits - r.mixed for r in self._of(prompt_ids)]
        mean = self.pool_mean
        return np.array(right) + PRIOR_COUNT * mean, np.array(wrong) + PRIOR_COUNT * (1.0 - mean)

    @property
    def pool_mean(self) -> float:
        """The share of right answers, or of groups whose rewards differ, over the records of all prompts."""
        right = self._sum(lambda r: r.right if self.binary else r.mixed)
        wrong = self._sum(lambda r: r.wrong if self.binary else r.visits - r.mixed)
        return (right + 1.0) / (right + wrong + 2.0)

    def _of(self, prompt_ids: Ints) -> list[Record]:
        """Each prompt's record; an empty one where it was never rolled out."""
        return [self._records.get(prompt_id, Record()) for prompt_id in prompt_ids.tolist()]

    def _sum(self, evidence: Callable[[Record], float]) -> float:
        # fsum is exact, so that the sum does not depend on the order in which prompts were first seen.
        return math.fsum(map(evidence, self._records.values()))

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, for JSON: Python writes floats so that they read back bit for bit."""
        return {
            "binary": self.binary,
            "exploration": [self._exploration.easy, self._exploration.hard],
            "records": {str(prompt_id): list(astuple(record)) for prompt_id, record in self._records.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, before or after it was written as JSON."""
        self.binary = bool(state["binary"])
        self._exploration = Exploration(*state.get("exploration", (0.5, 0.5)))
        self._records = {int(prompt_id): Record(*record) for prompt_id, record in state["records"].items()}

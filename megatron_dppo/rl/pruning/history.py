"""Reward history of each prompt, from earlier visits: all that the rules for prompts may use.

A pool has millions of prompts, so that records are rows of numbers in a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Floats, Ints

DECAY = 0.9
"""Weight that a visit's evidence keeps at the prompt's next visit."""
RECORD = {
    "right": 0.0,
    "wrong": 0.0,
    "visits": 0.0,
    "square": 0.0,
    "magnitude": math.nan,
    "equal_visits": 0.0,
    "easy": 0.0,
    "mixed": 0.0,
}
"""The decayed evidence of one prompt; here that of one never seen. A visit counts 1 when made, and
``DECAY`` times as much at each later one. With three right and one wrong answer at its only visit,
a prompt has right = 3, wrong = 1, visits = 1, square = 4 and magnitude = 0.87.

- ``right``: completions of reward 1; ``wrong``: all others.
- ``square``: Σ over visits of Σ_i A_i².
- ``magnitude``: mean |A| of the last visit; NaN where there was none.
- ``equal_visits``: latest visits, without a break, whose rewards were all equal.
- ``easy``: 1 where the last visit's rewards were all 1.
- ``mixed``: visits whose rewards were not all equal."""


@dataclass(slots=True)
class Exploration:
    """GRESO's p of easy and of hard prompts (arXiv:2506.02177): how often prompts of equal reward
    are visited again.

    At every step each moves a little, so that its share of the rolled-out groups approaches its
    target.
    """

    easy: float = 0.5
    hard: float = 0.5

    EASY_TARGET: ClassVar[float] = 0.25 / 3
    HARD_TARGET: ClassVar[float] = 0.5 / 3
    STEP: ClassVar[float] = 0.01
    LIMITS: ClassVar[tuple[float, float]] = (0.05, 0.95)

    def update(self, easy: float, hard: float) -> None:
        """Move by a step's groups: the share whose rewards were all 1, and the share that were
        equal but not 1."""
        self.easy = self._adjust(self.easy, easy < self.EASY_TARGET)
        self.hard = self._adjust(self.hard, hard < self.HARD_TARGET)

    def _adjust(self, p: float, up: bool) -> float:
        low, high = self.LIMITS
        return min(max(p + (self.STEP if up else -self.STEP), low), high)


def is_binary(rewards: Floats) -> bool:
    """Whether all are 0 or 1, so that answers are right or wrong."""
    return bool(np.isin(rewards, (0.0, 1.0)).all())


class PromptHistory:
    """A record for each prompt that has been rolled out.

    A step selects its prompts first, and updates the history with their rewards afterwards. If the
    history included the step's own rollouts, inclusion probabilities would depend on what was
    drawn, and the weights would be wrong.
    """

    def __init__(self) -> None:
        self.binary = True
        self._exploration = Exploration()
        self._records = PromptTable(RECORD)

    def __len__(self) -> int:
        """Prompts seen so far."""
        return len(self._records)

    def update(self, prompt_ids: Ints, rewards: Floats, advantages: Floats) -> None:
        """Add one visit of each of Q prompts.

        Args:
            prompt_ids: [Q].
            rewards: [Q, G].
            advantages: [Q, G], of the full groups.
        """
        self.binary = self.binary and is_binary(rewards)
        right = (rewards == 1.0).sum(axis=1)
        square = (advantages**2).sum(axis=1)
        magnitude = np.abs(advantages).mean(axis=1)
        equal = (rewards == rewards[:, :1]).all(axis=1)
        easy = right == rewards.shape[1]
        if len(prompt_ids):
            self._exploration.update(float(easy.mean()), float((equal & ~easy).mean()))
        old = self._records.get(prompt_ids)
        self._records.put(
            prompt_ids,
            right=DECAY * old["right"] + right,
            wrong=DECAY * old["wrong"] + (rewards.shape[1] - right),
            visits=DECAY * old["visits"] + 1.0,
            square=DECAY * old["square"] + square,
            magnitude=magnitude,
            equal_visits=np.where(equal, old["equal_visits"] + 1.0, 0.0),
            easy=easy,
            mixed=DECAY * old["mixed"] + ~equal,
        )

    def get_last_magnitude(self, prompt_ids: Ints) -> Floats:
        """[N], mean |A| of each prompt's last visit; NaN where there was none."""
        magnitude: Floats = self._records.get(prompt_ids)["magnitude"]
        return magnitude

    def count_equal_visits(self, prompt_ids: Ints) -> Ints:
        """[N], how many of each prompt's latest visits, without a break, gave equal rewards."""
        return self._records.get(prompt_ids)["equal_visits"].astype(np.int64)

    def get_exploration(self, prompt_ids: Ints) -> Floats:
        """[N], GRESO's p: that of easy prompts where the last visit's rewards were all 1, else that
        of hard ones."""
        easy = self._records.get(prompt_ids)["easy"]
        return np.where(easy > 0.0, self._exploration.easy, self._exploration.hard)

    def compute_mean_square(self, prompt_ids: Ints) -> Floats:
        """Return the decayed mean of Σ_i A_i² over each prompt's visits, [N]; for prompts never
        seen the pool's."""
        record = self._records.get(prompt_ids)
        pool = np.full(len(prompt_ids), self._sum("square") / self._sum("visits"))
        return np.divide(record["square"], record["visits"], out=pool, where=record["visits"] > 0.0)

    @property
    def pool_mean(self) -> float:
        """The share of right answers, or of groups whose rewards differ, over the records of all
        prompts."""
        right = self._sum("right" if self.binary else "mixed")
        wrong = self._sum("wrong") if self.binary else self._sum("visits", less="mixed")
        return (right + 1.0) / (right + wrong + 2.0)

    def _sum(self, name: str, *, less: str | None = None) -> float:
        # fsum is exact, so that the sum does not depend on the order in which prompts were first
        # seen.
        seen = self._records.seen
        return math.fsum((seen[name] - seen[less] if less else seen[name]).tolist())

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, for JSON: Python writes floats so that they read back bit
        for bit."""
        return {
            "binary": self.binary,
            "exploration": [self._exploration.easy, self._exploration.hard],
            "records": self._records.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, before or after it was written as JSON."""
        self.binary = bool(state["binary"])
        self._exploration = Exploration(*state.get("exploration", (0.5, 0.5)))
        self._records.load_state_dict(state["records"])


Rows = NDArray[np.void]


class PromptTable:
    """A row of named numbers for each prompt that was seen, in the order in which they were.

        table = PromptTable({"right": 0.0, "wrong": 0.0})
        table.put(np.array([7]), right=np.array([3.0]), wrong=np.array([1.0]))

    Then ``table.of(np.array([7, 8]))["right"]`` is [3, 0], and ``len(table)`` is 1.
    """

    def __init__(self, default: Mapping[str, float]) -> None:
        """``default``: the row of a prompt that was never seen."""
        self._dtype = np.dtype([(name, np.float64) for name in default])
        self._unseen = tuple(default.values())
        self._clear()

    def _clear(self) -> None:
        self._rows = np.array([self._unseen], self._dtype)
        self._row_of = np.zeros(0, np.int32)
        """By prompt id; 0, the row of those that were never seen."""
        self._seen = 0

    def __len__(self) -> int:
        return self._seen

    @property
    def seen(self) -> Rows:
        """[len(self)]"""
        return self._rows[1 : 1 + self._seen]

    def get(self, prompt_ids: Ints) -> Rows:
        """[N], a copy."""
        known = prompt_ids < len(self._row_of)
        rows = np.zeros(len(prompt_ids), np.int64)
        rows[known] = self._row_of[prompt_ids[known]]
        return self._rows[rows]

    def put(self, prompt_ids: Ints, **values: Floats) -> None:
        """Rows of distinct prompts, [N] for each of the table's names."""
        if not len(prompt_ids):
            return
        self._row_of = _resize(self._row_of, int(prompt_ids.max()) + 1)
        new = prompt_ids[self._row_of[prompt_ids] == 0]
        self._row_of[new] = 1 + self._seen + np.arange(len(new))
        self._seen += len(new)
        self._rows = _resize(self._rows, 1 + self._seen)
        rows = self._row_of[prompt_ids]
        for name, value in values.items():
            self._rows[name][rows] = value

    def state_dict(self) -> dict[str, Any]:
        """The rows by the ids of their prompts, for JSON: Python writes floats so that they read
        back bit for bit."""
        ids = np.flatnonzero(self._row_of)
        return {
            str(prompt_id): list(row)
            for prompt_id, row in zip(ids.tolist(), self.get(ids).tolist(), strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the result of ``state_dict``, before or after it was written as JSON."""
        self._clear()
        table = np.array([tuple(row) for row in state.values()], self._dtype)
        self.put(
            np.array([int(prompt_id) for prompt_id in state], np.int64),
            **{n: table[n] for n in self._dtype.names or ()},
        )


def _resize(array: NDArray[Any], size: int) -> NDArray[Any]:
    """With room for so many, and for as many again if there was none."""
    if size <= len(array):
        return array
    grown = np.zeros(2 * size, array.dtype)
    grown[: len(array)] = array
    return grown

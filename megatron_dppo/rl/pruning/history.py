"""Reward history of prompts from earlier visits: the only input of the rules for prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Bools, Floats, Ints

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
"""Decayed evidence of a prompt never seen. A visit counts 1, times ``DECAY`` per later visit. Three
right answers and one wrong answer at the only visit give right = 3, wrong = 1, visits = 1, square =
4 and magnitude = 0.87.

- ``right``: completions of reward 1; ``wrong``: all other completions.
- ``square``: Σ over visits of Σ_i A_i².
- ``magnitude``: mean |A| of the last visit; NaN without a visit.
- ``equal_visits``: latest consecutive visits with all rewards equal.
- ``easy``: 1 if all rewards of the last visit were 1.
- ``mixed``: visits with unequal rewards."""


@dataclass(slots=True)
class Exploration:
    """GRESO's p of easy and of hard prompts (arXiv:2506.02177): the probability of revisiting a
    prompt of equal rewards. Every step moves each p by ``STEP`` within ``LIMITS``: up if such
    groups are a smaller fraction than the target, else down.
    """

    easy: float = 0.5
    hard: float = 0.5

    EASY_TARGET: ClassVar[float] = 0.25 / 3
    HARD_TARGET: ClassVar[float] = 0.5 / 3
    STEP: ClassVar[float] = 0.01
    LIMITS: ClassVar[tuple[float, float]] = (0.05, 0.95)

    def update(self, easy: float, hard: float) -> None:
        """Move p by a step's fractions of groups: ``easy`` with all rewards 1, ``hard`` with other
        equal rewards."""
        self.easy = self._adjust(self.easy, easy < self.EASY_TARGET)
        self.hard = self._adjust(self.hard, hard < self.HARD_TARGET)

    def _adjust(self, p: float, up: bool) -> float:
        low, high = self.LIMITS
        return min(max(p + (self.STEP if up else -self.STEP), low), high)


def is_binary(rewards: Floats) -> bool:
    """Return whether all rewards are 0 or 1, and answers therefore right or wrong."""
    return bool(np.isin(rewards, (0.0, 1.0)).all())


class PromptHistory:
    """Records of the prompts rolled out."""

    # A step selects its prompts before their rewards update the history. Otherwise inclusion
    # probabilities would depend on the draw, and the weights would be wrong.
    def __init__(self) -> None:
        self.binary = True
        self._exploration = Exploration()
        self._records = PromptTable(RECORD)

    def __len__(self) -> int:
        """Number of prompts seen."""
        return len(self._records)

    def update(
        self,
        prompt_ids: Ints,
        rewards: Floats,
        advantages: Floats,
        equal: Bools,
    ) -> None:
        """Add one visit of each of Q prompts: rewards and advantages [Q, G] of full groups;
        ``equal`` [Q], True for groups without variance of their rewards."""
        self.binary = self.binary and is_binary(rewards)
        right = (rewards == 1.0).sum(axis=1)
        square = (advantages**2).sum(axis=1)
        magnitude = np.abs(advantages).mean(axis=1)
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
        """Return mean |A| of each prompt's last visit, [N]; NaN without a visit."""
        magnitude: Floats = self._records.get(prompt_ids)["magnitude"]
        return magnitude

    def count_equal_visits(self, prompt_ids: Ints) -> Ints:
        """Count latest consecutive visits with equal rewards, [N]."""
        return self._records.get(prompt_ids)["equal_visits"].astype(np.int64)

    def get_exploration(self, prompt_ids: Ints) -> Floats:
        """Return GRESO's p, [N]: easy if all rewards of the prompt's last visit were 1, else
        hard."""
        easy = self._records.get(prompt_ids)["easy"]
        return np.where(easy > 0.0, self._exploration.easy, self._exploration.hard)

    def compute_mean_square(self, prompt_ids: Ints) -> Floats:
        """Return the decayed mean of Σ_i A_i² over each prompt's visits, [N]; the pool's mean if
        never seen."""
        record = self._records.get(prompt_ids)
        pool = np.full(len(prompt_ids), self._sum("square") / self._sum("visits"))
        return np.divide(record["square"], record["visits"], out=pool, where=record["visits"] > 0.0)

    @property
    def pool_mean(self) -> float:
        """Fraction of right answers over all records; of groups with unequal rewards, if not
        ``binary``."""
        right = self._sum("right" if self.binary else "mixed")
        wrong = self._sum("wrong") if self.binary else self._sum("visits", less="mixed")
        # Laplace's rule of succession: 0.5 before the first visit.
        return (right + 1.0) / (right + wrong + 2.0)

    def _sum(self, name: str, *, less: str | None = None) -> float:
        seen = self._records.seen
        values = seen[name] - seen[less] if less else seen[name]
        # fsum is exact: the sum must not depend on the order of the prompts' first visits.
        return math.fsum(values.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {
            "binary": self.binary,
            "exploration": [self._exploration.easy, self._exploration.hard],
            "records": self._records.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.binary = self.binary and bool(state["binary"])
        # A state without "exploration" gets the initial probabilities.
        self._exploration = Exploration(*state.get("exploration", (0.5, 0.5)))
        self._records.load_state_dict(state["records"])


Rows = NDArray[np.void]


class PromptTable:
    """Row of named numbers per prompt seen (a pool has millions), in order of first appearance.

        table = PromptTable({"right": 0.0, "wrong": 0.0})
        table.put(np.array([7]), right=np.array([3.0]), wrong=np.array([1.0]))

    Then ``table.get(np.array([7, 8]))["right"]`` is [3, 0], and ``len(table)`` is 1.
    """

    def __init__(self, default: Mapping[str, float]) -> None:
        self._dtype = np.dtype([(name, np.float64) for name in default])
        self._unseen = tuple(default.values())
        self._clear()

    def _clear(self) -> None:
        self._rows = np.array([self._unseen], self._dtype)
        # Row by prompt id; row 0 is the default.
        self._row_of = np.zeros(0, np.int32)
        self._seen = 0

    def __len__(self) -> int:
        return self._seen

    @property
    def seen(self) -> Rows:
        """Rows of the prompts seen, [len(self)], a view."""
        return self._rows[1 : 1 + self._seen]

    def get(self, prompt_ids: Ints) -> Rows:
        """Return a copy of the prompts' rows, [N]."""
        known = prompt_ids < len(self._row_of)
        rows = np.zeros(len(prompt_ids), np.int64)
        rows[known] = self._row_of[prompt_ids[known]]
        return self._rows[rows]

    def put(self, prompt_ids: Ints, **values: Floats) -> None:
        """Write rows of distinct prompts: values [N] for each of the table's names."""
        if not len(prompt_ids):
            return
        # Arrays are indexed by prompt id and grow to the largest id.
        self._row_of = _resize(self._row_of, int(prompt_ids.max()) + 1)
        new = prompt_ids[self._row_of[prompt_ids] == 0]
        self._row_of[new] = 1 + self._seen + np.arange(len(new))
        self._seen += len(new)
        self._rows = _resize(self._rows, 1 + self._seen)
        rows = self._row_of[prompt_ids]
        for name, value in values.items():
            self._rows[name][rows] = value

    def state_dict(self) -> dict[str, Any]:
        """Return rows by prompt id, for JSON: floats read back bit for bit."""
        ids = np.flatnonzero(self._row_of)
        return {
            str(prompt_id): list(row)
            for prompt_id, row in zip(ids.tolist(), self.get(ids).tolist(), strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._clear()
        table = np.array([tuple(row) for row in state.values()], self._dtype)
        self.put(
            np.array([int(prompt_id) for prompt_id in state], np.int64),
            **{n: table[n] for n in self._dtype.names or ()},
        )


def _resize(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array of at least ``size`` elements: doubled if too short, filled with zeros."""
    if size <= len(array):
        return array
    grown = np.zeros(2 * size, array.dtype)
    grown[: len(array)] = array
    return grown

"""Records of prompts as rows of numbers: a pool has millions of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Floats, Ints

Rows = NDArray[np.void]


class PromptTable:
    """A row of named numbers for each prompt that was seen, in the order in which they were.

        table = PromptTable({"right": 0.0, "wrong": 0.0})
        table.put(np.array([7]), right=np.array([3.0]), wrong=np.array([1.0]))

    Then ``table.of(np.array([7, 8]))["right"]`` is [3, 0], and ``len(table)`` is 1.
    """

    def __init__(self, unseen: Mapping[str, float]) -> None:
        """``unseen``: the row of a prompt that was never seen."""
        self._dtype = np.dtype([(name, np.float64) for name in unseen])
        self._unseen = tuple(unseen.values())
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

    def of(self, prompt_ids: Ints) -> Rows:
        """[N], a copy."""
        known = prompt_ids < len(self._row_of)
        rows = np.zeros(len(prompt_ids), np.int64)
        rows[known] = self._row_of[prompt_ids[known]]
        return self._rows[rows]

    def put(self, prompt_ids: Ints, **values: Floats) -> None:
        """Rows of distinct prompts, [N] for each of the table's names."""
        if not len(prompt_ids):
            return
        self._row_of = _grown(self._row_of, int(prompt_ids.max()) + 1)
        new = prompt_ids[self._row_of[prompt_ids] == 0]
        self._row_of[new] = 1 + self._seen + np.arange(len(new))
        self._seen += len(new)
        self._rows = _grown(self._rows, 1 + self._seen)
        rows = self._row_of[prompt_ids]
        for name, value in values.items():
            self._rows[name][rows] = value

    def state_dict(self) -> dict[str, Any]:
        """The rows by the ids of their prompts, for JSON: Python writes floats so that they read back bit for bit."""
        ids = np.flatnonzero(self._row_of)
        return {str(prompt_id): list(row) for prompt_id, row in zip(ids.tolist(), self.of(ids).tolist(), strict=True)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what ``state_dict`` returned, before or after it was written as JSON. Names that an older version did
        not have are at the end, and as of prompts that were never seen."""
        self._clear()
        rows = [(*row, *self._unseen[len(row) :]) for row in state.values()]
        table = np.array(rows, self._dtype)
        self.put(
            np.array([int(prompt_id) for prompt_id in state], np.int64),
            **{n: table[n] for n in self._dtype.names or ()},
        )


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """With room for so many, and for as many again if there was none."""
    if size <= len(array):
        return array
    grown = np.zeros(2 * size, array.dtype)
    grown[: len(array)] = array
    return grown

"""Pruning statistics of a step's completions, for log and plots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Cell = tuple[float, float, int, float, int]
"""Two coordinates, and the completions there: number, sum of inclusion probabilities, number
kept."""


@dataclass(frozen=True, slots=True)
class PruningStats:
    """Counts of a step's completions: a line of ``pruning.jsonl``.

        PruningStats(kept=(1, 5), pruned=(1, 4),
                     by_group=((0.5, -1.0, 1, 1.0, 1), (0.5, 1.0, 1, 0.4, 0)), ...)

    trains on one completion of 5 tokens. In groups that are half right, 1 of 1 wrong and 0 of 1
    right answers were kept. The tables hold completions with an advantage only.
    """

    kept: tuple[int, int]
    """Completions trained on, and tokens. Prompt tokens count with each completion."""
    pruned: tuple[int, int]
    """Completions with a gradient that were not trained on, and tokens."""
    zero_advantage: tuple[int, int]
    """Completions without a gradient (A = 0 without a KL term, or a group that a rule removed), and
    tokens."""
    binary: bool
    """Whether each group has at most two different rewards."""
    by_group: tuple[Cell, ...]
    """Coordinates: fraction of the group's answers above the mean; side of the answer, 1 or −1."""
    by_reward: tuple[Cell, ...]
    """Coordinates: distance of the reward from the group's mean, in the group's standard
    deviations; side."""
    by_cause: tuple[Cell, ...]
    """Coordinates: log2 of the response's tokens; log2 of |A|·c·√Σ_t(1−p_t)²/π_prompt over the
    step's median."""

    def to_dict(self) -> dict[str, Any]:
        """Return a line of JSON."""
        # Files keep the older name of ``zero_advantage``.
        line = asdict(self)
        return line | {"idle": line.pop("zero_advantage")}

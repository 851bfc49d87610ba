"""Pruning statistics of a step's completions: counts and tables for the log and the pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Cell = tuple[float, float, int, float, int]
"""Two coordinates, how many completions are there, the sum of their inclusion probabilities, how
many were kept."""


@dataclass(frozen=True, slots=True)
class PruningStats:
    """A step's completions, counted: a line of ``pruning.jsonl``. The tables hold those with an
    advantage only.

        PruningStats(kept=(1, 5), pruned=(1, 4), by_group=((0.5, -1.0, 1, 1.0, 1), (0.5, 1.0, 1,
        0.4, 0)), ...)

    trains on one completion of 5 tokens. In groups that are half right it kept 1 of 1 wrong and 0
    of 1 right answers.
    """

    kept: tuple[int, int]
    """Completions trained on, and their tokens. The prompt's tokens count with each completion."""
    pruned: tuple[int, int]
    """Those that were not, although they have a gradient."""
    zero_advantage: tuple[int, int]
    """Those that have none: A = 0 and no KL term, or a group that a rule left out."""
    binary: bool
    """Whether no group has more than two different rewards."""
    by_group: tuple[Cell, ...]
    """By the share of the group's answers that are better than its mean, and by the answer's own
    side, 1 or −1."""
    by_reward: tuple[Cell, ...]
    """By the reward's distance from the group's mean in its standard deviations, and by side."""
    by_cause: tuple[Cell, ...]
    """By log2 of the response's tokens, and of its |A|·c·√Σ_t(1−p_t)²/π_prompt over the step's
    median."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The file keeps an older name of ``zero_advantage``."""
        line = asdict(self)
        return line | {"idle": line.pop("zero_advantage")}

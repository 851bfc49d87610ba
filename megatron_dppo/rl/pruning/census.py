"""Which completions of a step are trained on, and why: tables small enough to keep of every step, for the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_dppo.rl.pruning.minibatch import Pruned
from megatron_dppo.rl.types import Bools, Floats, StepMetadata

Cell = tuple[float, float, int, float, int]
"""Two coordinates, how many completions are there, the sum of their inclusion probabilities, how many were kept."""

SHARES = 16
"""A group's share of better answers is exact up to so many completions, and rounded to 1/SHARES beyond."""
PER_DEVIATION = 2
PER_OCTAVE_OF_LENGTH = 4
PER_OCTAVE_OF_SCORE = 2
WIDEST_SCORE = 4
"""Octaves to either side of the median score; what lies beyond is counted with the last."""


@dataclass(frozen=True, slots=True)
class Census:
    """A step's completions, counted. Only those that could teach something are in the tables: A ≠ 0."""

    kept: tuple[int, int]
    """Completions trained on, and the tokens of their rows."""
    pruned: tuple[int, int]
    """Those that were not, although they have a gradient."""
    idle: tuple[int, int]
    """Those that were not, and have none: A = 0 and no KL term, or a group that a rule threw away."""
    binary: bool
    """Whether no group has more than two different rewards, so that its answers are right or wrong."""
    by_group: tuple[Cell, ...]
    """By the share of the group's answers that are better than its mean (where rewards are 0 and 1: its accuracy), and
    by the answer's own side, 1 or −1."""
    by_reward: tuple[Cell, ...]
    """By the reward's distance from the group's mean in its standard deviations, to 1/PER_DEVIATION; and by side."""
    by_cause: tuple[Cell, ...]
    """By log2 of the response's tokens, to 1/PER_OCTAVE_OF_LENGTH; and by log2 of its score |A|·c·√Σ_t(1−p_t)²/π_prompt
    over the step's median (whatever ``pruning.completions.score`` is), to 1/PER_OCTAVE_OF_SCORE."""

    def as_row(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def census(parts: Sequence[tuple[StepMetadata, Pruned]]) -> Census:
    """Count a step's completions, minibatches together; and what was ``thrown_away`` (``rl/pruning/metrics.py``)."""
    rewards = np.concatenate([part.rewards for part, _ in parts])
    tokens = np.concatenate([part.prompt_lengths[:, None] + part.response_lengths for part, _ in parts])
    lengths = np.concatenate([part.response_lengths for part, _ in parts]).astype(np.float64)
    score = np.concatenate([_score(part, pruned) for part, pruned in parts])
    advantage = np.concatenate([pruned.advantage for _, pruned in parts])
    inclusion = np.concatenate([pruned.inclusion for _, pruned in parts])
    kept = np.concatenate([pruned.kept for _, pruned in parts])
    idle = np.concatenate([pruned.idle for _, pruned in parts])
    teaches = advantage != 0.0

    def total(which: Bools) -> tuple[int, int]:
        return int(which.sum()), int(tokens[which].sum())

    def table(x: Floats, y: Floats) -> tuple[Cell, ...]:
        return _table(x[teaches], y[teaches], inclusion[teaches], kept[teaches])

    side = np.sign(advantage)
    typical = float(np.median(score[teaches])) if teaches.any() else 1.0
    octaves = np.clip(_log2(score / (typical or 1.0)), -WIDEST_SCORE, WIDEST_SCORE)
    return Census(
        kept=total(kept),
        pruned=total(~kept & ~idle),
        idle=total(~kept & idle),
        binary=_two_valued(rewards),
        by_group=table(_rounded(_share_better(side), min(side.shape[1], SHARES)), side),
        by_reward=table(_rounded(_deviations(rewards), PER_DEVIATION), side),
        by_cause=table(_rounded(_log2(lengths), PER_OCTAVE_OF_LENGTH), _rounded(octaves, PER_OCTAVE_OF_SCORE)),
    )


def _table(x: Floats, y: Floats, inclusion: Floats, kept: Bools) -> tuple[Cell, ...]:
    """One cell for each pair of coordinates that occurs, in ascending order. All [n]."""
    places, cell = np.unique(np.stack([x, y], axis=1), axis=0, return_inverse=True)
    counts, expected, drawn = (
        np.bincount(cell.ravel(), weights, minlength=len(places)) for weights in (None, inclusion, kept)
    )
    return tuple(
        (float(x), float(y), int(count), round(float(pi), 6), int(keep))
        for (x, y), count, pi, keep in zip(places, counts, expected, drawn, strict=True)
    )


def _score(part: StepMetadata, pruned: Pruned) -> Floats:
    """[Q, G]"""
    score: Floats = np.abs(pruned.advantage) * pruned.coefficient * part.surprise / part.prompt_inclusion[:, None]
    return score


def _share_better(side: Floats) -> Floats:
    """[Q, G], of its whole group, for each."""
    share = (side > 0.0).sum(axis=1, keepdims=True) / max(side.shape[1], 1)
    return np.broadcast_to(share, side.shape)


def _deviations(rewards: Floats) -> Floats:
    """[Q, G], (r − mean) / std of its group; 0 where the group's rewards are equal. Whatever the host normalises by."""
    spread = rewards.std(axis=1, keepdims=True)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0.0)


def _two_valued(rewards: Floats) -> bool:
    low, high = (end(axis=1, keepdims=True) for end in (rewards.min, rewards.max))
    return bool(((rewards == low) | (rewards == high)).all())


def _log2(values: Floats) -> Floats:
    """A score of 0, of a completion whose every token was certain, is far below all others."""
    return np.log2(np.maximum(values, 1e-12))


def _rounded(values: Floats, parts: int) -> Floats:
    """To multiples of 1/parts."""
    rounded: Floats = np.round(values * parts) / max(parts, 1) + 0.0  # −0.0 becomes 0.0
    return rounded

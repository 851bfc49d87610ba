"""Warns when the length of the responses leaves where it began. It never stops a run.

A policy that has two styles of answering can settle on the shorter one within a few steps, because that one is better
for a while. It then has no long answers left to learn from. The length shows this before the reward does, which still
rises on the way into such a local optimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import mean

FIRST = 3
"""Steps whose mean length later ones are compared with."""
RECENT = 3
"""Steps in the running mean that is compared."""
TRUNCATED = 0.1
"""A rise of the truncated share by this much counts as growth: a length that is cut off cannot show it."""


class LengthGate:
    """Takes one row of metrics per step, in order; after a resume the earlier rows come first."""

    def __init__(self, bound: float | None) -> None:
        """
        Args:
            bound: ``run.length_gate``, the factor by which the running mean may fall or rise; None: it never warns.
        """
        self._bound = bound
        self._first: list[tuple[float, float]] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._outside = ""

    def look(self, step: int, row: Mapping[str, float]) -> str | None:
        """A warning when the length crosses a bound, else None. It warns again only if the length had come back.

        Args:
            step: counted from 1, as in the log.
            row: the step's metrics; one without ``rollout/response_len/mean`` (an evaluation's) is passed over.
        """
        if self._bound is None or "rollout/response_len/mean" not in row:
            return None
        measured = row["rollout/response_len/mean"], row.get("rollout/truncated_ratio", 0.0)
        if len(self._first) < FIRST:
            self._first.append(measured)
            return None
        self._recent.append(measured)
        if len(self._recent) < RECENT:
            return None
        (before, cut_before), (now, cut) = _means(self._first), _means(self._recent)
        outside = ""
        if now * self._bound < before:
            outside = "fell"
        elif now > before * self._bound or cut > cut_before + TRUNCATED:
            outside = "rose"
        crossed, self._outside = outside not in ("", self._outside), outside
        if not crossed:
            return None
        return (
            f"response length {outside}: {now:.1f} tokens, mean of steps {step - RECENT + 1} to {step}, against "
            f"{before:.1f} in the first {FIRST}; {cut:.0%} cut off, against {cut_before:.0%}. "
            + (_ON_FALL if outside == "fell" else _ON_RISE)
            + (_PRUNED if row.get("prune/max_weight", 1.0) > 1.0 else "")
        )


_ON_FALL = "The policy may be settling on a short style for good: read some answers, and watch held-out accuracy"
_ON_RISE = "Read some answers, and raise rollout.max_response_tokens if right ones are cut off"
_PRUNED = "; if a run without pruning does not do this, raise pruning.completions.keep or lower pruning.max_weight"


def _means(measured: list[tuple[float, float]] | deque[tuple[float, float]]) -> tuple[float, float]:
    """Mean length, mean truncated share."""
    return mean(length for length, _ in measured), mean(cut for _, cut in measured)

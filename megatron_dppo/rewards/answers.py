"""A scoring process's answer for a unit: the scores, or why there are none."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence

from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import InvalidScoreError, details, role_rewards, to_score

Answer = tuple[object, ...]
"""As ``worker.py`` lists them."""


def scored(unit: range, returned: Iterable[object]) -> Answer:
    """The answer for what a function returned for each completion of a unit.

    Raises:
        InvalidScoreError: one is no number to train on.
    """
    return "scores", unit, [(*to_score(each), *details(each), role_rewards(each)) for each in returned]


def failed(unit: range, items: Sequence[ScoreItem], error: BaseException) -> Answer:
    """The answer for a unit whose scoring raised ``error``."""
    if isinstance(error, InvalidScoreError):
        return "error", unit, error.kind, f"{error}\nfor the completion {items[0].solution!r:.300}"
    return "error", unit, _kind(error), "".join(traceback.format_exception(error))


def _kind(error: BaseException) -> str:
    """Where it was raised, and what: the same for two errors whose messages differ in the completion they quote."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)])

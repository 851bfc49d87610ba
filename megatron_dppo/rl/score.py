"""Score of one completion, without NumPy, because scoring processes import this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Score:
    """Verdict of a verifier on one completion.

        Score(reward=1.0, correct=True, answer="5.0", by=("number",))

    found the answer "5.0", which equals the label "5" by the rule ``number``.
    """

    reward: float
    correct: bool
    answer: str | None = None
    """Answer found in the completion; None if not reported."""
    by: tuple[str, ...] = ()
    """Equivalences that make the answer equal to the label; empty if not reported."""
    roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards of a conversation's roles; a missing role has ``reward``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log: rewards of several functions, and other numbers of a function."""
    failure: Literal["timeout", "error", "unscored"] | None = None
    """Reason for a missing reward.

    - ``timeout``: the worker was killed at a time limit.
    - ``error``: the function raised, returned no valid number, or two processes died.
    - ``unscored``: scoring stopped, because too many completions had failed.
    """
    traceback: str = ""
    """Traceback of the first ``error`` of its kind; else empty."""

    @classmethod
    def from_failure(
        cls,
        failure: Literal["timeout", "error", "unscored"],
        traceback: str = "",
    ) -> Score:
        return cls(math.nan, False, failure=failure, traceback=traceback)


def count_failures(scores: Sequence[Score]) -> tuple[int, int]:
    """Return the number of timeouts, and the number of errors."""
    timeouts = sum(score.failure == "timeout" for score in scores)
    errors = sum(score.failure == "error" for score in scores)
    return timeouts, errors


def collect_tracebacks(scores: Sequence[Score]) -> tuple[str, ...]:
    # A dict, because its keys keep their order.
    return tuple(dict.fromkeys(score.traceback for score in scores if score.traceback))

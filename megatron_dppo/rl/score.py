"""Score of one completion. Scoring processes import this file, therefore without NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Score:
    """Verdict of a verifier on one completion.

        Score(reward=1.0, correct=True, answer="5.0", by=("number",))

    took "5.0" for the answer, and the rule ``number`` made it equal to the label "5".
    """

    reward: float
    correct: bool
    answer: str | None = None
    """The answer that the verifier found in the completion, where it tells it."""
    by: tuple[str, ...] = ()
    """The equivalences by which the answer is equal to the label, where the verifier tells them."""
    roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the roles of a conversation; a role that is not here has ``reward``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log: the rewards of several functions, and those that a function returns or logs
    besides."""
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
        cls, failure: Literal["timeout", "error", "unscored"], traceback: str = ""
    ) -> Score:
        """Make the score of a completion without a reward."""
        return cls(math.nan, False, failure=failure, traceback=traceback)


def count_failures(scores: Sequence[Score]) -> tuple[int, int]:
    """Return the number of timeouts, and the number of errors."""
    timeouts, errors = (
        sum(score.failure == how for score in scores) for how in ("timeout", "error")
    )
    return timeouts, errors


def collect_tracebacks(scores: Sequence[Score]) -> tuple[str, ...]:
    """Return each traceback once."""
    return tuple(dict.fromkeys(score.traceback for score in scores if score.traceback))

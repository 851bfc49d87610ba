"""The verdict of a verifier on one completion. Scoring processes load this file, which does without NumPy."""

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
    """Numbers to log: the rewards of several functions, and those that a function returns or logs besides."""
    failure: Literal["timeout", "error", "unscored"] | None = None
    """Why there is no reward: the worker was ended at a time limit; the function raised, returned no number to train on
    or took two processes down; too many others had failed already."""
    traceback: str = ""
    """Of an ``error`` of a kind that was never reported before."""

    @classmethod
    def failed(cls, failure: Literal["timeout", "error", "unscored"], traceback: str = "") -> Score:
        """A completion without a reward."""
        return cls(math.nan, False, failure=failure, traceback=traceback)


def count_failures(scores: Sequence[Score]) -> tuple[int, int]:
    """How many completions ran into a time limit, and how many failed otherwise."""
    timeouts, errors = (sum(score.failure == how for score in scores) for how in ("timeout", "error"))
    return timeouts, errors


def tracebacks(scores: Sequence[Score]) -> tuple[str, ...]:
    """Each traceback once."""
    return tuple(dict.fromkeys(score.traceback for score in scores if score.traceback))

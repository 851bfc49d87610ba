"""What a pruning rule is, at either level: probabilities, a draw, and whether the estimate that follows is biased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_dppo.rl.pruning.draw import Draw, draw_systematic
from megatron_dppo.rl.types import Floats

Candidates = TypeVar("Candidates")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Candidates]):
    """A row of ``PROMPT_RULES`` or ``COMPLETION_RULES``."""

    inclusion: Callable[[Candidates, float], Floats]
    """From candidates and ``keep`` to inclusion probabilities, in the candidates' shape. For completions, floors and
    what teaches nothing are seen to by the caller."""
    draw: Draw = draw_systematic
    """Unless ``pruning.….draw`` names another."""
    biased: str = ""
    """Why the gradient's expectation is not the full batch's, for the log; empty where it is. What an unbiased rule
    keeps is weighted with 1/π."""
    weight: Callable[[Candidates, float], Floats] | None = None
    """Of a biased rule: the weights of what it keeps; None: 1."""

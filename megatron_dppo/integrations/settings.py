"""Settings of pruning in trainers of other projects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.errors import UserError
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES


@dataclass(frozen=True, slots=True)
class Pruning:
    """Settings of pruning. ``Pruning(budget=0.5)`` trains on half of a batch's tokens."""

    budget: float | Literal["auto"] = 0.5
    """Fraction of the tokens trained on, prompts included. ``threshold``: probability of low-scored
    completions. ``auto``, for ``neyman``: each batch's fraction of least variance × tokens."""
    rule: str = "neyman"
    """Unbiased rule in ``COMPLETION_RULES``."""
    max_weight: float = 10.0
    """Largest weight of a completion's loss: inclusion probabilities are at least its inverse."""
    seed: int = 0
    """Random seed of the draws, combined with the optimizer step."""

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a field is out of range, or the rule is unknown or biased.
        """
        rule = COMPLETION_RULES.get(self.rule)
        unbiased = ", ".join(name for name, known in COMPLETION_RULES.items() if not known.biased)
        if rule is None or rule.biased:
            problem = f"is biased: {rule.biased}" if rule else "is no rule"
            raise UserError("pruning.rule", self.rule, problem, f"Choose one of {unbiased}")
        if self.budget == "auto" and self.rule != "neyman":
            remedy = "Give a fraction, or rule='neyman'"
            raise UserError("pruning.budget", "auto", "is for neyman alone", remedy)
        is_fraction = isinstance(self.budget, int | float) and 0.0 < self.budget <= 1.0
        if self.budget != "auto" and not is_fraction:
            remedy = "Give more than 0, at most 1, or 'auto'"
            raise UserError("pruning.budget", self.budget, "is no fraction", remedy)
        if not (isinstance(self.max_weight, int | float) and 1.0 <= self.max_weight < math.inf):
            remedy = "Give a number from 1 on"
            raise UserError("pruning.max_weight", self.max_weight, "is below 1", remedy)

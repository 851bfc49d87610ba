"""What rules may look at: all that is known before a draw, and nothing that depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.rl.pruning.draw import Bools
from megatron_dppo.rl.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class CompletionCandidates:
    """The completions of one minibatch, whole groups. All [Q, G]."""

    advantage: Floats
    score: Floats
    """A proxy of the norm of the term that enters the sum, |A|·c·√Σ_t(1−p_t)²/π_prompt (``pruning.completions.score``
    chooses another). It carries the first draw's 1/π: without that, too little would be kept of what is heavy."""
    cost: Floats
    """Tokens of the row that a pack needs for it, prompt and response."""
    floor: Floats
    """Least inclusion probability, so that the weight 1/(π_prompt·π_completion) stays bounded."""
    idle: Bools
    """Whose gradient is exactly 0: they are dropped under every rule, and nothing is weighted up for them."""


@dataclass(frozen=True, slots=True)
class PromptCandidates:
    """The N prompts of a window, as earlier visits left them."""

    last_magnitude: Floats
    """[N], mean |A| of the last visit; NaN for prompts never seen."""
    expected_square: Floats
    """[N], E[Σ_i A_i²] of the next group, up to a common factor; the prior's for prompts never seen."""
    equal_visits: Ints
    """[N], how many of the latest visits, without a break, gave equal rewards."""
    explore: Floats
    """[N], GRESO's p: of easy prompts where the last visit's rewards were all 1, of hard ones elsewhere."""
    floor: float
    """Least inclusion probability."""

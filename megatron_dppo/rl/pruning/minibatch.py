"""The draw of one minibatch: advantages and the normaliser of whole groups first, then what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.rl.advantages import advantages
from megatron_dppo.rl.aggregation import coefficient, normaliser
from megatron_dppo.rl.hosts import Host
from megatron_dppo.rl.pruning.completions import CompletionCandidates, completion_inclusion, draw_completions
from megatron_dppo.rl.pruning.draw import Bools
from megatron_dppo.rl.types import Floats, StepMetadata


@dataclass(frozen=True, slots=True)
class Pruned:
    """A minibatch of Q groups after its draw. Arrays are [Q, G]."""

    advantage: Floats
    coefficient: Floats
    """c, the weight of a completion's tokens in the aggregation."""
    inclusion: Floats
    """π of the completion, given its prompt; 0 where its gradient is exactly 0."""
    weight: Floats
    """1/(π_prompt·π), the Horvitz-Thompson weight that it has if it is kept; 0 where its gradient is exactly 0."""
    kept: Bools
    normaliser: float
    """Z"""


def prune_minibatch(part: StepMetadata, config: Config, host: Host, *, keep: float, rng: np.random.Generator) -> Pruned:
    """Draw what a minibatch trains on.

    A completion of advantage 0 contributes exactly nothing, unless there is a KL term, and is dropped under every rule.
    No weight exceeds ``pruning.max_weight``, since no completion's probability is below 1/(max_weight·π_prompt).

    Args:
        part: metadata of the minibatch's groups, with the part of the window that they stand for.
        config: of the run.
        host: of the run.
        keep: ``pruning.completions.keep`` under its schedule.
        rng: for this one draw.
    """
    advantage = advantages(part.rewards, normalise=host.normalise)
    c = coefficient(host.aggregation, part.response_lengths)
    prompt_inclusion = part.prompt_inclusion[:, None]
    candidates = CompletionCandidates(
        advantage=advantage,
        score=np.abs(advantage) * c * part.surprise / prompt_inclusion,
        cost=(part.prompt_lengths[:, None] + part.response_lengths).astype(np.float64),
        floor=np.broadcast_to(np.minimum(1.0 / (config.pruning.max_weight * prompt_inclusion), 1.0), advantage.shape),
        idle=(advantage == 0.0) & (config.loss.kl_coef == 0.0),
    )
    rule = config.pruning.completions.rule
    inclusion = completion_inclusion(rule, candidates, keep)
    weight = np.divide(1.0, prompt_inclusion * inclusion, out=np.zeros_like(inclusion), where=inclusion > 0.0)
    return Pruned(
        advantage=advantage,
        coefficient=c,
        inclusion=inclusion,
        weight=weight,
        kept=draw_completions(rule, candidates, inclusion, rng),
        normaliser=normaliser(
            host.aggregation,
            response_lengths=part.response_lengths,
            prompt_inclusion=part.prompt_inclusion,
            prompts=part.window,
            max_response_tokens=config.rollout.max_response_tokens,
        ),
    )

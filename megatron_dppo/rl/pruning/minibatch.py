"""The draw of one minibatch. Advantages and the normaliser come from whole groups, before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.rl.advantages import advantages_of_segments, completion_advantages
from megatron_dppo.rl.objectives import Objective, coefficient, kept_share, normaliser
from megatron_dppo.rl.pruning.completion_rules import (
    CompletionCandidates,
    completion_inclusion,
    completion_weight,
    draw_completions,
)
from megatron_dppo.rl.pruning.prompt_rules import prompt_rule
from megatron_dppo.rl.pruning.schedule import adapted_keep
from megatron_dppo.rl.types import Bools, Floats, StepMetadata


@dataclass(frozen=True, slots=True)
class PruningDraw:
    """A minibatch of Q groups after its draw. Arrays are [Q, G].

    The paper's rule at ``keep`` 0.5 on one right and two wrong answers has ``inclusion`` [[1, 0.5, 0.5]] and ``weight``
    [[1, 2, 2]] if the prompt was kept for certain. Its draw may have ``kept`` [[True, False, True]].
    """

    advantage: Floats
    coefficient: Floats
    """c, the weight of a completion's tokens in the aggregation."""
    inclusion: Floats
    """π of the completion, given its prompt; 0 for zero advantage."""
    weight: Floats
    """1/(π_prompt·π), the Horvitz-Thompson weight that it has if it is kept; 0 for zero advantage. A biased rule has
    weights of its own in place of 1/π."""
    kept: Bools
    zero_advantage: Bools
    """A = 0, no KL term and no teacher: the gradient is exactly 0. No rule trains on these, and none is said to save
    them."""
    segments: Floats
    """[Q, G, S], the advantage of each segment, of which ``advantage`` is a mean; S = 1 where a completion has one."""
    normaliser: float
    """Z"""
    magnitude: Floats
    """Size of a completion's token advantages, see :func:`magnitudes`; |A| without a teacher."""


def prune_minibatch(
    part: StepMetadata, config: Config, objective: Objective, *, keep: float, rng: np.random.Generator
) -> PruningDraw:
    """Draw what a minibatch trains on.

    No weight exceeds ``pruning.max_weight``, since no completion's probability is below 1/(max_weight·π_prompt).

    Args:
        part: metadata of the minibatch's groups, with the part of the window that they stand for.
        config: of the run.
        objective: of the run.
        keep: ``pruning.completions.keep`` under its schedule.
        rng: for this one draw.
    """
    pruning = config.pruning.completions
    segments = advantages_of_segments(part, config, objective)
    candidates = completion_candidates(part, config, objective, segments)
    if pruning.schedule.shape == "adaptive":
        keep = adapted_keep(
            keep,
            pruning.schedule,
            candidates.score**2,
            lambda share: completion_inclusion(pruning.named, candidates, share),
        )
    inclusion = completion_inclusion(pruning.named, candidates, keep)
    kept = draw_completions(pruning.named, candidates, inclusion, rng, draw=pruning.draw)
    z = normaliser(
        objective.aggregation,
        sampled_lengths=part.sampled_lengths,
        prompt_inclusion=part.prompt_inclusion,
        prompts=len(part.prompt_ids) if prompt_rule(config.pruning.prompts.named).biased else part.window,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    if pruning.normaliser == "kept":
        z *= kept_share(
            objective.aggregation,
            sampled_lengths=part.sampled_lengths,
            prompt_inclusion=part.prompt_inclusion,
            kept=kept,
        )
    return PruningDraw(
        advantage=candidates.advantage,
        coefficient=coefficient(objective.aggregation, part.sampled_lengths),
        inclusion=inclusion,
        weight=completion_weight(pruning.named, candidates, inclusion, keep) / part.prompt_inclusion[:, None],
        kept=kept,
        zero_advantage=candidates.zero_advantage,
        segments=segments,
        normaliser=z,
        magnitude=magnitudes(part, candidates.advantage, config),
    )


def magnitudes(part: StepMetadata, advantage: Floats, config: Config) -> Floats:
    """√ of the mean square of what multiplies the scores of a completion's tokens: [Q, G] as A. Without a teacher: |A|.

    A server's tokens have the advantages A + β·log q/p, whose mean square is (A + β·mean)² + (β·deviation)².

    With a teacher's whole distribution a token's gradient by the logits is −A·(e_t − p) + β·p·(log(p/q) − KL). The
    log-ratios are known only once the teacher has read the rollouts. They are taken to be of size 1, and the two terms
    to be orthogonal: √(A² + β²). Either vanishes where the policy is certain, so that both are multiplied by the norm
    of the scores. That is a guess: it sets probabilities, and no weight depends on its being right.
    """
    pull = config.loss.distillation_coef * part.log_ratios
    magnitude: Floats = np.hypot(advantage + pull[..., 0], pull[..., 1])
    return magnitude


def completion_candidates(
    part: StepMetadata, config: Config, objective: Objective, segments: Floats
) -> CompletionCandidates:
    """Candidates of a minibatch for a rule; ``segments`` are the advantages of their segments."""
    advantage, prompt_inclusion = completion_advantages(part, segments), part.prompt_inclusion[:, None]
    c = coefficient(objective.aggregation, part.sampled_lengths)
    rewards_alone = ~part.log_ratios.any(axis=-1) & (config.loss.kl_coef == 0.0)
    score_norms = 1.0 if config.pruning.completions.score == "advantage" else part.score_norms
    return CompletionCandidates(
        advantage=advantage,
        score=magnitudes(part, advantage, config) * c * score_norms / prompt_inclusion,
        cost=part.tokens.astype(np.float64),
        floor=np.broadcast_to(np.minimum(1.0 / (config.pruning.max_weight * prompt_inclusion), 1.0), advantage.shape),
        zero_advantage=(advantage == 0.0) & rewards_alone,
    )

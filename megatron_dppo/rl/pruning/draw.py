"""The draw of one minibatch, and a step's ``prune/…`` metrics and pruning statistics from its
draws.

Advantages and the normaliser come from whole groups, before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.advantages import (
    compute_advantages,
    compute_completion_advantages,
    compute_group_advantages,
    find_masked_completions,
)
from megatron_dppo.rl.census import Cell, PruningStats
from megatron_dppo.rl.objectives import (
    Objective,
    compute_coefficients,
    compute_kept_fraction,
    compute_normaliser,
)
from megatron_dppo.rl.pruning.completion_rules import (
    CompletionCandidates,
    compute_completion_inclusion,
    compute_completion_weights,
    draw_completions,
    find_efficient_keep,
)
from megatron_dppo.rl.pruning.prompt_rules import find_prompt_rule
from megatron_dppo.rl.types import Bools, Floats, StepMetadata


@dataclass(frozen=True, slots=True)
class PruningDraw:
    """A minibatch of Q groups after its draw. Arrays are [Q, G].

    The paper's rule at ``keep`` 0.5 on one right and two wrong answers has ``inclusion`` [[1, 0.5,
    0.5]] and ``weight`` [[1, 2, 2]] if the prompt was kept for certain. Its draw may have ``kept``
    [[True, False, True]].
    """

    advantage: Floats
    coefficient: Floats
    """c, the weight of a completion's tokens in the aggregation."""
    inclusion: Floats
    """π of the completion, given its prompt; 0 for zero advantage."""
    weight: Floats
    """1/(π_prompt·π), the Horvitz-Thompson weight that it has if it is kept; 0 for zero advantage.
    A biased rule has weights of its own in place of 1/π."""
    kept: Bools
    zero_advantage: Bools
    """A = 0, no KL term and no teacher, or masked: the gradient is exactly 0. No rule trains on
    these, and none is said to save them."""
    segments: Floats
    """[Q, G, S], the advantage of each segment, of which ``advantage`` is a mean; S = 1 where a
    completion has one."""
    normaliser: float
    """Z"""
    magnitude: Floats
    """Size of a completion's token advantages, see :func:`compute_magnitudes`; |A| without a
    teacher."""


def prune_minibatch(
    part: StepMetadata,
    config: Config,
    objective: Objective,
    *,
    keep: Keep,
    rng: np.random.Generator,
) -> PruningDraw:
    """Draw what a minibatch trains on.

    No weight exceeds ``make_pruning_section.max_weight``, since no completion's probability is
    below 1/(max_weight·π_prompt).

    Args:
        part: metadata of the minibatch's groups, with the part of the window that they stand for.
        config: of the run.
        objective: of the run.
        keep: ``pruning.completions.keep`` under its schedule.
        rng: for this one draw.
    """
    pruning = config.pruning.completions
    candidates, segments, c, magnitude = compute_completion_terms(part, config, objective)
    if keep == "auto":
        keep = find_efficient_keep(
            pruning.named, candidates, generated=float(part.response_lengths.sum())
        )
    inclusion = compute_completion_inclusion(pruning.named, candidates, keep)
    kept = draw_completions(pruning.named, candidates, inclusion, rng, draw=pruning.draw)
    weight = (
        compute_completion_weights(pruning.named, candidates, inclusion, keep)
        / part.prompt_inclusion[:, None]
    )
    z = compute_normaliser(
        objective.aggregation,
        sampled_lengths=part.sampled_lengths,
        prompt_inclusion=part.prompt_inclusion,
        prompts=len(part.prompt_ids)
        if find_prompt_rule(config.pruning.prompts.named).biased
        else part.window,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    if pruning.normaliser == "kept":
        z *= compute_kept_fraction(
            objective.aggregation,
            sampled_lengths=part.sampled_lengths,
            prompt_inclusion=part.prompt_inclusion,
            kept=kept,
        )
    return PruningDraw(
        advantage=candidates.advantage,
        coefficient=c,
        inclusion=inclusion,
        weight=weight,
        kept=kept,
        zero_advantage=candidates.zero_advantage,
        segments=segments,
        normaliser=z,
        magnitude=magnitude,
    )


def compute_completion_terms(
    part: StepMetadata, config: Config, objective: Objective
) -> tuple[CompletionCandidates, Floats, Floats, Floats]:
    """Compute the sizes of a minibatch's terms, before anything is drawn.

    Returns:
        - Candidates of a completion rule.
        - [Q, G, S], advantages of the segments.
        - [Q, G], coefficients c of the aggregation.
        - [Q, G], :func:`compute_magnitudes`.
    """
    segments = compute_advantages(part, config, objective.advantage)
    advantage = compute_completion_advantages(part, segments)
    masked = find_masked_completions(part, config)
    c = compute_coefficients(objective.aggregation, part.sampled_lengths)
    magnitude = np.where(masked, 0.0, compute_magnitudes(part, advantage, config))
    prompt_inclusion = part.prompt_inclusion[:, None]
    rewards_alone = ~part.log_ratios.any(axis=-1) & (config.loss.kl_coef == 0.0)
    score_norms = 1.0 if config.pruning.completions.score == "advantage" else part.score_norms
    candidates = CompletionCandidates(
        advantage=advantage,
        score=magnitude * c * score_norms / prompt_inclusion,
        cost=part.tokens.astype(np.float64),
        floor=np.broadcast_to(
            np.minimum(1.0 / (config.pruning.max_weight * prompt_inclusion), 1.0), advantage.shape
        ),
        zero_advantage=(advantage == 0.0) & rewards_alone | masked,
    )
    return candidates, segments, c, magnitude


def compute_magnitudes(part: StepMetadata, advantage: Floats, config: Config) -> Floats:
    """Return the root mean square of the factors of a completion's token scores, [Q, G]. Without a
    teacher: |A|.

    A server's tokens have the advantages A + β·log q/p, whose mean square is (A + β·mean)² +
    (β·deviation)².

    With a teacher's whole distribution a token's gradient by the logits is −A·(e_t − p) +
    β·p·(log(p/q) − KL). The log-ratios are known only once the teacher has read the rollouts. They
    are taken to be of size 1, and the two terms to be orthogonal: √(A² + β²). Either vanishes where
    the policy is certain, so that both are multiplied by the norm of the scores. That is a guess:
    it sets probabilities, and no weight depends on its being right.
    """
    pull = config.loss.distillation_coef * part.log_ratios
    return np.hypot(advantage + pull[..., 0], pull[..., 1])


# The coordinates of the census's tables are rounded, so that the tables stay small.
BINS_PER_GROUP = 16
"""The share of a group's answers that are better than its mean is exact for groups of up to this
size."""
BINS_PER_DEVIATION = 2
BINS_PER_LENGTH_OCTAVE = 4
BINS_PER_SCORE_OCTAVE = 2
MAX_SCORE_OCTAVES = 4
"""Octaves to either side of the median score. Scores beyond are counted with the last."""


def compute_prune_metrics(
    window: float,
    parts: Sequence[tuple[StepMetadata, PruningDraw]],
    *,
    biased_prompts: bool = False,
) -> dict[str, float]:
    """``prune/…`` of a step.

    The tokens of a completion are those of its prompt and of its response.

    - ``kept_prompt_fraction``: prompts rolled out, over the window.
    - ``kept_completion_fraction``, ``kept_token_fraction``: completions trained on, and their
      tokens, over those rolled out.
    - ``zero_advantage_fraction``: completions with an advantage of 0, or masked.
    - ``max_weight``: the largest Horvitz-Thompson weight among the kept completions.
    - ``effective_sample_size``: (Σw)²/Σw² over the kept completions, as a share of their number
      (Kish); left out where nothing was kept.
    - ``saved_tokens_prompts``: tokens of the prompts that were not rolled out, estimated by Σ
      T_q·(1/π_q − 1), T_q the tokens of a group that was. A biased rule gives no π; there each
      counts with the mean of those rolled out.
    - ``saved_tokens_completions``: tokens of completions that were rolled out, have a gradient, and
      were pruned.
    - ``zero_advantage_tokens``: tokens of completions whose gradient is exactly 0. They are not
      trained on without pruning either, so that they are no saving.
    - ``compute_variance_inflation``: see the function of that name.
    - ``noise_share_prompts``, ``noise_share_completions``: the shares of prompt and completion
      pruning in the gradient's noise, see ``estimate_gradient_noise``. The rest is the share of
      sampling.

    The last three are left out if the rule of either level is biased: its error is its bias as well
    as its variance. A biased rule for completions is recognised by its weights.

    Args:
        window: N, the prompts that the step considered.
        parts: its minibatches, each with its draw; and the groups that a rule left out, see
            ``make_empty_draw``.
        biased_prompts: whether the rule for prompts is biased.
    """
    prompts = sum(len(part.prompt_ids) for part, _ in parts)
    tokens = np.concatenate([part.tokens for part, _ in parts])
    kept, zero_advantage, advantage, weight = _concat_fields(
        parts, "kept", "zero_advantage", "advantage", "weight"
    )
    weight = weight[kept]
    metrics = {
        "prune/kept_prompt_fraction": prompts / window if window else 0.0,
        "prune/kept_completion_fraction": float(kept.mean()) if kept.size else 0.0,
        "prune/kept_token_fraction": float(tokens[kept].sum() / tokens.sum()) if kept.size else 0.0,
        "prune/zero_advantage_fraction": float((advantage == 0.0).mean()) if kept.size else 0.0,
        "prune/max_weight": float(weight.max(initial=0.0)),
        "prune/saved_tokens_prompts": max(window - prompts, 0.0)
        * float(tokens.sum())
        / max(prompts, 1)
        if biased_prompts
        else sum(_estimate_skipped_tokens(part) for part, _ in parts),
        "prune/saved_tokens_completions": float(tokens[~kept & ~zero_advantage].sum()),
        "prune/zero_advantage_tokens": float(tokens[~kept & zero_advantage].sum()),
    }
    if weight.size:
        metrics["prune/effective_sample_size"] = float(
            weight.sum() ** 2 / (weight.size * (weight**2).sum())
        )
    if not biased_prompts and all(
        _is_weighted_by_inclusion(part, pruned) for part, pruned in parts
    ):
        sampling, by_prompts, by_completions = estimate_gradient_noise(parts)
        total = sampling + by_prompts + by_completions
        metrics |= {
            "prune/variance_inflation": compute_variance_inflation(parts),
            "prune/noise_share_prompts": by_prompts / total if total > 0.0 else 0.0,
            "prune/noise_share_completions": by_completions / total if total > 0.0 else 0.0,
        }
    return metrics


def _concat_fields(
    parts: Sequence[tuple[StepMetadata, PruningDraw]], *names: str
) -> list[NDArray[Any]]:
    """Arrays of all draws: of each name one [Q, G], over the groups of all parts."""
    return [np.concatenate([getattr(pruned, name) for _, pruned in parts]) for name in names]


def make_empty_draw(part: StepMetadata) -> PruningDraw:
    """The draw of groups that a rule left out after their rollouts: nothing of them is kept."""
    zeros = np.zeros(part.rewards.shape)
    nothing = np.zeros(part.rewards.shape, dtype=np.bool_)
    return PruningDraw(
        zeros,
        zeros,
        zeros,
        zeros,
        kept=nothing,
        zero_advantage=~nothing,
        segments=zeros[..., None],
        normaliser=0.0,
        magnitude=zeros,
    )


def compute_variance_inflation(parts: Sequence[tuple[StepMetadata, PruningDraw]]) -> float:
    """By how much pruning multiplies the sum of squares of the terms: Σ h²/(π_prompt·π) over Σ h²;
    1 without pruning.

    h is the proxy |A|·c·√Σ_t(1−p_t)² of a term's norm, with ``magnitude`` for |A| where there is a
    teacher. Both sums run over the window, and are estimated from the prompts rolled out. This is
    the variance of *independent* draws with the same probabilities. A systematic draw has less, of
    which there is no unbiased estimate. 1 if every h is 0.
    """
    squares = [(_compute_squares(part, pruned), pruned.weight) for part, pruned in parts]
    full = sum(float(square.sum()) for square, _ in squares)
    return (
        sum(float((square * weight).sum()) for square, weight in squares) / full
        if full > 0.0
        else 1.0
    )


def estimate_gradient_noise(
    parts: Sequence[tuple[StepMetadata, PruningDraw]],
) -> tuple[float, float, float]:
    """Where the noise of the gradient comes from, of a step whose weights are 1/(π_prompt·π).

    Each sum is over the window, and an unbiased estimate from the prompts rolled out. Only their
    ratios are of use. They take the terms for orthogonal and the draws for *independent*; a
    systematic draw adds less noise than that. h is that of ``compute_variance_inflation``, which
    times the first sum is the sum of all three.

    Returns:
        - Σ h², the noise of the full batch, whose completions are sampled. Estimated by Σ h²/π_q.
        - Σ h²·(1/π_q − 1), which the draw of prompts adds. Estimated by Σ (h²/π_q)·(1/π_q − 1).
        - Σ (h²/π_q)·(1/π − 1), which that of completions adds. Estimated by Σ (h²/π_q)·(1/π_q)·(1/π
          − 1).
    """
    sampling = prompts = completions = 0.0
    for part, pruned in parts:
        square = _compute_squares(part, pruned)
        first = 1.0 / part.prompt_inclusion[:, None]
        sampling += float(square.sum())
        prompts += float((square * (first - 1.0)).sum())
        completions += float((square * np.maximum(pruned.weight - first, 0.0)).sum())
    return sampling, prompts, completions


def _compute_squares(part: StepMetadata, draw: PruningDraw) -> Floats:
    """[Q, G], h²/π_prompt: a completion's term in the estimate of Σ h² over the window."""
    squares: Floats = _compute_term_norms(part, draw) ** 2 / part.prompt_inclusion[:, None]
    return squares


def _compute_term_norms(part: StepMetadata, draw: PruningDraw) -> Floats:
    """[Q, G], h."""
    norm: Floats = draw.magnitude * draw.coefficient * part.score_norms
    return norm


def _is_weighted_by_inclusion(part: StepMetadata, draw: PruningDraw) -> bool:
    """Whether every completion with an advantage may be kept, and then has the weight
    1/(π_prompt·π)."""
    has_advantage = draw.advantage != 0.0
    back = (draw.weight * draw.inclusion * part.prompt_inclusion[:, None])[has_advantage]
    return bool(np.allclose(back, 1.0))


def _estimate_skipped_tokens(part: StepMetadata) -> float:
    group = part.tokens.sum(axis=1)
    return float((group * (1.0 / part.prompt_inclusion - 1.0)).sum())


def compute_pruning_stats(parts: Sequence[tuple[StepMetadata, PruningDraw]]) -> PruningStats:
    """Count a step's completions: of all its minibatches, and of the groups that were
    ``make_empty_draw``."""
    rewards, tokens = (
        np.concatenate([getattr(part, name) for part, _ in parts]) for name in ("rewards", "tokens")
    )
    lengths = np.concatenate([part.response_lengths for part, _ in parts]).astype(np.float64)
    score = np.concatenate(
        [
            _compute_term_norms(part, pruned) / part.prompt_inclusion[:, None]
            for part, pruned in parts
        ]
    )
    kept, zero_advantage, advantage, inclusion = _concat_fields(
        parts, "kept", "zero_advantage", "advantage", "inclusion"
    )
    has_advantage = advantage != 0.0

    def count_tokens(mask: Bools) -> tuple[int, int]:
        return int(mask.sum()), int(tokens[mask].sum())

    def build_table(x: Floats, y: Floats) -> tuple[Cell, ...]:
        return _build_table(
            x[has_advantage], y[has_advantage], inclusion[has_advantage], kept[has_advantage]
        )

    deviations = compute_group_advantages(rewards, normalise=True)
    low = rewards.min(axis=1, keepdims=True)
    high = rewards.max(axis=1, keepdims=True)
    side = np.sign(advantage)
    samples = rewards.shape[1]
    better = np.broadcast_to((side > 0.0).sum(axis=1, keepdims=True) / samples, side.shape)
    typical = float(np.median(score[has_advantage])) if has_advantage.any() else 1.0
    octaves = np.clip(_log2(score / (typical or 1.0)), -MAX_SCORE_OCTAVES, MAX_SCORE_OCTAVES)
    return PruningStats(
        kept=count_tokens(kept),
        pruned=count_tokens(~kept & ~zero_advantage),
        zero_advantage=count_tokens(~kept & zero_advantage),
        binary=bool(((rewards == low) | (rewards == high)).all()),
        by_group=build_table(_round(better, min(samples, BINS_PER_GROUP)), side),
        by_reward=build_table(_round(deviations, BINS_PER_DEVIATION), side),
        by_cause=build_table(
            _round(_log2(lengths), BINS_PER_LENGTH_OCTAVE), _round(octaves, BINS_PER_SCORE_OCTAVE)
        ),
    )


def _build_table(x: Floats, y: Floats, inclusion: Floats, kept: Bools) -> tuple[Cell, ...]:
    """One cell for each pair of coordinates that occurs, in ascending order. All [n]."""
    places, cell = np.unique(np.stack([x, y], axis=1), axis=0, return_inverse=True)
    counts, expected, drawn = (
        np.bincount(cell.ravel(), weights, minlength=len(places))
        for weights in (None, inclusion, kept)
    )
    return tuple(
        (float(x), float(y), int(count), round(float(pi), 6), int(keep))
        for (x, y), count, pi, keep in zip(places, counts, expected, drawn, strict=True)
    )


def _log2(values: Floats) -> Floats:
    """log2. A score of 0, of a completion whose tokens were all certain, is put far below all
    others."""
    return np.log2(np.maximum(values, 1e-12))


def _round(values: Floats, parts: int) -> Floats:
    """To multiples of 1/parts."""
    rounded: Floats = np.round(values * parts) / max(parts, 1) + 0.0  # −0.0 becomes 0.0
    return rounded

"""Draw of a minibatch, and a step's ``prune/…`` metrics and pruning statistics.

Advantages and the normaliser are computed from whole groups, before any draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config, PruningConfig
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
    """Minibatch of Q groups after its draw. Arrays are [Q, G].

    For one right and two wrong answers of a prompt kept for certain, the paper's rule at ``keep``
    0.5 has ``inclusion`` [[1, 0.5, 0.5]], ``weight`` [[1, 2, 2]], and perhaps ``kept`` [[True,
    False, True]].
    """

    advantage: Floats
    coefficient: Floats
    """c, the weight of tokens in the aggregation."""
    inclusion: Floats
    """π of the completion, given its prompt; 0 for zero advantage."""
    weight: Floats
    """1/(π_prompt·π), the completion's Horvitz-Thompson weight if kept; 0 for zero advantage. A
    biased rule has its own weights instead of 1/π."""
    kept: Bools
    zero_advantage: Bools
    """As in :class:`CompletionCandidates`; never trained on, and no saving."""
    segments: Floats
    """[Q, G, S], advantage of each segment; ``advantage`` is a mean over segments. S = 1 for
    completions of one segment."""
    normaliser: float
    """Z"""
    magnitude: Floats
    """See :func:`compute_magnitudes`."""


def prune_minibatch(
    part: StepMetadata,
    config: Config,
    objective: Objective,
    *,
    keep: Keep,
    rng: np.random.Generator,
) -> PruningDraw:
    """Draw the completions that a minibatch trains on.

    Args:
        part: the minibatch's groups, with their part of the window.
        keep: ``pruning.completions.keep`` under its schedule.
        rng: generator for this single draw.
    """
    pruning = config.pruning.completions
    candidates, segments, c, magnitude = compute_completion_terms(part, config, objective)
    if keep == "auto":
        keep = find_efficient_keep(
            pruning.named, candidates, generated=float(part.response_lengths.sum())
        )
    inclusion = compute_completion_inclusion(pruning.named, candidates, keep)
    kept = draw_completions(pruning.named, candidates, inclusion, rng, draw=pruning.draw)
    weight = compute_completion_weights(pruning.named, candidates, inclusion, keep)
    weight = weight / part.prompt_inclusion[:, None]
    # A biased prompt rule has no 1/π: the mean is over the prompts rolled out.
    biased_prompts = find_prompt_rule(config.pruning.prompts.named).biased
    z = compute_normaliser(
        objective.aggregation,
        sampled_lengths=part.sampled_lengths,
        prompt_inclusion=part.prompt_inclusion,
        prompts=len(part.prompt_ids) if biased_prompts else part.window,
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
    part: StepMetadata,
    config: Config,
    objective: Objective,
) -> tuple[CompletionCandidates, Floats, Floats, Floats]:
    """Compute the sizes of a minibatch's terms, before any draw.

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
    # A KL term, an entropy bonus or a teacher gives completions of advantage 0 a gradient, too.
    others = config.loss.kl_coef > 0.0 or config.loss.entropy.is_used
    rewards_alone = ~part.log_ratios.any(axis=-1) & (not others)
    score_norms = 1.0 if config.pruning.completions.score == "advantage" else part.score_norms
    # The floor 1/(max_weight·π_prompt) bounds the product of both levels' weights by max_weight.
    floor = np.minimum(1.0 / (config.pruning.max_weight * prompt_inclusion), 1.0)
    candidates = CompletionCandidates(
        advantage=advantage,
        score=magnitude * c * score_norms / prompt_inclusion,
        cost=part.tokens.astype(np.float64),
        floor=np.broadcast_to(floor, advantage.shape),
        zero_advantage=(advantage == 0.0) & rewards_alone | masked,
    )
    return candidates, segments, c, magnitude


def describe_bound(config: PruningConfig) -> str | None:
    """Return a note if ``max_weight`` changes the probabilities of the paper's rule for
    completions, else None. No other rule has fixed probabilities."""
    if config.completions.named != "threshold":
        return None
    prompts = config.prompts
    least = {"threshold": prompts.keep, "neyman": prompts.floor}.get(prompts.named, 1.0)
    if prompts.function:
        least = prompts.floor
    keep = float(config.completions.share)
    floor = min(1.0 / (config.max_weight * least), 1.0)
    if floor <= keep * (1.0 + 1e-9):
        return None
    whose = f" of prompts kept with {least:.2f}" if least < 1.0 else ""
    # Rounded up, because a smaller value would change the rule again.
    enough = math.ceil(round(100.0 / (least * keep), 6)) / 100.0
    return (
        f"pruning.max_weight = {config.max_weight:g} changes the rule: completions{whose} are kept "
        f"with probability {floor:.2f} instead of {keep:.2f}. Set it to {enough:g} or more for the "
        "rule's own probabilities"
    )


def compute_magnitudes(part: StepMetadata, advantage: Floats, config: Config) -> Floats:
    """Return the root mean square of the factors of a completion's token scores, [Q, G]; |A|
    without a teacher or an entropy bonus.

    - Teacher on a server: tokens have advantages A + β·log q/p, of mean square (A + β·mean)² +
      (β·deviation)².
    - Whole distribution of a teacher: a token's gradient by the logits is −A·(e_t − p) +
      β·p·(log(p/q) − KL), of assumed size √(A² + β²).
    - Entropy bonus: β·p·(log p + H) in the token's gradient, with the same assumption.
    """
    # The log-ratios of a whole distribution are unknown until the teacher has read the rollouts:
    # assume size 1 and orthogonal terms. Both terms vanish if the policy is certain, and are
    # therefore multiplied by the norm of the scores. A wrong guess biases no weight.
    pull = config.loss.distillation_coef * part.log_ratios
    spread = np.hypot(pull[..., 1], config.loss.entropy.coef)
    return np.hypot(advantage + pull[..., 0], spread)


# Coordinates of the pruning statistics' tables are rounded to keep the tables small.
BINS_PER_GROUP = 16
"""The fraction of a group's answers above its mean is exact for groups up to this size."""
BINS_PER_DEVIATION = 2
BINS_PER_LENGTH_OCTAVE = 4
BINS_PER_SCORE_OCTAVE = 2
MAX_SCORE_OCTAVES = 4
"""Octaves on either side of the median score; scores beyond count as the last octave."""


def compute_prune_metrics(
    window: float,
    parts: Sequence[tuple[StepMetadata, PruningDraw]],
    *,
    biased_prompts: bool = False,
) -> dict[str, float]:
    """Compute ``prune/…`` of a step. A completion's tokens are its prompt's and its response's.

    - ``kept_prompt_fraction``: prompts rolled out / window.
    - ``kept_completion_fraction``, ``kept_token_fraction``: completions, and their tokens, trained
      on / rolled out.
    - ``zero_advantage_fraction``: completions with an advantage of 0, or masked.
    - ``max_weight``: largest Horvitz-Thompson weight of a kept completion.
    - ``effective_sample_size``: (Σw)²/Σw² over the kept completions / their number (Kish); missing
      if no completion was kept.
    - ``saved_tokens_prompts``: tokens of prompts not rolled out, estimated by Σ T_q·(1/π_q − 1),
      T_q: tokens of a group rolled out; under a biased rule, without π, by the mean of T_q.
    - ``saved_tokens_completions``: tokens of pruned completions, rolled out and with a gradient.
    - ``zero_advantage_tokens``: tokens of completions whose gradient is exactly 0. No saving: not
      trained on without pruning either.
    - ``variance_inflation``: see :func:`compute_variance_inflation`.
    - ``noise_share_prompts``, ``noise_share_completions``: fractions of the gradient's noise, see
      :func:`estimate_gradient_noise`; the rest is due to sampling.

    The last three are missing if either rule is biased.

    Args:
        window: N, prompts considered by the step.
        parts: minibatches of the step with their draws, and dropped groups with
            :func:`make_empty_draw`'s.
    """
    prompts = sum(len(part.prompt_ids) for part, _ in parts)
    tokens = np.concatenate([part.tokens for part, _ in parts])
    kept, zero_advantage, advantage, weight = _concat_fields(
        parts, "kept", "zero_advantage", "advantage", "weight"
    )
    weight = weight[kept]
    if biased_prompts:
        saved = max(window - prompts, 0.0) * float(tokens.sum()) / max(prompts, 1)
    else:
        saved = sum(_estimate_skipped_tokens(part) for part, _ in parts)
    metrics = {
        "prune/kept_prompt_fraction": prompts / window if window else 0.0,
        "prune/kept_completion_fraction": float(kept.mean()) if kept.size else 0.0,
        "prune/kept_token_fraction": float(tokens[kept].sum() / tokens.sum()) if kept.size else 0.0,
        "prune/zero_advantage_fraction": float((advantage == 0.0).mean()) if kept.size else 0.0,
        "prune/max_weight": float(weight.max(initial=0.0)),
        "prune/saved_tokens_prompts": saved,
        "prune/saved_tokens_completions": float(tokens[~kept & ~zero_advantage].sum()),
        "prune/zero_advantage_tokens": float(tokens[~kept & zero_advantage].sum()),
    }
    if weight.size:
        metrics["prune/effective_sample_size"] = float(
            weight.sum() ** 2 / (weight.size * (weight**2).sum())
        )
    # The error of a biased rule includes its bias. A biased rule for completions is recognised by
    # its weights.
    is_unbiased = not biased_prompts and all(
        _is_weighted_by_inclusion(part, pruned) for part, pruned in parts
    )
    if is_unbiased:
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
    fields = []
    for name in names:
        arrays = [getattr(pruned, name) for _, pruned in parts]
        fields.append(np.concatenate(arrays))
    return fields


def make_empty_draw(part: StepMetadata) -> PruningDraw:
    """Return the draw of groups dropped after their rollouts."""
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
    """Return the factor of pruning on the terms' sum of squares: Σ h²/(π_prompt·π) / Σ h²; 1
    without pruning, or if every h is 0.

    h is the proxy |A|·c·√Σ_t(1−p_t)² of a term's norm; under a teacher, ``magnitude`` replaces |A|.
    Both sums over the window are estimated from the prompts rolled out.
    """
    # The variance of *independent* draws with these inclusion probabilities. A systematic draw has
    # less, without an unbiased estimate.
    squares = [(_compute_squares(part, pruned), pruned.weight) for part, pruned in parts]
    full = sum(float(square.sum()) for square, _ in squares)
    if full > 0.0:
        return sum(float((square * weight).sum()) for square, weight in squares) / full
    return 1.0


def estimate_gradient_noise(
    parts: Sequence[tuple[StepMetadata, PruningDraw]],
) -> tuple[float, float, float]:
    """Estimate the sources of the gradient's noise, if weights are 1/(π_prompt·π).

    - Sums run over the window; their estimates from the prompts rolled out are unbiased.
    - Only ratios of the sums are of use.
    - Terms are assumed orthogonal and draws *independent*; a systematic draw adds less noise.
    - :func:`compute_variance_inflation` defines h, and returns the sum of all three / the first.

    Returns:
        - Σ h², the full batch's noise, due to sampling. Estimated by Σ h²/π_q.
        - Σ h²·(1/π_q − 1), added by the draw of prompts. Estimated by Σ (h²/π_q)·(1/π_q − 1).
        - Σ (h²/π_q)·(1/π − 1), added by the draw of completions. Estimated by Σ
          (h²/π_q)·(1/π_q)·(1/π − 1).
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
    """Return h²/π_prompt, [Q, G]: terms of the estimate of Σ h²."""
    squares: Floats = _compute_term_norms(part, draw) ** 2 / part.prompt_inclusion[:, None]
    return squares


def _compute_term_norms(part: StepMetadata, draw: PruningDraw) -> Floats:
    """Return h, [Q, G]."""
    norm: Floats = draw.magnitude * draw.coefficient * part.score_norms
    return norm


def _is_weighted_by_inclusion(part: StepMetadata, draw: PruningDraw) -> bool:
    """Return whether every completion with an advantage may be kept, with weight 1/(π_prompt·π)."""
    has_advantage = draw.advantage != 0.0
    back = (draw.weight * draw.inclusion * part.prompt_inclusion[:, None])[has_advantage]
    return bool(np.allclose(back, 1.0))


def _estimate_skipped_tokens(part: StepMetadata) -> float:
    group = part.tokens.sum(axis=1)
    return float((group * (1.0 / part.prompt_inclusion - 1.0)).sum())


def compute_pruning_stats(parts: Sequence[tuple[StepMetadata, PruningDraw]]) -> PruningStats:
    """Count a step's completions: all minibatches, and the groups of ``make_empty_draw``."""
    rewards = np.concatenate([part.rewards for part, _ in parts])
    tokens = np.concatenate([part.tokens for part, _ in parts])
    lengths = np.concatenate([part.response_lengths for part, _ in parts]).astype(np.float64)
    scores = [
        _compute_term_norms(part, pruned) / part.prompt_inclusion[:, None] for part, pruned in parts
    ]
    score = np.concatenate(scores)
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
    # Scores have no absolute scale: octaves are relative to the median.
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
    """Return a cell per pair of coordinates that occurs, ascending. Arguments are [n]."""
    places, cell = np.unique(np.stack([x, y], axis=1), axis=0, return_inverse=True)
    cell = cell.ravel()
    counts = np.bincount(cell, minlength=len(places))
    expected = np.bincount(cell, inclusion, minlength=len(places))
    drawn = np.bincount(cell, kept, minlength=len(places))
    return tuple(
        (float(x), float(y), int(count), round(float(pi), 6), int(keep))
        for (x, y), count, pi, keep in zip(places, counts, expected, drawn, strict=True)
    )


def _log2(values: Floats) -> Floats:
    # Completions of certain tokens have score 0: put them far below all other scores.
    return np.log2(np.maximum(values, 1e-12))


def _round(values: Floats, parts: int) -> Floats:
    # Adding 0.0 turns −0.0 into 0.0, which would be another cell.
    rounded: Floats = np.round(values * parts) / max(parts, 1) + 0.0
    return rounded

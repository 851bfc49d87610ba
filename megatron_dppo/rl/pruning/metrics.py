"""What pruning did to a step, in numbers for the log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dppo.rl.pruning.minibatch import Pruned
from megatron_dppo.rl.types import Floats, StepMetadata


def prune_metrics(window: float, parts: Sequence[tuple[StepMetadata, Pruned]]) -> dict[str, float]:
    """``prune/…`` of a step.

    - ``kept_prompt_fraction``: prompts rolled out, over the window.
    - ``kept_completion_fraction``, ``kept_token_fraction``: completions, and the tokens of their rows (prompt and
      response), trained on over rolled out.
    - ``zero_advantage_fraction``: completions that could teach nothing.
    - ``max_weight``: the largest Horvitz-Thompson weight among what was kept.
    - ``effective_sample_size``: (Σw)²/Σw² over the completions kept, as a share of their number (Kish).
    - ``variance_inflation``: see ``variance_inflation``.

    Args:
        window: N, the prompts that the step considered.
        parts: its minibatches, each with its draw.
    """
    prompts = sum(len(part.prompt_ids) for part, _ in parts)
    kept = np.concatenate([pruned.kept.ravel() for _, pruned in parts])
    advantage = np.concatenate([pruned.advantage.ravel() for _, pruned in parts])
    tokens = np.concatenate([(part.prompt_lengths[:, None] + part.response_lengths).ravel() for part, _ in parts])
    weight = np.concatenate([pruned.weight.ravel() for _, pruned in parts])[kept]
    return {
        "prune/kept_prompt_fraction": prompts / window if window else 0.0,
        "prune/kept_completion_fraction": float(kept.mean()) if kept.size else 0.0,
        "prune/kept_token_fraction": float(tokens[kept].sum() / tokens.sum()) if kept.size else 0.0,
        "prune/zero_advantage_fraction": float((advantage == 0.0).mean()) if kept.size else 0.0,
        "prune/max_weight": float(weight.max(initial=0.0)),
        "prune/effective_sample_size": float(weight.sum() ** 2 / (weight.size * (weight**2).sum()))
        if weight.size
        else 0.0,
        "prune/variance_inflation": variance_inflation(parts),
    }


def variance_inflation(parts: Sequence[tuple[StepMetadata, Pruned]]) -> float:
    """By how much pruning multiplies the sum of squares of the terms: Σ h²/(π_prompt·π) over Σ h²; 1 without pruning.

    h is the proxy |A|·c·√Σ_t(1−p_t)² of a term's norm, and both sums, which run over the window, are estimated from the
    prompts rolled out. This is the variance of *independent* draws with the same probabilities: a systematic draw has
    less, but admits no unbiased estimate of it. 1 where no completion could teach anything.
    """
    squares: list[tuple[Floats, Floats]] = []
    for part, pruned in parts:
        h = np.abs(pruned.advantage) * pruned.coefficient * part.surprise
        squares.append((h**2 / part.prompt_inclusion[:, None], pruned.weight))
    full = sum(float(square.sum()) for square, _ in squares)
    return sum(float((square * weight).sum()) for square, weight in squares) / full if full > 0.0 else 1.0

"""Rows of a run that never was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pruning.draw import compute_pruning_stats, prune_minibatch
from tests.rl.plans import step_config, step_metadata

Row = dict[str, float]


def made_up_rows(steps: int, *, evaluate_every: int = 2) -> list[Row]:
    """An evaluation at step 0, then steps of 2 s: 1 s of rollouts, 0.5 s of training, 0.5 s of
    nothing named."""
    noise = np.random.default_rng(0)
    rows: list[Row] = [{"step": 0, "eval/accuracy": 0.25, "perf/eval_time": 3.0}]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "rollout/raw_reward": 0.3 + 0.4 * step / steps + 0.05 * noise.normal(),
            "rollout/response_len/mean": 40.0 + step,
            "rollout/generated_tokens": 1000.0,
            "prune/kept_prompt_fraction": 0.75,
            "prune/kept_token_fraction": 0.5 if step % 2 else 0.4,
            "prune/effective_sample_size": 0.8,
            "prune/variance_inflation": 1.25,
            "prune/noise_share_prompts": 0.15,
            "prune/noise_share_completions": 0.05,
            "prune/saved_tokens_prompts": 200.0,
            "prune/saved_tokens_completions": 500.0,
            "prune/zero_advantage_tokens": 100.0,
            "prune/brier_model": 0.05,
            "prune/brier_pool": 0.11,
            "pack/fill": 0.98,
            "train/grad_norm": 1.5,
            "train/lr": 1e-3,
            "train/tokens": 400.0,
            "reward/timeouts": 0.0,
            "reward/errors": 0.0,
            "perf/step_time": 2.0,
            "perf/rollout_time": 1.0,
            "perf/actor_train_time": 0.5,
            "perf/saved_prompts_time": 0.25,
            "perf/saved_completions_time": 0.75,
        }
        if step % evaluate_every == 0:
            row |= {"eval/accuracy": 0.25 + 0.5 * step / steps, "perf/eval_time": 3.0}
        rows.append(row)
    return rows


def made_up_census(
    steps: int, *, rule: str = "neyman", graded: bool = False
) -> list[dict[str, Any]]:
    """Rows of ``pruning.jsonl``: real draws of made-up groups, with rewards of 0 and 1, or of any
    kind."""
    config = step_config(rule=rule)
    rows = []
    for step in range(1, steps + 1):
        metadata = step_metadata(16, seed=step)
        if graded:
            metadata = step_metadata(
                16, seed=step, rewards=np.random.default_rng(step).normal(size=(16, 8))
            )
        pruned = prune_minibatch(
            metadata,
            config,
            resolve_objective(config.loss),
            keep=0.5,
            rng=np.random.default_rng(step),
        )
        counted = compute_pruning_stats([(metadata, pruned)])
        rows.append({"step": step, **json.loads(json.dumps(counted.to_dict()))})
    return rows

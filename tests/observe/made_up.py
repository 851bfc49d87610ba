"""Rows of a run that never was."""

from __future__ import annotations

import numpy as np

Row = dict[str, float]


def made_up_rows(steps: int, *, evaluate_every: int = 2) -> list[Row]:
    """An evaluation at step 0, then steps of 2 s: 1 s of rollouts, 0.5 s of training, 0.5 s of nothing named."""
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
            "pack/fill": 0.98,
            "train/grad_norm": 1.5,
            "train/lr": 1e-3,
            "train/tokens": 400.0,
            "reward/timeouts": 0.0,
            "reward/errors": 0.0,
            "perf/step_time": 2.0,
            "perf/rollout_time": 1.0,
            "perf/actor_train_time": 0.5,
        }
        if step % evaluate_every == 0:
            row |= {"eval/accuracy": 0.25 + 0.5 * step / steps, "perf/eval_time": 3.0}
        rows.append(row)
    return rows

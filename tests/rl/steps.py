"""Metadata of made-up steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_dppo.config import CompletionPruningConfig, Config, LossConfig, PackConfig, PruningConfig, RolloutConfig
from megatron_dppo.rl.families import prompts_shared
from megatron_dppo.rl.types import StepMetadata, no_forks


def step_metadata(
    groups: int, samples: int = 8, *, seed: int = 0, window: float | None = None, **fields: Any
) -> StepMetadata:
    """Rewards of 0 and 1, lengths of 1 to 200 tokens; ``fields`` replaces what a test wants to set."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.5, 0.8, (groups, samples)), 1, 200).astype(np.int64)
    made: dict[str, Any] = {
        "prompt_ids": np.sort(rng.permutation(1000)[:groups]),
        "prompt_inclusion": np.ones(groups),
        "prompt_lengths": rng.integers(5, 30, groups),
        "samples": np.full(groups, samples),
        "response_lengths": lengths,
        "sampled_lengths": fields.get("response_lengths", lengths),
        "rewards": (rng.random((groups, samples)) < rng.random((groups, 1))).astype(float),
        "score_norms": np.sqrt(lengths * rng.uniform(0.1, 0.5, (groups, samples))),
        "forks": no_forks((groups, samples)),
        "versions": np.zeros((groups, samples), np.int64),
        "owners": rng.integers(0, 4, groups),
    }
    made |= fields
    made.setdefault("shared_lengths", prompts_shared(made["prompt_lengths"], samples))
    return StepMetadata(**made, window=float((1 / made["prompt_inclusion"]).sum()) if window is None else window)


def step_config(
    *, rule: str = "neyman", keep: float = 0.5, max_weight: float = 5.0, pack: PackConfig | None = None, **loss: Any
) -> Config:
    """A configuration of what the planner reads."""
    return Config(
        rollout=RolloutConfig(max_response_tokens=200),
        loss=LossConfig(**loss),
        pruning=PruningConfig(completions=CompletionPruningConfig(rule=rule, keep=keep), max_weight=max_weight),
        pack=pack or PackConfig(),
    )

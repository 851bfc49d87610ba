"""Metadata of made-up steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_dppo.config import CompletionPruningConfig, Config, LossConfig, PackConfig, PruningConfig, RolloutConfig
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.pack import prompts_shared
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import Prompt, StepMetadata, no_segments


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
        "response_lengths": lengths,
        "sampled_lengths": fields.get("response_lengths", lengths),
        "further_lengths": no_further((groups, samples)),
        "rewards": (rng.random((groups, samples)) < rng.random((groups, 1))).astype(float),
        "score_norms": np.sqrt(lengths * rng.uniform(0.1, 0.5, (groups, samples))),
        "log_ratios": np.zeros((groups, samples, 2)),
        "teacher": np.full(groups, -1),
        "segments": no_segments((groups, samples)),
        "versions": np.zeros((groups, samples), np.int64),
        "truncated": np.zeros((groups, samples), bool),
        "owners": rng.integers(0, 4, groups),
    }
    made |= fields
    made.setdefault("shared_lengths", prompts_shared(made["prompt_lengths"], samples))
    return StepMetadata(**made, window=float((1 / made["prompt_inclusion"]).sum()) if window is None else window)


def step_config(
    *, rule: str = "neyman", keep: Keep = 0.5, max_weight: float = 5.0, pack: PackConfig | None = None, **loss: Any
) -> Config:
    """A configuration of what the planner reads."""
    return Config(
        rollout=RolloutConfig(max_response_tokens=200),
        loss=LossConfig(**loss),
        pruning=PruningConfig(completions=CompletionPruningConfig(rule=rule, keep=keep), max_weight=max_weight),
        pack=pack or PackConfig(),
    )


def made_up_pool(size: int) -> list[Prompt]:
    """Prompts whose text says nothing of how hard they are: each asks for its own number."""
    return [
        Prompt(id=i, token_ids=np.array([i % 7, i % 5, 3], np.int32), text=f"say {i}", label=str(i))
        for i in range(size)
    ]


class Foretold(PromptHistory):
    """What some predictor says of the window, true or not; it has not seen the step's rollouts."""

    def __init__(self, squares: np.ndarray, tokens: np.ndarray) -> None:
        super().__init__(0.9)
        self._squares, self._tokens = squares, tokens

    def expected_square(self, prompt_ids: np.ndarray, *, group_size: int, normalised: bool) -> np.ndarray:
        return self._squares[prompt_ids]

    def expected_tokens(self, prompt_ids: np.ndarray) -> np.ndarray:
        return self._tokens[prompt_ids]

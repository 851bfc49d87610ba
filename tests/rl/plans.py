"""Made-up steps for the planner: metadata, configurations, plans, training samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LossConfig,
    PackConfig,
    PruningConfig,
    RolloutConfig,
)
from megatron_dppo.config.types import Keep
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.pruning.forecast import PromptFeatures, PromptForecast
from megatron_dppo.rl.types import Floats, Ints, MinibatchPlan, Prompt, StepMetadata, StepPlan

LAYOUT = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}


def step_metadata(
    groups: int, samples: int = 8, *, seed: int = 0, window: float | None = None, **fields: Any
) -> StepMetadata:
    """Return metadata with rewards of 0 and 1 and lengths of 1 to 200 tokens; ``fields`` replace
    the made-up ones."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.5, 0.8, (groups, samples)), 1, 200).astype(np.int64)
    made: dict[str, Any] = {
        "prompt_ids": np.sort(rng.permutation(1000)[:groups]),
        "prompt_inclusion": np.ones(groups),
        "prompt_lengths": rng.integers(5, 30, groups),
        "response_lengths": lengths,
        "sampled_lengths": fields.get("response_lengths", lengths),
        "rewards": (rng.random((groups, samples)) < rng.random((groups, 1))).astype(float),
        "score_norms": np.sqrt(lengths * rng.uniform(0.1, 0.5, (groups, samples))),
        "versions": np.zeros((groups, samples), np.int64),
        "owners": rng.integers(0, 4, groups),
    }
    made |= fields
    plain = planning.build_default_fields(made["prompt_lengths"], samples)
    total = float((1 / made["prompt_inclusion"]).sum()) if window is None else window
    return StepMetadata(**(plain | made), window=total)


def step_config(
    *,
    rule: str = "neyman",
    keep: Keep = 0.5,
    max_weight: float = 5.0,
    pack: PackConfig | None = None,
    **loss: Any,
) -> Config:
    """Return a configuration with the settings that the planner reads."""
    return Config(
        rollout=RolloutConfig(max_response_tokens=200),
        loss=LossConfig(**loss),
        pruning=PruningConfig(
            completions=CompletionPruningConfig(rule=rule, keep=keep), max_weight=max_weight
        ),
        pack=pack or PackConfig(),
    )


def plan(metadata: StepMetadata, config: Config, **options: Any) -> StepPlan:
    """Plan a step for one replica, unless ``options`` name another layout."""
    return planning.plan_step(metadata, config, **(LAYOUT | options))


def training_sample(
    samples: MinibatchPlan, k: int, prompt_ids: Ints, response_ids: Ints, **fields: Any
) -> TrainingSample:
    """Return row ``k`` of a plan with its tokens; ``fields`` replace the defaults of what the plan
    does not know."""
    made = {
        "engine_logprobs": np.zeros(len(response_ids), np.float32),
        "loss_mask": np.ones(len(response_ids), bool),
        "advantage": float(samples.advantage[k, 0]),
        "shared": int(samples.shared_length[k]),
    }
    return TrainingSample(
        prompt_ids, response_ids, scale=float(samples.scale[k]), version=0, **(made | fields)
    )


def made_up_pool(size: int) -> list[Prompt]:
    """Return prompts whose text does not tell their difficulty: each asks for its own number."""
    return [
        Prompt(id=i, token_ids=np.array([i % 7, i % 5, 3], np.int32), text=f"say {i}", label=str(i))
        for i in range(size)
    ]


class Foretold(PromptForecast):
    """Predictor with given values, true or not, that has not seen the step's rollouts."""

    def __init__(self, squares: Floats, tokens: Floats) -> None:
        super().__init__(PromptFeatures(()))
        self._given_squares, self._given_tokens = squares, tokens

    def expected_square(self, prompt_ids: Ints, *, group_size: int) -> Floats:
        return self._given_squares[prompt_ids]

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        return self._given_tokens[prompt_ids]

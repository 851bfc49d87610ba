"""TRL's GRPOTrainer with and without pruning of completions, on a CPU, one thread.

    python benchmarks/in_trl.py [--json]

``step_time_ratio`` is the CPU seconds of TRL's own optimizer step over those of a step at
``--budget``: draw, forward and backward passes, optimizer. Part of it is that rows of like length
share a micro-batch, which saves padding; ``all_kept_time_ratio`` is that of a step with all
completions kept, and has this part alone. The completions come from a function, so that generation
takes no time, as on GPUs of its own; all arms have the same ones. Their lengths are lognormal, and
half of the rewards are 1, so that few groups lack a gradient. ``smaller_batch_time_ratio`` is that
of an unpruned step over half of the prompts: the control, since a smaller batch saves time as well.
Arms take their steps in turn.

``gradient_error`` is, for each loss, the norm of the mean pruned gradient less TRL's gradient
without pruning, over the norm of the latter. The mean is over all offsets of the draw, in fp64, on
a policy of 16 dimensions. ``left_to_trl`` is that of ``dr_grpo`` with the divisor that TRL takes by
itself.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import arguments, finish, in_turn, paired_ratio
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl import GRPOTrainer

from megatron_dppo.integrations import trl as integration
from megatron_dppo.integrations.trl import PrunedGRPOTrainer, Pruning
from tests.integrations import trl_steps
from tests.integrations.trl_steps import relative_error, trainer, write_policy

SAMPLES, ROWS, PROMPT_TOKENS = 8, 8, 32


class Stopwatch(TrainerCallback):
    """CPU seconds of the last optimizer step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.process_time() - self._began


def completions(tokens: int, vocabulary: int) -> Callable[[list[str], GRPOTrainer], dict[str, Any]]:
    """TRL's ``rollout_func``: at most ``tokens`` random tokens for each prompt."""

    def roll_out(prompts: list[str], made: GRPOTrainer) -> dict[str, Any]:
        rng = np.random.default_rng(roll_out.calls)  # type: ignore[attr-defined]
        lengths = np.clip(rng.lognormal(np.log(0.3 * tokens), 0.6, len(prompts)), 4, tokens).astype(
            int
        )
        return {
            "prompt_ids": rng.integers(2, vocabulary, (len(prompts), PROMPT_TOKENS)).tolist(),
            "completion_ids": [rng.integers(2, vocabulary, length).tolist() for length in lengths],
            "logprobs": [np.log(rng.uniform(0.2, 1.0, length)).tolist() for length in lengths],
        }

    roll_out.calls = 0  # type: ignore[attr-defined]
    return roll_out


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(tokens) % 2) for tokens in completion_ids]


def contender(
    policy: Path, folder: Path, kind: type, prompts: int, tokens: int, **own: Any
) -> Callable[[int], float]:
    roll_out = completions(tokens, Qwen3Config.from_pretrained(policy).vocab_size)
    made = trainer(
        policy,
        folder,
        kind,
        rewards=even,
        rollout_func=roll_out,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=prompts * SAMPLES // ROWS,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        model_init_kwargs={"dtype": torch.float32},
        max_steps=1,
        **own,
    )
    made.add_callback(watch := Stopwatch())

    def step(number: int) -> float:
        roll_out.calls = number  # type: ignore[attr-defined]
        made.train()
        return watch.seconds

    return step


def step_times(options: Any, folder: Path) -> dict[str, list[float]]:
    policy = write_policy(folder / "policy")
    shape = dict(
        intermediate_size=3 * options.hidden, num_attention_heads=options.hidden // 64, head_dim=64
    )
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_key_value_heads=2,
        **shape,
    )
    Qwen3ForCausalLM(config).save_pretrained(policy)
    given = (options.prompts, options.tokens)
    pruning = Pruning(budget=options.budget)
    arms = {
        "unpruned": contender(policy, folder, GRPOTrainer, *given),
        "pruned": contender(policy, folder, PrunedGRPOTrainer, *given, pruning=pruning),
        "all_kept": contender(
            policy, folder, PrunedGRPOTrainer, *given, pruning=Pruning(budget=1.0)
        ),
        "smaller_batch": contender(
            policy, folder, GRPOTrainer, options.prompts // 2, options.tokens
        ),
    }
    return in_turn(arms, options.repeats)


def gradient_errors(folder: Path) -> dict[str, float]:
    policy = write_policy(folder / "tiny")
    losses = sorted(integration.DIVIDED_BY_ROWS | integration.DIVIDED_BY_TOKENS)
    return {
        name: relative_error(policy, folder, loss_type=name, num_iterations=2) for name in losses
    }


def error_left_to_trl(folder: Path) -> float:
    with (
        mock.patch.object(
            integration, "DIVIDED_BY_ROWS", integration.DIVIDED_BY_ROWS - {"dr_grpo"}
        ),
        mock.patch.object(
            integration, "DIVIDED_BY_TOKENS", integration.DIVIDED_BY_TOKENS | {"dr_grpo"}
        ),
    ):
        return relative_error(folder / "tiny", folder, loss_type="dr_grpo", num_iterations=2)


def main() -> None:
    options = arguments(
        __doc__,
        budget=(0.5, "fraction of the tokens that is trained on; default: %(default)s"),
        repeats=5,
        prompts=8,
        tokens=192,
        hidden=256,
        layers=4,
    ).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        errors, left = gradient_errors(folder), error_left_to_trl(folder)
        seconds = step_times(options, folder)
    ratios = {name: paired_ratio(seconds["unpruned"], seconds[name]) for name in seconds}
    figures = {
        "budget": options.budget,
        "step_time_ratio": ratios["pruned"]["ratio"],
        "step_time_interval": ratios["pruned"]["interval"],
        "all_kept_time_ratio": ratios["all_kept"]["ratio"],
        "smaller_batch_time_ratio": ratios["smaller_batch"]["ratio"],
        "seconds": {name: float(np.median(each)) for name, each in seconds.items()},
        "gradient_error": errors,
        "left_to_trl": left,
        "trl": trl_steps.VERSION,
    }
    finish(figures, options)


if __name__ == "__main__":
    main()

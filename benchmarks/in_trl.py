"""TRL's GRPOTrainer with and without pruning of completions, on a CPU, one thread.

    python benchmarks/in_trl.py [--json]

All arms share the completions, of lognormal lengths, which a function supplies: generation takes no
time, as on separate GPUs. Half of the rewards are 1, for few groups without a gradient. Arms take
steps in turn.

Time ratios are CPU seconds of TRL's own optimizer step, divided by CPU seconds of another step
(draw, forward and backward passes, optimizer):

- ``step_time_ratio``: a step at ``--budget``. Part of the gain is less padding, because rows of
  similar length share a micro-batch.
- ``all_kept_time_ratio``: a step with all completions kept. The gain is from padding alone.
- ``smaller_batch_time_ratio``: an unpruned step over half of the prompts. Control: a smaller batch
  saves time too.

Errors are norms of a difference of gradients, mean pruned minus unpruned, divided by the norm of
the unpruned gradient. The mean covers all offsets of the draw, in fp64, on a policy of 16
dimensions:

- ``gradient_error``: error of each loss.
- ``left_to_trl``: error of ``dr_grpo`` with TRL's own divisor.
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
    """Timer of the last optimizer step, in CPU seconds."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.process_time() - self._began


def completions(tokens: int, vocabulary: int) -> Callable[[list[str], GRPOTrainer], dict[str, Any]]:
    """Build a ``rollout_func`` for TRL: at most ``tokens`` random tokens per prompt."""

    def roll_out(prompts: list[str], made: GRPOTrainer) -> dict[str, Any]:
        rng = np.random.default_rng(roll_out.calls)  # type: ignore[attr-defined]
        lognormal = rng.lognormal(np.log(0.3 * tokens), 0.6, len(prompts))
        lengths = np.clip(lognormal, 4, tokens).astype(int)
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
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        intermediate_size=3 * options.hidden,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(policy)
    sizes = (options.prompts, options.tokens)
    half = (options.prompts // 2, options.tokens)
    pruning = Pruning(budget=options.budget)
    full = Pruning(budget=1.0)
    arms = {
        "unpruned": contender(policy, folder, GRPOTrainer, *sizes),
        "pruned": contender(policy, folder, PrunedGRPOTrainer, *sizes, pruning=pruning),
        "all_kept": contender(policy, folder, PrunedGRPOTrainer, *sizes, pruning=full),
        "smaller_batch": contender(policy, folder, GRPOTrainer, *half),
    }
    return in_turn(arms, options.repeats)


def gradient_errors(folder: Path) -> dict[str, float]:
    policy = write_policy(folder / "tiny")
    losses = sorted(integration.DIVIDED_BY_ROWS | integration.DIVIDED_BY_TOKENS)
    errors = {}
    for name in losses:
        errors[name] = relative_error(policy, folder, loss_type=name, num_iterations=2)
    return errors


def error_left_to_trl(folder: Path) -> float:
    by_rows = integration.DIVIDED_BY_ROWS - {"dr_grpo"}
    by_tokens = integration.DIVIDED_BY_TOKENS | {"dr_grpo"}
    with (
        mock.patch.object(integration, "DIVIDED_BY_ROWS", by_rows),
        mock.patch.object(integration, "DIVIDED_BY_TOKENS", by_tokens),
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
        errors = gradient_errors(folder)
        left = error_left_to_trl(folder)
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

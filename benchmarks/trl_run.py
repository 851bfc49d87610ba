"""Training by TRL's GRPOTrainer, in TRL's environment, for ``against_trl.py`` and
``real_curves.py``.

Settings suit TRL best on a CPU: fp32, no gradient checkpointing, one rollout per optimizer step and
therefore no pass for old log-probabilities, no reference model, no dropout, no checkpoints,
PyTorch's fused AdamW.

The only argument is a JSON object:

- ``policy``: Hugging Face directory
- ``pool``: JSONL file with ``prompt`` and ``label``
- ``steps``
- ``prompts``: prompts per step
- ``samples``: samples per prompt
- ``max_response_tokens``
- ``batch``: sequences per forward and backward pass
- ``lr``
- ``threads``
- ``reward``: ``sum``, ``exact`` or ``calculation``
- ``settings``: overrides of GRPOConfig
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_watch import StepWatch, compute_score
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class InTurn(TrainerCallback):
    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._watch.turn()


class Counted(GRPOTrainer):
    """Trainer with counts of real and padded tokens in the backward pass."""

    slots = 0
    """Tokens with padding."""
    tokens = 0
    """Tokens without padding."""

    def _compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        for mask in (inputs["prompt_mask"], inputs["completion_mask"]):
            self.slots += mask.numel()
            self.tokens += int(mask.sum())
        return super()._compute_loss(model, inputs)


def calculated(completion: list[dict[str, str]], truth: str) -> float:
    """Return 1 if the last boxed calculation gives the number, else 0."""
    boxes = re.findall(r"\\boxed\{([-+*/() \d]{1,80})\}", completion[0]["content"])
    # A tower of powers could take forever.
    if not boxes or "**" in boxes[-1]:
        return 0.0
    try:
        return float(eval(boxes[-1]) == int(truth))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return 0.0


def exact(completion: str, truth: str) -> float:
    """Return 1 if the text after the last number sign is the label, else 0."""
    return float(completion.rpartition("#")[2].strip() == truth)


SCORES = {
    "sum": lambda completion, truth: compute_score("", completion, truth),
    "exact": exact,
    "calculation": calculated,
}


def rows_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    watch = StepWatch()
    torch.set_num_threads(options.threads)
    rows = rows_of(options.pool)
    score = SCORES[options.reward]

    def reward(
        prompts: list[Any], completions: list[Any], label: list[str], **_: Any
    ) -> list[float]:
        return [score(*pair) for pair in zip(completions, label, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        own = dict(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.prompts * options.samples // options.batch,
            num_generations=options.samples,
            max_completion_length=options.max_response_tokens,
            loss_type="grpo",
            beta=0.0,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            optim="adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            model_init_kwargs={"dtype": "float32"},
        )
        examples = [{"prompt": row["prompt"], "label": row["label"]} for row in rows]
        trainer = Counted(
            model=options.policy,
            reward_funcs=reward,
            args=GRPOConfig(**own | options.settings),
            train_dataset=Dataset.from_list(examples),
            processing_class=AutoTokenizer.from_pretrained(options.policy),
            callbacks=[InTurn(watch)],
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    watch.finish(
        padding=1.0 - trainer.tokens / trainer.slots,
        trained_tokens=trainer.tokens / options.steps,
        reward=[row["reward"] for row in logged],
        response_length=[row["completions/mean_length"] for row in logged],
    )


if __name__ == "__main__":
    main()

"""One training by TRL's GRPOTrainer, in an environment of its own; against_trl.py and real_model.py
run it.

Settings are those that suit it best on a CPU: fp32, no gradient checkpointing, one rollout per
optimizer step and therefore no pass for old log-probabilities, no reference model, no dropout,
nothing saved, PyTorch's fused AdamW.

The only argument is a JSON object: ``policy`` (Hugging Face directory), ``pool`` (JSONL with prompt
and label), ``steps``, ``prompts`` per step, ``samples`` per prompt, ``max_response_tokens``,
``batch`` (sequences per forward and backward pass), ``lr``, ``threads``, ``reward`` (``sum``,
``exact`` or ``calculation``), ``settings`` (more of GRPOConfig, which win), and, if it
evaluates itself, ``load_problems`` (a file like ``pool``) and ``evaluate_every`` (steps).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_watch import StepWatch, compute_score
from transformers import AutoTokenizer, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer


class InTurn(TrainerCallback):
    def __init__(self, watch: StepWatch, more: Callable[[int], dict[str, float]]) -> None:
        self._watch, self._more = watch, more

    def on_step_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        self._watch.turn(partial(self._more, state.global_step))


class Counted(GRPOTrainer):
    """Counts the tokens of what goes through the backward pass."""

    slots = tokens = 0

    def _compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        for mask in (inputs["prompt_mask"], inputs["completion_mask"]):
            self.slots += mask.numel()
            self.tokens += int(mask.sum())
        return super()._compute_loss(model, inputs)


def calculated(completion: list[dict[str, str]], truth: str) -> float:
    """1 where the last calculation in a box makes the number."""
    boxes = re.findall(r"\\boxed\{([-+*/() \d]{1,80})\}", completion[0]["content"])
    try:
        return float(bool(boxes) and "**" not in boxes[-1] and eval(boxes[-1]) == int(truth))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return 0.0


def exact(completion: str, truth: str) -> float:
    """1 where the text after the last number sign is the label."""
    return float(completion.rpartition("#")[2].strip() == truth)


SCORES = {
    "sum": lambda completion, truth: compute_score("", completion, truth),
    "exact": exact,
    "calculation": calculated,
}


def rows_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def accuracy(
    trainer: GRPOTrainer, held_out: list[dict[str, str]], options: argparse.Namespace
) -> float:
    """Share of the held-out prompts whose greedy answer scores 1."""
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    asked = tokenizer(
        [row["prompt"] for row in held_out], padding=True, padding_side="left", return_tensors="pt"
    )
    asked.pop("token_type_ids", None)
    ids = model.generate(**asked, do_sample=False, max_new_tokens=options.max_response_tokens)
    answers = tokenizer.batch_decode(
        ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
    )
    model.train()
    score = SCORES[options.reward]
    return sum(
        score(answer, row["label"]) for answer, row in zip(answers, held_out, strict=True)
    ) / len(held_out)


def main() -> None:
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    watch = StepWatch()
    torch.set_num_threads(options.threads)
    rows = rows_of(options.pool)
    held_out = rows_of(options.held_out) if "held_out" in options else []
    score = SCORES[options.reward]

    def reward(
        prompts: list[Any], completions: list[Any], label: list[str], **_: Any
    ) -> list[float]:
        return [
            score(completion, truth) for completion, truth in zip(completions, label, strict=True)
        ]

    def more(step: int) -> dict[str, float]:
        evaluates = held_out and step % options.evaluate_every == 0
        return {"accuracy": accuracy(trainer, held_out, options)} if evaluates else {}

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
        trainer = Counted(
            model=options.policy,
            reward_funcs=reward,
            args=GRPOConfig(**own | options.settings),
            train_dataset=Dataset.from_list(
                [{"prompt": row["prompt"], "label": row["label"]} for row in rows]
            ),
            processing_class=AutoTokenizer.from_pretrained(options.policy),
            callbacks=[InTurn(watch, more)],
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    watch.finish(
        partial(more, options.steps),
        padding=1.0 - trainer.tokens / trainer.slots,
        trained_tokens=trainer.tokens / options.steps,
        reward=[row["reward"] for row in logged],
        response_length=[row["completions/mean_length"] for row in logged],
    )


if __name__ == "__main__":
    main()

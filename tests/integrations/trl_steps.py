"""Steps of TRL's trainers on a CPU, with and without pruning, for tests and
``benchmarks/in_trl.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from megatron_dppo.integrations.trl import PrunedGRPOTrainer, Pruning
from megatron_dppo.rl.pruning import prune_candidates
from tests.rl.integration import FixedOffset, outcomes

VERSION = trl.__version__
WORDS = ["<pad>", "<eos>", *"0123456789+= "]
SAMPLES, ROWS, ACCUMULATED, LONGEST = 4, 4, 3, 8
"""Completions of a prompt, rows of a micro-batch, micro-batches of an optimizer step, most tokens
of a completion."""


def write_policy(place: Path, *, experts: int = 0) -> Path:
    """Write a Qwen3 of 16 dimensions, with a token for each character of a sum."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8, num_key_value_heads=1, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    if experts:
        shape |= dict(num_experts=experts, num_experts_per_tok=1, moe_intermediate_size=16)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(place)
    else:
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def odd(completions: list[str], **_: Any) -> list[float]:
    """Return 1 for an odd sum of characters."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def long(completions: list[str], **_: Any) -> list[float | None]:
    """Return the length, scaled, and None for empty completions."""
    return [len(text) / 8 if text else None for text in completions]


def trainer(policy: Path, folder: Path, kind: type = GRPOTrainer, **options: Any) -> GRPOTrainer:
    own = {name: options.pop(name) for name in ("pruning", "rollout_func") if name in options}
    rewards = options.pop("rewards", odd)
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATED,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        model_init_kwargs={"dtype": torch.float64},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=4,
        learning_rate=0.01,
    )
    rows = [{"prompt": f"{'7' * (i % 3)}{i % 10}+{j}="} for i in range(10) for j in range(10)]
    return kind(
        model=str(policy),
        reward_funcs=rewards,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_list(rows),
        **own,
    )


def rolled_out(made: GRPOTrainer, begin: int) -> Any:
    """Generate a batch and move the policy away from it. Returns the loader's batch, before
    micro-batch ``begin``."""
    made.model.train()
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    loaded = next(iter(made.get_train_dataloader()))
    made._step = 0
    torch.manual_seed(3 + made.accelerator.process_index)
    GRPOTrainer._prepare_inputs(made, loaded)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    made._step = begin
    return loaded


def gradient(made: GRPOTrainer, loaded: Any, begin: int) -> torch.Tensor:
    """Return the gradient of one optimizer step, by the trainer's own micro-steps; [parameters]."""
    made.model.zero_grad()
    made._step = begin
    for _ in range(made.args.gradient_accumulation_steps):
        made.training_step(made.model, loaded, None)
    return torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])


def draws(pruned: PrunedGRPOTrainer) -> Iterator[float]:
    """Yield the probability of each outcome of the draw, while the trainer's next optimizer step
    has that outcome."""
    candidates, pruning = pruned._candidates, pruned.pruning
    _, inclusion = prune_candidates(
        candidates, pruning.budget, rule=pruning.rule, generated=1.0, seed=0
    )
    order = np.lexsort((candidates.advantage.ravel(), np.indices(inclusion.shape)[0].ravel()))
    assert ((inclusion > 0.0) & (inclusion < 1.0)).any()
    for offset, length in outcomes(inclusion.ravel()[order]):
        with mock.patch.object(
            np.random, "default_rng", lambda _, offset=offset: FixedOffset(offset)
        ):
            pruned._drawn_at = -1
            yield length


def relative_error(
    policy: Path,
    folder: Path,
    prepare: Callable[[GRPOTrainer], object] = lambda made: None,
    budget: float = 0.5,
    kind: type[GRPOTrainer] = GRPOTrainer,
    **case: Any,
) -> float:
    """Compare the mean pruned gradient over all offsets with the gradient of the trainer without
    pruning."""
    begin = ACCUMULATED
    pruning = Pruning(budget=budget, max_weight=4.0)
    pruned_kind = type("Pruned", (PrunedGRPOTrainer, kind), {})
    plain, pruned = (
        trainer(policy, folder, kind, **case),
        trainer(policy, folder, pruned_kind, pruning=pruning, **case),
    )
    loaded = []
    for made in (plain, pruned):
        prepare(made)
        loaded.append(rolled_out(made, begin))
    for ours, theirs in zip(pruned._buffered_inputs, plain._buffered_inputs, strict=True):
        assert torch.equal(ours["completion_ids"], theirs["completion_ids"])
    full = gradient(plain, loaded[0], begin)
    assert full.norm() > 1e-3
    mean = sum(share * gradient(pruned, loaded[1], begin) for share in draws(pruned))
    return float((mean - full).norm() / full.norm())


def trained(made: GRPOTrainer, **options: Any) -> torch.Tensor:
    """Train, and return the parameters."""
    made.train(**options)
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])

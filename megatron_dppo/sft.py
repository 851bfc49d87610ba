"""Supervised warm-up on worked answers, with the policy, packs and parallelism of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch

from megatron_dppo.config import Config, OptimizerConfig
from megatron_dppo.data.prompts import Pool, SupervisedExample, load_supervised_examples
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Responses, Sums, compute_learning_rate
from megatron_dppo.observe.console import Console
from megatron_dppo.observe.metrics import MetricsLog
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.observe.watchdog import Watchdog
from megatron_dppo.parallel.world import World, initialize, shutdown
from megatron_dppo.process.streams import make_progress_bar
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.packing import resolve_min_packs
from megatron_dppo.trainer.assemble import PolicyParts, acquire_run_lock, assemble_policy
from megatron_dppo.trainer.prompt_sampler import check_shares, make_order
from megatron_dppo.trainer.resume import record_warm_up

CONSOLE_ROWS = 20
"""Steps on a console without progress bar."""


def sft(config: Config) -> None:
    """Minimise the mean negative log-likelihood of answer tokens; write the policy to ``sft.out``.

    Raises:
        UserError: on every rank, if the user can mend the cause, or a loss or gradient is not
            finite.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with ExitStack() as to_close:
        check_lock = acquire_run_lock(config, world, to_close)
        to_close.enter_context(closing(Watchdog.from_config(config, world, PhaseTimers())))
        _run_warm_up(config, world, check_lock)
    shutdown()


def _run_warm_up(config: Config, world: World, check_lock: Callable[[], None]) -> None:
    parts = assemble_policy(config, world, temperature=1.0)
    answers = world.run_on_all_ranks(lambda: _load_answers(config, parts))
    out = Path(config.sft.out or Path(config.run.dir) / "sft")
    # Check the folder before the training, not after.
    parts.check_export(out, setting="sft.out")
    log = MetricsLog(Path(config.run.dir) / "sft-log", resume_step=-1) if world.is_rank0 else None
    console = Console(config.sft.steps) if world.is_rank0 else None
    row_every = max(1, config.sft.steps // CONSOLE_ROWS)
    order = make_order(answers, config.run.seed)
    timers = PhaseTimers()
    size = min(config.sft.batch, len(answers))
    check_shares(answers, size, "sft.batch")
    with make_progress_bar("warm-up steps", config.sft.steps, enabled=world.is_rank0) as advance:
        for step in range(config.sft.steps):
            with timers("step"):
                batch = [answers[int(i)] for i in order.next_window(size)]
                metrics = _update(parts, config, batch, step)
            metrics |= timers.take()
            if log:
                log.write(step + 1, metrics)
            if advance:
                advance(1, f"loss {metrics['train/loss']:.3f}")
            elif console and (step + 1) % row_every == 0:
                console.print_step(step + 1, metrics)
    if log:
        log.close()
    # Another process may have taken the folder meanwhile.
    world.broadcast(check_lock)
    parts.export(out, setting="sft.out")
    world.broadcast(lambda: record_warm_up(out, config))
    if console:
        console.print_banner([f"warmed-up policy: {out}"])


def _load_answers(config: Config, parts: PolicyParts) -> Pool[SupervisedExample]:
    answers = load_supervised_examples(parts.config.data, parts.tokenizer)
    unit = config.layout.pack_multiple
    longest = answers.longest
    if longest > config.usable_pack:
        problem = f"is less than the longest worked answer needs with its prompt, {longest} tokens"
        remedy = (
            f"Raise it to {-(-longest // unit) * unit} or more, or take long answers out of "
            "data.train"
        )
        raise UserError("pack.max_tokens", config.pack.max_tokens, problem, remedy)
    return answers


def _update(
    parts: PolicyParts,
    config: Config,
    batch: Sequence[SupervisedExample],
    step: int,
) -> dict[str, float]:
    # Weigh tokens equally, because a mean per answer would favour short answers.
    tokens = sum(len(answer.response_ids) for answer in batch)
    rate = _compute_rate(config, step)
    least = resolve_min_packs(config.pack.min_per_rank, config.layout.pp)
    packs = parts.pack(
        [_build_sample(a, tokens) for a in batch], replicas=parts.world.dp, min_per_rank=least
    )
    result = parts.actor.update([pack for _, pack in packs], _compute_loss, lr=rate)
    return {
        "train/loss": result.sums["train/loss"],
        "train/entropy_loss": result.sums["entropy"] / tokens,
        "train/grad_norm": result.grad_norm,
        "train/lr": rate,
        "train/tokens": float(sum(len(a.prompt_ids) + len(a.response_ids) for a in batch)),
    }


def _build_sample(answer: SupervisedExample, tokens: int) -> TrainingSample:
    length = len(answer.response_ids)
    return TrainingSample(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        # No engine generated these tokens.
        engine_logprobs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, bool),
        advantage=1.0,
        scale=1.0 / tokens,
        version=0,
    )


def _compute_loss(responses: Responses) -> tuple[torch.Tensor, Sums]:
    loss = -(responses.logprobs * responses.columns["scale"]).sum()
    return loss, {"train/loss": loss.detach(), "entropy": responses.entropy.detach().sum()}


def _compute_rate(config: Config, step: int) -> float:
    settings = OptimizerConfig(
        lr=config.sft.lr, schedule="cosine", warmup_steps=config.sft.warmup_steps
    )
    return compute_learning_rate(settings, step, config.sft.steps)

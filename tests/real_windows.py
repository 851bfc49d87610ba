"""Windows of a small Qwen3 that was really warmed up and trained, with the gradient of every single completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.real_gradients import gradient, gradients, gram, single_packs
from megatron_dppo.config import (
    ArithmeticConfig,
    CompletionPruningConfig,
    Config,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    PromptPruningConfig,
    PruningConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    replace,
)
from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Microbatch
from megatron_dppo.parallel.exchange import deliver
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.objectives import objective_for, soft_overlong_penalty
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.plan import plan_step, take_groups
from megatron_dppo.rl.pruning.draw import PruningDraw, prune_minibatch
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.pruning.schedule import mixed
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Floats, Group, Selection, StepMetadata, StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.sft import sft
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.learner import PolicyLoss
from tests.rl.integration import FixedOffset, outcomes
from tests.small_runs import begin_run

PROMPTS, SAMPLES, LIMIT = 12, 4, 32
HALF_WAY = 8
"""Steps of training between the first window and the second."""
UPDATES = 8
"""Updates between the second window's rollouts and its gradients."""
WINDOW = Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS)
LOSSES = {
    "grpo": LossConfig(name="grpo"),
    "grpo with KL": LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0),
    "dapo": LossConfig(name="dapo"),
    "dr_grpo": LossConfig(name="dr_grpo"),
    "gspo": LossConfig(name="gspo"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One window under one objective. Completions are in the order of the metadata, n = PROMPTS · SAMPLES of them."""

    loss: LossConfig
    metadata: StepMetadata
    """Of the whole window: nothing is pruned yet."""
    history: PromptHistory
    """Of earlier visits to these prompts."""
    gram: Floats
    """[n, n], inner products of the gradients g_i of Σ_t ℓ_t of each completion."""
    packed_error: tuple[float, ...]
    """For drawn plans: ‖packed gradient − Σ scale_i g_i‖ / ‖packed gradient‖."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that was measured of one policy."""

    windows: dict[tuple[str, str], Measured]
    """By stage and objective. After the warm-up, on-policy; half-way through training, some updates after the rollouts;
    ``graded`` is the half-way one with rewards that are not binary."""
    unit_gram: Floats
    """[n, n], of the window after the warm-up, with advantages of 1."""
    clipped: float
    """Share of the half-way window's tokens whose ratio is off 1 by more than GRPO's clip."""
    second_update: tuple[float, float]
    """Relative bias of a second update's gradient whose mask is the first one's, and of one that is drawn again."""


def configure(folder: Path) -> Config:
    """A policy of 52,000 parameters on sums of two and three digits, half of whose carries its teacher forgets."""
    return Config(
        run=RunConfig(dir=str(folder / "run"), steps=100, checkpoint_every=0, export=False),
        model=ModelConfig(path=str(folder / "initial")),
        data=DataConfig(
            chat_template=False,
            max_prompt_tokens=16,
            arithmetic=ArithmeticConfig(
                problems=700, eval_problems=4, max_terms=3, max_operand=9, forgotten_carries=0.5
            ),
        ),
        rollout=RolloutConfig(prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_response_tokens=LIMIT),
        reward=RewardConfig(function="exact"),
        loss=LossConfig(kl_coef=0.01),  # so that there is a reference
        pruning=PruningConfig(prompts=PromptPruningConfig(rule="none")),
        pack=PackConfig(max_tokens=512),
        optimizer=OptimizerConfig(lr=1e-3),
        eval=EvalConfig(every=0, problems=0),
        sft=SftConfig(steps=300, batch=32, lr=1e-2, out=str(folder / "warm")),
    )


def warm_up(rank: int, size: int, folder: Path) -> None:
    """Leave a warmed-up policy in ``folder/warm``."""
    write_model(folder / "initial", hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=192, std=0.05)
    sft(configure(folder))


def measure(rank: int, size: int, folder: Path) -> Measurements:
    """Both windows of one training run."""
    config = configure(folder)
    config = replace(config, model=replace(config.model, path=str(folder / "warm")))
    measured = {}
    with ExitStack() as to_close:
        trainer = begin_run(config, Trainer, to_close)
        trainer.sync(0)
        history = PromptHistory(0.9)
        for step, (stage, before, updates) in enumerate((("warm", 0, 0), ("half-way", HALF_WAY, UPDATES))):
            train(trainer, before)
            for earlier in range(3):
                remember(history, roll_out(trainer, 1000 * step + earlier).metadata)
            rollouts = roll_out(trainer, 1000 * step + 999)
            old = logprobs(trainer, rollouts)
            if stage == "warm":
                unit = gram(gradients(trainer.policy.actor, unit_packs(trainer, rollouts), plain_loss()))
            train(trainer, updates)
            known = old if updates else [None] * len(old)
            for name, loss in LOSSES.items():
                measured[stage, name] = window(trainer, rollouts, loss, history, known)
            if updates:
                measured["graded", "grpo"] = window(trainer, graded(rollouts), LOSSES["grpo"], history, known)
        ratio = np.exp(np.concatenate(logprobs(trainer, rollouts)) - np.concatenate(old))
        second = second_update(trainer, rollouts, old)
    return Measurements(measured, unit, float((np.abs(ratio - 1.0) > 0.2).mean()), second)


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        rollouts = trainer.roll_out(trainer.select(trainer.step))
        trainer.train(trainer.plan(rollouts), rollouts)
        trainer.step += 1


def roll_out(trainer: Trainer, step: int) -> CompleteRollouts:
    """The whole window, generated and scored by the policy as it stands."""
    return trainer.roll_out(StepRollouts(WINDOW, step))


def remember(history: PromptHistory, metadata: StepMetadata) -> None:
    history.update(metadata.prompt_ids, metadata.rewards, group_advantages(metadata.rewards, normalise=True))


def graded(rollouts: CompleteRollouts) -> CompleteRollouts:
    """The same with DAPO's soft penalty over the whole limit: long answers are worth less than short ones."""
    lengths = rollouts.metadata.response_lengths
    penalty = np.array([soft_overlong_penalty(row, limit=LIMIT, buffer=LIMIT) for row in lengths])
    return dataclasses.replace(
        rollouts, metadata=dataclasses.replace(rollouts.metadata, rewards=rollouts.metadata.rewards + penalty)
    )


def groups_of(rollouts: CompleteRollouts) -> list[Group]:
    return [rollouts.held[row] for row in range(PROMPTS)]


def logprobs(trainer: Trainer, rollouts: CompleteRollouts) -> list[np.ndarray | None]:
    """Of each completion's tokens, by the policy as it stands."""
    return trainer.policy.actor.log_probabilities([single.pack for single in unit_packs(trainer, rollouts)])


def unit_packs(trainer: Trainer, rollouts: CompleteRollouts) -> list[Microbatch]:
    """Each completion with an advantage of 1, on-policy."""
    packs = single_packs(groups_of(rollouts), np.ones((PROMPTS, SAMPLES)), trainer.policy.pad_id)
    return [Microbatch(pack) for pack in packs]


def plain_loss() -> PolicyLoss:
    return PolicyLoss(objective_for(LOSSES["grpo"]), kl_coef=0.0, tis_cap=None, version=0)


def window(
    trainer: Trainer,
    rollouts: CompleteRollouts,
    loss: LossConfig,
    history: PromptHistory,
    old: Sequence[np.ndarray | None],
) -> Measured:
    """Every completion's gradient under an objective, and how well they add up to those of real plans."""
    actor, pad_id, groups = trainer.policy.actor, trainer.policy.pad_id, groups_of(rollouts)
    objective, metadata = objective_for(loss), rollouts.metadata
    packs = single_packs(groups, group_advantages(metadata.rewards, normalise=objective.normalise), pad_id)
    reference = [None] * len(packs)
    if loss.kl_coef and trainer.learner.reference:
        reference = trainer.learner.reference.log_probabilities(packs)
    singles = [Microbatch(*parts) for parts in zip(packs, old, reference, strict=True)]
    policy_loss = PolicyLoss(objective, kl_coef=loss.kl_coef, tis_cap=loss.tis_cap, version=0)
    policy_loss.take_scored()
    rows, errors = gradients(actor, singles, policy_loss), []
    for seed in range(2):
        selection, plan = draw_plan(trainer.config, loss, metadata, history, seed)
        held = {row: groups[prompt] for row, prompt in enumerate(selection.prompt_ids)}
        for minibatch in (m for m in plan.minibatches if m.capacity):
            which = selection.prompt_ids[minibatch.samples.group] * SAMPLES + minibatch.samples.completion
            delivered = deliver(trainer.world, minibatch, held)
            full = [build_pack(part, capacity=minibatch.capacity, pad_id=pad_id, align=1) for part in delivered]
            parts = [[singles[i] for i in which[list(members)]] for members in minibatch.packs[0]]
            batches = [
                Microbatch(pack, joined([s.old_logprobs for s in part]), joined([s.reference_logprobs for s in part]))
                for pack, part in zip(full, parts, strict=True)
            ]
            packed = gradient(actor, batches, policy_loss).double()
            summed = torch.from_numpy(minibatch.samples.scale) @ rows[which].double()
            errors.append(float((packed - summed).norm() / packed.norm()))
    return Measured(loss, metadata, deepcopy(history), gram(rows), tuple(errors))


def draw_plan(
    config: Config, loss: LossConfig, metadata: StepMetadata, history: PromptHistory, seed: int
) -> tuple[Selection, StepPlan]:
    """What a run would have drawn of the window: both levels pruned, two updates, packs of a few rows."""
    config = replace(
        config,
        run=replace(config.run, seed=seed),
        loss=replace(loss, updates_per_rollout=2),
        pruning=PruningConfig(),
        pack=PackConfig(max_tokens=96),
    )
    selection = select(
        WINDOW.prompt_ids,
        history,
        config.pruning.prompts,
        group_size=SAMPLES,
        normalised=objective_for(loss).normalise,
        keep=0.7,
        rng=generator(seed, 0, Purpose.PROMPTS),
    )
    part = selected(metadata, selection)
    return selection, plan_step(part, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)


def selected(metadata: StepMetadata, selection: Selection) -> StepMetadata:
    """What the planner would know of the window, had only these prompts been rolled out."""
    part = take_groups(metadata, selection.prompt_ids)
    return dataclasses.replace(part, prompt_inclusion=selection.inclusion, window=float(selection.window))


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    return None if parts[0] is None else np.concatenate(parts)


def offsets(part: StepMetadata, config: Config) -> Iterator[tuple[PruningDraw, float]]:
    """Every outcome of a systematic draw of completions, with its probability."""
    objective, keep = objective_for(config.loss), config.pruning.completions.keep
    known = prune_minibatch(part, config, objective, keep=keep, rng=FixedOffset(0.5))
    groups = np.repeat(np.arange(len(known.advantage)), SAMPLES)
    order = np.lexsort((known.advantage.ravel(), groups))
    for offset, length in outcomes(known.inclusion.ravel()[order]):
        yield prune_minibatch(part, config, objective, keep=keep, rng=FixedOffset(offset)), length


def second_update(
    trainer: Trainer, rollouts: CompleteRollouts, old: Sequence[np.ndarray | None]
) -> tuple[float, float]:
    """Plain steps along each outcome of a first mask, and there the gradients of all rows of three mixed groups."""
    which = mixed(rollouts.metadata)[:3]
    part = take_groups(rollouts.metadata, which)
    groups = [rollouts.held[row] for row in which]
    packs = single_packs(groups, group_advantages(part.rewards, normalise=True), trainer.policy.pad_id)
    rows = (which[:, None] * SAMPLES + np.arange(SAMPLES)).ravel()
    singles = [Microbatch(pack, old[row]) for pack, row in zip(packs, rows, strict=True)]
    config = Config(
        pruning=PruningConfig(
            prompts=PromptPruningConfig(rule="none"), completions=CompletionPruningConfig(rule="neyman", keep=0.5)
        )
    )
    actor, loss = trainer.policy.actor, plain_loss()
    loss.take_scored()
    full = torch.from_numpy(1.0 / (part.response_lengths.ravel() * len(rows)))
    first = gradients(actor, singles, loss).double()
    length = 0.3 / (full @ first).norm()
    start = [parameter.detach().clone() for parameter in actor.parameters()]
    drawn = [
        (torch.from_numpy(np.where(p.kept, p.weight * p.coefficient / p.normaliser, 0.0).ravel()), chance)
        for p, chance in offsets(part, config)
    ]
    expected = sum(scale * chance for scale, chance in drawn)
    once, again, target = torch.zeros(3, first.shape[1], dtype=torch.float64)
    for scale, chance in drawn:
        step = length * (scale @ first)
        with torch.no_grad():
            parts = step.split([parameter.numel() for parameter in start])
            for parameter, origin, change in zip(actor.parameters(), start, parts, strict=True):
                parameter.copy_(origin - change.view_as(origin))
        there = gradients(actor, singles, loss).double()
        once += chance * ((scale - full) @ there)
        again += chance * ((expected - full) @ there)
        target += chance * (full @ there)
    return float(once.norm() / target.norm()), float(again.norm() / target.norm())

"""Windows of a small Qwen3, warmed up and trained, with the gradient of every single completion.

Tests read ``real_windows.npz``: on another processor, 300 updates in floating point lead to other completions.
``python -m tests.laws.real_windows`` measures new windows and writes that file.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.real_gradients import gradient, gradients, gram, single_packs
from megatron_dppo.config import Config, LossConfig, PruningConfig, replace
from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Microbatch
from megatron_dppo.parallel.exchange import deliver
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.objectives import objective_for, soft_overlong_penalty
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.plan import plan_step, take_groups
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Floats, Selection, StepMetadata, StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.sft import sft
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.learner import PolicyLoss
from tests.ranks import RankPool
from tests.rl.plans import step_metadata
from tests.small_runs import begin_run

STORED = Path(__file__).with_suffix(".npz")
PROMPTS, SAMPLES, LIMIT = 12, 4, 32
WINDOW = Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS)
LOSSES = {
    "grpo": LossConfig(name="grpo"),
    "grpo with KL": LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0),
    "dapo": LossConfig(name="dapo"),
    "dr_grpo": LossConfig(name="dr_grpo"),
    "gspo": LossConfig(name="gspo"),
}
CASES = (("binary", "grpo"), *(("graded", loss) for loss in LOSSES))
"""Kind of rewards and loss of each window. Graded rewards have DAPO's soft penalty over the whole limit."""
UPPER = np.triu_indices(PROMPTS * SAMPLES)
# A policy of 52,000 parameters on sums of two and three digits. The teacher forgets half of the carries.
# A KL term makes the trainer load the reference.
SETTINGS = f"""
run.checkpoint_every=0 run.export=false data.chat_template=false data.max_prompt_tokens=16
data.arithmetic.problems=700 data.arithmetic.eval_problems=4 data.arithmetic.max_terms=3
data.arithmetic.max_operand=9 data.arithmetic.forgotten_carries=0.5
rollout.prompts_per_step={PROMPTS} rollout.samples_per_prompt={SAMPLES} rollout.max_response_tokens={LIMIT}
reward.function=exact loss.kl_coef=0.01 pruning.prompts.rule=none pack.max_tokens=512 optimizer.lr=1e-3
eval.every=0 eval.problems=0 sft.batch=32 sft.lr=1e-2
"""


@dataclass(frozen=True, slots=True)
class RealWindow:
    """Unpruned window under one loss, with n = PROMPTS · SAMPLES completions."""

    loss: LossConfig
    metadata: StepMetadata
    history: PromptHistory
    """Three earlier visits to every prompt."""
    gram: Floats
    """[n, n], inner products of the gradients of Σ_t ℓ_t of each completion."""


def read_windows() -> dict[tuple[str, str], RealWindow]:
    with np.load(STORED) as stored:
        return {(kind, loss): _window(kind, loss, stored) for kind, loss in CASES}


def _window(kind: str, loss: str, stored: Mapping[str, Any]) -> RealWindow:
    known = {name: stored[name] for name in ("prompt_lengths", "response_lengths", "score_norms")}
    metadata = step_metadata(PROMPTS, SAMPLES, prompt_ids=WINDOW.prompt_ids, rewards=stored[f"{kind}/rewards"], **known)
    half = np.zeros((PROMPTS * SAMPLES, PROMPTS * SAMPLES))
    half[UPPER] = stored[f"{kind}/{loss}/gram"]
    return RealWindow(
        LOSSES[loss], metadata, history_of(stored[f"{kind}/earlier"]), half + half.T - np.diag(np.diag(half))
    )


def history_of(earlier: Floats) -> PromptHistory:
    """Return the history of visits to all prompts, whose rewards are [visits, PROMPTS, SAMPLES]."""
    history = PromptHistory(0.9)
    for rewards in earlier:
        history.update(WINDOW.prompt_ids, rewards, group_advantages(rewards, normalise=True))
    return history


def make_windows(ranks: RankPool, folder: Path, *, warm_up: int, updates: int) -> dict[str, Any]:
    """Return the arrays of ``real_windows.npz``, and ``packed_errors`` by kind of rewards and loss.

    Args:
        warm_up: steps of supervised training.
        updates: steps of reinforcement learning before the window's rollouts, and as many after them.
    """
    ranks.run(1, _warm_up, folder, warm_up)
    return ranks.run(1, _measure, folder, updates)[0]


def _configure(folder: Path, model: str, *more: str) -> Config:
    paths = [f"run.dir={folder / 'run'}", f"model.path={folder / model}", f"sft.out={folder / 'warm'}"]
    return load_config(None, [*SETTINGS.split(), *paths, *more])


def _warm_up(rank: int, size: int, folder: Path, steps: int) -> None:
    write_model(folder / "initial", hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=192, std=0.05)
    sft(_configure(folder, "initial", f"sft.steps={steps}"))


def _measure(rank: int, size: int, folder: Path, updates: int) -> dict[str, Any]:
    with ExitStack() as to_close:
        trainer = begin_run(_configure(folder, "warm", "run.steps=100"), Trainer, to_close)
        trainer.sync(0)
        _train(trainer, updates)
        visits = [trainer.roll_out(StepRollouts(WINDOW, 1000 + visit)) for visit in range(4)]
        packs = _single_packs(trainer, visits[-1], np.ones((PROMPTS, SAMPLES)))
        old = trainer.policy.actor.log_probabilities(packs)
        _train(trainer, updates)
        new = trainer.policy.actor.log_probabilities(packs)
        metadata = visits[-1].metadata
        found: dict[str, Any] = {
            "prompt_lengths": metadata.prompt_lengths,
            "response_lengths": metadata.response_lengths,
            "score_norms": metadata.score_norms,
            "clipped": np.mean(np.abs(np.expm1(np.concatenate(new) - np.concatenate(old))) > 0.2),
            "packed_errors": {},
        }
        for kind, loss in CASES:
            rewards = np.stack([_rewards(visit.metadata, kind) for visit in visits])
            found |= {f"{kind}/earlier": rewards[:-1], f"{kind}/rewards": rewards[-1]}
            window = dataclasses.replace(visits[-1], metadata=dataclasses.replace(metadata, rewards=rewards[-1]))
            rows, errors = _gradients(trainer, window, LOSSES[loss], history_of(rewards[:-1]), old)
            found[f"{kind}/{loss}/gram"] = gram(rows)[UPPER].astype(np.float32)
            found["packed_errors"][kind, loss] = errors
    return found


def _train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        rollouts = trainer.roll_out(trainer.select(trainer.step))
        trainer.train(trainer.plan(rollouts), rollouts)
        trainer.step += 1


def _rewards(metadata: StepMetadata, kind: str) -> Floats:
    if kind == "binary":
        return metadata.rewards
    penalty = [soft_overlong_penalty(row, limit=LIMIT, buffer=LIMIT) for row in metadata.response_lengths]
    return metadata.rewards + np.array(penalty)


def _single_packs(trainer: Trainer, rollouts: CompleteRollouts, advantage: Floats) -> list[Any]:
    groups = [rollouts.held[row] for row in range(PROMPTS)]
    return single_packs(groups, advantage, trainer.policy.pad_id)


def _gradients(
    trainer: Trainer,
    rollouts: CompleteRollouts,
    loss: LossConfig,
    history: PromptHistory,
    old: Sequence[np.ndarray],
) -> tuple[torch.Tensor, list[float]]:
    """Return the gradient of every completion, and the packed errors of drawn plans.

    A packed error is ‖packed gradient − Σ scale_i g_i‖ / ‖packed gradient‖ of one minibatch.
    """
    actor, pad_id, metadata = trainer.policy.actor, trainer.policy.pad_id, rollouts.metadata
    objective = objective_for(loss)
    packs = _single_packs(trainer, rollouts, group_advantages(metadata.rewards, normalise=objective.normalise))
    reference = [None] * len(packs)
    if loss.kl_coef:
        reference = trainer.learner.reference.log_probabilities(packs)
    singles = [Microbatch(*parts) for parts in zip(packs, old, reference, strict=True)]
    policy_loss = PolicyLoss(objective, kl_coef=loss.kl_coef, tis_cap=loss.tis_cap, version=0)
    policy_loss.take_scored()
    rows = gradients(actor, singles, policy_loss)
    errors = []
    for seed in range(2):
        selection, plan = _draw_plan(trainer.config, loss, metadata, history, seed)
        held = {row: rollouts.held[prompt] for row, prompt in enumerate(selection.prompt_ids)}
        for minibatch in (m for m in plan.minibatches if m.capacity):
            samples = minibatch.samples
            place = selection.prompt_ids[samples.group] * SAMPLES + samples.completion
            batches = []
            for members, part in zip(minibatch.packs[0], deliver(trainer.world, minibatch, held), strict=True):
                pack = build_pack(part, capacity=minibatch.capacity, pad_id=pad_id, align=1)
                of_pack = [singles[row] for row in place[list(members)]]
                old_logprobs = _join([single.old_logprobs for single in of_pack])
                batches.append(Microbatch(pack, old_logprobs, _join([single.reference_logprobs for single in of_pack])))
            packed = gradient(actor, batches, policy_loss).double()
            summed = torch.from_numpy(samples.scale) @ rows[place].double()
            errors.append(float((packed - summed).norm() / packed.norm()))
    return rows, errors


def _draw_plan(
    config: Config, loss: LossConfig, metadata: StepMetadata, history: PromptHistory, seed: int
) -> tuple[Selection, StepPlan]:
    """Draw both levels of a window, with two updates and packs of a few rows."""
    config = replace(
        config,
        run=replace(config.run, seed=seed),
        loss=replace(loss, updates_per_rollout=2),
        pruning=PruningConfig(),
        pack=replace(config.pack, max_tokens=96),
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
    part = select_groups(metadata, selection)
    return selection, plan_step(part, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)


def select_groups(metadata: StepMetadata, selection: Selection) -> StepMetadata:
    """Return what the planner knows when only the selected prompts were rolled out."""
    part = take_groups(metadata, selection.prompt_ids)
    return dataclasses.replace(part, prompt_inclusion=selection.inclusion, window=float(selection.window))


def _join(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    return None if parts[0] is None else np.concatenate(parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = make_windows(RankPool(), Path(folder), warm_up=300, updates=8)
    errors = max(max(errors) for errors in found.pop("packed_errors").values())
    clipped = found.pop("clipped")
    assert clipped > 0.02, "no clip is in force: all losses have the same gradients"
    np.savez_compressed(STORED, **found)
    print(f"{STORED}: {STORED.stat().st_size} bytes; packed errors up to {errors:.1e}; {clipped:.1%} of tokens clipped")


if __name__ == "__main__":
    main()

"""Law 2 of trees on real gradients: a real engine grows them, a real plan prunes and packs them, a real policy learns.

What they are held against is the estimate of flat groups. Both are sampled, and may differ by four standard errors of
their difference, along the direction that a part of the flat groups has named. ``tests/rl/test_trees.py`` knows all
outcomes of a smaller policy, and makes every classic mistake; here one of them shows that the measure is sharp enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.real_gradients import gradient, planned
from megatron_dppo.config import (
    ArithmeticConfig,
    BranchConfig,
    CompletionPruningConfig,
    Config,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    PackConfig,
    PromptPruningConfig,
    PruningConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TreeConfig,
)
from megatron_dppo.init import write_model
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.trees import node_values
from megatron_dppo.rl.types import Floats, Group, Segments, Selection, StepPlan
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.learner import PolicyLoss
from tests.ranks import RankPool
from tests.small_runs import begin_run

PROMPTS, SAMPLES, STEPS = 32, 8, 40
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    good = [character in "abcdefghijklm" for character in solution_str]
    return float(good[:1] == [True]) + float(sum(good[2:]) >= 2)
"""
"""The first token decides, and so do the last ones: trunks and leaves both have a gradient."""
OF_OWN = 1.0 - 1.0 / SAMPLES
"""Share of the gradient that a flat group has whose baseline is the mean of all its rewards, its own included."""
TWICE = TreeConfig(branches=(BranchConfig(at=1), BranchConfig(at=3)))
BY_ENTROPY = TreeConfig(branches=(BranchConfig(entropy=3.0, children=4, keep=0.5),))


def configure(folder: Path, tree: TreeConfig, *, pruned: bool) -> Config:
    """Responses of six tokens at most, each of which ends its response with a chance of one in eight or so."""
    return Config(
        run=RunConfig(dir=str(folder / "run"), checkpoint_every=0, export=False, seed=1 + len(tree.branches)),
        model=ModelConfig(path=str(folder / "hf")),
        data=DataConfig(
            chat_template=False, max_prompt_tokens=24, arithmetic=ArithmeticConfig(problems=40, eval_problems=4)
        ),
        rollout=RolloutConfig(
            prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
            max_response_tokens=6,
            stop_token_ids=(2, 10, 11, 12, 13, 14),
            tree=tree,
        ),
        reward=RewardConfig(function=f"{folder / 'reward.py'}:compute_score"),
        loss=LossConfig(name="dr_grpo"),
        pruning=PruningConfig(
            prompts=PromptPruningConfig(rule="none"),
            completions=CompletionPruningConfig(rule="neyman" if pruned else "none", keep=0.5),
        ),
        pack=PackConfig(max_tokens=4096),
        eval=EvalConfig(every=0, problems=0),
    )


def measure(rank: int, size: int, folder: Path, tree: TreeConfig, pruned: bool) -> Floats:
    """[STEPS, parameters], the gradients of as many rollouts; ``pruned``: of half of the prompts and completions."""
    gradients = []
    with ExitStack() as to_close:
        trainer = begin_run(configure(folder, tree, pruned=pruned), Trainer, to_close)
        trainer.sync(0)
        for trainer.step in range(STEPS):
            chosen, chance = np.arange(PROMPTS), np.ones(PROMPTS)
            if pruned:
                chosen = np.sort(np.random.default_rng(trainer.step).choice(PROMPTS, PROMPTS // 2, replace=False))
                chance = np.full(PROMPTS // 2, 0.5)
            rollouts = trainer.roll_out(StepRollouts(Selection(chosen, chance, window=PROMPTS), trainer.step))
            gradients.append(planned_gradient(trainer, trainer.plan(rollouts), rollouts.held))
    return np.stack(gradients)


def planned_gradient(trainer: Trainer, plan: StepPlan, held: Mapping[int, Group]) -> Floats:
    (minibatch,) = plan.minibatches
    packs = planned(minibatch, held, trainer.world, trainer.policy.pad_id)
    loss = PolicyLoss(objective_for(trainer.config.loss), kl_coef=0.0, tis_cap=None, version=0)
    return gradient(trainer.policy.actor, packs, loss).double().numpy()


def measure_mistake(rank: int, size: int, folder: Path, tree: TreeConfig) -> Floats:
    with mock.patch("megatron_dppo.rl.advantages.tree_advantages", mean_of_leaves):
        return measure(rank, size, folder, tree, pruned=False)


def mean_of_leaves(rewards: Floats, segments: Segments, tree: TreeConfig) -> Floats:
    """V(u) − the mean reward of the group, as of a flat one: half of a trunk's gradient is lost where K = 2."""
    values = node_values(rewards, segments, tree)
    slots = [np.repeat(level, SAMPLES // level.shape[1], axis=1) for level in values]
    return np.stack(slots, axis=-1) - rewards.mean(axis=1)[:, None, None]


@dataclass(frozen=True)
class Lab:
    """A policy, and what flat groups say of its gradient."""

    folder: Path
    direction: Floats
    """[parameters], of length 1."""
    truth: Floats
    """[n], the gradient along it, by other groups."""

    def standard_errors(self, gradients: Floats) -> float:
        """By how many standard errors the mean of [m, parameters] is off the truth."""
        along = gradients @ self.direction
        variance = sum(values.var(ddof=1) / len(values) for values in (along, self.truth))
        return float((along.mean() - self.truth.mean()) / np.sqrt(variance))


@pytest.fixture(scope="module")
def lab(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("trees")
    write_model(folder / "hf", hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64, std=0.2)
    (folder / "reward.py").write_text(REWARD)
    some, others = np.split(ranks.run(1, measure, folder, TreeConfig(), False)[0] / OF_OWN, [STEPS // 4])
    direction = some.mean(axis=0) / np.linalg.norm(some.mean(axis=0))
    return Lab(folder, direction, others @ direction)


def test_trees_have_the_gradient_of_flat_groups(lab: Lab, ranks: RankPool) -> None:
    """Two levels, after the first and the third token, which one path in three does not reach."""
    assert abs(lab.standard_errors(ranks.run(1, measure, lab.folder, TWICE, False)[0])) < 4.0


def test_trees_that_fork_by_entropy_have_it_too_pruned_before_and_after(lab: Lab, ranks: RankPool) -> None:
    assert abs(lab.standard_errors(ranks.run(1, measure, lab.folder, BY_ENTROPY, True)[0])) < 4.0


def test_trees_whose_baseline_is_the_mean_of_their_leaves_have_less(lab: Lab, ranks: RankPool) -> None:
    assert lab.standard_errors(ranks.run(1, measure_mistake, lab.folder, TWICE)[0]) < -8.0

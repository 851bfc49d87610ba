"""Law 1: for one step plan, loss and gradient are the same for every layout, microbatch order and pack order.

One update of Adam with eps = 1 and rate 1 moves a weight by g / (|g| + 1): the moved weights show the gradient, after
the optimizer has sharded it, to first order and in every bit that matters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.assemble import assemble_learner, assemble_policy
from megatron_dppo.bridge.stream import weight_stream
from megatron_dppo.config import (
    Config,
    LayoutConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    RolloutConfig,
)
from megatron_dppo.learner import Learner
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.world import World, initialize
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Completion, Group, Prompt, StepMetadata, StepPlan, VersionSpan
from tests.policies import write_policy
from tests.ranks import RankPool

QUERIES, SAMPLES, VOCAB = 6, 4, 131
Weights = dict[str, torch.Tensor]


def config_for(path: Path, layout: LayoutConfig, loss: LossConfig, pack_tokens: int, distributed: bool) -> Config:
    return Config(
        model=ModelConfig(path=str(path)),
        layout=layout,
        loss=loss,
        pack=PackConfig(max_tokens=pack_tokens),
        rollout=RolloutConfig(temperature=0.8, samples_per_prompt=SAMPLES, max_logprob_diff=100.0),
        optimizer=OptimizerConfig(lr=1.0, eps=1.0, clip_grad=0.0, distributed=distributed),
    )


def step_of_groups(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """A step with prompts pruned (weights up to 5) and mixed rewards, the same for every number of ranks."""
    rng = np.random.default_rng(5)
    groups = []
    for index in range(QUERIES):
        prompt = Prompt(index, rng.integers(3, VOCAB, rng.integers(2, 9)).astype(np.int32), "", "")
        completions = tuple(
            Completion(
                rng.integers(3, VOCAB, length).astype(np.int32),
                rng.normal(-3.0, 1.0, length).astype(np.float32),
                (VersionSpan(0, int(length)),),
                "stop",
            )
            for length in rng.integers(1, 24, SAMPLES)
        )
        rewards = rng.permutation([1.0, 0.0, 0.0, 1.0 if index % 2 else 0.0])
        groups.append(Group(prompt, completions, rewards))
    lengths = np.array([[len(c.token_ids) for c in g.completions] for g in groups])
    metadata = StepMetadata(
        prompt_ids=np.arange(QUERIES),
        prompt_inclusion=np.array([1.0, 0.5, 0.25, 0.2, 0.7, 1.0]),
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups]),
        response_lengths=lengths,
        rewards=np.array([g.rewards for g in groups]),
        surprise=rng.uniform(0.5, 2.0, lengths.shape),
        owners=np.arange(QUERIES) % ranks,
        window=float(QUERIES + 3),
    )
    return metadata, groups


def plan_for(world: World, config: Config, metadata: StepMetadata) -> StepPlan:
    layout = config.layout
    multiple = layout.tp if layout.sequence_parallel else 1
    return plan_step(
        metadata, config, replicas=world.dp, align=1, capacity_multiple=multiple, step=0, pipeline=layout.pp
    )


def reverse_order(plan: StepPlan) -> StepPlan:
    """The same packs as microbatches in the opposite order, with their rows in the opposite order."""
    minibatches = (
        replace(m, packs=tuple(tuple(pack[::-1] for pack in replica[::-1]) for replica in m.packs))
        for m in plan.minibatches
    )
    return replace(plan, minibatches=tuple(minibatches))


def build(rank: int, config: Config) -> tuple[World, Learner, object]:
    world = initialize(config.layout, seed=1, timeout_s=120.0)
    policy = assemble_policy(config, world, temperature=config.rollout.temperature)
    return world, assemble_learner(policy, PhaseTimers()), policy


def learned(rank: int, size: int, config: Config, backwards: bool) -> tuple[dict[str, float], Weights]:
    """Loss and metrics of one update, and the weights after it, under Hugging Face's names."""
    world, learner, policy = build(rank, config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    held = {i: group for i, group in enumerate(groups) if metadata.owners[i] == rank}
    result = learner.learn(reverse_order(plan) if backwards else plan, held, step=1)
    assert result.updated
    weights = {
        name: tensor.clone()
        for bucket in weight_stream(policy.actor.bare, policy.shape, world)
        for name, tensor in bucket.items()
    }
    return result.metrics, weights if rank == 0 else {}


def assert_same_update(ours: tuple[dict[str, float], Weights], reference: tuple[dict[str, float], Weights], start: Weights) -> None:
    terms = abs(reference[0]["train/pg_loss"])  # the loss is a small difference of terms of about this size
    assert ours[0]["train/loss"] == pytest.approx(reference[0]["train/loss"], rel=1e-5, abs=1e-5 * terms)
    for name in ("train/grad_norm", "train/pg_loss", "train/entropy_loss", "train/tokens"):
        assert ours[0][name] == pytest.approx(reference[0][name], rel=1e-5), name
    assert ours[1].keys() == reference[1].keys() == start.keys()
    for name, before in start.items():
        moved, expected = ours[1][name] - before, reference[1][name] - before
        assert expected.norm() > 0, name
        assert (moved - expected).norm() <= 1e-5 * expected.norm() + 2e-7 * before.norm(), name


LAYOUTS = {
    "tp2": (2, LayoutConfig(tp=2, dp=1)),
    "tp2 sp": (2, LayoutConfig(tp=2, dp=1, sequence_parallel=True)),
    "pp2": (2, LayoutConfig(pp=2, dp=1)),
    "dp2": (2, LayoutConfig(dp=2)),
    "tp2 pp2": (4, LayoutConfig(tp=2, pp=2, dp=1)),
    "tp2 sp dp2": (4, LayoutConfig(tp=2, dp=2, sequence_parallel=True)),
}
GRPO = LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0)
DAPO = LossConfig(name="dapo", tis_cap=2.0)


@pytest.fixture(scope="module", params=[(GRPO, False), (DAPO, True)], ids=["grpo untied", "dapo tied"])
def reference(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    loss, tied = request.param
    path = write_policy(tmp_path_factory.mktemp("policy"), tied=tied)
    config = config_for(path, LayoutConfig(dp=1), loss, 64, distributed=False)
    start = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    (_, before), *_ = ranks.run(1, learned, start, False)
    return path, loss, before, ranks.run(1, learned, config, False)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_update_does_not_depend_on_the_layout(name: str, ranks: RankPool, reference) -> None:
    path, loss, start, expected = reference
    size, layout = LAYOUTS[name]
    for distributed in (False, True) if name == "dp2" else (True,):
        config = config_for(path, layout, loss, 64, distributed)
        assert_same_update(ranks.run(size, learned, config, False)[0], expected, start)


def test_update_does_not_depend_on_microbatch_and_pack_order(ranks: RankPool, reference) -> None:
    path, loss, start, expected = reference
    config = config_for(path, LayoutConfig(dp=1), loss, 64, distributed=True)
    assert_same_update(ranks.run(1, learned, config, True)[0], expected, start)


def test_update_does_not_depend_on_the_size_of_packs(ranks: RankPool, reference) -> None:
    path, loss, start, expected = reference
    config = config_for(path, LayoutConfig(dp=1), loss, 400, distributed=True)
    assert_same_update(ranks.run(1, learned, config, False)[0], expected, start)

"""Law 1: for one step plan, loss and gradient are the same for every layout, microbatch order and pack order.

One update of Adam with eps = 1 and rate 1 moves a weight by g / (|g| + 1): the moved weights show the gradient, after
the optimizer has sharded it, to first order and in every bit that matters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.data.vocabulary import character_tokenizer, write_tokenizer
from megatron_dppo.rl.types import StepPlan
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of


def reverse_order(plan: StepPlan) -> StepPlan:
    """The same packs as microbatches in the opposite order, with their rows in the opposite order."""
    minibatches = (
        dataclasses.replace(m, packs=tuple(tuple(pack[::-1] for pack in replica[::-1]) for replica in m.packs))
        for m in plan.minibatches
    )
    return dataclasses.replace(plan, minibatches=tuple(minibatches))


def learned(rank: int, size: int, config: Config, backwards: bool) -> tuple[dict[str, float], Weights]:
    """Loss and metrics of one update, and the weights after it."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    result = learner.learn(
        reverse_order(plan) if backwards else plan, held_by(rank, metadata, groups), step=1, version=0
    )
    assert result.updated
    weights = weights_of(policy, world)
    return result.metrics, weights if rank == 0 else {}


Update = tuple[dict[str, float], Weights]


def assert_same_update(ours: Update, reference: Update, start: Weights) -> None:
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
    "cp2": (2, LayoutConfig(cp=2, dp=1)),
    "cp4": (4, LayoutConfig(cp=4, dp=1)),
    "cp2 dp2": (4, LayoutConfig(cp=2, dp=2)),
    "cp2 pp2": (4, LayoutConfig(cp=2, pp=2, dp=1)),
    "cp2 tp2 sp": (4, LayoutConfig(cp=2, tp=2, dp=1, sequence_parallel=True)),
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
    for distributed in (False, True) if name in ("dp2", "cp2") else (True,):
        config = config_for(path, layout, loss, 64, distributed)
        assert_same_update(ranks.run(size, learned, config, False)[0], expected, start)


def test_gspos_second_update_does_not_depend_on_the_layout(ranks: RankPool, tmp_path: Path) -> None:
    """There the ratio of a whole sequence differs from 1, and is clipped for some of them."""
    loss = LossConfig(name="gspo", updates_per_rollout=2, clip_low=0.02, clip_high=0.02)
    path = write_policy(tmp_path)

    def update(size: int, layout: LayoutConfig) -> Update:
        return ranks.run(size, learned, config_for(path, layout, loss, 64, distributed=True), False)[0]

    alone = update(1, LayoutConfig(dp=1))
    assert 0.0 < alone[0]["train/pg_clipfrac"] < 0.5
    for layout in (LayoutConfig(pp=2, dp=1), LayoutConfig(cp=2, dp=1)):
        shared = update(2, layout)
        for name in ("train/loss", "train/grad_norm", "train/pg_clipfrac"):
            assert shared[0][name] == pytest.approx(alone[0][name], rel=1e-4), name


def test_update_does_not_depend_on_microbatch_and_pack_order(ranks: RankPool, reference) -> None:
    path, loss, start, expected = reference
    config = config_for(path, LayoutConfig(dp=1), loss, 64, distributed=True)
    assert_same_update(ranks.run(1, learned, config, True)[0], expected, start)


def test_update_does_not_depend_on_the_size_of_packs(ranks: RankPool, reference) -> None:
    path, loss, start, expected = reference
    config = config_for(path, LayoutConfig(dp=1), loss, 400, distributed=True)
    assert_same_update(ranks.run(1, learned, config, False)[0], expected, start)


def test_experts_update_does_not_depend_on_the_layout(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB))
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    config = config_for(tmp_path, LayoutConfig(dp=1), GRPO, 64, distributed=True)
    still = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    (_, start), *_ = ranks.run(1, learned, still, False)
    expected = ranks.run(1, learned, config, False)[0]
    for name in ("dp2", "cp2 tp2 sp"):
        size, layout = LAYOUTS[name]
        assert_same_update(ranks.run(size, learned, replace(config, layout=layout), False)[0], expected, start)

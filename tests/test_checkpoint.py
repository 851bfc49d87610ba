"""A checkpoint holds all that later updates depend on, whatever the optimizer and the precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dppo.checkpoint import TRACKER, Checkpoints, latest_step
from megatron_dppo.config import Config, LayoutConfig, LossConfig
from megatron_dppo.errors import UserError
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

LAYOUTS = {
    "tp2 distributed optimizer": (2, LayoutConfig(tp=2, dp=1), True, "fp32"),
    "dp2 distributed optimizer bf16": (2, LayoutConfig(dp=2), True, "bf16"),
    "tp2 plain optimizer": (2, LayoutConfig(tp=2, dp=1), False, "fp32"),
    "tp2 pp2 tied": (4, LayoutConfig(tp=2, pp=2, dp=1), True, "fp32"),
}


def train(rank: int, size: int, config: Config, folder: Path, first: int, stop: int) -> Weights:
    """Updates ``first`` to ``stop``, from the checkpoint of ``first`` if there is one, which saves one after each."""
    world, learner, policy = build(config)
    checkpoints = Checkpoints(folder, world, keep=2)
    if first:
        step, state = checkpoints.load(policy.actor)
        assert (step, state) == (first, {"float": 0.1 + 0.2})
    metadata, groups = step_of_groups(size)
    held = held_by(rank, metadata, groups)
    for step in range(first, stop):
        learner.learn(plan_for(world, config, metadata), held, step=step + 1)
        checkpoints.save(policy.actor, step + 1, {"float": 0.1 + 0.2})
    return weights_of(policy, world)


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_updates_are_those_of_an_undisturbed_run(name: str, ranks: RankPool, tmp_path: Path) -> None:
    size, layout, distributed, dtype = LAYOUTS[name]
    path = write_policy(tmp_path / "policy", tied="tied" in name)
    config = config_for(path, layout, LossConfig(), 64, distributed)
    config = replace(
        config,
        model=replace(config.model, dtype=dtype),
        optimizer=replace(config.optimizer, lr=1e-2, eps=1e-8, clip_grad=1.0),
    )
    expected = ranks.run(size, train, config, tmp_path / "whole", 0, 5)[0]
    ranks.run(size, train, config, tmp_path / "halves", 0, 2)
    ours = ranks.run(size, train, config, tmp_path / "halves", 2, 5)[0]
    assert [tensor for tensor in expected if not torch.equal(ours[tensor], expected[tensor])] == []
    assert latest_step(tmp_path / "halves") == 5
    assert sorted(p.name for p in (tmp_path / "halves").iterdir()) == ["iter_0000004", "iter_0000005", TRACKER]


def save_without_room(rank: int, size: int, config: Config, folder: Path) -> str:
    world, _, policy = build(config)
    checkpoints = Checkpoints(folder, world, keep=2)
    checkpoints.save(policy.actor, 1, {})
    folder.joinpath("..", "ballast").write_bytes(bytes(6 * 2**20))
    with pytest.raises(UserError) as error:
        checkpoints.save(policy.actor, 2, {})
    return str(error.value)


def test_full_disk_is_told_on_every_rank_and_costs_no_checkpoint(
    ranks: RankPool, tmp_path: Path, small_disk: Path
) -> None:
    config = config_for(write_policy(tmp_path), LayoutConfig(tp=2, dp=1), LossConfig(), 64, distributed=True)
    for message in ranks.run(2, save_without_room, config, small_disk / "checkpoints"):
        assert message.startswith(f"run.dir = {small_disk}: a checkpoint could not be written")
    assert latest_step(small_disk / "checkpoints") == 1

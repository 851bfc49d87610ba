"""A checkpoint that is written while training goes on holds the state of its step, and counts once
it is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import find_latest_step
from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import build, held_by, plan_for, step_of_groups
from tests.trainer.test_checkpoint import STATE, configure, replace_run, train


def in_background(folder: Path, layout: LayoutConfig, **settings: Any) -> Config:
    config = configure(
        write_policy(folder / "policy", layers=2), folder / "run", layout, **settings
    )
    return replace(config, run=replace(config.run, checkpoint_in_background=True))


AT_BIRTH: list[int] = []
"""Signals that a child of this process sends itself as soon as it is forked, before it can write;
its own children do not."""


def send_at_birth() -> None:
    while AT_BIRTH:
        os.kill(os.getpid(), AT_BIRTH.pop())


os.register_at_fork(after_in_child=send_at_birth)


def train_while_it_is_written(
    rank: int, size: int, config: Config, stops: int, problem: str = ""
) -> tuple[int | None, int | None]:
    """Save after one update, stop the writers, update twice more; the step that counts before and
    after the end.

    Writers go on after the updates, unless a problem is expected.
    """
    world, learner, policy = build(config)
    checkpoints = Checkpoints(config, world)
    metadata, groups = step_of_groups(size)
    held = held_by(rank, metadata, groups)
    for step in range(3):
        learner.train(plan_for(world, config, metadata), held, step=step + 1, version=0)
        if step == 0:
            AT_BIRTH[:] = [stops]
            checkpoints.save(policy.actor, 1, STATE)
            AT_BIRTH.clear()
    folder = Path(config.run.dir, "checkpoints")
    world.barrier("updates")
    before = find_latest_step(folder)
    if problem:
        with pytest.raises((CheckpointException, RuntimeError), match=problem):
            checkpoints.finish()
    else:
        assert rank > 0 or not checkpoints.is_written()  # of replicas the first writes
        for child in psutil.Process().children():
            child.send_signal(signal.SIGCONT)
        checkpoints.finish()
    return before, find_latest_step(folder)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (LayoutConfig(tp=2, dp=1), {}),
        (LayoutConfig(dp=2), {"dtype": "bf16", "offload": True}),
    ],
    ids=["tp2", "dp2 bf16, as it lies on the host"],
)
def test_background_checkpoint_has_the_state_of_its_step(
    ranks: RankPool, tmp_path: Path, layout: LayoutConfig, settings: dict[str, Any]
) -> None:
    config = in_background(tmp_path, layout, **settings)
    expected, losses = ranks.run(2, train, replace_run(config, tmp_path / "whole"), 4, ())[0]
    assert ranks.run(2, train_while_it_is_written, config, signal.SIGSTOP)[0] == (None, 1)
    ours, resumed = ranks.run(2, train, config, 4, ())[0]
    assert resumed == losses[1:]
    assert [tensor for tensor in expected if not torch.equal(ours[tensor], expected[tensor])] == []


def test_checkpoint_of_a_killed_writer_never_counts(ranks: RankPool, tmp_path: Path) -> None:
    config = in_background(tmp_path, LayoutConfig(tp=2, dp=1))
    assert (
        ranks.run(2, train_while_it_is_written, config, signal.SIGKILL, "was ended")
        == [(None, None)] * 2
    )


def test_hanging_writer_ends_before_the_ranks_timeout(ranks: RankPool, tmp_path: Path) -> None:
    config = in_background(tmp_path, LayoutConfig(timeout_s=3.0))
    problem = r"not written within 2\.7 s"
    assert ranks.run(1, train_while_it_is_written, config, signal.SIGSTOP, problem) == [
        (None, None)
    ]

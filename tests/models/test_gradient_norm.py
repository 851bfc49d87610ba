"""The gradient's norm is Megatron's in every layout, and one copy to the host has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.config.run import LoraConfig
from megatron_dppo.models import actor
from megatron_dppo.models.optimizer import gradient_squares
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, build, config_for, held_by, plan_for, step_of_groups


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("policies")
    write_qwen3_moe(folder / "experts", Sizes(vocab_size=VOCAB), experts=4)
    return {False: write_policy(folder / "dense", tied=True, layers=2), True: folder / "experts"}


def norms(rank: int, size: int, config: Config) -> tuple[float, float, int]:
    """Norm of a step's gradient by the actor and by Megatron, and how many squares the actor summed."""
    found: list[Any] = []

    def both(optimizer: Any, device: torch.device) -> torch.Tensor:
        squares = gradient_squares(optimizer, device)
        found[:] = float(optimizer.get_grad_norm()), len(squares)
        return squares

    world, learner, _ = build(config)
    metadata, groups = step_of_groups(size)
    with mock.patch.object(actor, "gradient_squares", both):
        plan = plan_for(world, config, metadata)
        metrics = learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    return metrics["train/grad_norm"], *found


LAYOUTS = {
    "tp2 sp": (False, LayoutConfig(tp=2, dp=1, sequence_parallel=True)),
    "pp2": (False, LayoutConfig(pp=2, dp=1)),
    "dp2": (False, LayoutConfig(dp=2)),
    "experts ep2": (True, LayoutConfig(ep=2, dp=2)),
    "experts tp2 ep2 etp1": (True, LayoutConfig(tp=2, ep=2, etp=1, dp=1, sequence_parallel=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_is_megatrons(ranks: RankPool, paths: dict[bool, Path], name: str) -> None:
    experts, layout = LAYOUTS[name]
    whole, plain = (config_for(paths[experts], layout, LossConfig(), 64, distributed=each) for each in (True, False))
    lora = replace(whole, model=replace(whole.model, lora=LoraConfig(rank=4)))
    results = ranks.in_turn(2, *((norms, config) for config in (whole, plain, lora)))
    assert [squares for (_, _, squares), _ in results] == [1, 2 if experts else 1, 1]
    for (ours, megatrons, _), other in results:
        assert ours == other[0] == pytest.approx(megatrons, rel=1e-15)

"""Experts on ranks of their own and virtual stages: what the split of a plain update over layouts does not show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_qwen3_moe(folder, Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=4)
    return folder


def test_gradients_of_experts_and_others_are_clipped_by_one_norm(ranks: RankPool, path: Path) -> None:
    """A step of Adam with eps = 1 and rate 1 moves weights by their gradients, if these are small."""
    config = config_for(path, LayoutConfig(ep=2, dp=2), LossConfig(), 64, distributed=True)
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=1e-3))
    (metrics, before, after), _ = ranks.run(2, one_step, config)
    moved = sum(float((after[name] - before[name]).double().square().sum()) for name in before) ** 0.5
    assert metrics["train/grad_norm"] > 0.1
    assert moved == pytest.approx(1e-3, rel=0.02)


def one_step(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, Weights]:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    before = weights_of(policy, world)
    learned = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    return learned, before, weights_of(policy, world)


def loads(rank: int, size: int, config: Config) -> dict[str, float]:
    world, learner, _ = build(config)
    metadata, groups = step_of_groups(size)
    metrics = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    return {name.removeprefix("train/busiest_"): metrics[name] for name in metrics if "busiest" in name}


def test_the_busiest_expert_and_rank_are_told(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    """In the last two of four layers all tokens go to the same two experts."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (2, 3):
        gate = tensors[f"model.layers.{layer}.mlp.gate.weight"].zero_()
        gate[0], gate[1] = 1e-3, -1e-3  # whichever sign a token's sum has, one of them comes first
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = config_for(tmp_path, LayoutConfig(dp=2), LossConfig(), 64, distributed=True)
    again = replace(config, model=replace(config.model, recompute="full"))
    apart = replace(again, layout=LayoutConfig(ep=2, dp=2))
    alike, recomputed, (found, other) = ranks.in_turn(2, (loads, config), (loads, again), (loads, apart))
    assert found == other and alike[0] == recomputed[0]
    for i in range(1, 5):
        assert found[f"expert_{i}"] == alike[0][f"expert_{i}"]
        assert alike[0][f"rank_{i}"] == 1.0
    for i in (1, 2):
        assert 1 / 4 < found[f"expert_{i}"] < 1 / 2 < found[f"rank_{i}"] < 1.0

"""Experts on ranks of their own and virtual stages: what the split of a plain update over layouts does not show."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.config import Config, LayoutConfig, LossConfig, ModelConfig, replace
from megatron_dppo.models.policy import transformer_config
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.parallel.without_cuda import install
from megatron_dppo.rl.pack import build_pack
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_qwen3_moe(folder, Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=4)
    return folder


def two_steps(rank: int, size: int, config: Config) -> tuple[list[dict[str, float]], Weights, Weights]:
    """Metrics of two steps, and the weights before and after them."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan, held, before = plan_for(world, config, metadata), held_by(rank, metadata, groups), weights_of(policy, world)
    metrics = [learner.learn(plan, held, step=step, version=0) for step in (1, 2)]
    return metrics, before, weights_of(policy, world)


LAYOUTS = {
    "ep2 pp2 vpp2": LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
    "ep2 tp2 sp etp1": LayoutConfig(ep=2, tp=2, etp=1, dp=1, sequence_parallel=True),
}


def test_updates_with_a_reference_and_recomputation_depend_on_no_layout(ranks: RankPool, path: Path) -> None:
    """Two updates a step, gradients summed while the backward pass goes on, the reference on the host."""
    loss = LossConfig(name="grpo", kl_coef=0.1, updates_per_rollout=2)
    config = config_for(path, LayoutConfig(dp=1), loss, 64, distributed=True)
    config = replace(
        config,
        model=replace(config.model, recompute="full", reference_on_host=True),
        optimizer=replace(config.optimizer, lr=1e-2, clip_grad=1.0, overlap=True),
    )
    (expected, start, after), *_ = ranks.run(1, two_steps, config)
    for name, layout in LAYOUTS.items():
        metrics, before, ours = ranks.run(layout.tp * layout.pp * layout.dp, two_steps, replace(config, layout=layout))[
            0
        ]
        for step, reference in zip(metrics, expected, strict=True):
            for key in ("train/loss", "train/kl_loss", "train/grad_norm"):
                assert step[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-7), (name, key)
        for tensor, value in after.items():
            moved = value - start[tensor]
            assert torch.equal(before[tensor], start[tensor])
            assert (ours[tensor] - value).norm() <= 1e-4 * moved.norm() + 2e-7 * value.norm(), (name, tensor)


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


@pytest.mark.parametrize(
    ("layout", "batched"),
    [(LayoutConfig(pp=2), True), (LayoutConfig(pp=4, vpp=2), True), (LayoutConfig(pp=2, vpp=2), False)],
)
def test_two_interleaved_stages_do_not_send_in_batches(layout: LayoutConfig, batched: bool) -> None:
    """Each has the other before and after it, and a batch would confuse its two messages in silence."""
    install()
    with mock.patch("torch.cuda.is_available", return_value=True):
        config = transformer_config(PUBLISHED["qwen3-4b"], ModelConfig(spec="torch"), layout)
    assert config.batch_p2p_comm is batched


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


def experts_of_padding(rank: int, size: int, config: Config) -> list[int]:
    """How many experts of each layer the tokens of a pack without a sequence go to."""
    _, _, policy = build(config)
    chosen: list[int] = []
    (chunk,) = policy.actor.chunks
    for layer in chunk.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda *parts: chosen.append(int(parts[2][1].any(dim=0).sum())))
    policy.actor.log_probabilities([build_pack([], capacity=256, pad_id=policy.pad_id, align=1)])
    return chosen


def test_padding_does_not_crowd_at_a_few_experts(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB), experts=32)
    config = config_for(tmp_path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    config = replace(config, rollout=replace(config.rollout, stop_token_ids=(2,)))
    (chosen,) = ranks.run(1, experts_of_padding, config)
    assert len(chosen) == 2 and min(chosen) >= 4

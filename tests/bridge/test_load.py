"""Weights of a Megatron checkpoint as the initial policy, in any layout and precision; and models of another shape."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import METADATA
from megatron_dppo.bridge.load import bind
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.conversions import same, to_megatron, weights
from tests.bridge.directories import Sizes, write_qwen3
from tests.bridge.on_ranks import loaded_policy
from tests.damage import UNUSABLE
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

SIZES = {"layers": 2, "heads": 6, "kv_heads": 6, "ffn": 96}


def configure(policy: Path, run: Path, layout: LayoutConfig, kl_coef: float = 0.0, **model: str) -> Config:
    config = config_for(policy, layout, LossConfig(kl_coef=kl_coef), 128, distributed=True)
    return replace(config, run=replace(config.run, dir=str(run)), model=replace(config.model, **model))


def train_and_save(rank: int, size: int, config: Config) -> Weights:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    Checkpoints(config, world).save(policy.actor, 1, {})
    return weights_of(policy, world)


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """Train for an update at TP 2 x PP 2. Returns the folder of checkpoints, and the weights in there."""
    run = tmp_path_factory.mktemp("trained")
    policy = write_policy(run / "policy", **SIZES)
    saved = ranks.run(4, train_and_save, configure(policy, run, LayoutConfig(tp=2, pp=2, dp=1)))[0]
    assert not torch.equal(saved["model.norm.weight"], weights(policy)["model.norm.weight"])
    return run / "checkpoints", saved


def start(rank: int, size: int, config: Config) -> tuple[Weights, float]:
    """Return the initial weights, and the KL divergence from the reference before the first update."""
    world, learner, policy = build(config)
    initial = weights_of(policy, world)
    if not config.loss.kl_coef:
        return initial, 0.0
    metadata, groups = step_of_groups(size)
    learned = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=0, version=0)
    return initial, learned["train/kl_loss"]


def test_policy_and_reference_start_from_a_checkpoint(
    trained: tuple[Path, Weights], ranks: RankPool, tmp_path: Path
) -> None:
    checkpoints, saved = trained
    model = {"checkpoint": str(checkpoints)}
    config = configure(checkpoints / "hf", tmp_path, LayoutConfig(tp=3, dp=1), 0.1, **model)  # no weights in hf
    initial, kl = ranks.run(3, start, config)[0]
    assert same(initial, saved)
    assert kl == 0.0


def test_converted_weights_are_cast_to_the_runs_precision(
    trained: tuple[Path, Weights], ranks: RankPool, tmp_path: Path
) -> None:
    folder, policy = trained[0], trained[0].parent / "policy"
    assert to_megatron(policy, tmp_path / "megatron") == 0
    model = {"checkpoint": str(tmp_path / "megatron"), "dtype": "bf16"}
    initial, _ = ranks.run(1, start, configure(folder / "hf", tmp_path / "run", LayoutConfig(dp=1), **model))[0]
    assert same(initial, {name: tensor.bfloat16() for name, tensor in weights(policy).items()})


def refuse(rank: int, size: int, configs: Sequence[Config]) -> list[UserError]:
    errors = []
    for config in configs:
        with pytest.raises(UserError) as caught:
            build(config)
        errors.append(caught.value)
    return errors


OTHER_POLICIES = [
    ({"layers": 6}, False, "decoder.layers.", "6"),
    ({"ffn": 144}, False, "decoder.layers.mlp.linear_fc1.weight", "[2, 288, 48]"),
    ({"vocab": 300}, False, "embedding.word_embeddings.weight", "[384, 48]"),
    ({"tied": True}, False, "output_layer.weight", "no part of"),
    ({}, True, "output_layer.weight", "missing"),
]
"""What differs in a policy, whether the checkpoint's embedding is tied, the tensor and a word of the refusal."""


def test_another_policys_checkpoint_is_refused_by_tensor(ranks: RankPool, tmp_path: Path) -> None:
    for tied in (False, True):
        write_policy(tmp_path / f"{tied}", tied=tied, **SIZES)
        assert to_megatron(tmp_path / f"{tied}", tmp_path / f"{tied}.megatron") == 0
    configs = []
    for number, (sizes, tied, *_) in enumerate(OTHER_POLICIES):
        policy = write_policy(tmp_path / f"{number}", **SIZES | sizes)
        place = str(tmp_path / f"{tied}.megatron")
        configs.append(configure(policy, tmp_path / "run", LayoutConfig(pp=2, dp=1), checkpoint=place))
    for errors in ranks.run(2, refuse, configs):
        for error, (_, tied, tensor, word) in zip(errors, OTHER_POLICIES, strict=True):
            assert (error.setting, error.value) == ("model.checkpoint", tmp_path / f"{tied}.megatron/release")
            assert tensor in error.problem and word in error.problem


def test_a_damaged_checkpoint_is_named(trained: tuple[Path, Weights], ranks: RankPool, tmp_path: Path) -> None:
    policy, configs = trained[0].parent / "policy", []
    files = [(name, damage) for name in (METADATA, "__3_0.distcp") for damage in ("truncated", "zeros", "a folder")]
    for name, damage in files:
        place = shutil.copytree(trained[0] / "iter_0000001", tmp_path / name / damage)
        UNUSABLE[damage](place / name, random.Random(damage))
        configs.append(configure(policy, tmp_path / "run", LayoutConfig(tp=2, dp=1), checkpoint=str(place)))
    for errors in ranks.run(2, refuse, configs):
        for error, (name, damage) in zip(errors, files, strict=True):
            assert (error.setting, error.value) == ("model.checkpoint", tmp_path / name / damage)
            assert name in error.problem


OTHER_SHAPES = {
    "linear_fc1.weight has shape": {"ffn": 48},
    "0 parameters of the model are": {"num_layers": 3},
    "no entry of the mapping matches": {"num_layers": 1},
    "0 parameters of the model are .*linear_qkv.bias": {"architecture": "Qwen2ForCausalLM"},
}


def bind_other_shapes(rank: int, size: int, path: Path) -> None:
    (model,), shape, world = loaded_policy(path, LayoutConfig())
    for message, change in OTHER_SHAPES.items():
        model.shape = dataclasses.replace(shape, **change)
        with pytest.raises(ValueError, match=message):
            bind([model], world)


def test_a_model_of_another_shape_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes())
    ranks.run(1, bind_other_shapes, tmp_path)

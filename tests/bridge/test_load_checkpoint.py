"""``model.checkpoint``: the weights of a Megatron checkpoint, in any layout and precision, as the initial policy."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import METADATA, TRACKER
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.damage import UNUSABLE
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

TP2_PP2 = LayoutConfig(tp=2, pp=2, dp=1)


def configure(policy: Path, run: Path, layout: LayoutConfig) -> Config:
    config = config_for(policy, layout, LossConfig(), 128, distributed=True)
    return replace(config, run=replace(config.run, dir=str(run)))


def save(rank: int, size: int, config: Config) -> None:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    Checkpoints(config, world).save(policy.actor, 1, {})


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Runs of one update at TP 2 x PP 2, untied and tied: the policy that they began with, and their checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    for tied in (False, True):
        policy = write_policy(folder / f"{tied}" / "policy", tied=tied, layers=2, heads=6, kv_heads=6, ffn=96)
        ranks.run(4, save, configure(policy, folder / f"{tied}", TP2_PP2))
    return {tied: folder / f"{tied}" for tied in (False, True)}


def start(rank: int, size: int, config: Config) -> tuple[Weights, float]:
    """The initial weights; and the KL divergence from the reference before the first update, which a step refuses."""
    world, learner, policy = build(config)
    weights = weights_of(policy, world)
    if not config.loss.kl_coef:
        return weights, 0.0
    metadata, groups = step_of_groups(size)
    learned = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=0, version=0)
    return weights, learned["train/kl_loss"]


def from_checkpoint(config: Config, checkpoint: Path, **model: str) -> Config:
    return replace(config, model=replace(config.model, checkpoint=str(checkpoint), **model))


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_starts_in_any_layout_from_a_checkpoint_s_weights_alone(
    tied: bool, trained: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    run = trained[tied]
    one, tp3, both = LayoutConfig(dp=1), LayoutConfig(tp=3, dp=1), LayoutConfig(pp=2, dp=2)

    def elsewhere(layout: LayoutConfig) -> Config:
        config = configure(run / "checkpoints" / "hf", tmp_path / "run", layout)  # no safetensors in there
        return from_checkpoint(replace(config, loss=LossConfig(kl_coef=0.1)), run / "checkpoints")

    own = configure(run / "policy", run, TP2_PP2)
    began, alone = ranks.in_turn(1, (start, replace(own, layout=one)), (start, elsewhere(one)))
    as_saved, on_four = ranks.in_turn(4, (start, from_checkpoint(own, run / "checkpoints")), (start, elsewhere(both)))
    expected, _ = as_saved[0]
    assert not torch.equal(expected["model.norm.weight"], began[0][0]["model.norm.weight"])
    for ours, kl in (alone[0], on_four[0], ranks.run(3, start, elsewhere(tp3))[0]):
        assert kl == 0.0, "the reference has other weights"
        assert ours.keys() == expected.keys()
        assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def test_converted_weights_are_cast_to_the_run_s_precision(
    trained: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    run = trained[False]
    shutil.copytree(run / "checkpoints" / "iter_0000001", tmp_path / "release")
    (tmp_path / TRACKER).write_text("release\n")
    config = configure(run / "policy", tmp_path / "run", LayoutConfig(dp=1))
    full, _ = ranks.run(1, start, from_checkpoint(config, run / "checkpoints"))[0]
    half, _ = ranks.run(1, start, from_checkpoint(config, tmp_path, dtype="bf16"))[0]
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert [name for name in full if not torch.equal(half[name], full[name].bfloat16())] == []


def refused(rank: int, size: int, config: Config) -> UserError:
    with pytest.raises(UserError) as caught:
        build(config)
    return caught.value


def test_another_policy_s_checkpoint_is_refused_by_the_tensor_that_differs(
    trained: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    others = {
        "deeper": ({"layers": 6}, "decoder.layers.", "6"),
        "wider": ({"ffn": 144}, "decoder.layers.mlp.linear_fc1.weight", "[2, 288, 48]"),
        "more words": ({"vocab": 300}, "embedding.word_embeddings.weight", "[384, 48]"),
        "untied": ({}, "output_layer.weight", "missing"),
        "tied": ({}, "output_layer.weight", "no part of"),
    }
    for name, (sizes, tensor, expected) in others.items():
        place = trained[name != "tied"] / "checkpoints" / "iter_0000001"
        sizes = {"layers": 2, "heads": 6, "kv_heads": 6, "ffn": 96} | sizes
        policy = write_policy(tmp_path / name, tied=name != "untied", **sizes)
        config = configure(policy, tmp_path / "run", LayoutConfig(pp=2, dp=1))
        for error in ranks.run(2, refused, from_checkpoint(config, place.parent)):
            assert (error.setting, error.value) == ("model.checkpoint", place)
            assert tensor in error.problem and expected in error.problem


def refusals(rank: int, size: int, configs: list[Config]) -> list[UserError]:
    return [refused(rank, size, config) for config in configs]


def test_a_damaged_checkpoint_is_named(trained: dict[bool, Path], ranks: RankPool, tmp_path: Path) -> None:
    policy, places = trained[False] / "policy", {}
    for name in (METADATA, "__3_0.distcp"):
        for damage, harm in UNUSABLE.items():
            place = Path(shutil.copytree(trained[False] / "checkpoints" / "iter_0000001", tmp_path / name / damage))
            harm(place / name, random.Random(damage))
            places[place] = name
    config = configure(policy, tmp_path / "run", LayoutConfig(tp=2, dp=1))
    for errors in ranks.run(2, refusals, [from_checkpoint(config, place) for place in places]):
        for error, (place, name) in zip(errors, places.items(), strict=True):
            assert (error.setting, error.value) == ("model.checkpoint", place)
            assert name in error.problem, (place, error.problem)

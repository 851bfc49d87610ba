"""Weights of a Megatron checkpoint as the initial policy, in any layout and precision; and models
of another shape."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.conversions import same, to_megatron, weights
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

SIZES = {"layers": 2, "heads": 6, "kv_heads": 6, "ffn": 96}


def configure(
    policy: Path, run: Path, layout: LayoutConfig, kl_coef: float = 0.0, **model: str
) -> Config:
    config = config_for(policy, layout, LossConfig(kl_coef=kl_coef), 128, distributed=True)
    return replace(
        config, run=replace(config.run, dir=str(run)), model=replace(config.model, **model)
    )


def train_and_save(rank: int, size: int, config: Config) -> Weights:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )
    Checkpoints(config, world).save(policy.actor, 1, {})
    return weights_of(policy, world)


def start(rank: int, size: int, config: Config) -> tuple[Weights, float]:
    """Return the initial weights, and the KL divergence from the reference before the first
    update."""
    world, learner, policy = build(config)
    initial = weights_of(policy, world)
    metadata, groups = step_of_groups(size)
    learned = learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=0, version=0
    )
    return initial, learned["train/kl_loss"]


def test_policy_and_reference_start_from_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    policy, run = write_policy(tmp_path / "policy", **SIZES), tmp_path / "run"
    saved = ranks.run(4, train_and_save, configure(policy, run, LayoutConfig(tp=2, pp=2, dp=1)))[0]
    assert not torch.equal(saved["model.norm.weight"], weights(policy)["model.norm.weight"])
    for layout, dtype in ((LayoutConfig(tp=3, dp=1), "fp32"), (LayoutConfig(dp=1), "bf16")):
        model = {"checkpoint": str(run / "checkpoints"), "dtype": dtype}
        config = configure(
            run / "checkpoints/hf", tmp_path / dtype, layout, 0.1, **model
        )  # no weights in hf
        initial, kl = ranks.run(layout.tp, start, config)[0]
        assert same(
            initial, {name: t.bfloat16() if dtype == "bf16" else t for name, t in saved.items()}
        )
        assert kl == 0.0


def refuse(rank: int, size: int, configs: Sequence[Config]) -> list[UserError]:
    errors = []
    for config in configs:
        with pytest.raises(UserError) as caught:
            build(config)
        errors.append(caught.value)
    return errors


OTHER_POLICIES = [
    ({"layers": 6}, False, "decoder.layers.", "6"),
    ({"vocab": 300}, False, "embedding.word_embeddings.weight", "[384, 48]"),
    ({"tied": True}, False, "output_layer.weight", "no part of"),
    ({}, True, "output_layer.weight", "missing"),
]
"""What differs in a policy, whether the checkpoint's embedding is tied, the tensor and a word of
the refusal."""


def test_another_policys_checkpoint_is_refused_by_tensor(ranks: RankPool, tmp_path: Path) -> None:
    for tied in (False, True):
        write_policy(tmp_path / f"{tied}", tied=tied, **SIZES)
        assert to_megatron(tmp_path / f"{tied}", tmp_path / f"{tied}.megatron") == 0
    configs = []
    for number, (sizes, tied, *_) in enumerate(OTHER_POLICIES):
        policy = write_policy(tmp_path / f"{number}", **SIZES | sizes)
        place = str(tmp_path / f"{tied}.megatron")
        configs.append(
            configure(policy, tmp_path / "run", LayoutConfig(pp=2, dp=1), checkpoint=place)
        )
    for errors in ranks.run(2, refuse, configs):
        for error, (_, tied, tensor, word) in zip(errors, OTHER_POLICIES, strict=True):
            assert (error.setting, error.value) == (
                "model.checkpoint",
                tmp_path / f"{tied}.megatron/release",
            )
            assert tensor in error.problem and word in error.problem

"""Adapters (model.lora): law 1 holds of the merged weights; the base stays as it was, and is the KL term's reference."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.adapters import _part
from megatron_dppo.bridge.load import bind, bind_adapters, fill_parameter
from megatron_dppo.config import Config, LayoutConfig, LoraConfig, replace
from megatron_dppo.parallel.world import World
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.learner import Learner
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of
from tests.test_split_invariance import GRPO, ONE

LORA = LoraConfig(rank=3, alpha=6.0)


def with_lora(config: Config, lora: LoraConfig = LORA, **model: Any) -> Config:
    return replace(config, model=replace(config.model, lora=lora, **model))


def stirred(config: Config) -> tuple[World, Learner, PolicyParts]:
    """Adapters of which B is not zero either: A would have no gradient. The same in every layout."""
    world, learner, policy = build(config)
    for entry, parameter in bind_adapters(policy.actor.chunks, policy.shape, world).items():
        ((name, size),) = entry.tensors.items()
        whole = 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))

        def read(_: str, axis: int, start: int, stop: int, whole: torch.Tensor = whole) -> torch.Tensor:
            return whole.narrow(axis, start, stop - start)

        fill_parameter(entry, parameter.data, read, _part(entry, world), entry.parts(world.layout))
    return world, learner, policy


def learned(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, Weights, bool]:
    """Metrics of one update, the merged weights before it and after it, and whether the base is bit by bit the same."""
    world, learner, policy = stirred(config)
    metadata, groups = step_of_groups(size)
    chunks = policy.actor.chunks
    base = {entry: parameter.clone() for entry, parameter in bind(chunks, policy.shape, world).items()}
    start = weights_of(policy, world)
    result = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    frozen = all(torch.equal(base[entry], now) for entry, now in bind(chunks, policy.shape, world).items())
    weights = weights_of(policy, world)
    return result.metrics, start if rank == 0 else {}, weights if rank == 0 else {}, frozen


SP = partial(LayoutConfig, tp=2, sequence_parallel=True)
LAYOUTS = {
    "dense": {
        "one": ONE,
        "tp2": LayoutConfig(tp=2, dp=1),
        "tp2 sp": SP(dp=1),
        "cp2": LayoutConfig(cp=2, dp=1),
        "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
        "dp2": LayoutConfig(dp=2),
    },
    "experts": {
        "one": ONE,
        "ep2 dp2": LayoutConfig(ep=2, dp=2),
        "dp2 etp2": LayoutConfig(etp=2, dp=2),
        "ep2 tp2 etp1": SP(ep=2, etp=1, dp=1),
        "ep2 tp2 etp2": SP(ep=2, etp=2, dp=2),
    },
}
ALL, SOME = LORA.targets, ("q_proj", "v_proj", "up_proj")


@pytest.mark.parametrize("family", LAYOUTS)
def test_an_update_of_adapters_depends_on_no_layout(family: str, ranks: RankPool, tmp_path: Path) -> None:
    if family == "dense":
        write_policy(tmp_path)
    else:
        write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB), experts=4)
    layouts = LAYOUTS[family]
    configs = {name: with_lora(config_for(tmp_path, of, GRPO, 64, True)) for name, of in layouts.items()}
    configs["plain optimizer"] = with_lora(config_for(tmp_path, ONE, GRPO, 64, False))
    configs["recomputed"] = with_lora(config_for(tmp_path, ONE, GRPO, 64, True), recompute="full")
    configs["experts or MLP recomputed"] = with_lora(configs["one"], recompute="selective")
    found = {}
    for size in (1, 2, 4):
        names = [
            name for name, of in configs.items() if of.layout.tp * of.layout.pp * of.layout.cp * of.layout.dp == size
        ]
        results = ranks.in_turn(size, *((learned, configs[name]) for name in names)) if names else []
        assert all(frozen for of_call in results for *_, frozen in of_call)
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, results, strict=True)}
    metrics, start, weights, _ = found["one"]
    moved = {name for name in start if not torch.equal(start[name], weights[name])}
    assert moved == {name for name in start if name.split(".")[-2] in ALL}
    for where, (ours, before, after, _) in found.items():
        assert ours["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-5), where
        assert ours["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-4, abs=1e-5), where
        for name in start:
            assert (before[name] - start[name]).norm() <= 1e-6 * start[name].norm(), (where, name)
            expected = weights[name] - start[name]
            error = after[name] - before[name] - expected
            assert error.norm() <= 1e-5 * expected.norm() + 2e-7 * start[name].norm(), (where, name)

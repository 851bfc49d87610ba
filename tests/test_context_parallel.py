"""Whole runs on context-parallel ranks: warmed up, trained, with a reference and both levels of pruning."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.sft import sft
from megatron_dppo.train import train
from tests.ranks import RankPool
from tests.small_runs import Rows, configure, rows, write_run

STEPS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("policy"))


def live(rank: int, size: int, config: Config) -> None:
    train(config)


def warm_up(rank: int, size: int, config: Config) -> None:
    sft(config)


def run_in(layout: LayoutConfig, ranks: RankPool, policy: Path, run: Path) -> Rows:
    config = configure(policy, run, layout, steps=STEPS)
    config = replace(config, loss=replace(config.loss, kl_coef=0.1, updates_per_rollout=2))
    ranks.run(layout.tp * layout.cp, live, config)
    return rows(run)


def test_a_run_is_that_of_one_rank(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    alone = run_in(LayoutConfig(dp=1), ranks, policy, tmp_path / "alone")
    for name, layout in {
        "cp2": LayoutConfig(cp=2),
        "cp2 tp2": LayoutConfig(cp=2, tp=2, sequence_parallel=True),
    }.items():
        shared = run_in(layout, ranks, policy, tmp_path / name)
        assert len(shared) == len(alone) == STEPS + 1
        for ours, reference in zip(shared[1:], alone[1:], strict=True):
            drawn = [name for name in reference if name.startswith(("rollout/reward", "rollout/response", "prune/"))]
            assert len(drawn) > 2
            for name in (*drawn, "train/grad_norm", "train/kl_loss", "train/entropy_loss", "train/tokens"):
                assert ours[name] == pytest.approx(reference[name], rel=1e-3, abs=1e-7), name


def test_a_warm_up_is_that_of_one_rank(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    warmed = []
    for name, layout in {"alone": LayoutConfig(dp=1), "shared": LayoutConfig(cp=2, dp=1)}.items():
        config = configure(policy, tmp_path / name, layout)
        config = replace(config, sft=replace(config.sft, steps=3, batch=8, out=str(tmp_path / name / "hf")))
        ranks.run(layout.cp, warm_up, config)
        warmed.append(load_file(tmp_path / name / "hf" / "model.safetensors"))
    alone, shared = warmed
    assert alone.keys() == shared.keys()
    for tensor, value in alone.items():
        assert float((shared[tensor] - value).abs().max()) < 1e-4, tensor

"""What CUDA alone can show of servers on the trainer's GPU: the memory that a trainer gives
back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.config import LayoutConfig, LossConfig, replace
from megatron_dppo.init import write_model
from tests.gpu.test_te_on_gpu import over_nccl
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA"),
]
MIB = 2**20


def released(rank: int, size: int, path: Path) -> list[tuple[int, int]]:
    """Bytes that the process has of the device, before and after it gives some back, twice, with a
    step between."""
    over_nccl()
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    config = replace(config, model=replace(config.model, spec="torch"))
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    seen = []
    for step in range(2):
        plan = plan_for(world, config, metadata)
        learner.train(plan, held_by(rank, metadata, groups), step=step + 1, version=0)
        before = torch.cuda.memory_reserved()
        policy.actor.release_memory()
        seen.append((before, torch.cuda.memory_reserved()))
    return seen


def test_gradients_and_caches_go_back_to_the_device(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    write_model(
        path, hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=4096, vocab_size=2048
    )
    weights = (path / "model.safetensors").stat().st_size  # fp32, as gradients are
    [seen] = ranks.run(1, released, path)
    for before, after in seen:
        assert before - after >= weights, "the gradients, and what passes had"
        assert after <= 3 * weights + 64 * MIB, "weights and two moments"
    assert seen[1][1] <= seen[0][1] + 4 * MIB, "no step leaves more behind than the one before"

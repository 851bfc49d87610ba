"""Adapters in Transformer Engine's layers, with norms apart and experts grouped, against torch's
layers in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import Config, replace
from megatron_dppo.rl.pack import build_pack
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.gpu.test_te_on_gpu import configure, over_nccl, pytestmark, rows_of_a_step
from tests.models.test_lora import stirred, with_lora
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, held_by, plan_for, step_of_groups

__all__ = ["pytestmark"]


def scored_and_learned(rank: int, size: int, config: Config) -> tuple[np.ndarray, float]:
    """The log-probabilities of a step's completions, and the norm of its gradient."""
    over_nccl()
    world, learner, policy = stirred(config)
    (logprobs,) = policy.actor.log_probabilities(
        [build_pack(rows_of_a_step(), capacity=1024, pad_id=0, align=1)]
    )
    metadata, groups = step_of_groups(size)
    metrics = learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )
    return logprobs, metrics["train/grad_norm"]


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_te_computes_with_adapters_what_torch_does(
    family: str, ranks: RankPool, tmp_path: Path
) -> None:
    if family == "dense":
        write_policy(tmp_path)
    else:
        sizes = Sizes(vocab_size=VOCAB, hidden_size=64, intermediate_size=64, head_dim=16)
        write_qwen3_moe(tmp_path, sizes, experts=4)
    found = {}
    for name, spec, dtype in (
        ("exact", "torch", "fp32"),
        ("torch", "torch", "bf16"),
        ("te", "te", "bf16"),
    ):
        config = with_lora(configure(tmp_path, "torch"))
        config = replace(config, model=replace(config.model, spec=spec, dtype=dtype))
        [found[name]] = ranks.run(1, scored_and_learned, config)
    exact, norm = found.pop("exact")
    error = {name: np.abs(logprobs - exact).mean() for name, (logprobs, _) in found.items()}
    assert 0 < error["te"] < 2 * error["torch"], error
    assert found["te"][1] == pytest.approx(norm, rel=0.05)

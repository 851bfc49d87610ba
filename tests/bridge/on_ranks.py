"""What the bridge's tests run on every rank."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_dppo.bridge.load import load_policy
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.models.policy import PolicyModel, build_policy
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.parallel.world import World, initialize


def loaded_policy(
    path: Path, layout: LayoutConfig, dtype: str = "fp32"
) -> tuple[list[PolicyModel], PolicyShape, World]:
    """This rank's shard of the policy at ``path``, NaN wherever loading leaves anything out."""
    world = initialize(layout, seed=1, timeout_s=60.0)
    shape = read_shape(path)
    chunks = build_policy(shape, ModelConfig(path=str(path), dtype=dtype), layout, temperature=1.0)
    for chunk in chunks:
        chunk.bfloat16() if dtype == "bf16" else chunk.float()
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    world.together(lambda: load_policy(chunks, path, world))
    return chunks, shape, world

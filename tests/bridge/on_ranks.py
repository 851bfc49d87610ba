"""Functions of ranks: load a policy into a layout, and stream the policy back."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.load import load_policy
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.stream import Consumers, weight_stream
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.models.policy import PolicyModel, build_policy
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.parallel.world import World, initialize

Names = list[list[str]]
"""Names of the tensors in each bucket."""


def size_of(layout: LayoutConfig) -> int:
    return layout.tp * layout.pp * layout.cp * (layout.dp or 1)


def loaded_policy(
    path: Path, layout: LayoutConfig, dtype: str = "fp32"
) -> tuple[list[PolicyModel], PolicyShape, World]:
    """Build this rank's shard of the policy at ``path``, with NaN wherever loading leaves anything
    out."""
    world = initialize(layout, seed=1, timeout_s=60.0)
    shape = read_shape(path)
    chunks = build_policy(shape, ModelConfig(path=str(path), dtype=dtype), layout, temperature=1.0)
    for chunk in chunks:
        chunk.bfloat16() if dtype == "bf16" else chunk.float()
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    world.run_on_all_ranks(lambda: load_policy(chunks, path, world))
    return chunks, shape, world


def stream_back(
    rank: int, size: int, path: Path, layout: LayoutConfig, dtype: str = "fp32"
) -> dict[Consumers, Names]:
    """Stream to each kind of consumers, and compare every tensor with the directory's."""
    model, _, world = loaded_policy(path, layout, dtype)
    stored = load_file(path / "model.safetensors")
    streams: dict[Consumers, Names] = {}
    for to in Consumers:
        streams[to] = []
        for bucket in weight_stream(model, world, to=to, bucket_mib=1):
            for name, tensor in bucket.items():
                assert tensor.dtype == stored[name].dtype
                assert tensor.is_contiguous()
                assert torch.equal(tensor, stored[name]), f"{name} has changed"
            leads = world.shard_group_rank == 0 and (
                to is Consumers.STAGE_LEADERS or world.pp_rank == 0
            )
            assert bool(bucket) == (to is Consumers.EVERYONE or leads)
            streams[to].append(list(bucket))
    return streams


def assert_complete(
    ranks: list[dict[Consumers, Names]], layout: LayoutConfig, shape: PolicyShape
) -> None:
    """Each consumer of each copy has every tensor once, and ranks that only send have as many
    buckets."""
    expected = sorted(expected_tensors(shape))

    def names(*streams: Names) -> list[str]:
        return sorted(name for stream in streams for bucket in stream for name in bucket)

    everyone = [streams[Consumers.EVERYONE] for streams in ranks]
    assert names(everyone[0]) == expected
    assert all(stream == everyone[0] for stream in everyone)
    copy, stage = max(layout.tp, layout.expert_tp * layout.ep), len(ranks) // layout.pp
    for rank, streams in enumerate(ranks):
        leads = rank < stage and rank % copy == 0
        assert streams[Consumers.LEADER] == (everyone[0] if leads else [[]] * len(everyone[0]))
    of_stages = [streams[Consumers.STAGE_LEADERS] for streams in ranks]
    assert names(*of_stages) == sorted(expected * (stage // copy))
    assert all(
        len(stream) == len(of_stages[rank // copy * copy]) for rank, stream in enumerate(of_stages)
    )

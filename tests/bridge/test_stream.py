"""Law 4 on real ranks: Hugging Face → Megatron in any layout → Hugging Face, bit by bit; and the stream's promises."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.binding import bind
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.stream import plan_buckets, weight_stream
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.shape import PolicyShape, read_shape
from tests.bridge.directories import Sizes, write_qwen3
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool

LAYOUTS = {
    "one": LayoutConfig(),
    "tp2": LayoutConfig(tp=2),
    "pp2": LayoutConfig(pp=2),
    "tp2pp2": LayoutConfig(tp=2, pp=2),
    "tp4": LayoutConfig(tp=4),
}
SEVERAL_BUCKETS = Sizes(vocab_size=1500, hidden_size=192, intermediate_size=512, num_hidden_layers=4)


def stream_back(rank: int, size: int, path: Path, layout: LayoutConfig, dtype: str) -> list[list[str]]:
    """The names in each bucket, after every tensor has been compared with the directory's."""
    model, shape, world = loaded_policy(path, layout, dtype)
    stored = load_file(path / "model.safetensors")
    buckets = []
    for bucket in weight_stream(model, shape, world, bucket_mib=1):
        for name, tensor in bucket.items():
            assert tensor.dtype == stored[name].dtype
            assert tensor.is_contiguous()
            assert torch.equal(tensor, stored[name]), f"{name} has changed"
        buckets.append(list(bucket))
    return buckets


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_round_trip_is_the_identity(ranks: RankPool, tmp_path: Path, layout: LayoutConfig, tied: bool) -> None:
    shape = write_qwen3(tmp_path, Sizes(tie_word_embeddings=tied))
    streams = ranks.run(layout.tp * layout.pp, stream_back, tmp_path, layout, "fp32")
    assert all(stream == streams[0] for stream in streams)
    assert sorted(name for bucket in streams[0] for name in bucket) == sorted(expected_tensors(shape))


def test_a_rank_may_hold_nothing_but_padding(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes(vocab_size=50))
    ranks.run(2, stream_back, tmp_path, LayoutConfig(tp=2), "fp32")


def test_round_trip_in_bf16(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes(), dtype=torch.bfloat16)
    ranks.run(4, stream_back, tmp_path, LayoutConfig(tp=2, pp=2), "bf16")


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2pp2"]], ids=["one", "tp2pp2"])
def test_buckets_are_bounded_and_cover_everything_once(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    shape = write_qwen3(tmp_path, SEVERAL_BUCKETS)
    sizes = {name: 4 * prod(size) for name, size in expected_tensors(shape).items()}
    streams = ranks.run(layout.tp * layout.pp, stream_back, tmp_path, layout, "fp32")
    assert all(stream == streams[0] for stream in streams)
    assert sorted(name for bucket in streams[0] for name in bucket) == sorted(sizes)
    assert len(streams[0]) >= 6
    assert sizes["lm_head.weight"] > 2**20  # too large for a bucket, so alone in its own
    assert all(sum(map(sizes.get, bucket)) <= 2**20 or len(bucket) == 1 for bucket in streams[0])


@pytest.mark.parametrize("most_bytes", [1, 3000, 20000, 10**9])
def test_planned_buckets_are_as_full_as_the_order_allows(most_bytes: int) -> None:
    shape = PolicyShape(4, 12, 8, 4, 6, 16, 131, False, 1e6, 1e-6, 128)
    buckets = plan_buckets(shape, 0, 1, most_bytes, torch.float32)
    sizes = [[4 * sum(map(prod, entry.tensors.values())) for entry in bucket] for bucket in buckets]
    assert all(sum(bucket) <= most_bytes or len(bucket) == 1 for bucket in sizes)
    assert all(sum(a) + b[0] > most_bytes for a, b in pairwise(sizes))


def stream_alone(rank: int, size: int, path: Path) -> bool:
    model, shape, world = loaded_policy(path, LayoutConfig(tp=2, dp=2))
    if world.dp_rank == 1:
        return True  # a collective with another replica would now wait for this rank
    stored = load_file(path / "model.safetensors")
    return all(torch.equal(t, stored[n]) for bucket in weight_stream(model, shape, world) for n, t in bucket.items())


def test_replicas_do_not_speak_to_one_another(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes())
    assert all(ranks.run(4, stream_alone, tmp_path, timeout=60.0))


def views_of_parameters(rank: int, size: int, path: Path) -> dict[str, bool]:
    model, shape, world = loaded_policy(path, LayoutConfig())
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return {
        name: tensor.untyped_storage().data_ptr() in storages
        for bucket in weight_stream(model, shape, world)
        for name, tensor in bucket.items()
    }


def test_an_unsplit_policy_is_streamed_without_copies_except_for_qkv(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes())
    (viewed,) = ranks.run(1, views_of_parameters, tmp_path)
    assert {name.split(".")[-2] for name, view in viewed.items() if not view} == {"q_proj", "k_proj", "v_proj"}


def cast_stream(rank: int, size: int, path: Path, layout: LayoutConfig) -> bool:
    model, shape, world = loaded_policy(path, layout)
    stored = load_file(path / "model.safetensors")
    stream = weight_stream(model, shape, world, dtype=torch.bfloat16)
    return all(torch.equal(t, stored[n].bfloat16()) for bucket in stream for n, t in bucket.items())


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2"]], ids=["one", "tp2"])
def test_a_stream_may_have_another_type(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    write_qwen3(tmp_path, Sizes())
    assert all(ranks.run(layout.tp, cast_stream, tmp_path, layout))


def load_mismatched(rank: int, size: int, path: Path, other: Path) -> str:
    model, _, world = loaded_policy(path, LayoutConfig())
    with pytest.raises(ValueError) as caught:
        bind(model, read_shape(other), world)
    return str(caught.value)


def test_a_model_that_was_built_for_another_shape_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path / "model", Sizes())
    write_qwen3(tmp_path / "wide", Sizes(intermediate_size=48))
    write_qwen3(tmp_path / "deep", Sizes(num_hidden_layers=3))
    write_qwen3(tmp_path / "flat", Sizes(num_hidden_layers=1))
    for other, message in {"wide": "linear_fc1.weight has shape", "deep": "0 parameters", "flat": "no entry"}.items():
        (refusal,) = ranks.run(1, load_mismatched, tmp_path / "model", tmp_path / other)
        assert message in refusal

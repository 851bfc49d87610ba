"""Law 4 on real ranks: Hugging Face → Megatron in any layout → Hugging Face, bit by bit; and the stream's promises."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dppo.bridge.load import bind
from megatron_dppo.bridge.mapping import entries, expected_tensors
from megatron_dppo.bridge.stream import Consumers, plan_buckets, weight_stream
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World
from tests.bridge.directories import FAMILIES, Sizes, write_qwen3
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool

LAYOUTS = {
    "one": LayoutConfig(),
    "tp2": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "tp2pp2": LayoutConfig(tp=2, pp=2, sequence_parallel=True),
    "tp4": LayoutConfig(tp=4, sequence_parallel=True),
    "pp2vpp2": LayoutConfig(pp=2, vpp=2),
}
OF_EXPERTS = {
    "ep2": LayoutConfig(ep=2, dp=2),
    "ep2tp2": LayoutConfig(ep=2, tp=2, etp=1, sequence_parallel=True),
    "ep2tp2etp2": LayoutConfig(ep=2, tp=2, dp=2, sequence_parallel=True),
    "tp2etp1": LayoutConfig(tp=2, etp=1, sequence_parallel=True),
    "ep2pp2vpp2": LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
    "ep2 of dp4": LayoutConfig(ep=2, dp=4),
}
MIB = 2**20
SEVERAL_BUCKETS = Sizes(vocab_size=1500, hidden_size=192, intermediate_size=512, num_hidden_layers=4)
"""Of one MiB each, in which neither the embedding nor the output layer has room."""
Names = list[list[str]]
"""Of the tensors in each bucket."""


def size_of(layout: LayoutConfig) -> int:
    return layout.tp * layout.pp * (layout.dp or 1)


def consumes(world: World, to: Consumers) -> bool:
    return to is Consumers.EVERYONE or (world.copy_rank == 0 and (to is Consumers.STAGE_LEADERS or world.pp_rank == 0))


def stream_back(rank: int, size: int, path: Path, layout: LayoutConfig, dtype: str) -> dict[Consumers, Names]:
    """To all who may consume, after every tensor has been compared with the directory's."""
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
            assert bool(bucket) == consumes(world, to)
            streams[to].append(list(bucket))
    return streams


def assert_complete(ranks: list[dict[Consumers, Names]], layout: LayoutConfig, shape: PolicyShape) -> None:
    """Each consumer of each copy got every tensor once, and the ranks that only send as many buckets."""
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
    assert all(len(stream) == len(of_stages[rank // copy * copy]) for rank, stream in enumerate(of_stages))


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [("Qwen3", "fp32", False), ("Qwen3", "fp32", True), ("Qwen2.5", "bf16", True), ("Qwen3-MoE", "bf16", False)],
)
def test_round_trip_is_the_identity_in_every_layout(
    ranks: RankPool, tmp_path: Path, family: str, dtype: str, tied: bool
) -> None:
    sizes = Sizes(tie_word_embeddings=tied, num_hidden_layers=4)
    experts = {"experts": 6} if family == "Qwen3-MoE" else {}
    shape = FAMILIES[family](tmp_path, sizes, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, **experts)
    assert sorted(expected_tensors(shape)) == sorted(load_file(tmp_path / "model.safetensors"))
    for size in (1, 2, 4):
        layouts = [layout for layout in (LAYOUTS | (OF_EXPERTS if experts else {})).values() if size_of(layout) == size]
        results = ranks.in_turn(size, *((stream_back, tmp_path, layout, dtype) for layout in layouts))
        for layout, streams in zip(layouts, results, strict=True):
            assert_complete(streams, layout, shape)


def test_a_rank_may_hold_nothing_but_padding(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes(vocab_size=50))
    ranks.run(2, stream_back, tmp_path, LayoutConfig(tp=2), "fp32")


def sizes_in_bytes(shape: PolicyShape) -> dict[str, int]:
    return {name: 4 * prod(size) for name, size in expected_tensors(shape).items()}


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2pp2"]], ids=["one", "tp2pp2"])
def test_buckets_are_bounded_and_cover_everything_once(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    shape = write_qwen3(tmp_path, SEVERAL_BUCKETS)
    sizes = sizes_in_bytes(shape)
    streams = ranks.run(size_of(layout), stream_back, tmp_path, layout, "fp32")
    assert_complete(streams, layout, shape)
    assert len(streams[0][Consumers.LEADER]) >= 6
    assert sizes["lm_head.weight"] > MIB  # too large for a bucket, so alone in its own
    for buckets in streams[0].values():
        assert all(sum(map(sizes.get, bucket)) <= MIB or len(bucket) == 1 for bucket in buckets)


def test_stages_may_have_more_buckets_than_others(ranks: RankPool, tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, tie_word_embeddings=True))
    streams = ranks.run(4, stream_back, tmp_path, LAYOUTS["tp2pp2"], "fp32")
    assert_complete(streams, LAYOUTS["tp2pp2"], shape)
    assert [len(stream[Consumers.STAGE_LEADERS]) for stream in streams] == [5, 5, 4, 4]


@pytest.mark.parametrize("most_bytes", [1, 3000, 20000, 10**9])
def test_planned_buckets_are_as_full_as_the_order_allows(most_bytes: int) -> None:
    shape = PolicyShape(4, 12, 8, 4, 6, 16, 131, False, 1e6, 1e-6, 128)
    buckets = plan_buckets(shape, [0], LayoutConfig(), most_bytes=most_bytes, dtype=torch.float32)
    assert [item.entry for bucket in buckets for item in bucket] == list(entries(shape))
    sizes = [[4 * item.entry.elements for item in bucket] for bucket in buckets]
    assert all(sum(bucket) <= most_bytes or len(bucket) == 1 for bucket in sizes)
    assert all(sum(a) + b[0] > most_bytes for a, b in pairwise(sizes))


def test_the_stages_share_every_bucket() -> None:
    shape = PolicyShape(8, 12, 8, 4, 6, 16, 131, False, 1e6, 1e-6, 128)
    buckets = plan_buckets(shape, [0, 1], LayoutConfig(pp=2), most_bytes=10_000, dtype=torch.float32)
    assert len(buckets) >= 6
    for bucket in buckets:
        of_stage = [4 * sum(item.entry.elements for item in bucket if item.stage == stage) for stage in (0, 1)]
        assert abs(of_stage[0] - of_stage[1]) <= 4 * max(entry.elements for entry in entries(shape))


@contextmanager
def sends_seen_by(see: Callable[[list[dist.P2POp]], None]) -> Iterator[None]:
    send = dist.batch_isend_irecv

    def seen(operations: list[dist.P2POp]) -> list[dist.Work]:
        see(operations)
        return send(operations)

    with patch.object(dist, "batch_isend_irecv", seen):
        yield


def events(rank: int, size: int, path: Path, layout: LayoutConfig, to: Consumers) -> list[str]:
    model, _, world = loaded_policy(path, layout)
    log: list[str] = []
    with sends_seen_by(lambda _: log.append("gather")):
        for _ in weight_stream(model, world, to=to, bucket_mib=1):
            log.append("bucket")
    return log


def test_the_next_gather_has_begun_when_a_bucket_is_handed_out(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, SEVERAL_BUCKETS)
    results = ranks.in_turn(2, *((events, tmp_path, LAYOUTS["tp2"], to) for to in Consumers))
    for log in chain.from_iterable(results):
        buckets = log.count("bucket")
        assert buckets >= 6
        assert log == ["gather", *["gather", "bucket"] * (buckets - 1), "bucket"]


def hold_one_back(rank: int, size: int, path: Path, layout: LayoutConfig, to: Consumers) -> bool:
    """The slow consumer stays at its second bucket until all the others have their third."""
    model, _, world = loaded_policy(path, layout)
    stored = load_file(path / "model.safetensors")
    slow = rank == 0 if to is Consumers.EVERYONE else consumes(world, to)
    same = []
    for number, bucket in enumerate(weight_stream(model, world, to=to, bucket_mib=1), start=1):
        if number == (2 if slow else 3):
            world.wait_for_all("bucket")
        same += [torch.equal(tensor, stored[name]) for name, tensor in bucket.items()]
    return all(same)


def test_the_next_bucket_arrives_while_the_consumer_has_this_one(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, SEVERAL_BUCKETS)
    calls = [(hold_one_back, tmp_path, LAYOUTS["tp2pp2"], to) for to in Consumers]
    assert all(chain.from_iterable(ranks.in_turn(4, *calls, timeout=90.0)))


def collectives_between(rank: int, size: int, path: Path, layout: LayoutConfig, to: Consumers) -> bool:
    model, _, world = loaded_policy(path, layout)
    stored = load_file(path / "model.safetensors")
    groups = [parallel_state.get_tensor_model_parallel_group()]
    if to is not Consumers.STAGE_LEADERS:
        groups += [parallel_state.get_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group(), None]
    right = []
    for number, bucket in enumerate(weight_stream(model, world, to=to, bucket_mib=1)):
        for group in groups:
            ones = torch.full((1000,), number)
            dist.all_reduce(ones, group=group)
            right.append(bool((ones == number * dist.get_world_size(group)).all()))
            dist.broadcast(ones, group=group, group_src=dist.get_world_size(group) - 1)
        right += [torch.equal(tensor, stored[name]) for name, tensor in bucket.items()]
    return all(right)


def test_consumers_may_use_the_same_groups_between_buckets(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, tie_word_embeddings=True))
    calls = [(collectives_between, tmp_path, LAYOUTS["tp2pp2"], to) for to in Consumers]
    assert all(chain.from_iterable(ranks.in_turn(4, *calls, timeout=90.0)))


def elements_sent(rank: int, size: int, path: Path, layout: LayoutConfig) -> tuple[int, dict[Consumers, int]]:
    """Of this rank's parameters, and in a stream."""
    model, _, world = loaded_policy(path, layout)
    sent = dict.fromkeys(Consumers, 0)
    for to in Consumers:

        def count(operations: list[dist.P2POp], to: Consumers = to) -> None:
            sent[to] += sum(operation.tensor.numel() for operation in operations if operation.op is dist.isend)

        with sends_seen_by(count):
            for _ in weight_stream(model, world, to=to):
                pass
    return sum(parameter.numel() for chunk in model for parameter in chunk.parameters()), sent


@pytest.mark.parametrize(("family", "layout"), [("Qwen3", LAYOUTS["tp2pp2"]), ("Qwen3-MoE", OF_EXPERTS["ep2pp2vpp2"])])
def test_a_consumer_is_sent_what_it_does_not_have_and_nothing_twice(
    ranks: RankPool, tmp_path: Path, family: str, layout: LayoutConfig
) -> None:
    experts = {"experts": 6} if family == "Qwen3-MoE" else {}
    shape = FAMILIES[family](tmp_path, Sizes(vocab_size=256, num_hidden_layers=4), **experts)  # which needs no padding
    policy = sum(prod(size) for size in expected_tensors(shape).values())
    held, sent = zip(*ranks.run(4, elements_sent, tmp_path, layout), strict=True)
    total = {to: sum(by_rank[to] for by_rank in sent) for to in Consumers}
    assert total[Consumers.LEADER] == policy - held[0]
    assert total[Consumers.STAGE_LEADERS] == policy - held[0] - held[2]
    assert total[Consumers.EVERYONE] == 3 * policy  # norms included, which a rank has of its own stage: so little


class Held(TorchDispatchMode):
    """Bytes of the tensors that are made within the ``with`` block, as long as they live, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and (key := leaf.untyped_storage()._cdata) not in self._known | before:
                self._known.add(key)
                self.now += leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self._free, key, leaf.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


def most_held(rank: int, size: int, path: Path, layout: LayoutConfig) -> dict[Consumers, float]:
    """MiB, with the bucket that is handed out."""
    model, _, world = loaded_policy(path, layout)
    most = {}
    for to in Consumers:
        with Held() as held:
            for _ in weight_stream(model, world, to=to, bucket_mib=1):
                pass
        most[to] = held.most / MIB
    return most


@pytest.mark.parametrize(
    ("layout", "vocabulary"),
    [(LAYOUTS["tp2"], 1280), (LAYOUTS["pp2"], 4096), (LAYOUTS["tp2pp2"], 1280), (LAYOUTS["tp2pp2"], 4096)],
    ids=["tp2", "pp2, embedding larger", "tp2pp2", "tp2pp2, embedding larger"],
)
def test_a_stream_takes_two_buckets(ranks: RankPool, tmp_path: Path, layout: LayoutConfig, vocabulary: int) -> None:
    shape = write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, vocab_size=vocabulary))
    embedding = sizes_in_bytes(shape)["lm_head.weight"] / MIB
    larger = embedding if embedding > 1 else 0.0
    for rank, most in enumerate(ranks.run(size_of(layout), most_held, tmp_path, layout)):
        for to in Consumers:
            first = rank % layout.tp == 0 and (to is Consumers.STAGE_LEADERS or rank == 0)
            if to is Consumers.EVERYONE or first:
                assert most[to] <= 2 + larger
                assert most[to] > 1 or layout.tp == 1
            else:
                assert most[to] <= (1 + larger) / layout.tp


def stream_alone(rank: int, size: int, path: Path, layout: LayoutConfig) -> bool:
    model, _, world = loaded_policy(path, layout)
    if world.dp_rank == 1 or world.cp_rank == 1:
        return True  # an exchange with another replica would now wait for this rank
    stored = load_file(path / "model.safetensors")
    return all(
        torch.equal(tensor, stored[name])
        for to in Consumers
        for bucket in weight_stream(model, world, to=to)
        for name, tensor in bucket.items()
    )


@pytest.mark.parametrize("layout", [LayoutConfig(tp=2, dp=2), LayoutConfig(tp=2, cp=2)], ids=["dp2", "cp2"])
def test_replicas_do_not_speak_to_one_another(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    write_qwen3(tmp_path, Sizes())
    assert all(ranks.run(4, stream_alone, tmp_path, layout, timeout=60.0))


def views_of_parameters(rank: int, size: int, path: Path) -> dict[str, bool]:
    model, _, world = loaded_policy(path, LayoutConfig())
    storages = {parameter.untyped_storage().data_ptr() for chunk in model for parameter in chunk.parameters()}
    return {
        name: tensor.untyped_storage().data_ptr() in storages
        for bucket in weight_stream(model, world)
        for name, tensor in bucket.items()
    }


def test_an_unsplit_policy_is_streamed_without_copies_except_for_qkv(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, Sizes())
    (viewed,) = ranks.run(1, views_of_parameters, tmp_path)
    assert {name.split(".")[-2] for name, view in viewed.items() if not view} == {"q_proj", "k_proj", "v_proj"}


def cast_stream(rank: int, size: int, path: Path, layout: LayoutConfig) -> bool:
    model, _, world = loaded_policy(path, layout)
    stored = load_file(path / "model.safetensors")
    stream = weight_stream(model, world, bucket_mib=1, dtype=torch.bfloat16)
    return all(torch.equal(t, stored[n].bfloat16()) for bucket in stream for n, t in bucket.items())


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2"]], ids=["one", "tp2"])
def test_a_stream_may_have_another_type(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, vocab_size=4096))
    assert all(ranks.run(layout.tp, cast_stream, tmp_path, layout))


OTHER_SHAPES: dict[str, dict[str, dict[str, object]]] = {
    "Qwen3": {
        "linear_fc1.weight has shape": {"ffn": 48},
        "0 parameters of the model are": {"num_layers": 3},
        "no entry of the mapping matches": {"num_layers": 1},
        "0 parameters of the model are .*linear_qkv.bias": {"architecture": "Qwen2ForCausalLM"},
    },
    "Qwen2.5": {"0 parameters of the model are .*q_layernorm": {"architecture": "Qwen3ForCausalLM"}},
    "Qwen3-MoE": {
        "0 parameters of the model are .*fc1": {"architecture": "Qwen3ForCausalLM", "experts": 0},
        "router.weight has shape .5, 24., and the mapping makes it .4, 24.": {"experts": 4},
    },
}
"""By family and refusal, what of the shape is another."""


def refusals(rank: int, size: int, path: Path, changes: Sequence[dict[str, object]]) -> list[str]:
    model, shape, world = loaded_policy(path, LayoutConfig())
    said = []
    for change in changes:
        model[0].shape = replace(shape, **change)
        with pytest.raises(ValueError) as caught:
            bind(model, world)
        said.append(str(caught.value))
    return said


def test_a_model_that_was_built_for_another_shape_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for family in OTHER_SHAPES:
        FAMILIES[family](tmp_path / family, Sizes())
    calls = [(refusals, tmp_path / family, [*others.values()]) for family, others in OTHER_SHAPES.items()]
    for others, [said] in zip(OTHER_SHAPES.values(), ranks.in_turn(1, *calls), strict=True):
        for message, refusal in zip(others, said, strict=True):
            assert re.search(message, refusal), refusal

"""The weight stream's promises: bounded buckets, overlap, memory, and only those exchanges that a consumer needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
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

from megatron_dppo.bridge.mapping import entries, expected_tensors
from megatron_dppo.bridge.stream import Consumers, plan_buckets, weight_stream
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.directories import Sizes, write_qwen3
from tests.bridge.on_ranks import assert_complete, consumes, loaded_policy, stream_back
from tests.ranks import RankPool

TP2 = LayoutConfig(tp=2, sequence_parallel=True)
TP2_PP2 = LayoutConfig(tp=2, pp=2, sequence_parallel=True)
MIB = 2**20
SEVERAL_BUCKETS = Sizes(vocab_size=1500, hidden_size=192, intermediate_size=512, num_hidden_layers=4)
"""Sizes with several buckets of 1 MiB. Embedding and output layer are larger than a bucket."""
TIED = replace(SEVERAL_BUCKETS, tie_word_embeddings=True)
SHAPE = PolicyShape(8, 12, 8, 4, 6, 16, 131, False, 1e6, 1e-6, 128)


def test_buckets_are_bounded_and_hold_each_tensor_once(ranks: RankPool, tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path, TIED)
    sizes = {name: 4 * prod(size) for name, size in expected_tensors(shape).items()}
    streams = ranks.run(4, stream_back, tmp_path, TP2_PP2)
    assert_complete(streams, TP2_PP2, shape)
    assert sizes["model.embed_tokens.weight"] > MIB  # and so alone in a bucket
    for buckets in streams[0].values():
        assert all(sum(map(sizes.get, bucket)) <= MIB or len(bucket) == 1 for bucket in buckets)
    # The first stage has the embedding; the copy on the last stage, the output layer, is left out.
    assert [len(stream[Consumers.STAGE_LEADERS]) for stream in streams] == [5, 5, 4, 4]


@pytest.mark.parametrize("most_bytes", [1, 3000, 10**9])
def test_planned_buckets_are_as_full_as_the_order_allows(most_bytes: int) -> None:
    buckets = plan_buckets(SHAPE, [0], LayoutConfig(), most_bytes=most_bytes, dtype=torch.float32)
    assert [item.entry for bucket in buckets for item in bucket] == list(entries(SHAPE))
    sizes = [[4 * item.entry.elements for item in bucket] for bucket in buckets]
    assert all(sum(bucket) <= most_bytes or len(bucket) == 1 for bucket in sizes)
    assert all(sum(a) + b[0] > most_bytes for a, b in pairwise(sizes))


def test_stages_share_every_bucket() -> None:
    buckets = plan_buckets(SHAPE, [0, 1], LayoutConfig(pp=2), most_bytes=10_000, dtype=torch.float32)
    assert len(buckets) >= 6
    for bucket in buckets:
        first, second = (4 * sum(item.entry.elements for item in bucket if item.stage == stage) for stage in (0, 1))
        assert abs(first - second) <= 4 * max(entry.elements for entry in entries(SHAPE))


@contextmanager
def sends_seen_by(see: Callable[[list[dist.P2POp]], None]) -> Iterator[None]:
    send = dist.batch_isend_irecv

    def seen(operations: list[dist.P2POp]) -> list[dist.Work]:
        see(operations)
        return send(operations)

    with patch.object(dist, "batch_isend_irecv", seen):
        yield


def log_events(rank: int, size: int, path: Path, to: Consumers) -> list[str]:
    model, _, world = loaded_policy(path, TP2)
    log: list[str] = []
    with sends_seen_by(lambda _: log.append("gather")):
        for _ in weight_stream(model, world, to=to, bucket_mib=1):
            log.append("bucket")
    return log


def test_next_gather_begins_before_a_bucket_is_handed_out(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, SEVERAL_BUCKETS)
    for log in chain.from_iterable(ranks.in_turn(2, *((log_events, tmp_path, to) for to in Consumers))):
        buckets = log.count("bucket")
        assert buckets >= 6
        assert log == ["gather", *["gather", "bucket"] * (buckets - 1), "bucket"]


def hold_back_a_consumer(rank: int, size: int, path: Path, to: Consumers) -> bool:
    """Keep the slow consumer at its second bucket until all other ranks have their third."""
    model, _, world = loaded_policy(path, TP2_PP2)
    stored = load_file(path / "model.safetensors")
    slow = rank == 0 if to is Consumers.EVERYONE else consumes(world, to)
    equal = []
    for number, bucket in enumerate(weight_stream(model, world, to=to, bucket_mib=1), start=1):
        if number == (2 if slow else 3):
            world.wait_for_all("bucket")
        equal += [torch.equal(tensor, stored[name]) for name, tensor in bucket.items()]
    return all(equal)


def use_groups_between_buckets(rank: int, size: int, path: Path, to: Consumers) -> bool:
    model, _, world = loaded_policy(path, TP2_PP2)
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


@pytest.mark.parametrize("consume", [hold_back_a_consumer, use_groups_between_buckets])
def test_consumers_may_wait_and_communicate(ranks: RankPool, tmp_path: Path, consume: Callable[..., bool]) -> None:
    write_qwen3(tmp_path, TIED)
    calls = [(consume, tmp_path, to) for to in Consumers]
    assert all(chain.from_iterable(ranks.in_turn(4, *calls, timeout=90.0)))


def count_elements_sent(rank: int, size: int, path: Path) -> tuple[int, dict[Consumers, int]]:
    """Return how many elements this rank has as parameters, and how many each stream sends."""
    model, _, world = loaded_policy(path, TP2_PP2)
    sent = dict.fromkeys(Consumers, 0)
    for to in Consumers:

        def count(operations: list[dist.P2POp], to: Consumers = to) -> None:
            sent[to] += sum(operation.tensor.numel() for operation in operations if operation.op is dist.isend)

        with sends_seen_by(count):
            for _ in weight_stream(model, world, to=to):
                pass
    return sum(parameter.numel() for chunk in model for parameter in chunk.parameters()), sent


def test_consumers_are_sent_missing_tensors_only_and_once(ranks: RankPool, tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path, Sizes(vocab_size=256, num_hidden_layers=4))  # without padding
    policy = sum(prod(size) for size in expected_tensors(shape).values())
    held, sent = zip(*ranks.run(4, count_elements_sent, tmp_path), strict=True)
    total = {to: sum(by_rank[to] for by_rank in sent) for to in Consumers}
    assert total[Consumers.LEADER] == policy - held[0]
    assert total[Consumers.STAGE_LEADERS] == policy - held[0] - held[2]
    assert total[Consumers.EVERYONE] == 3 * policy  # norms of a rank's own stage included: hardly any bytes


class HeldMemory(TorchDispatchMode):
    """Bytes of the living tensors made within the ``with`` block: now, and at most."""

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


def measure_memory(rank: int, size: int, path: Path) -> dict[Consumers, float]:
    """Return the most MiB that each stream holds, the bucket that is handed out included."""
    model, _, world = loaded_policy(path, TP2_PP2)
    most = {}
    for to in Consumers:
        with HeldMemory() as held:
            for _ in weight_stream(model, world, to=to, bucket_mib=1):
                pass
        most[to] = held.most / MIB
    return most


@pytest.mark.parametrize("vocabulary", [1280, 4096])
def test_a_stream_takes_two_buckets(ranks: RankPool, tmp_path: Path, vocabulary: int) -> None:
    write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, vocab_size=vocabulary))
    embedding = 4 * vocabulary * SEVERAL_BUCKETS.hidden_size / MIB
    larger = embedding if embedding > 1 else 0.0
    for rank, most in enumerate(ranks.run(4, measure_memory, tmp_path)):
        for to in Consumers:
            leads = rank % 2 == 0 and (to is Consumers.STAGE_LEADERS or rank == 0)
            if to is Consumers.EVERYONE or leads:
                assert 1 < most[to] <= 2 + larger
            else:
                assert most[to] <= (1 + larger) / 2


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
def test_replicas_exchange_nothing(ranks: RankPool, tmp_path: Path, layout: LayoutConfig) -> None:
    write_qwen3(tmp_path, Sizes())
    assert all(ranks.run(4, stream_alone, tmp_path, layout, timeout=60.0))

"""The weight stream's promises: bounded buckets, overlap, memory, and only those exchanges that a
consumer needs."""

import weakref
from dataclasses import replace
from itertools import chain
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

from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.stream import Consumers, plan_buckets, weight_stream
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import read_shape
from tests.bridge.directories import Sizes, write_qwen3
from tests.bridge.on_ranks import assert_complete, loaded_policy, stream_back
from tests.policies import write_family
from tests.ranks import RankPool

TP2_PP2 = LayoutConfig(tp=2, pp=2, sequence_parallel=True)
MIB = 2**20
SEVERAL_BUCKETS = Sizes(
    vocab_size=1500, hidden_size=192, intermediate_size=512, num_hidden_layers=4
)
"""Sizes with several buckets of 1 MiB. Embedding and output layer are larger than a bucket."""
TIED = replace(SEVERAL_BUCKETS, tie_word_embeddings=True)


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


def use_groups_between_buckets(rank: int, size: int, path: Path, to: Consumers) -> bool:
    model, _, world = loaded_policy(path, TP2_PP2)
    stored = load_file(path / "model.safetensors")
    groups = [parallel_state.get_tensor_model_parallel_group()]
    if to is not Consumers.STAGE_LEADERS:
        groups += [
            parallel_state.get_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            None,
        ]
    equal = []
    for number, bucket in enumerate(weight_stream(model, world, to=to, bucket_mib=1)):
        for group in groups:
            numbers = torch.full((1000,), number)
            dist.all_reduce(numbers, group=group)
            equal.append(bool((numbers == number * dist.get_world_size(group)).all()))
        equal += [torch.equal(tensor, stored[name]) for name, tensor in bucket.items()]
    return all(equal)


def test_consumers_may_communicate(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, TIED)
    calls = [(use_groups_between_buckets, tmp_path, to) for to in Consumers]
    assert all(chain.from_iterable(ranks.in_turn(4, *calls, timeout=90.0)))


def count_elements_sent(rank: int, size: int, path: Path) -> tuple[int, dict[Consumers, int]]:
    """Return the number of elements of this rank's parameters, and the number that each stream
    sends."""
    model, _, world = loaded_policy(path, TP2_PP2)
    sent = dict.fromkeys(Consumers, 0)
    gathers: list[Consumers] = []
    send = dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> list[dist.Work]:
        gathers.append(to)
        sent[to] += sum(
            operation.tensor.numel() for operation in operations if operation.op is dist.isend
        )
        return send(operations)

    with patch.object(dist, "batch_isend_irecv", count):
        for to in Consumers:
            ahead = [
                gathers.count(to) - number
                for number, _ in enumerate(weight_stream(model, world, to=to, bucket_mib=1), 1)
            ]
            # The next gather begins before a bucket is handed out. Here, all ranks take part in all
            # gathers.
            assert to is not Consumers.EVERYONE or ahead == [*[1] * (len(ahead) - 1), 0]
            assert len(ahead) > 3
    return sum(parameter.numel() for chunk in model for parameter in chunk.parameters()), sent


def test_consumers_are_sent_missing_tensors_only_and_once(ranks: RankPool, tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path, replace(SEVERAL_BUCKETS, vocab_size=1536))  # without padding
    policy = sum(prod(size) for size in expected_tensors(shape).values())
    held, sent = zip(*ranks.run(4, count_elements_sent, tmp_path), strict=True)
    total = {to: sum(by_rank[to] for by_rank in sent) for to in Consumers}
    assert total[Consumers.LEADER] == policy - held[0]
    assert total[Consumers.STAGE_LEADERS] == policy - held[0] - held[2]
    assert (
        total[Consumers.EVERYONE] == 3 * policy
    )  # norms of a rank's own stage included: hardly any bytes


class HeldMemory(TorchDispatchMode):
    """The most bytes of living tensors that were made within the ``with`` block."""

    def __init__(self, model: list[PolicyModel]) -> None:
        super().__init__()
        self.most = 0
        self._known = {
            parameter.untyped_storage() for chunk in model for parameter in chunk.parameters()
        }
        self._held = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {leaf.untyped_storage() for leaf in tree_leaves(result) if torch.is_tensor(leaf)}
        self._held |= made - self._known
        self.most = max(self.most, sum(storage.nbytes() for storage in self._held))
        return result


def measure_memory(rank: int, size: int, path: Path) -> dict[Consumers, float]:
    """Return the most MiB that each stream holds, the bucket that is handed out included."""
    model, _, world = loaded_policy(path, TP2_PP2)
    most = {}
    for to in Consumers:
        with HeldMemory(model) as held:
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


def test_tensors_kept_in_fp32_share_no_bucket_with_bf16(tmp_path: Path) -> None:
    """Qwen3.5 keeps some parameters of its delta networks in fp32, and a bucket has one type."""
    write_family(tmp_path, "Qwen3_5ForCausalLM")
    shape = read_shape(tmp_path)
    buckets = plan_buckets(shape, [0], LayoutConfig(), most_bytes=1 << 40, dtype=torch.bfloat16)
    assert [{item.entry.mapping.exact for item in bucket} for bucket in buckets] == [
        {False},
        {True},
    ]

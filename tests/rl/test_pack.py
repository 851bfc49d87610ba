"""Packs written out, and the prefix trees of samples that begin alike."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pack import (
    LEAST_SHARED,
    TrainingSample,
    build_pack,
    build_prefix_tree,
    compute_shared_lengths,
    find_path,
    select_shared_lengths,
    split_prefix_groups,
)
from megatron_dppo.rl.types import Completion, Pack

PAD = 999
Sequences = list[tuple[int, ...]]
sequences = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=7
)
aligns = st.sampled_from([1, 2, 8])


def sample(prompt: int, response: int, first: int = 0, **fields: Any) -> TrainingSample:
    """Return prompt tokens first, first + 1, …, then response tokens from 100 + first on."""
    made: dict[str, Any] = {
        "response_ids": np.arange(100 + first, 100 + first + response, dtype=np.int32),
        "engine_logprobs": -np.arange(1, response + 1, dtype=np.float32),
        "loss_mask": np.ones(response, bool),
        "advantage": 1.0,
        "scale": 1.0,
        "version": 0,
    }
    return TrainingSample(
        prompt_ids=np.arange(first, first + prompt, dtype=np.int32), **(made | fields)
    )


def pack_of(*samples: TrainingSample, capacity: int, align: int = 1) -> Pack:
    return build_pack(samples, capacity, pad_id=PAD, align=align)


def check(pack: Pack, **expected: list[Any]) -> None:
    assert {name: getattr(pack, name).tolist() for name in expected} == expected


def test_padding_counts_among_the_segments() -> None:
    assert pack_of(sample(2, 3), capacity=64).max_seqlen == 59
    assert pack_of(capacity=64).max_seqlen == 64


def test_pack_of_two_samples_written_out() -> None:
    pack = pack_of(
        sample(2, 3, advantage=0.5, scale=0.1),
        sample(1, 2, first=10, version=3),
        capacity=12,
        align=2,
    )
    assert pack.max_seqlen == 6
    assert pack.parents is None and pack.tokens is None
    check(
        pack,
        token_ids=[0, 1, 100, 101, 102, PAD, 10, 110, 111, PAD, 0, 1],
        position_ids=[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1],
        cu_seqlens=[0, 6, 10, 12],
        predictors=[1, 2, 3, 6, 7],
        targets=[100, 101, 102, 110, 111],
        sample=[0, 0, 0, 1, 1],
        advantage=[0.5, 0.5, 0.5, 1.0, 1.0],
        scale=[0.1, 0.1, 0.1, 1.0, 1.0],
        engine_logprobs=[-1, -2, -3, -1, -2],
        versions=[0, 0, 0, 3, 3],
    )
    assert pack.predictors.dtype == pack.targets.dtype == np.int64


def test_pack_of_one_prompt_with_two_responses_written_out() -> None:
    pack = pack_of(
        sample(2, 3),
        sample(2, 2, response_ids=np.array([200, 201], np.int32), shared=2),
        capacity=8,
    )
    check(
        pack,
        token_ids=[0, 1, 100, 101, 102, 200, 201, 0],
        position_ids=[0, 1, 2, 3, 4, 2, 3, 0],
        cu_seqlens=[0, 2, 5, 7, 8],
        predictors=[1, 2, 3, 1, 5],
        parents=[-1, 0, 0, -1],
        tokens=[2, 3, 2, 1],
    )


def test_given_tokens_are_read_and_not_trained_on() -> None:
    """Advantages may differ by token, as those of segments do."""
    mask, advantage = np.array([True, False, False, True]), np.array([0.5, 9.0, 9.0, -0.5])
    pack = pack_of(
        sample(2, 4, loss_mask=mask, advantage=advantage), sample(1, 2, first=10), capacity=9
    )
    check(
        pack,
        token_ids=[0, 1, 100, 101, 102, 103, 10, 110, 111],
        predictors=[1, 4, 6, 7],
        targets=[100, 103, 110, 111],
        sample=[0, 0, 1, 1],
        advantage=[0.5, -0.5, 1.0, 1.0],
        engine_logprobs=[-1, -4, -1, -2],
    )


def test_shared_tokens_are_stored_once_and_predict_for_each() -> None:
    """A prompt of 3 tokens. The second response goes on from the first one's second token. Each
    segment is padded."""
    second = sample(3, 4, shared=5, response_ids=np.array([100, 101, 7, 8]))
    third = sample(3, 1, shared=3, scale=2.0, response_ids=np.array([9]))
    pack = pack_of(sample(3, 3), second, third, sample(1, 1, first=10), capacity=17, align=2)
    check(
        pack,
        token_ids=[0, 1, 2, PAD, 100, 101, 102, PAD, 7, 8, 9, PAD, 10, 110, 0, 1, 2],
        position_ids=[0, 1, 2, 3, 3, 4, 5, 6, 5, 6, 3, 4, 0, 1, 0, 1, 2],
        cu_seqlens=[0, 4, 6, 8, 10, 12, 14, 17],
        predictors=[2, 4, 5, 2, 4, 5, 8, 2, 12],
        targets=[100, 101, 102, 100, 101, 7, 8, 9, 110],
        sample=[0, 0, 0, 1, 1, 1, 1, 2, 3],
        scale=[1.0] * 7 + [2.0, 1.0],
    )
    assert (pack.parents.tolist(), pack.tokens.tolist()) == (
        [-1, 0, 1, 1, 0, -1, -1],
        [3, 2, 1, 2, 1, 2, 3],
    )
    assert pack.max_seqlen == 7
    assert find_path(pack, 9).tolist() == [0, 1, 2, 4, 5, 8, 9]
    assert find_path(pack, 13).tolist() == [12, 13]


def test_routing_lies_beside_its_tokens() -> None:
    """Of a shared token the first routing counts. Less is known than was read; a sample may have
    none."""
    first = sample(2, 3, routing=np.array([[[1, 2]], [[3, 4]]], np.uint8))
    second = sample(1, 2, first=10, routing=np.array([[[5, 6]], [[7, 8]]], np.uint8))
    third = sample(1, 3, first=10, shared=1, routing=np.full((2, 1, 2), 9, np.uint8))
    pack = pack_of(first, second, third, sample(1, 1), capacity=18, align=2)
    assert pack.routing[:, 0, 0].tolist() == [1, 3, *[255] * 4, 5, 255, 7, 255, 9, *[255] * 7]
    assert pack.routing[:, 0, 1].tolist() == [2, 4, *[255] * 4, 6, 255, 8, 255, 9, *[255] * 7]
    assert pack_of(sample(1, 1), capacity=4).routing is None
    assert pack_of(first, capacity=5).routing[:, 0, 0].tolist() == [1, 3, 255, 255, 255]


def test_targets_of_a_sample_without_a_teacher_are_unknown() -> None:
    taught = sample(1, 2, teacher_logprobs=np.array([-0.5, -2.0], np.float32))
    pack = pack_of(sample(2, 1), taught, capacity=8)
    np.testing.assert_array_equal(pack.teacher_logprobs, np.array([np.nan, -0.5, -2.0], np.float32))
    assert pack_of(sample(2, 1), capacity=8).teacher_logprobs is None


def test_pack_without_samples_is_all_padding() -> None:
    pack = build_pack([], capacity=8, pad_id=2, align=1)
    check(
        pack,
        token_ids=[0, 1, 2, 0, 1, 2, 0, 1],
        cu_seqlens=[0, 8],
        targets=[],
        engine_logprobs=[],
        scale=[],
    )


def test_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 6 tokens do not fit into a pack of 5"):
        pack_of(sample(2, 3), capacity=5, align=2)


def share(of: Sequences) -> list[int]:
    """Return how many tokens each sequence has in common with the one before."""
    equal = [
        [a == b for a, b in zip(one, other, strict=False)] + [False] for one, other in pairwise(of)
    ]
    return [0, *(row.index(False) for row in equal)]


@given(sequences)
def test_paths_of_a_prefix_tree_are_the_samples(of: Sequences) -> None:
    """No shared token is stored twice."""
    shares = share(of)
    segments = build_prefix_tree([*map(len, of)], shares)
    assert sum(end - begin for *_, begin, end in segments) == sum(map(len, of)) - sum(shares)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    prefixes = set()
    for number, (parent, first, begin, end) in enumerate(segments):
        assert begin < end and len(paths[parent]) == begin
        paths[number] = paths[parent] + of[first][begin:end]
        prefixes |= {paths[number][:length] for length in range(begin + 1, end + 1)}
    assert set(of) <= prefixes


@given(sequences, aligns, st.integers(1, 40))
def test_pieces_of_prefix_groups_keep_to_their_size(of: Sequences, align: int, most: int) -> None:
    lengths = np.array([*map(len, of)])
    pieces = split_prefix_groups(lengths, np.array(share(of)), max_slots=most, align=align)
    assert pieces.starts[0] == 0 and pieces.starts[-1] == len(of)
    for number, (first, last) in enumerate(pairwise(pieces.starts.tolist())):
        shares = pieces.shared[first:last].tolist()
        assert shares[0] == 0 and all(shares[1:])
        segments = build_prefix_tree(lengths[first:last].tolist(), shares)
        assert pieces.slots[number] == sum(
            -(-(end - begin) // align) * align for *_, begin, end in segments
        )
        assert pieces.slots[number] <= (-(-lengths[first:last] // align) * align).sum()
        assert pieces.slots[number] <= most or last == first + 1


def test_prefix_group_is_cut_where_its_size_ends() -> None:
    lengths, shared = np.array([30, 30, 30]), np.array([0, 20, 20])
    for most, starts, slots in ((50, [0, 3], [50]), (49, [0, 2, 3], [40, 30])):
        pieces = split_prefix_groups(lengths, shared, max_slots=most, align=1)
        assert (pieces.starts.tolist(), pieces.slots.tolist()) == (starts, slots)


def completion(*tokens: int) -> Completion:
    ids = np.array(tokens, np.int32)
    nothing, sampled = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return Completion(ids, nothing, sampled, np.zeros(len(ids), np.int32), "stop")


def test_responses_share_what_is_long_enough_for_a_segment() -> None:
    trunk = range(LEAST_SHARED)
    group = completion(*trunk, 7), completion(*trunk, 8), completion(*trunk[:-1], 9), completion(1)
    assert compute_shared_lengths(4, group) == [0, 4 + LEAST_SHARED, 4, 4]
    whole = completion(*trunk, 1, 2, 3, 4)
    several = replace(whole, starts=(LEAST_SHARED, LEAST_SHARED + 2))
    assert compute_shared_lengths(4, (whole, several)) == [0, 4 + LEAST_SHARED]


def test_kept_neighbours_share_the_least_of_those_between() -> None:
    table = np.array([[0, 20, 30, 25], [0, 9, 9, 9]])
    group, kept = np.array([0, 0, 0, 1, 1]), np.array([0, 2, 3, 1, 3])
    assert select_shared_lengths(table, group, kept).tolist() == [0, 20, 25, 0, 9]

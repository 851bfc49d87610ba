"""Families of samples that begin alike: what they share, how they are cut, which segments they make."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pack import LEAST_SHARED, PrefixGroups, cut, prefix_tree, shared_lengths, shared_of_kept
from megatron_dppo.rl.types import Completion, VersionSpan

Sequences = list[tuple[int, ...]]
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=7)
aligns = st.sampled_from([1, 2, 8])


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def shared(of: Sequences) -> list[int]:
    return [0, *(common(*pair) for pair in pairwise(of))]


def slots(of: Sequences, shares: list[int], align: int) -> int:
    segments = prefix_tree([*map(len, of)], shares)
    return sum(-(-(end - begin) // align) * align for *_, begin, end in segments)


def completion(*tokens: int) -> Completion:
    ids = np.array(tokens, np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), bool), (VersionSpan(0, len(ids)),), "stop")


def test_a_tree_written_out() -> None:
    assert prefix_tree([5, 6, 5], [0, 5, 3]) == [(-1, 0, 0, 3), (0, 0, 3, 5), (1, 1, 5, 6), (0, 2, 3, 5)]
    assert prefix_tree([2, 3], [0, 0]) == [(-1, 0, 0, 2), (-1, 1, 0, 3)]
    assert prefix_tree([4, 4, 2], [0, 4, 2]) == [(-1, 0, 0, 2), (0, 0, 2, 4)]


@given(sequences)
def test_the_path_of_every_sample_is_its_tokens_and_nothing_shared_is_there_twice(of: Sequences) -> None:
    shares = shared(of)
    segments = prefix_tree([*map(len, of)], shares)
    assert all(begin < end and parent < number for number, (parent, _, begin, end) in enumerate(segments))
    assert sum(end - begin for *_, begin, end in segments) == sum(map(len, of)) - sum(shares)

    def path(number: int) -> tuple[int, ...]:
        if number < 0:
            return ()
        parent, first, begin, end = segments[number]
        above = path(parent)
        assert len(above) == begin
        return above + of[first][begin:end]

    paths = {path(number)[:length] for number in range(len(segments)) for length in range(1, len(path(number)) + 1)}
    assert set(of) <= paths


@given(sequences, aligns, st.integers(1, 40))
def test_pieces_keep_to_their_size_and_take_up_what_they_say(of: Sequences, align: int, most: int) -> None:
    lengths = np.array([*map(len, of)])
    pieces: PrefixGroups = cut(lengths, np.array(shared(of)), most=most, align=align)
    assert pieces.starts[0] == 0 and pieces.starts[-1] == len(of)
    for number, (first, last) in enumerate(pairwise(pieces.starts.tolist())):
        shares = pieces.shared[first:last].tolist()
        assert shares[0] == 0 and (last == first + 1 or all(share > 0 for share in shares[1:]))
        assert pieces.slots[number] == slots(of[first:last], shares, align)
        apart = (-(-lengths[first:last] // align) * align).sum()
        assert pieces.slots[number] <= apart and (pieces.slots[number] <= most or last == first + 1)
    assert pieces.sums(lengths.astype(float)).sum() == lengths.sum()


def test_a_family_is_whole_where_it_fits() -> None:
    pieces = cut(np.array([30, 30, 30]), np.array([0, 20, 20]), most=50, align=1)
    assert (pieces.starts.tolist(), pieces.slots.tolist()) == ([0, 3], [50])
    pieces = cut(np.array([30, 30, 30]), np.array([0, 20, 20]), most=49, align=1)
    assert (pieces.starts.tolist(), pieces.slots.tolist()) == ([0, 2, 3], [40, 30])


def test_short_prompts_are_not_shared_where_padding_costs_more() -> None:
    assert not cut(np.array([8, 8]), np.array([0, 1]), most=99, align=8).shared.any()
    assert cut(np.array([16, 16]), np.array([0, 8]), most=99, align=8).shared.tolist() == [0, 8]


def test_responses_share_what_is_long_enough_for_a_segment() -> None:
    trunk = range(LEAST_SHARED)
    group = completion(*trunk, 7), completion(*trunk, 8), completion(*trunk[:-1], 9), completion(1)
    assert shared_lengths(4, group) == [0, 4 + LEAST_SHARED, 4, 4]


def test_what_was_pruned_between_two_takes_their_common_tokens_along() -> None:
    table = np.array([[0, 20, 30, 25], [0, 9, 9, 9]])
    group, kept = np.array([0, 0, 0, 1, 1]), np.array([0, 2, 3, 1, 3])
    assert shared_of_kept(table, group, kept).tolist() == [0, 20, 25, 0, 9]

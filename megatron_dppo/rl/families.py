"""Families: samples that begin with the same tokens, which a pack holds once.

A family's samples stand one after the other. The number of tokens that a sample shares with the one before it is the
place where it leaves their common path. All of these numbers together define the family's tree:

    p p p a a          lengths [5, 6, 5], shared [0, 5, 3]
    p p p a a b
    p p p c c          is  ppp ─┬─ aa ─── b    of 8 tokens in place of 16.
                                └─ cc
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Completion, Ints

LEAST_SHARED = 16
"""Fewest tokens of a response that are worth a segment of their own."""


def shared_lengths(prompt: int, completions: Sequence[Completion]) -> list[int]:
    """Tokens that each completion, its prompt of so many tokens included, has in common with the one before it.

    The first one's is 0. Common beginnings of responses count from ``LEAST_SHARED`` tokens on.
    """
    shared = [0]
    for before, completion in pairwise(completions):
        common = _common(_first(before), _first(completion))
        shared.append(prompt + (common if common >= LEAST_SHARED else 0))
    return shared


def prompts_shared(prompt_lengths: Ints, samples: int) -> Ints:
    """[Q, samples], what groups share of which nothing but the prompts is known. ``prompt_lengths`` are [Q]."""
    shared = np.repeat(prompt_lengths[:, None], samples, axis=1)
    shared[:, :1] = 0
    return shared


def shared_of_kept(shared: Ints, group: Ints, completion: Ints) -> Ints:
    """[K], what each of K kept completions has in common with the kept one before it; 0 begins a group.

    Where others stood between the two, it is the least that any of them shared with its predecessor.

    Args:
        shared: [Q, G], of all completions.
        group: [K], ascending.
        completion: [K], ascending in each group.
    """
    kept = np.zeros(len(group), np.int64)
    same = np.flatnonzero(group[1:] == group[:-1]) + 1
    for k in same.tolist():
        kept[k] = shared[group[k], completion[k - 1] + 1 : completion[k] + 1].min()
    return kept


def _first(completion: Completion) -> NDArray[np.int32]:
    """The response's tokens in the first sequence."""
    return completion.token_ids[: completion.starts[0] if completion.starts else None]


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Families cut into pieces that go into packs whole; the samples of a piece stand one after the other."""

    starts: Ints
    """[p + 1], the first sample of each piece, and at the end the number of samples."""
    slots: Ints
    """[p], what each takes up in a pack: its segments, padded."""
    shared: Ints
    """[n], what each sample shares with the one before it in its piece."""

    def of(self, pieces: Sequence[int]) -> tuple[int, ...]:
        """The samples of some pieces, ascending."""
        return tuple(k for piece in sorted(pieces) for k in range(self.starts[piece], self.starts[piece + 1]))

    def sums(self, of_samples: NDArray[np.float64]) -> NDArray[np.float64]:
        """[n], of samples, to [p], of pieces."""
        return np.add.reduceat(of_samples, self.starts[:-1])


def single(lengths: Ints, align: int) -> PrefixGroups:
    """Every sample by itself."""
    return PrefixGroups(np.arange(len(lengths) + 1), -(-lengths // align) * align, np.zeros(len(lengths), np.int64))


def cut(lengths: Ints, shared: Ints, *, most: int, align: int) -> PrefixGroups:
    """Families in pieces of at most ``most`` slots, unless a single sample takes more.

    A sample also begins a new piece where sharing would take more slots than it saves, which the padding of short
    segments can do.

    Args:
        lengths: [n], tokens of each sample.
        shared: [n], those that it has in common with the one before it; 0 begins a family.
        align: a segment is padded to a multiple of this.
    """

    def padded(tokens: int) -> int:
        return -(-tokens // align) * align

    starts: list[int] = []
    slots: list[int] = []
    joined: list[int] = []
    ends: list[int] = []  # where the segments end that make up the last sample
    for k, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        if common:
            stay = bisect_right(ends, common)
            left = ends[stay - 1] if stay else 0
            path = ends[:stay] + ([common] if common > left else [])
            more = padded(length - common)
            if common > left:  # the segment that it leaves in the middle becomes two
                more += padded(common - left) + padded(ends[stay] - common) - padded(ends[stay] - left)
            if more <= padded(length) and slots[-1] + more <= most:
                slots[-1] += more
                joined.append(common)
                ends = path + ([length] if length > common else [])
                continue
        starts.append(k)
        slots.append(padded(length))
        joined.append(0)
        ends = [length]
    return PrefixGroups(np.array([*starts, len(lengths)]), np.array(slots, np.int64), np.array(joined, np.int64))


def prefix_tree(lengths: Sequence[int], shared: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The segments of some samples, each before those that go on from it, and all of its descendants right after it.

    Args:
        lengths: [n], tokens of each sample.
        shared: [n], those that it has in common with the one before it.

    Returns:
        For each segment its parent (−1: none), the first sample that it belongs to, and the first and the last token of
        it, counted along that sample, the last one exclusive.
    """
    segments: list[tuple[int, int, int, int]] = []

    def grow(first: int, last: int, begin: int, parent: int) -> None:
        end = min(shared[first + 1 : last], default=lengths[first])
        if end > begin:
            segments.append((parent, first, begin, end))
            parent = len(segments) - 1
        if last == first + 1:
            return
        leaves = [first, *(k for k in range(first + 1, last) if shared[k] == end), last]
        for child, after in pairwise(leaves):
            if after > child + 1 or lengths[child] > end:
                grow(child, after, end, parent)

    grow(0, len(lengths), 0, -1)
    return segments

"""From training samples to a pack: the arrays of one microbatch in THD form.

Samples that begin with the same tokens, be it those of a system message, are a family, and a pack
holds these tokens once. A family's samples stand one after the other. The number of tokens that a
sample shares with the one before it is the place where it leaves their common path. All of these
numbers together define the family's tree:

    p p p a a          lengths [5, 6, 5], shared [0, 5, 3]
    p p p a a b
    p p p c c          is  ppp ─┬─ aa ─── b    of 8 tokens in place of 16.
                                └─ cc
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import (
    Bools,
    Completion,
    Floats,
    Ints,
    Pack,
    Routing,
    get_unknown_expert,
)

LEAST_SHARED = 16
"""Fewest tokens that are worth a segment of their own, at the beginning of prompts or of
responses."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A kept completion with its tokens, on the rank that trains on it.

        TrainingSample(prompt_ids=[12, 4], response_ids=[6, 6, 2], engine_logprobs=[-0.7, 0, -0.1],
                       loss_mask=[True, False, True], ...)

    is a response of three tokens to a prompt of two, and two of the three are trained on. The lists
    stand for arrays.
    """

    prompt_ids: NDArray[np.int32]
    """[P], at least one."""
    response_ids: NDArray[np.int32]
    """[L]"""
    engine_logprobs: NDArray[np.float32]
    """[L], not read where ``loss_mask`` is False."""
    loss_mask: Bools
    """[L], True for the tokens that are trained on."""
    advantage: Floats | float
    """[L], or one of all tokens; not read where ``loss_mask`` is False."""
    scale: float
    version: int
    """The oldest weights that made any of the response."""
    shared: int = 0
    """Tokens of prompt and response that it has in common with the sample before it, and that the
    pack holds once."""
    routing: Routing | None = None
    """Experts of the first prompt and response tokens, in the layers of this rank's stage."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[L], as in Completion; None where no server teaches this one."""


def build_pack(samples: Sequence[TrainingSample], capacity: int, pad_id: int, align: int) -> Pack:
    """Lay samples back to back, each padded to a multiple of ``align``; what is left is one last
    segment of padding.

    Samples that share tokens share one segment, from which the segments of their own parts go on;
    each segment is padded. The padding at the end repeats the pack's tokens, or counts up to
    ``pad_id`` in a pack without any. In a mixture equal tokens would all go to the same few
    experts, whose ranks might not have the memory for them.

    The token before a response token predicts it, so that scoring needs no shifted labels. A token
    that the policy did not sample is read, and has no predictor. A pack without samples is all
    padding.

    Raises:
        ValueError: the samples need more than ``capacity`` tokens.
    """
    sequences = [np.concatenate([sample.prompt_ids, sample.response_ids]) for sample in samples]
    lengths = [len(tokens) for tokens in sequences]
    shared = [sample.shared for sample in samples]
    segments = build_prefix_tree(lengths, shared) if samples else []
    parents, first, begins, ends = np.array(segments, np.int64).reshape(-1, 4).T
    sizes = -(-(ends - begins) // align) * align
    if (used := int(sizes.sum())) > capacity:
        raise ValueError(f"samples of {used} tokens do not fit into a pack of {capacity}")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    places = _assign_slots(
        shared, lengths, zip(first, begins, ends, starts[:-1].tolist(), strict=True)
    )
    tokens = ends - begins
    if used < capacity:  # one more segment, of padding
        starts = np.append(starts, capacity)
        begins = np.append(begins, 0)
        parents = np.append(parents, -1)
        sizes, tokens = (np.append(some, capacity - used) for some in (sizes, tokens))

    token_ids = np.full(capacity, pad_id, dtype=np.int64)
    for sequence, slots in zip(sequences, places, strict=True):
        token_ids[slots] = sequence
    token_ids[used:] = np.resize(
        token_ids[:used] if used else np.arange(pad_id + 1), capacity - used
    )
    sampled = [np.flatnonzero(sample.loss_mask) for sample in samples]
    responses = [
        len(sample.prompt_ids) + steps for sample, steps in zip(samples, sampled, strict=True)
    ]
    owner = np.repeat(np.arange(len(samples)), [len(steps) for steps in sampled])
    advantages = [np.broadcast_to(sample.advantage, len(sample.response_ids)) for sample in samples]
    of_teachers = [sample.teacher_logprobs for sample in samples]
    return Pack(
        token_ids=token_ids,
        position_ids=np.arange(capacity) - np.repeat(starts[:-1] - begins, sizes),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int((begins + sizes).max(initial=0)),
        predictors=_join(slots[at - 1] for slots, at in zip(places, responses, strict=True)),
        targets=_join(tokens[at] for tokens, at in zip(sequences, responses, strict=True)),
        sample=owner,
        advantage=np.concatenate(
            [np.zeros(0), *(a[at] for a, at in zip(advantages, sampled, strict=True))]
        ),
        scale=np.array([sample.scale for sample in samples], dtype=np.float64)[owner],
        engine_logprobs=_gather_targets([sample.engine_logprobs for sample in samples], sampled),
        teacher_logprobs=_gather_targets(of_teachers, sampled)
        if any(of is not None for of in of_teachers)
        else None,
        versions=np.array([sample.version for sample in samples], dtype=np.int64)[owner],
        parents=parents if (parents >= 0).any() else None,
        tokens=tokens if (parents >= 0).any() else None,
        routing=_merge_routing([sample.routing for sample in samples], places, capacity),
    )


def find_path(pack: Pack, place: int) -> Ints:
    """The places of the tokens that the one at ``place`` of a pack sees, in their order;
    itself is the last."""
    segment = int(np.searchsorted(pack.cu_seqlens, place, side="right")) - 1
    stretches = [np.arange(pack.cu_seqlens[segment], place + 1)]
    while (
        pack.parents is not None
        and pack.tokens is not None
        and (segment := int(pack.parents[segment])) >= 0
    ):
        stretches.insert(0, pack.cu_seqlens[segment] + np.arange(pack.tokens[segment]))
    return np.concatenate(stretches)


def _assign_slots(
    shared: Sequence[int], lengths: Sequence[int], segments: Iterable[tuple[int, int, int, int]]
) -> list[Ints]:
    """For each sample the place of each of its tokens in the pack, [n].

    Args:
        shared: tokens that each sample has in common with the one before it.
        lengths: tokens of each sample.
        segments: the first sample of each, its first and last token there, and its place in the
            pack.
    """
    slots = [np.empty(length, np.int64) for length in lengths]
    for sample, begin, end, start in segments:
        slots[sample][begin:end] = start + np.arange(end - begin)
    for k, common in enumerate(shared):
        slots[k][:common] = slots[k - 1][:common]
    return slots


def _gather_targets(
    samples: Sequence[NDArray[np.float32] | None], sampled: Sequence[Ints]
) -> NDArray[np.float32]:
    """[R], from one value for each token of a sample's response, and the places of those that are
    trained on. NaN for a sample without values."""
    parts = [np.zeros(0, np.float32)]
    for values, at in zip(samples, sampled, strict=True):
        parts.append(np.full(len(at), np.nan, np.float32) if values is None else values[at])
    return np.concatenate(parts)


def _join(parts: Iterable[NDArray[Any]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _merge_routing(
    tables: Sequence[Routing | None], slots: Sequence[Ints], capacity: int
) -> Routing | None:
    """[T, layers, k], from that of each sample, the first one's where they share; None where no
    sample has any."""
    known = [
        (table, places) for table, places in zip(tables, slots, strict=True) if table is not None
    ]
    if not known:
        return None
    like = known[0][0]
    routing = np.full((capacity, *like.shape[1:]), get_unknown_expert(like.dtype), like.dtype)
    for table, places in reversed(known):
        routing[places[: len(table)]] = table
    return routing


def compute_shared_lengths(prompt: int, completions: Sequence[Completion]) -> list[int]:
    """Tokens that each completion, its prompt of so many tokens included, has in common with the
    one before it.

    The first one's is 0. Common beginnings of responses count from ``LEAST_SHARED`` tokens on.
    """
    shared = [0]
    for before, completion in pairwise(completions):
        shared.append(
            prompt
            + count_common_tokens(_get_first_sequence(before), _get_first_sequence(completion))
        )
    return shared


def expand_prompt_lengths(prompt_lengths: Ints, samples: int) -> Ints:
    """[Q, samples], what groups share of which nothing but the prompts is known. ``prompt_lengths``
    are [Q]."""
    shared = np.repeat(prompt_lengths[:, None], samples, axis=1)
    shared[:, :1] = 0
    return shared


def select_shared_lengths(shared: Ints, group: Ints, completion: Ints) -> Ints:
    """[K], what each of K kept completions has in common with the kept one before it; 0 begins a
    group.

    Where others stood between the two, it is the least that any of them shared with its
    predecessor.

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


def _get_first_sequence(completion: Completion) -> NDArray[np.int32]:
    """The response's tokens in the first sequence."""
    return completion.token_ids[: completion.starts[0] if completion.starts else None]


def count_common_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two sequences begin with alike; 0 where these are fewer than
    ``LEAST_SHARED``."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    common = int(differs[0]) if len(differs) else shorter
    return common if common >= LEAST_SHARED else 0


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Families cut into pieces that go into packs whole; the samples of a piece stand one after the
    other."""

    starts: Ints
    """[p + 1], the first sample of each piece, and at the end the number of samples."""
    slots: Ints
    """[p], what each takes up in a pack: its segments, padded."""
    shared: Ints
    """[n], what each sample shares with the one before it in its piece."""

    def get_samples(self, pieces: Sequence[int]) -> tuple[int, ...]:
        """The samples of some pieces, ascending."""
        return tuple(
            k for piece in sorted(pieces) for k in range(self.starts[piece], self.starts[piece + 1])
        )

    def sum_by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[n], of samples, to [p], of pieces."""
        return np.add.reduceat(values, self.starts[:-1])


def build_ungrouped(lengths: Ints, align: int) -> PrefixGroups:
    """Every sample by itself."""
    return PrefixGroups(
        np.arange(len(lengths) + 1), -(-lengths // align) * align, np.zeros(len(lengths), np.int64)
    )


def split_prefix_groups(lengths: Ints, shared: Ints, *, max_slots: int, align: int) -> PrefixGroups:
    """Families in pieces of at most ``max_slots`` slots, unless a single sample takes more.

    A sample also begins a new piece where sharing would take more slots than it saves, which the
    padding of short segments can do.

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
                more += (
                    padded(common - left) + padded(ends[stay] - common) - padded(ends[stay] - left)
                )
            if more <= padded(length) and slots[-1] + more <= max_slots:
                slots[-1] += more
                joined.append(common)
                ends = path + ([length] if length > common else [])
                continue
        starts.append(k)
        slots.append(padded(length))
        joined.append(0)
        ends = [length]
    return PrefixGroups(
        np.array([*starts, len(lengths)]), np.array(slots, np.int64), np.array(joined, np.int64)
    )


def build_prefix_tree(
    lengths: Sequence[int], shared: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """The segments of some samples, each before those that go on from it, and all of its
    descendants right after it.

    Args:
        lengths: [n], tokens of each sample.
        shared: [n], those that it has in common with the one before it.

    Returns:
        For each segment its parent (−1: none), the first sample that it belongs to, and the first
        and the last token of it, counted along that sample, the last one exclusive.
    """
    segments: list[tuple[int, int, int, int]] = []

    def add_segments(first: int, last: int, begin: int, parent: int) -> None:
        end = min(shared[first + 1 : last], default=lengths[first])
        if end > begin:
            segments.append((parent, first, begin, end))
            parent = len(segments) - 1
        if last == first + 1:
            return
        leaves = [first, *(k for k in range(first + 1, last) if shared[k] == end), last]
        for child, after in pairwise(leaves):
            if after > child + 1 or lengths[child] > end:
                add_segments(child, after, end, parent)

    add_segments(0, len(lengths), 0, -1)
    return segments

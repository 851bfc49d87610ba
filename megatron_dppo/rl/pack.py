"""Packs of training samples: the arrays of one microbatch in THD form.

Consecutive samples with the same first tokens, such as a system message, are a prefix group. A pack
stores shared tokens once. Lengths and shared lengths define the tree of a prefix group:

    p p p a a          lengths [5, 6, 5], shared [0, 5, 3]
    p p p a a b
    p p p c c          is  ppp ─┬─ aa ─── b    with 8 tokens instead of 16.
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

from megatron_dppo.rl.sampling_mask import SamplingMask, join_masks
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
"""Fewest common tokens, at the beginning of prompts or responses, that are worth a segment."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Kept completion with tokens, on the rank that trains on it."""

    prompt_ids: NDArray[np.int32]
    """[P], at least one token."""
    response_ids: NDArray[np.int32]
    """[L]"""
    engine_logprobs: NDArray[np.float32]
    """[L], not read if ``loss_mask`` is False."""
    loss_mask: Bools
    """[L], True for tokens that are trained on."""
    advantage: Floats | float
    """[L], or one value for all tokens; not read if ``loss_mask`` is False."""
    scale: float
    version: int
    """Version of the oldest weights that generated a token."""
    shared: int = 0
    """Tokens shared with the previous sample, stored once in the pack."""
    routing: Routing | None = None
    """Experts of the first tokens, in the layers of this rank's stage."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[L], as in Completion; None without a teacher server."""
    sampling_mask: SamplingMask | None = None
    """Mask of L tokens, as in Completion."""


def build_pack(samples: Sequence[TrainingSample], capacity: int, pad_id: int, align: int) -> Pack:
    """Lay samples back to back, with segments padded to a multiple of ``align``.

    - Shared tokens are one segment; child segments hold the remaining tokens of each sample.
    - One last segment of padding fills the pack.
    - Tokens that the policy did not sample are read, and have no predictor.

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
    # Append a segment of padding.
    if used < capacity:
        starts = np.append(starts, capacity)
        begins = np.append(begins, 0)
        parents = np.append(parents, -1)
        sizes = np.append(sizes, capacity - used)
        tokens = np.append(tokens, capacity - used)

    token_ids = np.full(capacity, pad_id, dtype=np.int64)
    for sequence, slots in zip(sequences, places, strict=True):
        token_ids[slots] = sequence
    # Padding repeats the pack's tokens, or 0 to ``pad_id`` in an empty pack, because a mixture of
    # experts would send equal tokens to the same few experts, whose ranks might run out of memory.
    padding = token_ids[:used] if used else np.arange(pad_id + 1)
    token_ids[used:] = np.resize(padding, capacity - used)
    sampled = [np.flatnonzero(sample.loss_mask) for sample in samples]
    responses = [
        len(sample.prompt_ids) + steps for sample, steps in zip(samples, sampled, strict=True)
    ]
    owner = np.repeat(np.arange(len(samples)), [len(steps) for steps in sampled])
    advantages = [np.broadcast_to(sample.advantage, len(sample.response_ids)) for sample in samples]
    teacher_logprobs = None
    if any(sample.teacher_logprobs is not None for sample in samples):
        teacher_logprobs = _gather_targets([sample.teacher_logprobs for sample in samples], sampled)
    targets = _join(tokens[at] for tokens, at in zip(sequences, responses, strict=True))
    return Pack(
        token_ids=token_ids,
        position_ids=np.arange(capacity) - np.repeat(starts[:-1] - begins, sizes),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int((begins + sizes).max(initial=0)),
        # The predictor is the token before, so that scoring needs no shifted labels.
        predictors=_join(slots[at - 1] for slots, at in zip(places, responses, strict=True)),
        targets=targets,
        sample=owner,
        advantage=np.concatenate(
            [np.zeros(0), *(a[at] for a, at in zip(advantages, sampled, strict=True))]
        ),
        scale=np.array([sample.scale for sample in samples], dtype=np.float64)[owner],
        engine_logprobs=_gather_targets([sample.engine_logprobs for sample in samples], sampled),
        teacher_logprobs=teacher_logprobs,
        versions=np.array([sample.version for sample in samples], dtype=np.int64)[owner],
        parents=parents if (parents >= 0).any() else None,
        tokens=tokens if (parents >= 0).any() else None,
        routing=_merge_routing([sample.routing for sample in samples], places, capacity),
        kept_ids=_pad_masks(samples, sampled, targets),
    )


def find_path(pack: Pack, place: int) -> Ints:
    """Return the positions that the token at ``place`` attends to, in path order."""
    segment = int(np.searchsorted(pack.cu_seqlens, place, side="right")) - 1
    stretches = [np.arange(pack.cu_seqlens[segment], place + 1)]
    if pack.parents is None or pack.tokens is None:
        return stretches[0]
    while (segment := int(pack.parents[segment])) >= 0:
        stretches.insert(0, pack.cu_seqlens[segment] + np.arange(pack.tokens[segment]))
    return np.concatenate(stretches)


def _assign_slots(
    shared: Sequence[int],
    lengths: Sequence[int],
    segments: Iterable[tuple[int, int, int, int]],
) -> list[Ints]:
    """Return the position in the pack of each token of each sample.

    Args:
        shared: tokens that each sample shares with the previous sample.
        lengths: tokens of each sample.
        segments: (sample, begin, end, start) of each segment: the first sample with the segment,
            positions in this sample, and a position in the pack.
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
    """Return the values of trained tokens [R], NaN for a sample without values."""
    parts = [np.zeros(0, np.float32)]
    for values, at in zip(samples, sampled, strict=True):
        parts.append(np.full(len(at), np.nan, np.float32) if values is None else values[at])
    return np.concatenate(parts)


def _pad_masks(
    samples: Sequence[TrainingSample],
    sampled: Sequence[Ints],
    targets: Ints,
) -> Ints | None:
    """Return the kept ids of trained tokens, [R, K]; None without sampling masks."""
    lengths = [len(sample.response_ids) for sample in samples]
    mask = join_masks([sample.sampling_mask for sample in samples], lengths)
    if mask is None:
        return None
    starts = np.cumsum([0, *lengths]).tolist()
    trained = _join(start + at for start, at in zip(starts, sampled, strict=False))
    return mask.select(trained).pad(targets)


def _join(parts: Iterable[NDArray[Any]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _merge_routing(
    tables: Sequence[Routing | None],
    slots: Sequence[Ints],
    capacity: int,
) -> Routing | None:
    """Return the routing of a pack, [T, layers, k]."""
    known = [
        (table, places) for table, places in zip(tables, slots, strict=True) if table is not None
    ]
    if not known:
        return None
    like = known[0][0]
    routing = np.full((capacity, *like.shape[1:]), get_unknown_expert(like.dtype), like.dtype)
    # Reversed, so that shared tokens get the routing of the first sample.
    for table, places in reversed(known):
        routing[places[: len(table)]] = table
    return routing


def compute_shared_lengths(prompt: int, completions: Sequence[Completion]) -> list[int]:
    """Return the tokens that each completion shares with the previous completion; 0 for the first.

    Common beginnings of responses count from ``LEAST_SHARED`` tokens on.
    """
    shared = [0]
    for before, completion in pairwise(completions):
        common = count_common_tokens(_get_first_sequence(before), _get_first_sequence(completion))
        shared.append(prompt + common)
    return shared


def expand_prompt_lengths(prompt_lengths: Ints, samples: int) -> Ints:
    """Return shared lengths [Q, samples] for groups with known prompts only."""
    shared = np.repeat(prompt_lengths[:, None], samples, axis=1)
    shared[:, :1] = 0
    return shared


def select_shared_lengths(shared: Ints, group: Ints, completion: Ints) -> Ints:
    """Return the tokens [K] that each kept completion shares with the previous kept one; 0 begins a
    group.

    Args:
        shared: [Q, G], tokens that each completion shares with the previous completion.
        group: [K], index of the group, ascending.
        completion: [K], index in the group, ascending in each group.
    """
    kept = np.zeros(len(group), np.int64)
    same = np.flatnonzero(group[1:] == group[:-1]) + 1
    for k in same.tolist():
        # Over a gap of dropped completions, the least of all shared lengths in between.
        kept[k] = shared[group[k], completion[k - 1] + 1 : completion[k] + 1].min()
    return kept


def _get_first_sequence(completion: Completion) -> NDArray[np.int32]:
    return completion.token_ids[: completion.starts[0] if completion.starts else None]


def count_common_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two sequences; 0 if below ``LEAST_SHARED``."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    common = int(differs[0]) if len(differs) else shorter
    return common if common >= LEAST_SHARED else 0


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Prefix groups of consecutive samples, each held whole by one pack."""

    starts: Ints
    """[p + 1], first sample of each; ends with the number of samples."""
    slots: Ints
    """[p], slots of each in a pack: the padded segments."""
    shared: Ints
    """[n], tokens shared with the previous sample of the same prefix group."""

    def get_samples(self, groups: Sequence[int]) -> tuple[int, ...]:
        """Return the samples of some prefix groups, ascending."""
        return tuple(
            k for group in sorted(groups) for k in range(self.starts[group], self.starts[group + 1])
        )

    def sum_by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values of samples [n] over each prefix group, [p]."""
        return np.add.reduceat(values, self.starts[:-1])


def build_ungrouped(lengths: Ints, align: int) -> PrefixGroups:
    return PrefixGroups(
        np.arange(len(lengths) + 1), -(-lengths // align) * align, np.zeros(len(lengths), np.int64)
    )


def split_prefix_groups(lengths: Ints, shared: Ints, *, max_slots: int, align: int) -> PrefixGroups:
    """Split prefix groups into smaller groups of at most ``max_slots`` slots, or of a single
    sample.

    Args:
        lengths: [n], tokens of each sample.
        shared: [n], tokens shared with the previous sample; 0 begins a prefix group.
        max_slots: limit of a group.
        align: padding multiple of a segment.
    """

    def padded(tokens: int) -> int:
        return -(-tokens // align) * align

    starts: list[int] = []
    slots: list[int] = []
    joined: list[int] = []
    # Ends of the segments on the path of the last sample.
    ends: list[int] = []
    for k, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        if common:
            stay = bisect_right(ends, common)
            left = ends[stay - 1] if stay else 0
            path = ends[:stay] + ([common] if common > left else [])
            more = padded(length - common)
            # A segment that the sample leaves in the middle becomes two segments.
            if common > left:
                end = ends[stay]
                more += padded(common - left) + padded(end - common) - padded(end - left)
            # A new group begins if sharing takes more slots than it saves, because short segments
            # are padded.
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
    """Return the segments of samples, each directly followed by all of its descendants.

    Args:
        lengths: [n], tokens of each sample.
        shared: [n], tokens shared with the previous sample.

    Returns:
        (parent, sample, begin, end) of each segment: −1 for a root, the first sample with the
        segment, and positions in this sample, the end exclusive.
    """
    segments: list[tuple[int, int, int, int]] = []

    def add_segments(first: int, last: int, begin: int, parent: int) -> None:
        end = min(shared[first + 1 : last], default=lengths[first])
        if end > begin:
            segments.append((parent, first, begin, end))
            parent = len(segments) - 1
        if last == first + 1:
            return
        # A child begins at each sample that leaves the path at ``end``.
        leaves = [first, *(k for k in range(first + 1, last) if shared[k] == end), last]
        for child, after in pairwise(leaves):
            if after > child + 1 or lengths[child] > end:
                add_segments(child, after, end, parent)

    add_segments(0, len(lengths), 0, -1)
    return segments

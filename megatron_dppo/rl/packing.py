"""Dense packing: whole sequences into packs of one capacity, balanced over ranks.

Invariants, each with a test:

- Each sequence is in exactly one pack, whole.
- No pack exceeds the capacity, and the capacity does not exceed ``max_tokens``.
- All ranks have the same number of packs; packs may be empty (all padding).
- The same lengths give the same packs.

The capacity of a step is tokens / packs, plus the least excess that whole sequences need, so that
the last packs are not half empty.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.rl.pack import PrefixGroups, build_ungrouped, split_prefix_groups
from megatron_dppo.rl.types import Floats, Ints

GOOD_FILL = 0.97
GOOD_IMBALANCE = 1.05
"""The search stops at this fill and imbalance; see :class:`Packing`."""
MORE_PACKS = 2
"""End of the search, in multiples of the fewest packs; at least four packs per rank are tried."""
SAME_FILL = 0.995
"""Fraction of the best fill that counts as equal; the best balanced packing is then taken."""
GROUP_SIZES = (0.75, 0.6, 0.5, 0.4, 0.25)
"""Sizes of prefix groups to try, as fractions of the largest that fits."""


HIDDEN = 2560
"""Hidden size of Qwen3-4B."""


def compute_sequence_costs(lengths: Ints, hidden: float = HIDDEN, shared: Ints | int = 0) -> Floats:
    """Return FLOPs of sequences, up to a factor.

    A transformer layer of width h does about 24h² FLOPs per token in its matrices, and 2h per token
    and key in causal attention. A sequence of n tokens costs n + n²/(12h).

    Args:
        lengths: [n], tokens of each sequence.
        hidden: hidden size h of the policy.
        shared: [n], first tokens of each sequence, excluded from the cost.
    """
    squares = np.square(lengths, dtype=np.float64) - np.square(shared, dtype=np.float64)
    return lengths - shared + squares / (12.0 * hidden)


Sharing = Literal["auto", "on", "off"]
"""Values of ``pack.share_prefixes``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Assignment of sequences to packs and ranks."""

    capacity: int
    """Tokens per pack; 0 without sequences."""
    packs: tuple[tuple[tuple[int, ...], ...], ...]
    """``packs[d][k]``: sequences in pack k of rank d, a rank's costliest pack first."""
    fill: float
    """Fraction of slots with real tokens."""
    imbalance: float
    """Cost of the costliest rank over the mean of all ranks."""
    cost: float = 0.0
    """Cost of the costliest rank, padding included."""
    shared: tuple[int, ...] = ()
    """Tokens that each sequence shares with the previous one of the pack, stored once; 0 for a
    pack's first."""
    saved: int = 0
    """Tokens without a slot, because other sequences share these tokens."""

    @property
    def is_good(self) -> bool:
        """Whether the search for a better number of packs stops at this packing."""
        return self.fill >= GOOD_FILL and self.imbalance <= GOOD_IMBALANCE


def resolve_min_packs(setting: int, pipeline: int) -> int:
    """Return ``pack.min_per_rank``; for 0, twice the pipeline stages, or 1 without a pipeline."""
    # Twice the stages, because the pipeline's bubble is then small.
    return setting or (2 * pipeline if pipeline > 1 else 1)


def pack_sequences(
    lengths: Sequence[int] | Ints,
    *,
    ranks: int,
    max_tokens: int,
    shared: Sequence[int] | Ints | None = None,
    between: Sequence[int] | Ints | None = None,
    share: Sharing = "auto",
    align: int = 1,
    capacity_multiple: int = 1,
    window: int = 64,
    min_per_rank: int = 1,
    least_per_rank: int = 1,
    hidden: float = HIDDEN,
) -> Packing:
    """Pack sequences for data-parallel ranks.

    The number of packs is the least that ``max_tokens`` and ``min_per_rank`` allow, or up to twice
    that number if more packs

    - are filled better, for example if no two of three sequences fit into one pack,
    - balance ranks better: with one pack per rank, the rank of the longest sequences computes the
      most attention.

    Args:
        lengths: [n], tokens of each sequence, all positive.
        ranks: number of data-parallel ranks.
        max_tokens: ``pack.max_tokens``.
        shared: [n], tokens shared with the previous sequence; None: no tokens.
        between: [n], tokens that the first sequence of a prefix group shares with the previous
            prefix group; None: no tokens.
        share: ``pack.share_prefixes``.
        align: padding multiple of each segment.
        capacity_multiple: divisor of the capacity, as well as ``align``.
        window: ``pack.window``.
        min_per_rank: fewest packs per rank; fewer if sequences are too few.
        least_per_rank: fewest packs per rank, filled up with empty packs.
        hidden: hidden size of the policy, used to balance ranks.

    Raises:
        UserError: a sequence does not fit into ``pack.max_tokens``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return Packing(capacity=0, packs=((),) * ranks, fill=0.0, imbalance=1.0)
    unit = math.lcm(align, capacity_multiple)
    slots = -(-lengths // align) * align
    most = max_tokens // unit * unit
    if slots.max() > most:
        units = f" (packs are multiples of {unit} tokens in this layout)" if unit > 1 else ""
        problem = (
            f"a sequence of {lengths[slots.argmax()]} tokens does not fit into a pack of "
            f"{most}{units}"
        )
        least = -(-int(slots.max()) // unit) * unit
        remedy = f"Set pack.max_tokens to {least} or more, or shorten prompts or responses"
        raise UserError("pack.max_tokens", max_tokens, problem, remedy)
    wanted = max(min(min_per_rank, len(lengths) // ranks), least_per_rank)
    pack = partial(
        _pack,
        lengths,
        ranks=ranks,
        most=most,
        unit=unit,
        window=window,
        wanted=wanted,
        hidden=hidden,
    )
    groupings: list[PrefixGroups] = []
    if shared is not None and share != "off":
        groupings += _build_groupings(lengths, np.asarray(shared), most, align)
        if between is not None and np.any(between):
            all_shared = np.asarray(shared) + np.asarray(between)
            groupings += _build_groupings(lengths, all_shared, most, align)
    # Ungrouped first, because min takes the first of equal costs.
    if share != "on" or not groupings:
        groupings.insert(0, build_ungrouped(lengths, align))
    return min(map(pack, groupings), key=lambda packing: packing.cost)


def _build_groupings(lengths: Ints, shared: Ints, max_slots: int, align: int) -> list[PrefixGroups]:
    """Return groupings into whole prefix groups, if possible, then into ever smaller groups. A
    group stores the whole path to its first sequence."""
    if not shared.any():
        return []
    groupings = [split_prefix_groups(lengths, shared, max_slots=max_slots, align=align)]
    largest = int(groupings[0].slots.max())
    # Large groups repeat few tokens, but fill and balance packs badly, so that several sizes are
    # tried.
    for fraction in GROUP_SIZES:
        size = int(fraction * largest)
        grouping = split_prefix_groups(lengths, shared, max_slots=size, align=align)
        if grouping.shared.any() and len(grouping.slots) > len(groupings[-1].slots):
            groupings.append(grouping)
    return groupings


def _pack(
    lengths: Ints,
    groups: PrefixGroups,
    *,
    ranks: int,
    most: int,
    unit: int,
    window: int,
    wanted: int,
    hidden: float,
) -> Packing:
    fewest = max(-(-int(groups.slots.sum()) // (ranks * most)), wanted)
    found: list[Packing] = []
    for per_rank in range(fewest, max(MORE_PACKS * fewest, 4) + 1):
        packs = _find_tightest(groups.slots, ranks * per_rank, window, unit, most)
        if packs is not None:
            found.append(_distribute_packs(*packs, lengths, groups, hidden, ranks))
        # More packs than prefix groups would be empty.
        if found and (found[-1].is_good or ranks * per_rank >= len(groups.slots)):
            break
    # ``found`` is never empty: any two packs of a greedy packing together exceed one pack, so twice
    # the fewest packs suffice.
    fullest = max(packing.fill for packing in found)
    full = [packing for packing in found if packing.fill >= SAME_FILL * fullest]
    return min(full, key=lambda p: p.imbalance)


def _distribute_packs(
    capacity: int,
    packs: list[list[int]],
    lengths: Ints,
    groups: PrefixGroups,
    hidden: float,
    ranks: int,
) -> Packing:
    work = groups.sum_by_group(compute_sequence_costs(lengths, hidden, groups.shared))
    tokens = int((lengths - groups.shared).sum())
    costs = np.array([work[pack].sum() for pack in packs])
    shares = _assign_packs(costs, ranks)
    load = np.array([sum(costs[share]) for share in shares])
    padding = capacity * len(packs) - tokens
    samples = [groups.get_samples(pack) for pack in packs]
    by_rank: list[tuple[tuple[int, ...], ...]] = []
    for share in shares:
        by_rank.append(tuple(samples[k] for k in share))
    return Packing(
        capacity=capacity,
        packs=tuple(by_rank),
        fill=tokens / (capacity * len(packs)),
        imbalance=float(load.max() / load.mean()),
        cost=float(load.max() + padding / ranks),
        shared=tuple(groups.shared.tolist()),
        saved=int(lengths.sum()) - tokens,
    )


def compute_pack_metrics(packings: Sequence[Packing]) -> dict[str, float]:
    """Return ``pack/…`` of a step with one packing per minibatch."""
    counts = [sum(map(len, packing.packs)) for packing in packings]
    slots = [count * packing.capacity for count, packing in zip(counts, packings, strict=True)]
    filled = sum(packing.fill * size for packing, size in zip(packings, slots, strict=True))
    saved = sum(packing.saved for packing in packings)
    return {
        "pack/fill": filled / sum(slots) if sum(slots) else 0.0,
        "pack/count": float(sum(counts)),
        "pack/empty": float(
            sum(not pack for packing in packings for of_rank in packing.packs for pack in of_rank)
        ),
        # Counts are sums over all ranks, capacity and imbalance the largest of the step.
        "pack/capacity": float(max(packing.capacity for packing in packings)),
        "pack/shared": saved / max(saved + filled, 1.0),
        "pack/imbalance": max(packing.imbalance for packing in packings),
    }


def _iter_capacities(slots: Ints, packs: int, unit: int, most: int) -> Iterator[int]:
    """Yield ascending capacities to try."""
    least = max(int(slots.max()), -(-int(slots.sum()) // packs))
    slack = 0.0
    step = 0.0025
    last = 0
    while last < most:
        capacity = min(-(-math.ceil(least * (1.0 + slack)) // unit) * unit, most)
        if capacity > last:
            yield capacity
        last = max(capacity, last)
        # Steps of 0.25%, then growing steps.
        slack += step
        step *= 1.0 if slack < 0.04 else 1.5


def _find_tightest(
    slots: Ints,
    packs: int,
    window: int,
    unit: int,
    most: int,
) -> tuple[int, list[list[int]]] | None:
    """Return the size of the fullest pack, and the packs, at the first capacity that suffices;
    None without such a capacity."""
    longest_first = np.argsort(-slots, kind="stable")
    descending = slots[longest_first].tolist()

    for capacity in _iter_capacities(slots, packs, unit, most):
        greedy = _pack_greedily(descending, capacity, window, packs)
        if greedy is not None:
            filled: list[list[int]] = [longest_first[pack].tolist() for pack in greedy]
            fullest = max(int(slots[pack].sum()) for pack in filled)
            empty: list[list[int]] = [[] for _ in range(packs - len(filled))]
            return -(-fullest // unit) * unit, filled + empty
    return None


def _pack_greedily(
    descending: list[int],
    capacity: int,
    window: int,
    most_packs: int,
) -> list[list[int]] | None:
    """Pack greedily within a sliding window of the ``window`` longest unpacked sequences.

    - The longest sequence that fits into a pack goes into the fullest pack with room. If no
      sequence fits, the longest sequence opens a pack.
    - Then the window slides, so that small sequences are left for the gaps.

    Args:
        descending: [n], slots of each sequence, at most the capacity.

    Returns:
        Packs of positions in ``descending``; None if more than ``most_packs`` are needed.
    """
    packs: list[list[int]] = []
    # Negative and ascending, so that bisect finds the longest sequence that fits.
    waiting = [-length for length in descending[:window]]
    positions = list(range(len(waiting)))
    # Ascending: free slots · most_packs + index, for packs with room for the smallest sequence.
    room: list[int] = []
    smallest = descending[-1]
    coming = len(waiting)
    while waiting:
        first = bisect_left(waiting, -(room[-1] // most_packs)) if room else len(waiting)
        if first == len(waiting):
            if len(packs) == most_packs:
                return None
            first = 0
            index = len(packs)
            left = capacity
            packs.append([])
        else:
            fullest = bisect_left(room, -waiting[first] * most_packs)
            left, index = divmod(room.pop(fullest), most_packs)
        left += waiting.pop(first)
        packs[index].append(positions.pop(first))
        # Forget a pack without room for the smallest sequence.
        if left >= smallest:
            insort(room, left * most_packs + index)
        if coming < len(descending):
            waiting.append(-descending[coming])
            positions.append(coming)
            coming += 1
    return packs


def _assign_packs(costs: Floats, ranks: int) -> list[list[int]]:
    """Assign equal numbers of packs to ranks: the costliest first, to the rank with the least
    work."""
    per_rank = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    queue = [(0.0, rank) for rank in range(ranks)]
    heapify(queue)
    for pack in np.argsort(-costs, kind="stable").tolist():
        lightest, rank = heappop(queue)
        shares[rank].append(pack)
        # A full rank leaves the queue, because ranks have equal numbers of packs.
        if len(shares[rank]) < per_rank:
            heappush(queue, (lightest + float(costs[pack]), rank))
    return shares

"""Dense packing: whole sequences into packs of one capacity, with as many packs and as much work
for every rank.

The invariants, each with a test:

- each sequence is in exactly one pack, whole; no pack exceeds the capacity, nor the capacity
  ``max_tokens``;
- every rank has the same number of packs, of which some may be empty (all padding);
- the same lengths give the same packs.

The capacity is chosen for the step: the tokens over the number of packs, and as little more as
whole sequences need. So the last packs are not half empty.
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
"""The search stops at this share of slots with real tokens, and at this cost of the costliest rank
over the mean."""
MORE_PACKS = 2
"""The search goes up to this many times the fewest packs, and always up to four per rank."""
SAME_FILL = 0.995
"""A fill of at least this share of the best one counts as equal to it, so that the better balanced
packing is taken."""
PIECES = (0.75, 0.6, 0.5, 0.4, 0.25)
"""Sizes of pieces that are tried, as shares of the largest one that fits."""


HIDDEN = 2560
"""Hidden size of Qwen3-4B."""


def compute_sequence_costs(lengths: Ints, hidden: float = HIDDEN, shared: Ints | int = 0) -> Floats:
    """Return FLOPs of sequences, up to a factor.

    A transformer layer of width h does about 24h² FLOPs per token in its matrices, and 2h per token
    and key in causal attention. A sequence of n tokens costs n + n²/(12h).

    Args:
        lengths: [n], tokens of each sequence.
        hidden: hidden size h of the policy.
        shared: [n], first tokens of each sequence whose cost is left out.
    """
    squares = np.square(lengths, dtype=np.float64) - np.square(shared, dtype=np.float64)
    return lengths - shared + squares / (12.0 * hidden)


Sharing = Literal["auto", "on", "off"]
"""``pack.share_prefixes``"""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence goes.

        Packing(capacity=8, packs=(((0, 2),), ((1,),)), fill=0.94, imbalance=1.07)

    gives rank 0 one pack with sequences 0 and 2, and rank 1 one pack with sequence 1.
    """

    capacity: int
    """Tokens per pack; 0 where there are no sequences."""
    packs: tuple[tuple[tuple[int, ...], ...], ...]
    """packs[d][k] are the sequences in pack k of rank d; a rank's costliest pack comes first."""
    fill: float
    """Share of all slots that hold real tokens."""
    imbalance: float
    """Cost of the costliest rank over the mean of all."""
    cost: float = 0.0
    """Cost of the costliest rank, padding included."""
    shared: tuple[int, ...] = ()
    """Tokens that each sequence shares with the sequence before it in the same pack, stored once; 0
    for the first of a pack."""
    saved: int = 0
    """Tokens that need no slot, because other sequences share them."""

    @property
    def is_good(self) -> bool:
        """Whether the search for a better number of packs stops here."""
        return self.fill >= GOOD_FILL and self.imbalance <= GOOD_IMBALANCE


def resolve_min_packs(setting: int, pipeline: int) -> int:
    """``pack.min_per_rank``; for its 0 twice the pipeline stages, for a small bubble, and 1 without
    a pipeline."""
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

    The number of packs is the least that ``max_tokens`` and ``min_per_rank`` allow. Up to twice as
    many are taken, if that fills them better, as for three sequences of which no two fit together,
    or balances the ranks better: with one pack each, the rank of the longest sequences would have
    the most attention to compute.

    Families are cut into pieces, which share what they can; each piece begins with the whole path
    to its first sequence. Large pieces repeat little, and fill and balance packs badly. So several
    sizes are tried, and the packing is taken whose costliest rank has the least to compute.

    Args:
        lengths: [n], tokens of each sequence, all positive.
        ranks: data-parallel ranks to share the packs.
        max_tokens: ``pack.max_tokens``, most tokens in a pack.
        shared: [n], how many tokens each has in common with the one before it; None: nothing.
        between: [n], the same for the first of each family and the family before it; None: nothing.
        share: ``pack.share_prefixes``.
        align: every segment takes up its length rounded up to this multiple.
        capacity_multiple: the capacity is a multiple of this, and of ``align``.
        window: how many of the longest unpacked sequences are looked at.
        min_per_rank: fewest packs per rank, as long as there are sequences for them.
        least_per_rank: fewest packs per rank in any case. Where sequences are too few, the rest are
            empty.
        hidden: hidden size of the policy, for :func:`compute_sequence_costs`, which balance the
            ranks.

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
    ways: list[PrefixGroups] = []
    if shared is not None and share != "off":
        ways += _build_groupings(lengths, np.asarray(shared), most, align)
        if between is not None and np.any(between):
            ways += _build_groupings(lengths, np.asarray(shared) + np.asarray(between), most, align)
    if share != "on" or not ways:
        ways.insert(0, build_ungrouped(lengths, align))
    return min(map(pack, ways), key=lambda packing: packing.cost)


def _build_groupings(lengths: Ints, shared: Ints, max_slots: int, align: int) -> list[PrefixGroups]:
    """Families whole where they fit, and cut to pieces that leave the packer more and more
    freedom."""
    if not shared.any():
        return []
    ways = [split_prefix_groups(lengths, shared, max_slots=max_slots, align=align)]
    largest = int(ways[0].slots.max())
    for part in PIECES:
        way = split_prefix_groups(lengths, shared, max_slots=int(part * largest), align=align)
        if way.shared.any() and len(way.slots) > len(ways[-1].slots):
            ways.append(way)
    return ways


def _pack(
    lengths: Ints,
    pieces: PrefixGroups,
    *,
    ranks: int,
    most: int,
    unit: int,
    window: int,
    wanted: int,
    hidden: float,
) -> Packing:
    """The best packing of these pieces."""
    fewest = max(-(-int(pieces.slots.sum()) // (ranks * most)), wanted)
    found: list[Packing] = []
    for per_rank in range(fewest, max(MORE_PACKS * fewest, 4) + 1):
        packs = _find_tightest(pieces.slots, ranks * per_rank, window, unit, most)
        found += [_distribute_packs(*packs, lengths, pieces, hidden, ranks)] if packs else []
        if found and (found[-1].is_good or ranks * per_rank >= len(pieces.slots)):
            break
    # Something was found: any two packs of a greedy packing exceed one pack together, so twice the
    # fewest suffice.
    fullest = max(packing.fill for packing in found)
    return min(
        (packing for packing in found if packing.fill >= SAME_FILL * fullest),
        key=lambda p: p.imbalance,
    )


def _distribute_packs(
    capacity: int,
    packs: list[list[int]],
    lengths: Ints,
    pieces: PrefixGroups,
    hidden: float,
    ranks: int,
) -> Packing:
    """A packing from packs of one capacity, shared out to the ranks."""
    work = pieces.sum_by_group(compute_sequence_costs(lengths, hidden, pieces.shared))
    tokens = int((lengths - pieces.shared).sum())
    shares = _assign_packs(np.array([work[pack].sum() for pack in packs]), ranks)
    load = np.array([sum(work[packs[k]].sum() for k in share) for share in shares])
    padding = capacity * len(packs) - tokens
    return Packing(
        capacity=capacity,
        packs=tuple(tuple(pieces.get_samples(packs[k]) for k in share) for share in shares),
        fill=tokens / (capacity * len(packs)),
        imbalance=float(load.max() / load.mean()),
        cost=float(load.max() + padding / ranks),
        shared=tuple(pieces.shared.tolist()),
        saved=int(lengths.sum()) - tokens,
    )


def compute_pack_metrics(packings: Sequence[Packing]) -> dict[str, float]:
    """``pack/…`` of a step with one packing per minibatch; counts are over all ranks, ``capacity``
    is the largest."""
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
        "pack/capacity": float(max(packing.capacity for packing in packings)),
        "pack/shared": saved / max(saved + filled, 1.0),
        "pack/imbalance": max(packing.imbalance for packing in packings),
    }


def _iter_capacities(slots: Ints, packs: int, unit: int, most: int) -> Iterator[int]:
    """Capacities to try for a number of packs: upwards by quarters of a percent, then by growing
    steps."""
    least = max(int(slots.max()), -(-int(slots.sum()) // packs))
    slack = 0.0
    step = 0.0025
    last = 0
    while last < most:
        capacity = min(-(-math.ceil(least * (1.0 + slack)) // unit) * unit, most)
        if capacity > last:
            yield capacity
        last = max(capacity, last)
        slack += step
        step *= 1.0 if slack < 0.04 else 1.5


def _find_tightest(
    slots: Ints, packs: int, window: int, unit: int, most: int
) -> tuple[int, list[list[int]]] | None:
    """The packs at the first capacity at which ``packs`` of them suffice, with the
    fullest one's size; None if none."""
    longest_first = np.argsort(-slots, kind="stable")
    descending = slots[longest_first].tolist()
    order = longest_first.tolist()
    for capacity in _iter_capacities(slots, packs, unit, most):
        greedy = _pack_greedily(descending, capacity, window, packs)
        if greedy is not None:
            filled = [[order[position] for position in pack] for pack in greedy]
            fullest = max(int(slots[pack].sum()) for pack in filled)
            return -(-fullest // unit) * unit, filled + [[] for _ in range(packs - len(filled))]
    return None


def _pack_greedily(
    descending: list[int], capacity: int, window: int, most_packs: int
) -> list[list[int]] | None:
    """Window-based greedy packing.

    Among the ``window`` longest unpacked sequences, the longest that fits anywhere goes into the
    fullest pack that it fits; if none fits, the longest opens a pack. Then the window slides. This
    leaves the small sequences for the gaps.

    Args:
        descending: [n], slots that each sequence takes up, none above the capacity.

    Returns:
        Packs of positions in ``descending``, or None where more than ``most_packs`` would be
        needed.
    """
    packs: list[list[int]] = []
    waiting = [
        -length for length in descending[:window]
    ]  # ascending, so that bisect finds the longest that fits
    positions = list(range(len(waiting)))
    room: list[
        int
        # Ascending: tokens left · most_packs + index, for packs that anything could still go into.
    ] = []
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
            left, index = divmod(
                room.pop(bisect_left(room, -waiting[first] * most_packs)), most_packs
            )
        left += waiting.pop(first)
        packs[index].append(positions.pop(first))
        if left >= smallest:
            insort(room, left * most_packs + index)
        if coming < len(descending):
            waiting.append(-descending[coming])
            positions.append(coming)
            coming += 1
    return packs


def _assign_packs(costs: Floats, ranks: int) -> list[list[int]]:
    """Packs to ranks, equally many each: the costliest first, each to the rank with the least work
    so far."""
    per_rank = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    queue = [(0.0, rank) for rank in range(ranks)]
    heapify(queue)
    for pack in np.argsort(-costs, kind="stable").tolist():
        lightest, rank = heappop(queue)
        shares[rank].append(pack)
        if len(shares[rank]) < per_rank:
            heappush(queue, (lightest + float(costs[pack]), rank))
    return shares

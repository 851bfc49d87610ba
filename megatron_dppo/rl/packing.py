"""Dense packing: whole sequences into packs of one capacity, the same number of packs and equal work for every rank.

What holds for every plan, and is tested as such:

- each sequence is in exactly one pack, whole; no pack exceeds the capacity, nor the capacity ``max_tokens``;
- every rank has the same number of packs (some may be empty: they are padding);
- the same lengths give the same packs.

The capacity is chosen for the step, so that the last packs are not half empty: the tokens over the packs wanted, plus
the little that packing whole sequences needs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Floats, Ints

GOOD_FILL = 0.97
"""Share of slots with real tokens at which the packer stops looking for a better number of packs."""
GOOD_BALANCE = 1.005
"""Cost of the costliest rank over the mean at which packs are no longer exchanged between ranks."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs of a sequence of n tokens, up to a factor: ``linear``·n for the matrices, ``quadratic``·n² for attention.

    A transformer layer of width h does about 24h FLOPs per token and parameter row in its matrices and 2h per token and
    key in causal attention, whose ratio is 1/(12h). The default is that of h = 2560 (Qwen3-4B).
    """

    linear: float = 1.0
    quadratic: float = 1.0 / (12 * 2560)

    def __call__(self, lengths: Ints) -> Floats:
        """Cost of each sequence, from its length in tokens."""
        return self.linear * lengths + self.quadratic * lengths.astype(np.float64) ** 2


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence goes."""

    capacity: int
    """Tokens per pack; 0 where there are no sequences."""
    packs: tuple[tuple[tuple[int, ...], ...], ...]
    """packs[d][k] are the sequences in pack k of rank d; a rank's costliest pack comes first."""
    fill: float
    """Share of all slots that hold real tokens."""
    imbalance: float
    """Cost of the costliest rank over the mean of all."""


def pack_sequences(
    lengths: Sequence[int] | Ints,
    *,
    ranks: int,
    max_tokens: int,
    align: int = 1,
    capacity_multiple: int = 1,
    window: int = 64,
    min_per_rank: int = 1,
    costs: CostModel = CostModel(),
) -> Packing:
    """Pack sequences for data-parallel ranks.

    The number of packs is the least that ``max_tokens`` and ``min_per_rank`` allow; up to twice as many are taken if
    that fills them better, as for three sequences that do not go in pairs.

    Args:
        lengths: [n], tokens of each sequence, all positive.
        ranks: data-parallel ranks to share the packs.
        max_tokens: ``pack.max_tokens``, most tokens in a pack.
        align: every sequence takes up its length rounded up to this multiple.
        capacity_multiple: the capacity is a multiple of this, and of ``align``.
        window: how many of the longest unpacked sequences are looked at.
        min_per_rank: fewest packs per rank, as long as there are sequences for them.
        costs: what ranks are balanced by.

    Raises:
        UserError: a sequence does not fit into ``pack.max_tokens``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return Packing(capacity=0, packs=((),) * ranks, fill=0.0, imbalance=1.0)
    unit = math.lcm(align, capacity_multiple)
    slots, most = -(-lengths // align) * align, max_tokens // unit * unit
    if slots.max() > most:
        raise UserError(
            "pack.max_tokens",
            max_tokens,
            f"a sequence of {lengths[slots.argmax()]} tokens does not fit into a pack of {most}"
            + (f" (packs are multiples of {unit} tokens in this layout)" if unit > 1 else ""),
            f"Set pack.max_tokens to {-(-int(slots.max()) // unit) * unit} or more, or shorten prompts or responses",
        )

    fewest = max(-(-int(slots.sum()) // (ranks * most)), min(min_per_rank, max(1, len(lengths) // ranks)))
    best: tuple[int, list[list[int]]] | None = None
    for per_rank in range(fewest, 2 * fewest + 1):
        found = _tightest(slots, ranks * per_rank, window, unit, most)
        if found and (best is None or found[0] * len(found[1]) < best[0] * len(best[1])):
            best = found
        if best and (_fill(lengths, *best) >= GOOD_FILL or ranks * per_rank >= len(lengths)):
            break
    assert (
        best is not None
    )  # any two packs of a greedy packing exceed one: at ``most``, fewer than twice the least are opened
    capacity, packs = best
    work = costs(lengths)
    shares = _share_out(np.array([work[pack].sum() for pack in packs]), ranks)
    load = np.array([sum(work[packs[k]].sum() for k in share) for share in shares])
    return Packing(
        capacity=capacity,
        packs=tuple(tuple(tuple(sorted(packs[k])) for k in share) for share in shares),
        fill=_fill(lengths, capacity, packs),
        imbalance=float(load.max() / load.mean()),
    )


def pack_metrics(packings: Sequence[Packing]) -> dict[str, float]:
    """``pack/…`` of a step with one packing per minibatch; ``count`` is over all ranks, ``capacity`` the largest."""
    counts = [sum(map(len, packing.packs)) for packing in packings]
    slots = [count * packing.capacity for count, packing in zip(counts, packings, strict=True)]
    filled = sum(packing.fill * size for packing, size in zip(packings, slots, strict=True))
    return {
        "pack/fill": filled / sum(slots) if sum(slots) else 0.0,
        "pack/count": float(sum(counts)),
        "pack/capacity": float(max(packing.capacity for packing in packings)),
        "pack/imbalance": max(packing.imbalance for packing in packings),
    }


def _fill(lengths: Ints, capacity: int, packs: list[list[int]]) -> float:
    return float(lengths.sum() / (capacity * len(packs)))


def _capacities(slots: Ints, packs: int, unit: int, most: int) -> Iterator[int]:
    """Capacities worth trying for a number of packs: upwards by quarters of a percent, then by steps that grow."""
    least = max(int(slots.max()), -(-int(slots.sum()) // packs))
    slack, step, last = 0.0, 0.0025, 0
    while last < most:
        capacity = min(-(-math.ceil(least * (1.0 + slack)) // unit) * unit, most)
        if capacity > last:
            yield capacity
        last = max(capacity, last)
        slack += step
        step *= 1.0 if slack < 0.04 else 1.5


def _tightest(slots: Ints, packs: int, window: int, unit: int, most: int) -> tuple[int, list[list[int]]] | None:
    """The sequences in so many packs at the first capacity that allows it, cut to the fullest pack; None if none does."""
    longest_first = np.argsort(-slots, kind="stable")
    descending, order = slots[longest_first].tolist(), longest_first.tolist()
    for capacity in _capacities(slots, packs, unit, most):
        greedy = _greedy(descending, capacity, window, packs)
        if greedy is not None:
            filled = [[order[position] for position in pack] for pack in greedy]
            fullest = max(int(slots[pack].sum()) for pack in filled)
            return -(-fullest // unit) * unit, filled + [[] for _ in range(packs - len(filled))]
    return None


def _greedy(descending: list[int], capacity: int, window: int, most_packs: int) -> list[list[int]] | None:
    """Window-based greedy packing.

    Of the ``window`` longest sequences that wait, the longest that fits anywhere goes into the fullest pack that it
    fits; where none fits, the longest opens a pack. Then the window slides. Small sequences are thus left for the gaps.

    Args:
        descending: [n], slots that each sequence takes up, none above the capacity.

    Returns:
        Packs of positions in ``descending``, or None where more than ``most_packs`` would be needed.
    """
    packs: list[list[int]] = []
    waiting = [-length for length in descending[:window]]  # ascending, so that bisect finds the longest that fits
    positions = list(range(len(waiting)))
    room: list[int] = []  # ascending: tokens left · most_packs + index, for packs that anything could still go into
    smallest = descending[-1]
    coming = len(waiting)
    while waiting:
        first = bisect_left(waiting, -(room[-1] // most_packs)) if room else len(waiting)
        if first == len(waiting):
            if len(packs) == most_packs:
                return None
            first, index, left = 0, len(packs), capacity
            packs.append([])
        else:
            left, index = divmod(room.pop(bisect_left(room, -waiting[first] * most_packs)), most_packs)
        left += waiting.pop(first)
        packs[index].append(positions.pop(first))
        if left >= smallest:
            insort(room, left * most_packs + index)
        if coming < len(descending):
            waiting.append(-descending[coming])
            positions.append(coming)
            coming += 1
    return packs


def _share_out(costs: Floats, ranks: int) -> list[list[int]]:
    """Packs to ranks, equally many each: the costliest first, each to the rank with the least work so far.

    Then the most and the least loaded rank exchange the two packs that level them best, while that helps.
    """
    per_rank = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    queue = [(0.0, rank) for rank in range(ranks)]
    heapify(queue)
    for pack in np.argsort(-costs, kind="stable").tolist():
        lightest, rank = heappop(queue)
        shares[rank].append(pack)
        if len(shares[rank]) < per_rank:
            heappush(queue, (lightest + float(costs[pack]), rank))

    for _ in range(4 * ranks):
        load = np.array([costs[share].sum() for share in shares])
        heavy, light = int(load.argmax()), int(load.argmin())
        gap = load[heavy] - load[light]
        if load[heavy] <= GOOD_BALANCE * load.mean():
            break
        moved = costs[shares[heavy]][:, None] - costs[shares[light]][None, :]
        give, take = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 1e-9 * gap < moved[give, take] < (1.0 - 1e-9) * gap:
            break
        shares[heavy][give], shares[light][take] = shares[light][take], shares[heavy][give]
    return [sorted(share, key=lambda pack: (-costs[pack], pack)) for share in shares]

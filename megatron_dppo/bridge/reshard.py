"""From one layout to another: which rank sends what to which, from the mapping alone, without a process group.

A rank of the target takes what it holds already from itself, and everything else from the least loaded of the ranks
that hold it, straight to where it belongs: nothing moves twice, and nothing that need not. Tokens that only the padded
vocabulary has are nobody's: the target fills them with zeros. No torch is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_dppo.bridge.layout import Holding, Layout, holdings
from megatron_dppo.bridge.mapping import Entry, Piece, Row
from megatron_dppo.models.shape import PolicyShape


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows (axis 0) or columns (axis 1) of a rank's parameter, for a parameter of the same or another rank.

    Parameters go by :attr:`Holding.parameter`.
    """

    axis: int
    length: int
    source: int
    source_parameter: str
    source_start: int
    target: int
    target_parameter: str
    target_start: int
    bytes: int

    @property
    def moves(self) -> bool:
        """Whether it leaves its process; one that does not may still have another place there."""
        return self.source != self.target


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What every rank sends, receives and keeps."""

    source: Layout
    target: Layout
    slices: tuple[Slice, ...]
    """In one order for both ends: large parameters first, equal ones in the order of the forward pass."""
    least_bytes: int
    """What the target's ranks need and do not have, counted without the slices. No plan can move less."""

    def sends(self, rank: int) -> list[Slice]:
        return [part for part in self.slices if part.moves and part.source == rank]

    def receives(self, rank: int) -> list[Slice]:
        return [part for part in self.slices if part.moves and part.target == rank]

    def keeps(self, rank: int) -> list[Slice]:
        return [part for part in self.slices if not part.moves and part.target == rank]

    @property
    def bytes_held(self) -> int:
        """By all ranks of the target in the end, without padding."""
        return sum(part.bytes for part in self.slices)

    @property
    def bytes_moved(self) -> int:
        return sum(part.bytes for part in self.slices if part.moves)

    @property
    def bytes_sent(self) -> Counter[int]:
        """By rank."""
        return _totals((part.source, part.bytes) for part in self.slices if part.moves)

    @property
    def bytes_received(self) -> Counter[int]:
        """By rank."""
        return _totals((part.target, part.bytes) for part in self.slices if part.moves)

    def describe(self) -> str:
        """A few lines for people."""
        counts = {
            "held in the end": self.bytes_held,
            "moved": self.bytes_moved,
            "least that could move": self.least_bytes,
            "most that one rank sends": max(self.bytes_sent.values(), default=0),
            "most that one rank receives": max(self.bytes_received.values(), default=0),
        }
        lines = [f"  {what:<28}{count / 2**30:9.2f} GiB" for what, count in counts.items()]
        return "\n".join([f"{self.source} -> {self.target}, {len(self.slices)} slices", *lines])


def plan_reshard(
    shape: PolicyShape, source: Layout, target: Layout, *, itemsize: int, first_target: int = 0
) -> ReshardPlan:
    """How a policy gets from one layout into another: with the fewest bytes moved, sends balanced over replicas.

    Args:
        itemsize: bytes of a weight.
        first_target: the target's rank 0, in a numbering of the ranks of both. 0: the target is of the source's own
            processes; ``source.size``: it is of others.

    Raises:
        UserError: if the policy cannot be cut as one of the layouts says.
    """
    origins: defaultdict[tuple[object, ...], list[Holding]] = defaultdict(list)
    for origin in holdings(shape, source):
        origins[origin.contents].append(origin)
    runs: dict[tuple[Row, int], list[_Run]] = {}
    slices: list[Slice] = []
    sent = [0] * source.size
    large_first = sorted(holdings(shape, target), key=lambda holding: holding.entry.elements, reverse=True)
    for holding in large_first:  # so that small ones can level what large ones left uneven
        entry, parameter, row_bytes = holding.entry, holding.parameter, holding.width * itemsize
        whence = origins[holding.contents]
        for part, replicas in enumerate(holding.ranks):
            if (entry.row, part) not in runs:  # they are the same in every layer and expert
                runs[entry.row, part] = _runs(entry, len(whence[0].ranks), part, len(holding.ranks))
            for run in runs[entry.row, part]:
                size = run.length * row_bytes
                having = {rank: origin for origin in whence for held in run.parts for rank in origin.ranks[held]}
                for replica in replicas:
                    rank = first_target + replica
                    sender = rank if rank in having else min(having, key=sent.__getitem__)
                    sent[sender] += size if sender != rank else 0
                    here, there = (having[sender].parameter, run.source_start), (parameter, run.target_start)
                    slices.append(Slice(entry.axis, run.length, sender, *here, rank, *there, size))
    return ReshardPlan(source, target, tuple(slices), _missing_weights(shape, source, target, first_target) * itemsize)


def _missing_weights(shape: PolicyShape, source: Layout, target: Layout, first_target: int) -> int:
    """Weights that the target's ranks need and do not have, over all of them."""
    has: defaultdict[tuple[int, str | None], list[Piece]] = defaultdict(list)
    for holding in holdings(shape, source):
        for rank, piece in holding.pieces():
            has[rank, piece.name].append(piece)
    missing = 0
    for holding in holdings(shape, target):
        width = holding.width
        for rank, piece in holding.pieces():
            own = has.get((first_target + rank, piece.name), ())
            overlaps = (min(piece.stop, held.stop) - max(piece.start, held.start) for held in own)
            missing += (piece.length - sum(length for length in overlaps if length > 0)) * width
    return missing


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive slices of a part of the source's that are consecutive in a part of the target's."""

    parts: tuple[int, ...]
    """Of the source, those that have them: all if nothing is cut, else one."""
    source_start: int
    target_start: int
    length: int


def _runs(entry: Entry, source_parts: int, part: int, parts: int) -> list[_Run]:
    """What part ``part`` of ``parts`` is put together from, in as few runs as can be.

    A query group's queries, key and value are three tensors, and consecutive in both: whole groups go as one.
    """
    having: dict[tuple[Piece, ...], list[int]] = {}
    for source_part in range(source_parts):
        having.setdefault(entry.pieces(source_part, source_parts), []).append(source_part)
    runs: list[_Run] = []
    for piece, target_start in _placed(entry.pieces(part, parts)):
        for pieces, holders in having.items():
            for held, source_start in _placed(pieces):
                start, stop = max(piece.start, held.start), min(piece.stop, held.stop)
                if piece.name is None or piece.name != held.name or start >= stop:
                    continue
                whence, whither = source_start + start - held.start, target_start + start - piece.start
                run = _Run(tuple(holders), whence, whither, stop - start)
                last = runs[-1] if runs else run
                if (last.parts, last.source_start + last.length) == (run.parts, whence):  # runs leave no gap in between
                    runs[-1] = replace(last, length=last.length + run.length)
                else:
                    runs.append(run)
    return runs


def _placed(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    """The pieces of a part, each with where it begins there."""
    offset = 0
    for piece in pieces:
        yield piece, offset
        offset += piece.length


def _totals(counts: Iterable[tuple[int, int]]) -> Counter[int]:
    totals: Counter[int] = Counter()
    for rank, count in counts:
        totals[rank] += count
    return totals

"""Which rank holds what of a policy, in every layout that Megatron knows: from the mapping alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod

from megatron_dppo.bridge.mapping import Entry, Piece, entries
from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, check_layout


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks hold a policy, and which of them holds what, in Megatron's order of ranks.

    Raises:
        UserError: naming the setting and the values that would work, if the numbers contradict one another.
    """

    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of a stage (virtual stages)."""
    ep: int = 1
    """Shares that the experts are dealt out in, equal runs of them."""
    etp: int | None = None
    """Ranks that an expert is cut over; None: tp."""
    dp: int = 1
    """Replicas of all but the experts, context-parallel ranks among them; experts have tp · dp / (etp · ep)."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp"):
            if getattr(self, name) < 1:
                raise UserError(f"layout.{name}", getattr(self, name), "is no number of ranks", "Set it to 1 or more")
        if self.vpp > 1 and self.pp == 1:
            problem = "virtual stages need several pipeline stages, and layout.pp is 1"
            raise UserError("layout.vpp", self.vpp, problem, "Set it to 1, or layout.pp to 2 or more")
        _check_divides("etp", self.expert_tp, self.stage_size, f"the {self.stage_size} ranks of a stage (tp · dp)")
        shares = self.stage_size // self.expert_tp
        _check_divides("ep", self.ep, shares, f"the {shares} expert shares that a stage has ranks for (tp · dp / etp)")

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.dp

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.stage_size * self.pp

    def check(self, shape: PolicyShape) -> None:
        """Check that a policy of this shape can be cut so.

        Raises:
            UserError: naming the setting and the values that would work.
        """
        dense = replace(shape, ffn=shape.heads, experts=0) if shape.experts else shape  # experts are cut over etp
        check_layout(dense, LayoutConfig(tp=self.tp, pp=self.pp))
        layers = shape.num_layers // self.pp
        _check_divides("vpp", self.vpp, layers, f"the {layers} layers of a pipeline stage")
        if shape.experts:
            possible = gcd(shape.experts, self.stage_size // self.expert_tp)
            _check_divides("ep", self.ep, possible, f"the {shape.experts} experts")
            possible = gcd(shape.ffn, self.stage_size // self.ep)
            _check_divides("etp", self.expert_tp, possible, f"the {shape.ffn} feed-forward units of an expert")
        elif self.ep > 1:
            raise UserError("layout.ep", self.ep, "the policy has no experts to deal out", "Set it to 1")

    def holders(self, stage: int, share: int | None = None) -> list[range]:
        """The ranks of a stage that hold a parameter, one range of replicas for each part that the parameter is cut in.

        Args:
            share: of the experts, if it is a parameter of one.
        """
        parts, step = (self.tp, self.tp) if share is None else (self.expert_tp, self.expert_tp * self.ep)
        first, stop = stage * self.stage_size + (share or 0) * parts, (stage + 1) * self.stage_size
        return [range(first + part, stop, step) for part in range(parts)]

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "ep", "dp") if getattr(self, name) > 1}
        if self.expert_tp != self.tp:
            sizes["etp"] = self.expert_tp
        words = " x ".join(f"{name.upper()} {size}" for name, size in sizes.items())
        return f"{words or 'TP 1'} ({self.size} {'ranks' if self.size > 1 else 'rank'})"


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter in a layout, and who has it."""

    entry: Entry
    ranks: list[range]
    """For each part that the parameter is cut in, in the order of :meth:`Entry.pieces`, the ranks that have it."""

    @property
    def parameter(self) -> str:
        """Its name, with layers and experts counted over all ranks."""
        return self.entry.megatron[0]

    @property
    def contents(self) -> tuple[object, ...]:
        """Equal for parameters that are made of the same tensors: the embedding, and an output layer tied to it."""
        return next(iter(self.entry.row.tensors)), self.entry.layer, self.entry.expert

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """What each rank has, without padding."""
        for part, ranks in enumerate(self.ranks):
            pieces = [piece for piece in self.entry.pieces(part, len(self.ranks)) if piece.name is not None]
            yield from ((rank, piece) for rank in ranks for piece in pieces)

    @property
    def width(self) -> int:
        """Weights of a row, or of a column where the parameter is cut between columns."""
        shape = next(iter(self.entry.tensors.values()))
        return prod(shape) // shape[self.entry.axis]


def holdings(shape: PolicyShape, layout: Layout) -> Iterator[Holding]:
    """Every parameter of a policy in a layout, tied copies too, stage by stage in the order of the forward pass.

    Raises:
        UserError: if the policy cannot be cut so.
    """
    layout.check(shape)
    for stage in range(layout.pp):
        for entry in entries(shape, stage, layout.pp, layout.vpp):
            share = None if entry.expert is None else entry.expert * layout.ep // shape.experts
            yield Holding(entry, layout.holders(stage, share))


def _check_divides(name: str, value: int, whole: int, what: str) -> None:
    if value < 1 or whole % value:
        possible = ", ".join(str(d) for d in range(1, whole + 1) if whole % d == 0)
        raise UserError(f"layout.{name}", value, f"does not divide {what}", f"Set it to one of {possible}")

"""A policy that reads calibration sequences: all of it in this process, or (:mod:`live`) its shards on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron_dppo.compress.absence import Part, as_cut, mean_costs, mean_loss, without
from megatron_dppo.compress.activity import Activity, measure_activity
from megatron_dppo.compress.calibration import Batch
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.passes import Accumulator
from megatron_dppo.models.shape import PolicyShape

Measure = Literal["loss", "logits", "reward"]
"""Measures of the absence of layers."""


class Reader(Protocol):
    """Source of scores. Under a layout every method is collective, and gives every rank the same."""

    @property
    def shape(self) -> PolicyShape: ...

    def activity(self) -> Activity: ...

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, feed-forward width] fp64 each, of every unit: the sum of squares of its two rows and its column, and the
        sum of absolute values of its column."""
        ...

    def loss(self) -> float:
        """Mean negative log-likelihood of response tokens."""
        ...

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        """Cost of the policy without each set of blocks: its mean loss, the mean ‖logits − logits of the whole policy‖₂
        over places before response tokens, or the mean reward of its own answers, negated."""
        ...

    def without(
        self, *, blocks: Collection[int] = (), attention: Collection[int] = ()
    ) -> AbstractContextManager[None]: ...

    def as_cut(self, cut: Cut) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Transformers' model in this process."""

    model: Any
    shape: PolicyShape
    batches: Sequence[Batch]
    passes: Accumulator = field(default_factory=Accumulator)

    def activity(self) -> Activity:
        return measure_activity(self.model, self.shape, self.batches, self.passes)

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        layers = [(m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight) for m in self._feed_forwards()]
        return stacked(layers)

    def _feed_forwards(self) -> list[Any]:
        return [layer.mlp for layer in self.model.model.layers]

    def loss(self) -> float:
        return mean_loss(self.model, self.batches, self.passes)

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        assert measure != "reward"  # the command has ranks answer, for which there are engines
        return mean_costs(self.model, self.batches, measure, absent, self.passes)

    def without(self, *, blocks: Collection[int] = (), attention: Collection[int] = ()) -> AbstractContextManager[None]:
        return without(self.model, blocks=blocks, attention=attention)

    def as_cut(self, cut: Cut) -> AbstractContextManager[None]:
        return as_cut(self.model, cut)


@torch.no_grad()
def stacked(layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`Reader.weights_of_neurons` of each layer's gate, up and down projections."""
    squares = [
        sum((w.double().square().sum(1) for w in (gate, up, down.T)), start=torch.zeros(())).cpu()
        for gate, up, down in layers
    ]
    return torch.stack(squares), torch.stack([down.double().abs().sum(0).cpu() for *_, down in layers])


def remove_greedily(reader: Reader, count: int, part: Part, *, say: Callable[[str], None]) -> list[int]:
    """The layers whose block or attention is removed, one after the other, each time that which leaves the least
    perplexity: 2SSP's second stage (2501.17771) where ``part`` is attention."""
    removed: list[int] = []
    for turn in range(count):
        losses = {}
        for layer in sorted(set(range(reader.shape.num_layers)) - set(removed)):
            gone = [*removed, layer]
            with reader.without(blocks=gone) if part == "block" else reader.without(attention=gone):
                losses[layer] = reader.loss()
        removed.append(min(losses, key=lambda layer: (losses[layer], layer)))
        say(f"{part} {removed[-1]} removed, {turn + 1} of {count}: loss {losses[removed[-1]]:.4f}")
    return removed

"""Which parts of a policy go: every method, with the scores that it can go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dppo.compress.cut import Cut, attentions_to_remove, check_cut, highest, sizes
from megatron_dppo.compress.reader import Reader, remove_greedily
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

SCORES = {
    "2ssp": ("activation", "random"),
    "width": ("activation", "magnitude", "random"),
    "depth": ("shapley-loss", "greedy", "influence", "random"),
}
"""By method; the first is its default."""
NO_CALIBRATION = ("magnitude", "random")
"""Scores that ask nothing of the policy."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a policy is made smaller."""

    method: str
    """One of :data:`SCORES`."""
    score: str
    keep: float
    """Share of the weights of all layers' matrices that is left, embeddings aside."""
    multiple: int | None = None
    """The number of units left is a multiple of this; None: of ``MULTIPLE``."""
    zero_attention: bool = False
    """Whether attention that 2SSP removes may be written as zeros."""
    seed: int = 1
    subnetworks: int | None = None
    """Pairs of random subnetworks that Shapley values are means over; None: layers are left out one at a time."""

    def check(self, shape: PolicyShape) -> None:
        """Refuse what cannot be done to a policy of this shape, or not be said by its config.json.

        Raises:
            UserError: naming the option.
        """
        if self.score not in SCORES[self.method]:
            problem = f"is no score of --method {self.method}"
            raise UserError("--score", self.score, problem, f"Give one of {', '.join(SCORES[self.method])}")
        if self.subnetworks is not None and self.score != "shapley-loss":
            problem = f"are what Shapley values are measured on, and --score {self.score} is none"
            raise UserError("--subnetworks", self.subnetworks, problem, "Give --score shapley-loss")
        check_cut(shape, self.method, self.keep)
        if self.method == "2ssp" and attentions_to_remove(shape, 1 - self.keep) and not self.zero_attention:
            count = attentions_to_remove(shape, 1 - self.keep)
            problem = f"removes the attention of {count} layers, and config.json cannot say that a layer has none"
            remedy = (
                "Give --zero-attention, which writes zeros for their output projection (they keep their size), "
                "or --method width or depth"
            )
            raise UserError("--method", self.method, problem, remedy)

    def sizes(self, shape: PolicyShape) -> Cut:
        """How much is left, with the first parts in the place of those that will be chosen; no weights are read.

        Raises:
            UserError: if the share that is to be kept leaves nothing, or everything.
        """
        return sizes(shape, self.method, self.keep, self.multiple)

    def passes(self, shape: PolicyShape) -> int:
        """How often scoring reads each sequence."""
        layers, left = shape.num_layers, self.sizes(shape)
        if self.score in NO_CALIBRATION:
            return 0
        if self.score == "shapley-loss":
            return passes_of(layers, self.subnetworks or 0)
        turns = layers - len(left.layers) if self.score == "greedy" else len(left.silenced)
        return sum(layers - turn for turn in range(turns)) + (self.score != "greedy")


def choose(reader: Reader, shape: PolicyShape, recipe: Recipe, *, say: Callable[[str], None]) -> Cut:
    """Score a policy's parts and keep the best.

    Args:
        reader: the policy, with calibration sequences; ``random`` asks nothing of it.
        say: is told what goes, as it is known.
    """
    left = recipe.sizes(shape)
    if recipe.method == "depth":
        return Cut(_layers(reader, shape, recipe, len(left.layers), say))
    scores = _scores(reader, shape, recipe)
    assert left.neurons is not None
    width = len(left.neurons[0])
    cut = Cut(left.layers, neurons=tuple(highest(row.tolist(), width) for row in scores))
    if not left.silenced:
        return cut
    if recipe.score == "random":
        return replace(cut, silenced=highest(_random((shape.num_layers,), recipe.seed).tolist(), len(left.silenced)))
    with reader.as_cut(cut):  # the second stage sees what the first has left
        removed = remove_greedily(reader, len(left.silenced), "attention", say=say)
    return replace(cut, silenced=tuple(sorted(removed)))


def _scores(reader: Reader, shape: PolicyShape, recipe: Recipe) -> torch.Tensor:
    """[L, feed-forward width] scores of units."""
    match recipe.score:
        case "random":
            return _random((shape.num_layers, shape.ffn), recipe.seed)
        case "magnitude":
            return reader.weights_of_neurons().sqrt()
    return reader.activity().neurons


def _layers(
    reader: Reader, shape: PolicyShape, recipe: Recipe, left: int, say: Callable[[str], None]
) -> tuple[int, ...]:
    """The layers that stay."""
    number = shape.num_layers
    if recipe.score == "shapley-loss":
        return highest(shapley_values(reader, recipe.subnetworks or 0, recipe.seed), left)
    match recipe.score:
        case "random":
            return highest(_random((number,), recipe.seed).tolist(), left)
        case "greedy":
            removed = remove_greedily(reader, number - left, "block", say=say)
            return tuple(sorted(set(range(number)) - set(removed)))
    return highest((1 - reader.activity().cosines).tolist(), left)


def _random(size: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def halves(layers: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Pairs of subnetworks: one without a random half of the layers, and one without all others.

    Of an odd number, the smaller half goes first. Over each pair every layer is absent once.

        halves(4, 2, seed=1) → [(0, 1), (2, 3), (0, 3), (1, 2)]

    Args:
        count: of pairs.
    """
    draw = np.random.default_rng(seed)
    orders = [draw.permutation(layers).tolist() for _ in range(count)]
    return [tuple(sorted(half)) for order in orders for half in (order[: layers // 2], order[layers // 2 :])]


def shapley_values(reader: Reader, pairs: int, seed: int) -> list[float]:
    """φ_l = E[loss | l absent] − E[loss | l present] of each layer l.

    Args:
        pairs: of random halves, of which both means are taken. 0: each layer is left out alone, and the means are of
            one policy each: the loss without l, and that of the whole policy.
    """
    layers = reader.shape.num_layers
    if pairs == 0:
        present, *absent = reader.costs([(), *((layer,) for layer in range(layers))])
        return [cost - present for cost in absent]
    subnetworks = halves(layers, pairs, seed)
    costs = np.array(reader.costs(subnetworks))
    gone = np.array([[layer in absent for layer in range(layers)] for absent in subnetworks])
    return (np.where(gone, costs[:, None], -costs[:, None]).sum(0) / pairs).tolist()


def passes_of(layers: int, pairs: int) -> int:
    """How often :func:`shapley_values` reads each sequence."""
    return 2 * pairs or 1 + layers

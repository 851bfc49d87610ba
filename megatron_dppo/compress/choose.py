"""Which parts of a policy go: every method, with the scores that it can go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dppo.compress.cut import Cut, attentions_to_remove, groups_left, highest, layers_left, width_left
from megatron_dppo.compress.reader import Reader, remove_greedily
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

SCORES = {
    "2ssp": ("activation",),
    "width": ("activation", "wanda", "magnitude", "random"),
    "depth": (
        "shapley-loss",
        "shapley-logits",
        "greedy",
        "influence",
        "last-token",
        "relative-l1",
        "relative-l2",
        "in-a-row",
        "random",
    ),
    "heads": ("activation", "random"),
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
    multiple: int = 128
    """What the width of a feed-forward layer is a multiple of."""
    zero_attention: bool = False
    """Whether attention that 2SSP removes may be written as zeros."""
    seed: int = 1

    def check(self, shape: PolicyShape) -> None:
        """Refuse what cannot be done to a policy of this shape, or not be said by its config.json.

        Raises:
            UserError: naming the option.
        """
        if self.score not in SCORES[self.method]:
            problem = f"is no score of --method {self.method}"
            raise UserError("--score", self.score, problem, f"Give one of {', '.join(SCORES[self.method])}")
        if not 0 < self.keep < 1:
            raise UserError("--keep", self.keep, "is no share between 0 and 1", "Give 0.75, for instance")
        if shape.experts and self.method != "depth":
            problem = "removes parts of a feed-forward layer or attention, and is for policies without experts"
            raise UserError("--method", self.method, problem, "Give depth")
        if self.method == "heads" and shape.qkv_bias:
            problem = "needs a config.json that names the width of a head, which Qwen2.5's readers ignore"
            raise UserError("--method", self.method, problem, "Give width or depth")
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
        everything = tuple(range(shape.num_layers))
        match self.method:
            case "depth":
                return Cut(everything[: layers_left(shape, self.keep)])
            case "heads":
                return Cut(everything, groups=(tuple(range(groups_left(shape, self.keep))),) * shape.num_layers)
        gone = attentions_to_remove(shape, 1 - self.keep) if self.method == "2ssp" else 0
        width = width_left(shape, self.keep, self.multiple, attentions_gone=gone)
        return Cut(everything, neurons=(tuple(range(width)),) * shape.num_layers, silenced=everything[:gone])


def choose(reader: Reader, shape: PolicyShape, recipe: Recipe, *, say: Callable[[str], None]) -> Cut:
    """Score a policy's parts and keep the best.

    Args:
        reader: the policy, with calibration sequences; ``random`` asks nothing of it.
        say: is told what goes, as it is known.
    """
    sizes = recipe.sizes(shape)
    if recipe.method == "depth":
        return Cut(_layers(reader, shape, recipe, len(sizes.layers), say))
    if sizes.groups is not None:
        if recipe.score == "random":
            scores = _random((shape.num_layers, shape.kv_heads), recipe.seed)
        else:
            scores = reader.activity().groups
        return Cut(sizes.layers, groups=_best(scores, len(sizes.groups[0])))
    assert sizes.neurons is not None
    cut = Cut(sizes.layers, neurons=_best(_neurons(reader, shape, recipe), len(sizes.neurons[0])))
    if not sizes.silenced:
        return cut
    with reader.as_cut(cut):  # the second stage sees what the first has left
        removed = remove_greedily(reader, len(sizes.silenced), "attention", say=say)
    return Cut(cut.layers, cut.neurons, silenced=tuple(sorted(removed)))


def _neurons(reader: Reader, shape: PolicyShape, recipe: Recipe) -> torch.Tensor:
    """[L, feed-forward width] the score of each neuron."""
    match recipe.score:
        case "random":
            return _random((shape.num_layers, shape.ffn), recipe.seed)
        case "magnitude":
            return reader.weights_of_neurons()[0].sqrt()
        case "activation":
            return reader.activity().neurons
    # Wanda's |W_ij| · ‖x_j‖₂, summed over the outputs i
    return reader.weights_of_neurons()[1] * reader.activity().inputs


def _layers(
    reader: Reader, shape: PolicyShape, recipe: Recipe, left: int, say: Callable[[str], None]
) -> tuple[int, ...]:
    """The layers that stay."""
    number = shape.num_layers
    match recipe.score:
        case "random":
            return highest(_random((number,), recipe.seed).tolist(), left)
        case "greedy":
            removed = remove_greedily(reader, number - left, "block", say=say)
            return tuple(sorted(set(range(number)) - set(removed)))
        case "shapley-loss":
            return highest(reader.leave_one_out("loss"), left)
        case "shapley-logits":
            return highest(reader.leave_one_out("logits"), left)
    activity = reader.activity()
    match recipe.score:
        case "in-a-row":  # those over which the residual stream turns least (2403.17887)
            starts = range(left + 1)
            first = max(starts, key=lambda i: (float(activity.cosines[i, i + number - left]), -i))
            return (*range(first), *range(first + number - left, number))
        case "influence":
            return highest((1 - activity.cosines.diagonal(1)).tolist(), left)
        case "last-token":
            return highest((1 - activity.last_cosines).tolist(), left)
        case "relative-l1":
            return highest(activity.relative_l1.tolist(), left)
    return highest(activity.relative_l2.tolist(), left)


def _best(scores: torch.Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Of each layer's parts those with the highest scores."""
    return tuple(highest(row.tolist(), count) for row in scores)


def _random(size: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

"""Kept parts of a policy, and how many may be kept: from shapes alone, without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

MULTIPLES = {"2ssp": 128, "width": 128, "depth": 1, "heads": 1, "experts": 8, "hidden": 128, "minitron": 128}
"""By method: the number of parts left is a multiple of this, unless another is asked for. 128 units or channels suit
kernels, 8 experts go to 8 expert-parallel ranks. Layers and heads are as many as the share says."""

EXPERT_INPUTS = 8
"""An expert's inputs are a multiple of 16 bytes, so many values of bf16, for the ``grouped_mm`` of transformers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a policy that are kept, by their numbers there, ascending.

        Cut(layers=(0, 1, 3))

    is the policy without its third layer. ``neurons`` and ``groups`` have an entry for every layer of the policy, also
    for those that go.
    """

    layers: tuple[int, ...]
    neurons: tuple[tuple[int, ...], ...] | None = None
    """Units of each layer's feed-forward, equally many; None: all."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Key-value heads of each layer, with the query heads that they serve, equally many; None: all."""
    experts: tuple[tuple[int, ...], ...] | None = None
    """Experts of each layer, equally many, with their rows of its router; None: all."""
    channels: tuple[int, ...] | None = None
    """Channels of the residual stream, the same for all layers, embedding and output layer; None: all."""
    silenced: tuple[int, ...] = ()
    """Layers whose attention gives nothing. config.json cannot say this: their output projections become zeros, and
    keep their place."""

    def shape(self, source: PolicyShape) -> PolicyShape:
        """The sizes of what is left."""
        groups = len(self.groups[0]) if self.groups is not None else source.kv_heads
        return replace(
            source,
            num_layers=len(self.layers),
            ffn=len(self.neurons[0]) if self.neurons is not None else source.ffn,
            kv_heads=groups,
            heads=source.heads // source.kv_heads * groups,
            experts=len(self.experts[0]) if self.experts is not None else source.experts,
            hidden=len(self.channels) if self.channels is not None else source.hidden,
        )


def attention_weights(shape: PolicyShape) -> int:
    """Weights of a layer's four projections of attention."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def feed_forward_weights(shape: PolicyShape) -> int:
    """Weights of a layer's gate, up and down projections, or of those of all its experts and of its router."""
    return shape.hidden * (3 * shape.ffn * max(1, shape.experts) + shape.experts)


def attentions_to_remove(shape: PolicyShape, sparsity: float) -> int:
    """2SSP's N_attn = round(N · s^((|FFN| / |attn|) / 1.5)) of N layers (2501.17771); a half is rounded up."""
    ratio = feed_forward_weights(shape) / attention_weights(shape)
    return math.floor(shape.num_layers * sparsity ** (ratio / 1.5) + 0.5)


def layers_left(shape: PolicyShape, keep: float) -> int:
    """Layers that hold the share ``keep`` of all layers' weights, rounded.

    Raises:
        UserError: naming ``--keep``, if none or all are left.
    """
    left = round(shape.num_layers * keep)
    if not 0 < left < shape.num_layers:
        problem = f"leaves {left} of {shape.num_layers} layers"
        raise UserError("--keep", keep, problem, f"Give a share between 1/{shape.num_layers} and 1")
    return left


def width_left(shape: PolicyShape, keep: float, multiple: int, *, attentions_gone: int = 0) -> int:
    """Width of every feed-forward layer at which the share ``keep`` of all layers' weights is left.

    Args:
        multiple: the width is rounded to the nearest one of it, up or down.
        attentions_gone: layers whose attention is counted as gone already.

    Raises:
        UserError: if no such width is there.
    """
    attention, feed_forward = attention_weights(shape), feed_forward_weights(shape)
    left = keep * (attention + feed_forward) - attention * (1 - attentions_gone / shape.num_layers)
    exact = left / (feed_forward / shape.ffn)
    if exact <= 0:
        least = attention / (attention + feed_forward)
        problem = f"is less than attention alone takes of a layer, {least:.3f}"
        raise UserError("--keep", keep, problem, "Raise it, or give --method depth")
    return _rounded(exact, multiple, shape.ffn, "units of a feed-forward layer")


def experts_left(shape: PolicyShape, keep: float, multiple: int) -> int:
    """Experts of every layer, with their rows of the router, that leave the share ``keep`` of all layers' weights.

    Raises:
        UserError: naming ``--keep``, if they are fewer than a token has; ``--multiple``, if there is no such number.
    """
    attention, feed_forward = attention_weights(shape), feed_forward_weights(shape)
    exact = shape.experts * (1 - (1 - keep) * (attention + feed_forward) / feed_forward)
    if exact < shape.experts_per_token:
        least = 1 - (1 - shape.experts_per_token / shape.experts) * feed_forward / (attention + feed_forward)
        problem = f"leaves {max(exact, 0):.1f} of {shape.experts} experts, and a token has {shape.experts_per_token}"
        raise UserError("--keep", keep, problem, f"Give a share of {least:.3f} or more, or --method depth")
    return _rounded(exact, multiple, shape.experts, "experts", least=shape.experts_per_token)


def channels_left(shape: PolicyShape, keep: float, multiple: int) -> int:
    """Width of the residual stream at which the share ``keep`` of all layers' weights is left: they go with it.

    Raises:
        UserError: naming ``--multiple``, if no such width is there, or transformers could not compute experts of it.
    """
    left = _rounded(keep * shape.hidden, multiple, shape.hidden, "channels of the residual stream")
    if shape.experts and left % EXPERT_INPUTS:
        problem = f"leaves {left} channels, and transformers computes experts of a multiple of {EXPERT_INPUTS} only"
        raise UserError("--multiple", multiple, problem, f"Give a multiple of {EXPERT_INPUTS}")
    return left


def _rounded(exact: float, multiple: int, whole: int, what: str, least: int = 1) -> int:
    """The nearest multiple, up or down.

    Raises:
        UserError: if it is below ``least``, or nothing goes.
    """
    left = round(exact / multiple) * multiple
    if not least <= left < whole:
        problem = f"leaves {left} {what} where {exact:.1f} are asked for, and {least} to {whole - 1} are possible"
        raise UserError("--multiple", multiple, problem, "Lower it")
    return left


def all_widths_left(shape: PolicyShape, keep: float, multiple: int) -> tuple[int, int, int]:
    """Channels, key-value heads of every layer and units of every feed-forward layer of which about the same share is
    left, so that the share ``keep`` of all layers' weights is: of the first two its root, since a matrix has its share
    of rows times its share of columns. The heads are rounded to a divisor of how many there were, so that tensor
    parallelism still divides them, and the units make up for that.

    Raises:
        UserError: naming ``--keep`` or ``--multiple``, if no such numbers are there.
    """
    channels = channels_left(shape, math.sqrt(keep), multiple)
    divisors = [count for count in range(1, shape.kv_heads + 1) if shape.kv_heads % count == 0]
    groups = min(divisors, key=lambda count: (abs(count - math.sqrt(keep) * shape.kv_heads), -count))
    narrow = replace(shape, hidden=channels, kv_heads=groups, heads=shape.heads // shape.kv_heads * groups)
    left = keep * (attention_weights(shape) + feed_forward_weights(shape)) - attention_weights(narrow)
    exact = left / (feed_forward_weights(narrow) / shape.ffn)
    if not 0 < exact < shape.ffn:
        problem = (
            f"is left by no number of units between 1 and {shape.ffn - 1} with {channels} of {shape.hidden} channels "
            f"and {groups} of {shape.kv_heads} groups of query heads"
        )
        raise UserError("--keep", keep, problem, "Give another share, a smaller --multiple, or another --method")
    return channels, groups, _rounded(exact, multiple, shape.ffn, "units of a feed-forward layer")


def groups_left(shape: PolicyShape, keep: float) -> int:
    """Key-value heads of every layer at which about the share ``keep`` of all layers' weights is left.

    Raises:
        UserError: naming ``--keep``, if none or all are left.
    """
    attention, feed_forward = attention_weights(shape), feed_forward_weights(shape)
    gone = (1 - keep) * (attention + feed_forward)
    left = round(shape.kv_heads * (1 - gone / attention))
    if not 0 < left < shape.kv_heads:
        least = (feed_forward + attention / shape.kv_heads) / (attention + feed_forward)
        problem = f"leaves {max(left, 0)} of {shape.kv_heads} groups of query heads"
        raise UserError("--keep", keep, problem, f"Give a share of {least:.3f} or more, or another --method")
    return left


def highest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """The numbers of the ``count`` highest scores, ascending; of equal ones, the first."""
    return tuple(sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]))


def check_cut(shape: PolicyShape, method: str, keep: float) -> None:
    """
    Raises:
        UserError: naming ``--keep``, if it is no share; ``--method``, if nothing of the kind can go from a policy of
            this shape.
    """
    if not 0 < keep < 1:
        raise UserError("--keep", keep, "is no share between 0 and 1", "Give 0.75, for instance")
    if shape.hybrid:
        problem = f"cannot remove anything from {shape.architecture}, which has gated delta networks"
        raise UserError("--method", method, problem, "Give a policy that has attention in every layer")
    if shape.experts and method in ("2ssp", "width", "minitron"):
        problem = "removes units of feed-forward layers, and is for policies without experts"
        raise UserError("--method", method, problem, "Give experts, hidden, heads or depth")
    if method == "experts" and not shape.experts:
        raise UserError("--method", method, "removes experts, and this policy has none", "Give width, for instance")
    if method in ("heads", "hidden", "minitron") and not shape.family.reads_head_dim:
        problem = "needs a config.json that names the width of a head, which some readers of this family ignore"
        raise UserError("--method", method, problem, "Give width or depth")


def sizes(shape: PolicyShape, method: str, keep: float, multiple: int | None = None) -> Cut:
    """How much a method leaves, with the first parts in the place of those that will be chosen.

    Args:
        multiple: of which the number of parts left is one; None: that of :data:`MULTIPLES`.

    Raises:
        UserError: if the share that is to be kept leaves nothing, or everything.
    """
    layers, multiple = tuple(range(shape.num_layers)), multiple or MULTIPLES[method]

    def of_each_layer(count: int) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(count)),) * shape.num_layers

    match method:
        case "depth":
            return Cut(layers[: layers_left(shape, keep)])
        case "heads":
            return Cut(layers, groups=of_each_layer(groups_left(shape, keep)))
        case "experts":
            return Cut(layers, experts=of_each_layer(experts_left(shape, keep, multiple)))
        case "hidden":
            return Cut(layers, channels=tuple(range(channels_left(shape, keep, multiple))))
        case "minitron":
            channels, groups, width = all_widths_left(shape, keep, multiple)
            stream = tuple(range(channels))
            return Cut(layers, of_each_layer(width), of_each_layer(groups), channels=stream)
    gone = attentions_to_remove(shape, 1 - keep) if method == "2ssp" else 0
    width = width_left(shape, keep, multiple, attentions_gone=gone)
    return Cut(layers, neurons=of_each_layer(width), silenced=layers[:gone])

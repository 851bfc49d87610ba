"""Kept parts of a policy, and how many may be kept: from shapes alone, without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

MULTIPLE = 128
"""The number of units left is a multiple of this, which suits kernels, unless another is asked for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a policy that are kept, by their numbers there, ascending.

        Cut(layers=(0, 1, 3))

    is the policy without its third layer. ``neurons`` has an entry for every layer of the policy, also for those that
    go.
    """

    layers: tuple[int, ...]
    neurons: tuple[tuple[int, ...], ...] | None = None
    """Units of each layer's feed-forward, equally many; None: all."""
    silenced: tuple[int, ...] = ()
    """Layers whose attention gives nothing. config.json cannot say this: their output projections become zeros, and
    keep their place."""

    def shape(self, source: PolicyShape) -> PolicyShape:
        """The sizes of what is left."""
        return replace(
            source,
            num_layers=len(self.layers),
            ffn=len(self.neurons[0]) if self.neurons is not None else source.ffn,
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


def _rounded(exact: float, multiple: int, whole: int, what: str) -> int:
    """The nearest multiple, up or down.

    Raises:
        UserError: if it is 0, or nothing goes.
    """
    left = round(exact / multiple) * multiple
    if not 1 <= left < whole:
        problem = f"leaves {left} {what} where {exact:.1f} are asked for, and 1 to {whole - 1} are possible"
        raise UserError("--multiple", multiple, problem, "Lower it")
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
    if shape.experts and method != "depth":
        problem = "removes units of feed-forward layers, and is for policies without experts"
        raise UserError("--method", method, problem, "Give depth")


def sizes(shape: PolicyShape, method: str, keep: float, multiple: int | None = None) -> Cut:
    """How much a method leaves, with the first parts in the place of those that will be chosen.

    Args:
        multiple: of which the number of units left is one; None: :data:`MULTIPLE`.

    Raises:
        UserError: if the share that is to be kept leaves nothing, or everything.
    """
    layers, multiple = tuple(range(shape.num_layers)), multiple or MULTIPLE

    def of_each_layer(count: int) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(count)),) * shape.num_layers

    if method == "depth":
        return Cut(layers[: layers_left(shape, keep)])
    gone = attentions_to_remove(shape, 1 - keep) if method == "2ssp" else 0
    width = width_left(shape, keep, multiple, attentions_gone=gone)
    return Cut(layers, neurons=of_each_layer(width), silenced=layers[:gone])

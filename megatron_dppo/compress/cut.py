"""What is left of a policy, and how much may be: sizes from shapes alone, without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

MULTIPLE = 128
"""What the width of a feed-forward layer is a multiple of, unless another is asked for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a policy that are kept, by their numbers there, ascending.

        Cut(layers=(0, 1, 3))

    is the policy without its third layer. ``neurons`` and ``groups`` have an entry for every layer of the policy, also
    for those that go.
    """

    layers: tuple[int, ...]
    neurons: tuple[tuple[int, ...], ...] | None = None
    """Of each layer's feed-forward, equally many; None: all."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Key-value heads of each layer, with the query heads that they serve, equally many; None: all."""
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
        )


def attention_weights(shape: PolicyShape) -> int:
    """Weights of a layer's four projections of attention."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def feed_forward_weights(shape: PolicyShape) -> int:
    """Weights of a layer's three projections of its feed-forward layer, or of those of all its experts."""
    return 3 * shape.hidden * shape.ffn * max(1, shape.experts)


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
    width = round(exact / multiple) * multiple
    if exact <= 0:
        least = attention / (attention + feed_forward)
        problem = f"is less than attention alone takes of a layer, {least:.3f}"
        raise UserError("--keep", keep, problem, "Raise it, or give --method depth")
    if not 0 < width < shape.ffn:
        problem = f"allows no width between 0 and {shape.ffn} but {width} where {exact:.0f} units are to be left"
        raise UserError(
            "--multiple", multiple, problem, "Lower it, to 128 times the tensor-parallel ranks or a divisor"
        )
    return width


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
    if shape.experts and method != "depth":
        problem = "removes parts of a feed-forward layer or attention, and is for policies without experts"
        raise UserError("--method", method, problem, "Give depth")
    if method == "heads" and shape.qkv_bias:
        problem = "needs a config.json that names the width of a head, which Qwen2.5's readers ignore"
        raise UserError("--method", method, problem, "Give width or depth")


def sizes(shape: PolicyShape, method: str, keep: float, multiple: int) -> Cut:
    """How much a method leaves, with the first parts in the place of those that will be chosen.

    Raises:
        UserError: if the share that is to be kept leaves nothing, or everything.
    """
    everything = tuple(range(shape.num_layers))
    match method:
        case "depth":
            return Cut(everything[: layers_left(shape, keep)])
        case "heads":
            return Cut(everything, groups=(tuple(range(groups_left(shape, keep))),) * shape.num_layers)
    gone = attentions_to_remove(shape, 1 - keep) if method == "2ssp" else 0
    width = width_left(shape, keep, multiple, attentions_gone=gone)
    return Cut(everything, neurons=(tuple(range(width)),) * shape.num_layers, silenced=everything[:gone])

"""Number and size of a policy's kept parts, from the policy's shape without weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

Part = Literal["block", "attention", "feed-forward"]
"""Part of a layer that ``depth`` removes."""
PARTS: tuple[Part, ...] = get_args(Part)
SCORES = {
    "width": ("activation", "magnitude", "random"),
    "depth": ("shapley-loss", "greedy", "influence", "random"),
    "2ssp": ("activation", "random"),
}
"""Scores of each method, the default first."""
NO_CALIBRATION = ("magnitude", "random")
"""Scores without calibration sequences."""
MULTIPLE = 128
"""Default multiple of kept units, for matrix kernels."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Kept parts, by ascending index in the larger policy: Cut((0, 1, 3)) removes the third of four
    layers."""

    layers: tuple[int, ...]
    units: tuple[tuple[int, ...], ...] | None = None
    """Kept feed-forward units of each layer of the larger policy, in equal numbers; None: all."""
    zero_attention: tuple[int, ...] = ()
    """Layers with zeros as attention's output projection: config.json has no sign for a layer
    without attention."""
    zero_feed_forward: tuple[int, ...] = ()
    """Layers with zeros as down projection."""

    def remove(self, part: Part, layers: Collection[int]) -> Cut:
        """Return a cut without a part of further layers."""
        if part == "attention":
            return replace(self, zero_attention=tuple(sorted({*self.zero_attention, *layers})))
        if part == "feed-forward":
            return replace(
                self, zero_feed_forward=tuple(sorted({*self.zero_feed_forward, *layers}))
            )
        return replace(self, layers=tuple(layer for layer in self.layers if layer not in layers))

    def compute_shape(self, larger: PolicyShape) -> PolicyShape:
        ffn = len(self.units[0]) if self.units else larger.ffn
        return replace(larger, num_layers=len(self.layers), ffn=ffn)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options that decide a cut."""

    method: str
    score: str
    keep: float
    """Fraction of all layers' weights to keep, without embeddings and norms; zeroed parts count as
    removed."""
    part: Part = "block"
    multiple: int = MULTIPLE
    """Divisor of the number of kept units."""
    zero_attention: bool = False
    """Whether 2SSP may write zeros as output projections."""
    seed: int = 1
    subnetworks: int | None = None
    """Pairs of random subnetworks for Shapley values; None: each layer is left out once."""

    def check(self, shape: PolicyShape) -> None:
        """Check the options, for this shape.

        Raises:
            UserError: naming the option.
        """
        if self.score not in SCORES[self.method]:
            problem = f"is no score of --method {self.method}"
            raise UserError(
                "--score", self.score, problem, f"Give one of {', '.join(SCORES[self.method])}"
            )
        if self.part != "block" and self.method != "depth":
            problem = f"is for --method depth, and --method is {self.method}"
            raise UserError("--part", self.part, problem, "Leave it out")
        if self.subnetworks and self.score != "shapley-loss":
            problem = f"is for Shapley values, and --score is {self.score}"
            raise UserError("--subnetworks", self.subnetworks, problem, "Leave it out")
        if not 0 < self.keep < 1:
            raise UserError(
                "--keep", self.keep, "is no fraction between 0 and 1", "Give 0.75, for instance"
            )
        if shape.hybrid:
            problem = f"cannot remove parts of {shape.architecture}, which has gated delta networks"
            raise UserError(
                "--method", self.method, problem, "Give a policy with attention in every layer"
            )
        if shape.experts and self.method != "depth":
            problem = "removes feed-forward units, which is not supported for mixtures of experts"
            raise UserError("--method", self.method, problem, "Give --method depth")
        # Zeros save no size: require ``--zero-attention``.
        count = count_removed_attentions(shape, 1 - self.keep) if self.method == "2ssp" else 0
        if count and not self.zero_attention:
            problem = (
                f"removes the attention of {count} layers, and config.json has no sign for "
                "such a layer"
            )
            remedy = (
                "Give --zero-attention to write zeros as output projections (same size), or "
                "--method width"
            )
            raise UserError("--method", self.method, problem, remedy)

    def plan_cut(self, shape: PolicyShape) -> Cut:
        """Return a cut of the final size, of the first parts instead of the best.

        Raises:
            UserError: naming ``--keep`` or ``--multiple``, if no part or every part is kept.
        """
        layers = tuple(range(shape.num_layers))
        if self.method == "depth":
            kept = count_kept_layers(shape, self.keep, self.part)
            return Cut(layers).remove(self.part, layers[kept:])
        zeroed = count_removed_attentions(shape, 1 - self.keep) if self.method == "2ssp" else 0
        width = count_kept_units(shape, self.keep, self.multiple, zeroed)
        return Cut(layers, (tuple(range(width)),) * len(layers), layers[:zeroed])

    def count_reads(self, shape: PolicyShape) -> int:
        """Count the scores' passes over the sequences."""
        layers = shape.num_layers
        turns = 0
        if self.score in NO_CALIBRATION:
            return 0
        if self.score == "shapley-loss":
            return 2 * self.subnetworks if self.subnetworks else 1 + layers
        if self.method == "2ssp":
            turns = count_removed_attentions(shape, 1 - self.keep)
        if self.score == "greedy":
            turns = layers - count_kept_layers(shape, self.keep, self.part)
        # Each turn measures the loss without every layer that still has the part.
        ablations = sum(layers - turn for turn in range(turns))
        return ablations + (self.score != "greedy")


def count_attention_weights(shape: PolicyShape) -> int:
    """Count a layer's weights in its four attention projections."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def count_feed_forward_weights(shape: PolicyShape) -> int:
    """Count a layer's weights in gate, up and down projections, or in experts and router."""
    return shape.hidden * (3 * shape.ffn * max(1, shape.experts) + shape.experts)


def count_removed_attentions(shape: PolicyShape, sparsity: float) -> int:
    """Return 2SSP's number of layers without attention (arXiv:2501.17771), of N layers:
    round(N · s^((|FFN| / |attn|) / 1.5)), a half rounded up."""
    ratio = count_feed_forward_weights(shape) / count_attention_weights(shape)
    return math.floor(shape.num_layers * sparsity ** (ratio / 1.5) + 0.5)


def count_kept_layers(shape: PolicyShape, keep: float, part: Part) -> int:
    """Return the number of layers that keep a part.

    Raises:
        UserError: naming ``--keep``, if no layer or every layer keeps the part.
    """
    attention = count_attention_weights(shape)
    feed_forward = count_feed_forward_weights(shape)
    whole = attention + feed_forward
    size = {"block": whole, "attention": attention, "feed-forward": feed_forward}[part]
    # ``keep`` is a fraction of whole layers: a part alone must lose more.
    kept = keep if part == "block" else 1 - (1 - keep) * whole / size
    left = round(shape.num_layers * kept)
    if not 0 < left < shape.num_layers:
        least = 1 - (1 - 1 / shape.num_layers) * size / whole
        problem = f"leaves {max(left, 0)} of {shape.num_layers} layers with their {part}"
        raise UserError("--keep", keep, problem, f"Give a fraction between {least:.3f} and 1")
    return left


def count_kept_units(shape: PolicyShape, keep: float, multiple: int, zeroed: int) -> int:
    """Return the number of kept units per layer, rounded to a multiple of ``multiple``.

    Args:
        zeroed: layers whose attention counts as removed.

    Raises:
        UserError: naming ``--keep`` or ``--multiple``, if no unit or every unit is kept.
    """
    attention = count_attention_weights(shape)
    feed_forward = count_feed_forward_weights(shape)
    # Attention is kept in full except in zeroed layers; the units get the rest of the budget.
    left = keep * (attention + feed_forward) - attention * (1 - zeroed / shape.num_layers)
    exact = left / (feed_forward / shape.ffn)
    if exact <= 0:
        least = attention / (attention + feed_forward)
        problem = f"is less than the fraction of attention, {least:.3f}"
        raise UserError("--keep", keep, problem, "Raise it, or give --method depth")
    width = round(exact / multiple) * multiple
    if not 0 < width < shape.ffn:
        problem = f"leaves {width} of {shape.ffn} feed-forward units; {exact:.1f} are asked for"
        raise UserError("--multiple", multiple, problem, "Lower it")
    return width


def select_highest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the ascending indices of the ``count`` highest scores; the first of equal scores."""
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return tuple(sorted(ranked[:count]))

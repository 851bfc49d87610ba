"""How many weights a policy has, in all, in use for a token, and on each rank. Counted from the bridge's own table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from megatron_dppo.bridge.mapping import entries
from megatron_dppo.models.shape import PUBLISHED, PolicyShape, read_shape

VARIANTS = ("-base", "-instruct-2507", "-thinking-2507", "-instruct", "-thinking", "-fp8")


def shape_of(path: str) -> PolicyShape:
    """The shape of a policy: of its directory where there is one, else of the published model of its name.

    Raises:
        UserError: on ``model.path``, if it is neither.
    """
    name = Path(path).name.lower()
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return PUBLISHED[name] if not Path(path).is_dir() and name in PUBLISHED else read_shape(path)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights by what they are for; padding of the vocabulary is not among them."""

    total: int
    active: int
    """Those that one token meets: of experts, as many as it goes to."""
    matrices: int
    """The active ones in the layers: a token's forward pass takes two FLOPs for each."""
    head: int
    """The output layer's, which response tokens meet."""


@cache
def parameters_of(shape: PolicyShape) -> Parameters:
    """Count a policy's weights."""
    embedding = shape.vocab_size * shape.hidden
    outside = embedding if shape.tied else 2 * embedding
    total = _elements(shape, 0, 1, 1, padded=False)
    experts = _expert_elements(shape, 1) * shape.num_layers
    unused = experts - experts * shape.experts_per_token // max(shape.experts, 1)
    return Parameters(total, total - unused, total - unused - outside, embedding)


@cache
def rank_elements(shape: PolicyShape, stage: int, stages: int, tp: int) -> int:
    """Weights that a rank of a pipeline stage holds, the vocabulary's padding included."""
    return _elements(shape, stage, stages, tp, padded=True)


def _elements(shape: PolicyShape, stage: int, stages: int, tp: int, *, padded: bool) -> int:
    """Counted with one layer and one expert, and multiplied: a mixture has thousands of entries."""
    thin = replace(shape, num_layers=stages, experts=min(shape.experts, 1))
    outside = layer = 0
    for entry in entries(thin, stage, stages):
        entry = replace(entry, shape=shape)
        size = prod(entry.shard_shape(tp)) if padded else entry.elements
        outside += size if entry.layer is None else 0
        layer += size if entry.layer is not None and entry.expert is None else 0
    return outside + (layer + _expert_elements(shape, tp)) * (shape.num_layers // stages)


def _expert_elements(shape: PolicyShape, tp: int) -> int:
    """Of the experts of one layer on one of ``tp`` ranks."""
    thin = replace(shape, num_layers=1, experts=min(shape.experts, 1))
    return shape.experts * sum(prod(entry.shard_shape(tp)) for entry in entries(thin) if entry.expert is not None)

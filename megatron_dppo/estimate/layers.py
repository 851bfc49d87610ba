"""Kinds of layers of a policy, and the costs of a gated delta network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from megatron_dppo.bridge.mapping import Entry
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.layout import stage_layers

DELTA_CHUNK = 64
"""Tokens of a chunk in flash-linear-attention."""


def kinds_of_stage(shape: PolicyShape, stage: int, layout: LayoutConfig) -> list[str]:
    """Kinds of these layers."""
    return [shape.layer_types[layer] for layers in stage_layers(shape.num_layers, stage, layout) for layer in layers]


def thin(shape: PolicyShape) -> PolicyShape:
    """One that has all that differs, because a mixture has thousands of entries."""
    return dataclasses.replace(shape, num_layers=shape.attention_interval, experts=min(shape.experts, 1), tied=True)


def of_each_kind(entries: Iterable[Entry], shape: PolicyShape) -> Iterator[tuple[Entry, str]]:
    """Entries of the first layer of each kind, and those outside the layers, with the kind or nothing."""
    kinds = shape.layer_types
    for entry in entries:
        kind = "" if entry.layer is None else kinds[entry.layer]
        if entry.layer is None or kinds.index(kind) == entry.layer:
            yield entry, kind


def delta_elements(shape: PolicyShape) -> float:
    """Elements that a gated delta network keeps of a token: outputs of the input projection and of the convolution,
    queries and keys for each value head, 64 products of a chunk for each, and what comes of the delta rule. That is 2%
    more than a rehearsal of Qwen3.5-4B keeps; no GPU has measured it."""
    keys, values = shape.delta_keys * shape.delta_key_dim, shape.delta_values * shape.delta_value_dim
    repeated = shape.delta_values * (2 * shape.delta_key_dim + DELTA_CHUNK)
    return 4.0 * keys + 4 * values + repeated


def delta_flops(shape: PolicyShape) -> float:
    """FLOPs of a token's forward pass through one delta rule: products within its chunk, half of which are masked, and
    reads and writes of the state."""
    sizes = shape.delta_key_dim + shape.delta_value_dim
    state = 3 * shape.delta_key_dim * shape.delta_value_dim
    return 2.0 * shape.delta_values * (DELTA_CHUNK * sizes + state)

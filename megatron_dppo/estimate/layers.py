"""Costs of a gated delta network."""

from __future__ import annotations

from megatron_dppo.models.shape import PolicyShape

DELTA_CHUNK = 64
"""Tokens of a chunk in flash-linear-attention."""


def count_delta_elements(shape: PolicyShape) -> float:
    """Count the elements kept per token by a gated delta network.

    - Outputs of the input projection, the convolution and the delta rule.
    - Per value head: queries, keys, and 64 products of a chunk.

    The count is 2% above a rehearsal of Qwen3.5-4B; not measured on a GPU.
    """
    keys = shape.delta_keys * shape.delta_key_dim
    values = shape.delta_values * shape.delta_value_dim
    repeated = shape.delta_values * (2 * shape.delta_key_dim + DELTA_CHUNK)
    return 4.0 * keys + 4 * values + repeated


def count_delta_flops(shape: PolicyShape) -> float:
    """Count the FLOPs of a token's forward pass through one delta rule: products within its chunk
    (half are masked), reads and writes of the state."""
    sizes = shape.delta_key_dim + shape.delta_value_dim
    state = 3 * shape.delta_key_dim * shape.delta_value_dim
    return 2.0 * shape.delta_values * (DELTA_CHUNK * sizes + state)

"""Qwen3.5: three layers of four are gated delta networks, the fourth is attention with an output gate.

Published checkpoints have a vision tower and heads for further tokens besides. Neither is trained: an export carries
both along. A norm's weight is its distance from one, but for that behind the delta rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_dppo.models.family import (
    COLUMN,
    DIMENSIONS,
    GATED_QKV,
    MLP,
    QK_NORMS,
    REPLICATED,
    ROW,
    SECTIONS,
    Family,
    layer_row,
)

_ATTENTION: dict[str, Any] = {"layers": "full_attention"}
_DELTA: dict[str, Any] = {"layers": "linear_attention"}
_MIXED = ((0, "query", "delta_keys"), (0, "key", "delta_keys"), (0, "value", "delta_values"))
_IN_PROJ = (*_MIXED, (1, "z", "delta_values"), (2, "beta", "delta_heads"), (3, "alpha", "delta_heads"))

ROWS = (
    layer_row(
        REPLICATED,
        "input_layernorm.weight | self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        **_ATTENTION,
    ),
    layer_row(
        GATED_QKV, "self_attention.linear_qkv.weight", *(f"self_attn.{x}_proj.weight" for x in "qkv"), **_ATTENTION
    ),
    layer_row(ROW, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", **_ATTENTION),
    *(replace(row, **_ATTENTION) for row in QK_NORMS),
    layer_row(
        REPLICATED,
        "input_layernorm.weight | self_attention.in_proj.layer_norm_weight",
        "input_layernorm.weight",
        **_DELTA,
    ),
    layer_row(
        SECTIONS,
        "self_attention.in_proj.weight",
        *(f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")),
        sections=_IN_PROJ,
        **_DELTA,
    ),
    layer_row(SECTIONS, "self_attention.conv1d.weight", "linear_attn.conv1d.weight", sections=_MIXED, **_DELTA),
    layer_row(COLUMN, "self_attention.dt_bias", "linear_attn.dt_bias", **_DELTA),
    layer_row(COLUMN, "self_attention.A_log", "linear_attn.A_log", exact=True, **_DELTA),
    layer_row(REPLICATED, "self_attention.out_norm.weight", "linear_attn.norm.weight", exact=True, **_DELTA),
    layer_row(ROW, "self_attention.out_proj.weight", "linear_attn.out_proj.weight", **_DELTA),
    *MLP,
)


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, delta: int, tied: bool) -> dict[str, Any]:
    """The shape of a published Qwen3.5, whose delta networks have so many value heads."""
    own: dict[str, Any] = {
        "num_layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "tied": tied,
    }
    own |= {"delta_keys": 16, "delta_values": delta, "delta_key_dim": 128, "delta_value_dim": 128, "delta_taps": 4}
    own |= {"rotary_fraction": 0.25, "attention_interval": 4}
    return own | {"head_dim": 256, "vocab_size": 248320, "rope_theta": 1e7, "rms_eps": 1e-6, "max_positions": 262144}


TEXT = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    rows=ROWS,
    megatron={
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
    },
    keys={
        "attention_interval": "full_attention_interval",
        "rotary_fraction": "partial_rotary_factor",
        "delta_keys": "linear_num_key_heads",
        "delta_values": "linear_num_value_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "delta_taps": "linear_conv_kernel_dim",
    },
    supported={
        "attention_bias": (False, None),
        "attn_output_gate": (True,),
        "hidden_act": ("silu",),
        "mlp_only_layers": ([], None),
    },
    dimensions=DIMENSIONS
    | {
        "q_proj": ("gated_queries", "hidden"),
        "in_proj_qkv": ("delta_mixed", "hidden"),
        "in_proj_z": ("delta_values", "hidden"),
        "in_proj_b": ("delta_heads", "hidden"),
        "in_proj_a": ("delta_heads", "hidden"),
        "out_proj": ("hidden", "delta_values"),
        "conv1d": ("delta_mixed", "one", "delta_taps"),
        "linear_attn": ("delta_heads",),  # A_log, dt_bias
        "linear_attn.norm": ("delta_head",),
    },
    carried=("mtp.",),
    published={
        "qwen3.5-4b": sizes(32, 2560, 16, 4, 9216, delta=32, tied=True),
        "qwen3.5-9b": sizes(32, 4096, 16, 4, 12288, delta=32, tied=False),
        "qwen3.5-27b": sizes(64, 5120, 24, 4, 17408, delta=48, tied=False),
    },
)
WITH_VISION = replace(
    TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text_config="text_config",
    body="language_model.",
    carried=("model.visual.", "mtp."),
    published={},
)

"""Qwen3.5: of every four layers, three are gated delta networks; the fourth is attention with an
output gate. The model is dense, or has experts in every layer, including an expert shared by all
tokens.

Published checkpoints also have a vision tower and heads that predict several tokens ahead. These
parts stay untrained: an export copies the tensors. Files store a norm's weight minus 1, except for
the norm after the delta rule. Files hold the experts of a layer in two tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_dppo.models.family import (
    COLUMN,
    DIMENSIONS,
    EXPERTS,
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
# Hugging Face stacks queries, keys and values of a delta network in the first tensor.
_MIXED = ((0, "query", "delta_keys"), (0, "key", "delta_keys"), (0, "value", "delta_values"))
_IN_PROJ = (
    *_MIXED,
    (1, "z", "delta_values"),
    (2, "beta", "delta_heads"),
    (3, "alpha", "delta_heads"),
)

MIXERS = (
    layer_row(
        REPLICATED,
        "input_layernorm.weight | self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        **_ATTENTION,
    ),
    layer_row(
        GATED_QKV,
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{x}_proj.weight" for x in "qkv"),
        **_ATTENTION,
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
    layer_row(
        SECTIONS,
        "self_attention.conv1d.weight",
        "linear_attn.conv1d.weight",
        sections=_MIXED,
        **_DELTA,
    ),
    layer_row(COLUMN, "self_attention.dt_bias", "linear_attn.dt_bias", **_DELTA),
    layer_row(COLUMN, "self_attention.A_log", "linear_attn.A_log", exact=True, **_DELTA),
    layer_row(
        REPLICATED,
        "self_attention.out_norm.weight",
        "linear_attn.norm.weight",
        exact=True,
        **_DELTA,
    ),
    layer_row(ROW, "self_attention.out_proj.weight", "linear_attn.out_proj.weight", **_DELTA),
)
_NORM, _ROUTER, _FC1, _FC2 = EXPERTS
_FUSED = "model.{body}layers.{layer}.mlp.experts."
_SHARED = "mlp.shared_expert"
MIXTURE_ROWS = (
    *MIXERS,
    _NORM,
    _ROUTER,
    replace(_FC1, fused=_FUSED + "gate_up_proj"),
    replace(_FC2, fused=_FUSED + "down_proj"),
    layer_row(
        COLUMN,
        f"{_SHARED}s.linear_fc1.weight",
        f"{_SHARED}.gate_proj.weight",
        f"{_SHARED}.up_proj.weight",
    ),
    layer_row(ROW, f"{_SHARED}s.linear_fc2.weight", f"{_SHARED}.down_proj.weight"),
    layer_row(REPLICATED, f"{_SHARED}s.gate_weight", f"{_SHARED}_gate.weight"),
)


def make_sizes(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    delta: int,
    tied: bool,
) -> dict[str, Any]:
    """Return the shape of a published Qwen3.5; ``delta``: value heads of a delta network."""
    own: dict[str, Any] = {
        "num_layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "tied": tied,
    }
    own |= {
        "delta_keys": 16,
        "delta_values": delta,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
        "delta_taps": 4,
    }
    own |= {"rotary_fraction": 0.25, "attention_interval": 4}
    return own | {
        "head_dim": 256,
        "vocab_size": 248320,
        "rope_theta": 1e7,
        "rms_eps": 1e-6,
        "max_positions": 262144,
    }


TEXT = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    rows=(*MIXERS, *MLP),
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
        "qwen3.5-4b": make_sizes(32, 2560, 16, 4, 9216, delta=32, tied=True),
        "qwen3.5-9b": make_sizes(32, 4096, 16, 4, 12288, delta=32, tied=False),
        "qwen3.5-27b": make_sizes(64, 5120, 24, 4, 17408, delta=48, tied=False),
    },
)
MIXTURE = replace(
    TEXT,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    rows=MIXTURE_ROWS,
    megatron={**TEXT.megatron, "moe_shared_expert_gate": True},
    keys={
        **TEXT.keys,
        "ffn": "moe_intermediate_size",
        "shared_ffn": "shared_expert_intermediate_size",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    dimensions={
        **TEXT.dimensions,
        "shared_expert.gate_proj": ("shared_feed_forward", "hidden"),
        "shared_expert.up_proj": ("shared_feed_forward", "hidden"),
        "shared_expert.down_proj": ("hidden", "shared_feed_forward"),
        "shared_expert_gate": ("one", "hidden"),
    },
    published={
        "qwen3.5-35b-a3b": make_sizes(40, 2048, 16, 2, 512, delta=32, tied=False)
        | {"shared_ffn": 512, "experts": 256, "experts_per_token": 8},
    },
)
_WHOLE: dict[str, Any] = {
    "text_config": "text_config",
    "body": "language_model.",
    "carried": ("model.visual.", "mtp."),
    "published": {},
}
WITH_VISION = replace(
    TEXT, architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5", **_WHOLE
)
MIXTURE_WITH_VISION = replace(
    MIXTURE, architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe", **_WHOLE
)

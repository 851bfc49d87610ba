"""Qwen2.5 (Qwen2 in transformers) has biases of queries, keys and values. Qwen3 has norms of
queries and keys, and is dense or has experts in every layer."""

from __future__ import annotations

from typing import Any

from megatron_dppo.models.family import ATTENTION, EXPERTS, MLP, QK_NORMS, QKV_BIASES, Family

SUPPORTED = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
}


def make_sizes(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    tied: bool = False,
) -> dict[str, Any]:
    """Return the shape of a published Qwen3."""
    own = {
        "num_layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "tied": tied,
    }
    return own | {
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rms_eps": 1e-6,
        "max_positions": 40960,
    }


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rows=(*ATTENTION, *QKV_BIASES, *MLP),
    megatron={"add_qkv_bias": True},
    optional=("head_dim",),
    supported=SUPPORTED,
    reads_head_dim=False,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rows=(*ATTENTION, *QK_NORMS, *MLP),
    megatron={"qk_layernorm": True},
    supported=SUPPORTED,
    published={
        "qwen3-0.6b": make_sizes(28, 1024, 16, 8, 3072, tied=True),
        "qwen3-1.7b": make_sizes(28, 2048, 16, 8, 6144, tied=True),
        "qwen3-4b": make_sizes(36, 2560, 32, 8, 9728, tied=True),
        "qwen3-8b": make_sizes(36, 4096, 32, 8, 12288),
        "qwen3-14b": make_sizes(40, 5120, 40, 8, 17408),
        "qwen3-32b": make_sizes(64, 5120, 64, 8, 25600),
    },
)

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    rows=(*ATTENTION, *QK_NORMS, *EXPERTS),
    megatron={"qk_layernorm": True},
    keys={
        "ffn": "moe_intermediate_size",
        "experts": "num_experts | num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "renormalises_experts": "norm_topk_prob",
    },
    optional=("head_dim",),
    supported={**SUPPORTED, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    published={
        "qwen3-30b-a3b": make_sizes(48, 2048, 32, 4, 768)
        | {"experts": 128, "experts_per_token": 8},
        "qwen3-235b-a22b": make_sizes(94, 4096, 64, 4, 1536)
        | {"experts": 128, "experts_per_token": 8},
    },
)

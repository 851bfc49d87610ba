"""Qwen3-MoE: Qwen3 with experts in every layer."""

from __future__ import annotations

from megatron_dppo.models.families.qwen3 import SUPPORTED, sizes
from megatron_dppo.models.family import ATTENTION, EXPERTS, QK_NORMS, Family

FAMILY = Family(
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
        "qwen3-30b-a3b": sizes(48, 2048, 32, 4, 768) | {"experts": 128, "experts_per_token": 8},
        "qwen3-235b-a22b": sizes(94, 4096, 64, 4, 1536) | {"experts": 128, "experts_per_token": 8},
    },
)

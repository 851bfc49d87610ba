"""Qwen2.5, under the name of Qwen2: biases in queries, keys and values."""

from __future__ import annotations

from megatron_dppo.models.families.qwen3 import SUPPORTED
from megatron_dppo.models.family import ATTENTION, MLP, QKV_BIAS, Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rows=(*ATTENTION, QKV_BIAS, *MLP),
    megatron={"add_qkv_bias": True},
    optional=("head_dim",),
    supported=SUPPORTED,
    reads_head_dim=False,
)

"""Qwen3: dense, with normed queries and keys."""

from __future__ import annotations

from typing import Any

from megatron_dppo.models.family import ATTENTION, MLP, QK_NORMS, Family

SUPPORTED = {"attention_bias": (False, None), "hidden_act": ("silu",), "use_sliding_window": (False, None)}


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> dict[str, Any]:
    """The shape of a published Qwen3."""
    own = {"num_layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "tied": tied}
    return own | {"head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6, "rms_eps": 1e-6, "max_positions": 40960}


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rows=(*ATTENTION, *QK_NORMS, *MLP),
    megatron={"qk_layernorm": True},
    supported=SUPPORTED,
    published={
        "qwen3-0.6b": sizes(28, 1024, 16, 8, 3072, tied=True),
        "qwen3-1.7b": sizes(28, 2048, 16, 8, 6144, tied=True),
        "qwen3-4b": sizes(36, 2560, 32, 8, 9728, tied=True),
        "qwen3-8b": sizes(36, 4096, 32, 8, 12288),
        "qwen3-14b": sizes(40, 5120, 40, 8, 17408),
        "qwen3-32b": sizes(64, 5120, 64, 8, 25600),
    },
)

"""The sizes of the published Qwen3 models. Needs no torch."""

from __future__ import annotations

from megatron_dppo.models.shape import PolicyShape


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> PolicyShape:
    return PolicyShape(
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocab_size=151936,
        tied=tied,
        rope_theta=1e6,
        rms_eps=1e-6,
        max_positions=40960,
    )


PUBLISHED = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 768).with_experts(128, per_token=8),
}

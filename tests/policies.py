"""Small random Qwen3 directories for tests, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.init import character_tokenizer, write_tokenizer


def write_policy(
    path: Path,
    *,
    tied: bool = False,
    vocab: int = 131,
    layers: int = 4,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 80,
    seed: int = 7,
) -> Path:
    """A policy with large random weights and norms away from one, so that no mistake hides behind a default."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    write_tokenizer(character_tokenizer(), path, max_tokens=512)
    return path

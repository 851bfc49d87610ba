"""Small Qwen3 directories, written by transformers itself, with a tokenizer and a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.models.shape import PolicyShape, read_shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Odd on purpose: 50 rows of vocabulary leave the second of two ranks nothing but padding."""

    vocab_size: int = 131
    hidden_size: int = 24
    intermediate_size: int = 40
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 6
    tie_word_embeddings: bool = False


def write_qwen3(
    path: Path, sizes: Sizes, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB"
) -> PolicyShape:
    """A policy with random weights everywhere (norms too, where ones would hide an error)."""
    fields = {name: getattr(sizes, name) for name in Sizes.__slots__}
    config = Qwen3Config(**fields, max_position_embeddings=128, initializer_range=0.1, bos_token_id=1, eos_token_id=2)
    generator = torch.Generator().manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=[2])
    model.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(sizes.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w3 {% endfor %}"
    tokenizer.save_pretrained(path)
    return read_shape(path)

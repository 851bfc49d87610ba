"""Small directories of every family, written and read by transformers, with a tokenizer and a chat
template."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

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


SMOLLM2 = Sizes(hidden_size=36, num_attention_heads=9, num_key_value_heads=3, head_dim=4,
intermediate_size=48,
                tie_word_embeddings=True)  # fmt: skip
"""The heads of SmolLM2-135M, which three ranks divide, and two do not."""


COMMON: dict[str, Any] = {
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "rms_norm_eps": 1e-5,
}


def write_directory(
    config: PreTrainedConfig,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
) -> PolicyShape:
    """Write random weights, also for norms and biases (ones and zeros would hide an error), and a
    tokenizer."""
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=[2])
    model.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    # The last row is left to the token that transformers adds to tokenizers of some families.
    words = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(config.vocab_size - 1)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w3 {% endfor %}"
    tokenizer.save_pretrained(path)
    return read_shape(path)


def _write_dense(
    kind: type[PreTrainedConfig], path: Path, sizes: Sizes, **options: Any
) -> PolicyShape:
    return write_directory(kind(**asdict(sizes), **COMMON), path, **options)


write_qwen3 = partial(_write_dense, Qwen3Config)
write_qwen2 = partial(_write_dense, Qwen2Config)
write_llama = partial(_write_dense, LlamaConfig)


def write_qwen3_moe(
    path: Path,
    sizes: Sizes,
    *,
    experts: int = 5,
    experts_per_token: int = 2,
    renormalises: bool = True,
    **options: Any,
) -> PolicyShape:
    """Write a policy with experts, each of the feed-forward layer's size."""
    fields = {**asdict(sizes), "moe_intermediate_size": sizes.intermediate_size}
    routing = {
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "norm_topk_prob": renormalises,
    }
    return write_directory(Qwen3MoeConfig(**fields, **routing, **COMMON), path, **options)


FAMILIES: dict[str, Callable[..., PolicyShape]] = {
    "Qwen3": write_qwen3,
    "Qwen2.5": write_qwen2,
    "Qwen3-MoE": write_qwen3_moe,
}
"""The writer of a directory of each family."""


def logits(path: Path) -> torch.Tensor:
    """Return logits of the model that transformers loads from a directory, in the type of its
    config.json."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


def assert_same_for_transformers(written: Path, source: Path) -> None:
    """Compare logits, generation settings and chat template of two directories, bit by bit."""
    assert torch.equal(logits(written), logits(source))
    ours, theirs = (GenerationConfig.from_pretrained(path).to_dict() for path in (written, source))
    assert ours == theirs
    message = [{"role": "user", "content": "w7 w8"}]
    ours, theirs = (
        AutoTokenizer.from_pretrained(path).apply_chat_template(message)
        for path in (written, source)
    )
    assert ours == theirs

"""Small random directories for tests: Qwen3's as transformers writes them, and those of any family
as ``init`` does."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from megatron_dppo.errors import UserError
from megatron_dppo.init import build_character_tokenizer, write_model, write_tokenizer
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import check_megatron, read_shape


def make_policy(
    *,
    tied: bool = False,
    vocab: int = 131,
    layers: int = 4,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 80,
    seed: int = 7,
    std: float = 0.15,
) -> Qwen3ForCausalLM:
    """A policy with large random weights and norms away from one, so that no mistake hides behind a
    default."""
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
        initializer_range=std,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


def write_policy(path: Path, **options: Any) -> Path:
    """Write ``make_policy`` with a tokenizer of single characters."""
    make_policy(**options).save_pretrained(path)
    write_tokenizer(build_character_tokenizer(), path, max_tokens=512)
    return path


SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
"""With a base of 100 and heads of 12, of six frequencies one is kept, one is interpolated, and four
are divided."""


def write_family(path: Path, architecture: str, *, experts: int = 4, **changes: object) -> Path:
    """A policy that ``init`` makes, then with norms and biases that are neither one nor zero, with
    scaled rotary positions if the family has Llama 3's, and with changes of its config.json:
    ``...`` leaves a setting out."""
    family = FAMILIES[architecture]
    experts = experts if "experts" in family.keys else 0
    head_dim = 16 if "rotary_fraction" in family.keys else 12
    write_model(path, family=family.model_type.removesuffix("_text"), experts=experts,
    vocab_size=131, hidden=48,
                layers=4, heads=4, kv_heads=2, head_dim=head_dim, ffn=80, tie=False, std=0.15)  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor += torch.rand(tensor.shape, generator=generator) - 0.5
    config = json.loads((path / "config.json").read_text())
    if "shared_ffn" in family.keys:
        config |= _narrow_shared_experts(tensors)
    if any(scaling.rope_type == "llama3" for scaling in family.rope_scalings):
        config |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **SCALED}}
    if "rotary_fraction" in family.keys:
        # The first token of a segment has (q k) v behind the delta rule, of which a norm without
        # this leaves the sign.
        config |= {"rms_norm_eps": 1e-3}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    written = {name: value for name, value in (config | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(written))
    if family.text_config:
        _add_vision(path, written)
    return path


def _narrow_shared_experts(tensors: dict[str, torch.Tensor], width: int = 24) -> dict[str, object]:
    """Make them another width than the other experts have. Returns what config.json then says."""
    for name, tensor in tensors.items():
        if "shared_expert." in name:
            tensors[name] = (
                tensor[:, :width] if "down_proj" in name else tensor[:width]
            ).contiguous()
    return {"shared_expert_intermediate_size": width}


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}


def _add_vision(path: Path, text: dict[str, object]) -> None:
    """Make the text model of a directory a part of one with a vision tower and a head for further
    tokens, in bf16."""
    kind = Qwen3_5MoeConfig if "num_experts" in text else Qwen3_5Config
    whole = kind(
        text_config=text, vision_config={**VISION, "num_position_embeddings": 16}
    ).to_dict()
    whole |= {
        "architectures": [
            str(text["architectures"][0]).replace("CausalLM", "ConditionalGeneration")
        ]
    }
    whole["text_config"] = {name: value for name, value in text.items() if name != "architectures"}
    (path / "config.json").write_text(json.dumps(whole))
    (path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    tensors = load_file(path / "model.safetensors")
    tensors = {
        name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()
    }
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tower = Qwen3_5VisionModel(
            Qwen3_5VisionConfig(**VISION, num_position_embeddings=16)
        ).state_dict()
    tensors |= {f"model.visual.{name}": tensor.bfloat16() for name, tensor in tower.items()}
    tensors["mtp.fc.weight"] = torch.ones(48, 96, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def trains(path: Path) -> bool:
    """Whether the installed Megatron-Core can train this policy."""
    try:
        check_megatron(read_shape(path))
    except UserError:
        return False
    return True

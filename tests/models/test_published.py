"""Tables of published models against transformers, without memory for a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_dppo.bridge.mapping import expected_tensors, parameters, redundant_tensors
from megatron_dppo.models.shape import read_shape


@dataclass(frozen=True)
class Published:
    """A model: the sizes in its config.json, and the parameters of its card."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    billions: str
    """Parameters by the model card."""
    architecture: str = "Qwen3ForCausalLM"
    more: dict[str, Any] = field(default_factory=lambda: {"head_dim": 128})

    def write(self, path: Path) -> None:
        model_type = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2"}.get(self.architecture, "qwen3_moe")
        config = {
            "architectures": [self.architecture],
            "model_type": model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            **self.more,
        }
        (path / "config.json").write_text(json.dumps(config))


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MODELS = {
    "Qwen3-0.6B": Published(28, 1024, 16, 8, 3072, "0.6", more={"head_dim": 128, "tie_word_embeddings": True}),
    "Qwen3-8B": Published(36, 4096, 32, 8, 12_288, "8.2"),
    "Qwen3-30B-A3B": Published(
        *(48, 2048, 32, 4, 6144, "30.5", "Qwen3MoeForCausalLM"),
        more={"head_dim": 128, **EXPERTS},
    ),
    "Qwen2.5-7B": Published(*(28, 3584, 28, 4, 18_944, "7.6", "Qwen2ForCausalLM"), more={"vocab_size": 152_064}),
}


@pytest.mark.parametrize("name", MODELS)
def test_table_has_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    MODELS[name].write(tmp_path)
    shape = read_shape(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    written = {n: tuple(t.shape) for n, t in revert_weight_conversion(model, model.state_dict()).items()}
    assert written == expected_tensors(shape) | redundant_tensors(shape)
    assert parameters(shape) == model.num_parameters()
    assert f"{parameters(shape) / 1e9:.1f}" == MODELS[name].billions

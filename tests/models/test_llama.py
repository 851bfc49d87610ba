"""Rotary frequencies and default sizes of Llama and Mistral, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dppo.models.shape import read_shape
from tests.policies import SCALED, write_family


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_frequencies_of_llama_3_are_transformers(kind: str, tmp_path: Path) -> None:
    """Older files write ``type`` for ``rope_type``."""
    scaling = SCALED | {"original_max_position_embeddings": 8192, "factor": 32.0}
    config = LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, hidden_size=4096)
    expected, attention = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    write_family(tmp_path, "LlamaForCausalLM", rope_theta=5e5, rope_scaling={kind: "llama3", **scaling})
    found = read_shape(tmp_path).rope_scaling
    assert found is not None and attention == 1.0
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    torch.testing.assert_close(found.scale(frequencies), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("absent", [None, ...])
@pytest.mark.parametrize("names", ["head_dim num_key_value_heads", "head_dim"], ids=["Llama", "Mistral"])
def test_absent_sizes_are_transformers_defaults(names: str, absent: object, tmp_path: Path) -> None:
    family = "LlamaForCausalLM" if "num_key" in names else "MistralForCausalLM"
    path = write_family(tmp_path, family, **dict.fromkeys(names.split(), absent))
    shape, config = read_shape(path), AutoConfig.from_pretrained(path)
    assert [shape.config_sizes[name] for name in names.split()] == [getattr(config, name) for name in names.split()]

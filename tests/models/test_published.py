"""Tables of published models against transformers, without memory for a weight."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_dppo.bridge.mapping import count_parameters, expected_tensors, list_redundant_tensors
from megatron_dppo.models.shape import PUBLISHED, read_shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", "0.6"),
        ("qwen3-8b", "8.2"),
        ("qwen3-30b-a3b", "30.5"),
        ("qwen3.5-35b-a3b", "34.7"),
    ],
)
def test_table_has_the_tensors_of_transformers(name: str, billions: str, tmp_path: Path) -> None:
    """Compare parameters with the model card's."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].as_config()))
    shape = read_shape(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    written = {
        n: tuple(t.shape) for n, t in revert_weight_conversion(model, model.state_dict()).items()
    }
    assert written == expected_tensors(shape) | list_redundant_tensors(shape)
    assert count_parameters(shape) == model.num_parameters()
    assert f"{count_parameters(shape) / 1e9:.1f}" == billions

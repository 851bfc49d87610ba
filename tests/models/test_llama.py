"""What a config.json of a Llama or a Mistral says. All else of the families is in ``tests/laws/test_parity.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from tests.policies import SCALED, write_family

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path, factor: float, kind: str) -> None:
    """Also as older files write them, ``type`` for ``rope_type``."""
    scaling = SCALED | {"original_max_position_embeddings": 8192, "factor": factor}
    config = LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, hidden_size=4096)
    expected, attention = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    write_family(tmp_path, LLAMA, rope_theta=5e5, rope_scaling={kind: "llama3", **scaling})
    found = read_shape(tmp_path).rope_scaling
    assert found is not None and attention == 1.0
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    torch.testing.assert_close(found.scale(frequencies), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "changes", "problem", "remedy"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias = true", "whose attention_bias is false"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = true", "whose mlp_bias is false"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2", "whose pretraining_tp is 1"),
        (LLAMA, {"rope_scaling": {"type": "dynamic"}}, 'rope_type = "dynamic"', 'is "default" or "llama3"'),
        (LLAMA, {"rope_scaling": SCALED | {"type": "llama3", "factor": "8"}}, 'factor = "8"', "fetch the model again"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'", "fetch the model again"),
        (MISTRAL, {"sliding_window": 32}, "sliding_window = 32", "whose sliding_window is null"),
        (MISTRAL, {"sliding_window": ...}, "sliding_window = 4096", "whose sliding_window is null"),
    ],
)
def test_settings_without_support_are_refused(
    tmp_path: Path, family: str, changes: dict, problem: str, remedy: str
) -> None:
    """A Mistral whose config.json leaves ``sliding_window`` out has one: transformers' default."""
    with pytest.raises(UserError) as caught:
        read_shape(write_family(tmp_path, family, **changes))
    assert caught.value.setting == "model.path"
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("absent", [None, ...])
@pytest.mark.parametrize(("family", "names"), [(LLAMA, ("head_dim", "num_key_value_heads")), (MISTRAL, ("head_dim",))])
def test_sizes_that_files_leave_out_are_those_of_transformers(
    tmp_path: Path, family: str, names: tuple[str, ...], absent: object
) -> None:
    path = write_family(tmp_path, family, **dict.fromkeys(names, absent))
    shape, config = read_shape(path), AutoConfig.from_pretrained(path)
    assert [shape.config_sizes[name] for name in names] == [getattr(config, name) for name in names]

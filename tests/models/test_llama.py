"""Scaled rotary positions and default sizes of Llama and Mistral."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_dppo.models.shape import read_shape
from tests.policies import SCALED, write_family


def test_scaling_under_its_older_name_is_the_same(tmp_path: Path) -> None:
    new, old = (
        read_shape(
            write_family(
                tmp_path / kind, "LlamaForCausalLM", rope_scaling={kind: "llama3", **SCALED}
            )
        )
        for kind in ("rope_type", "type")
    )
    assert new == old and new.rope_scaling is not None


@pytest.mark.parametrize("absent", [None, ...])
@pytest.mark.parametrize(
    "names", ["head_dim num_key_value_heads", "head_dim"], ids=["Llama", "Mistral"]
)
def test_absent_sizes_are_transformers_defaults(names: str, absent: object, tmp_path: Path) -> None:
    family = "LlamaForCausalLM" if "num_key" in names else "MistralForCausalLM"
    path = write_family(tmp_path, family, **dict.fromkeys(names.split(), absent))
    shape, config = read_shape(path), AutoConfig.from_pretrained(path)
    assert [shape.config_sizes[name] for name in names.split()] == [
        getattr(config, name) for name in names.split()
    ]

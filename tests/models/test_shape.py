"""Shapes read from a config.json, refused models, and layouts that a shape allows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models import shape as shapes
from megatron_dppo.models.shape import (
    PolicyShape,
    check_layout,
    check_megatron,
    padded_vocab,
    read_shape,
)
from tests.policies import SCALED, write_family, write_policy

SHAPE = PolicyShape(
    num_layers=6,
    hidden=48,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=80,
    vocab_size=131,
    tied=False,
    rope_theta=5e5,
    rms_eps=1e-6,
    max_positions=512,
)
MOE_SHAPE = replace(
    SHAPE, architecture="Qwen3MoeForCausalLM", ffn=32, experts=6, experts_per_token=2
)
HYBRID_SHAPE = replace(SHAPE, attention_interval=2, delta_keys=4)
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
}
MOE |= {"num_experts_per_tok": 2}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": ...}
OLD_ROPE = {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}


def write_config(path: Path, **changes: Any) -> Path:
    """Write a policy as transformers does, with changes of its config.json; ``...`` leaves a
    setting out."""
    write_policy(path, layers=6, heads=8, kv_heads=4)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    config = json.loads((path / "config.json").read_text()) | rope | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, SHAPE),
        (OLD_ROPE, SHAPE),
        ({"rope_scaling": {"type": "default", "rope_theta": 5e5}}, SHAPE),
        (
            MOE | {"num_experts": 6, "norm_topk_prob": True},
            replace(MOE_SHAPE, renormalises_experts=True),
        ),
        (
            MOE | {"num_local_experts": 6, "norm_topk_prob": False},
            replace(MOE_SHAPE, renormalises_experts=False),
        ),
        (QWEN2, replace(SHAPE, architecture="Qwen2ForCausalLM", head_dim=6)),
    ],
)
def test_shape_is_read_from_config_json(
    changes: dict[str, Any], shape: PolicyShape, tmp_path: Path
) -> None:
    path = write_config(tmp_path, **changes)
    assert read_shape(path) == shape
    config = json.loads((path / "config.json").read_text())
    assert shape.as_config()["model_type"] == config["model_type"]


LLAMA, MISTRAL, HYBRID = "LlamaForCausalLM", "MistralForCausalLM", "Qwen3_5ForCausalLM"


def test_omitted_settings_have_transformers_defaults(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    changes = {"partial_rotary_factor": ..., "layer_types": kinds}
    hybrid = read_shape(write_family(tmp_path / "hybrid", HYBRID, **changes))
    assert (hybrid.rotary_fraction, hybrid.attention_interval) == (0.25, 4)
    llama = read_shape(write_family(tmp_path / "llama", LLAMA, num_key_value_heads=...))
    assert llama.kv_heads == llama.heads


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ("", {"model_type": "llama"}, 'Qwen3ForCausalLM is of model_type "llama"'),
    ("", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, "yarn"),
    ("", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("", {"hidden_act": "gelu"}, "gelu"),
    ("", {"use_sliding_window": True}, "use_sliding_window = true"),
    ("", {"attention_bias": True}, "attention_bias = true"),
    ("", {"head_dim": ...}, "has no 'head_dim'"),
    ("", MOE | {"num_experts": 6, "mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    (
        "",
        MOE | {"num_experts": 6, "num_experts_per_tok": 1, "norm_topk_prob": True},
        "a single expert",
    ),
    ("", MOE | {"num_experts": 6, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    (
        "",
        MOE | {"num_experts": 6, "num_experts_per_tok": 7},
        "num_experts_per_tok = 7 for 6 experts",
    ),
    ("", MOE | {"num_experts": 6, "norm_topk_prob": "false"}, "norm_topk_prob"),
    ("", {"num_key_value_heads": 3}, "num_key_value_heads = 3 for 8 query heads"),
    ("", {"head_dim": 7}, "head_dim = 7"),
    ("", {"rms_norm_eps": 1e-300}, "rms_norm_eps = 1e-300"),
    ("", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters"),
    ("", {"rope_parameters": {"rope_theta": 1e-300}}, "rope_theta = 1e-300"),
    ("", {"rope_parameters": {"rope_theta": None}}, "rope_theta = null"),
    ("", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("", {"rope_scaling": "x"}, "rope_scaling"),
    (
        "",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling and rope_parameters that differ",
    ),
    (
        "",
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e6},
        "rope_scaling and rope_parameters that differ",
    ),
    (LLAMA, {"attention_bias": True}, "attention_bias = true"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = true"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2"),
    (LLAMA, {"rope_scaling": {"type": "dynamic"}}, 'rope_type = "dynamic"'),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", **SCALED, "factor": 1e-30}}, "factor = 1e-30"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", **SCALED, "high_freq_factor": 1}},
        "not below high_freq_factor",
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "default"}},
        "rope_scaling and rope_parameters that differ",
    ),
    (MISTRAL, {"sliding_window": 32}, "sliding_window = 32"),
    (MISTRAL, {"sliding_window": ...}, "sliding_window = 4096"),  # transformers' default
    (HYBRID, {"layer_types": ["full_attention"] * 4}, "layer_types"),
    (HYBRID, {"layer_types": ["full_attention", *["linear_attention"] * 3]}, "layer_types"),
    *(
        (HYBRID, {"full_attention_interval": value}, "full_attention_interval")
        for value in (0, 5, "x", None, [], {})
    ),
    (HYBRID, {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    (HYBRID, {"partial_rotary_factor": 1e-9}, "partial_rotary_factor = 1e-09"),
    (HYBRID, {"rope_parameters": {"mrope_section": "x"}}, "mrope_section"),
    (HYBRID, {"linear_num_key_heads": 3}, "linear_num_key_heads = 3 for 8 value heads"),
]


@pytest.mark.parametrize(("family", "changes", "problem"), REFUSED)
def test_unsupported_model_is_refused(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        read_shape(
            write_family(tmp_path, family, **changes)
            if family
            else write_config(tmp_path, **changes)
        )
    assert caught.value.setting == "model.path"
    assert problem in caught.value.problem


def test_folder_without_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: is not a directory"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_shape(tmp_path)
    for text, words in (("{", "not JSON"), ("[]", "no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            read_shape(tmp_path)


UNFIT: list[tuple[PolicyShape, dict[str, Any], str, str]] = [
    (SHAPE, {"tp": 8}, "tp", "one of 1, 2, 4"),
    (SHAPE, {"pp": 2, "vpp": 2}, "pp", "one of 3, or set layout.vpp to one of 1, 3"),
    (
        SHAPE,
        {"pp": 4, "first_stage_layers": 2},
        "pp",
        "one of 2, 3, 5, or leave layout.first_stage_layers",
    ),
    (SHAPE, {"vpp": 2}, "vpp", "set layout.pp to 2 or more"),
    (SHAPE, {"ep": 2}, "ep", "Leave it out"),
    (MOE_SHAPE, {"ep": 4}, "ep", "one of 1, 2, 3, 6"),
    (MOE_SHAPE, {"etp": 3}, "etp", "layout.etp to one of 1, 2, 4,"),
    (
        MOE_SHAPE,
        {"tp": 2, "etp": 1, "ep": 3, "sequence_parallel": True},
        "ep",
        "layout.etp to one of 2, 4",
    ),
    (MOE_SHAPE, {"tp": 2}, "sequence_parallel", "Set it to true"),
    (replace(MOE_SHAPE, shared_ffn=25), {"tp": 2, "sequence_parallel": True}, "tp", "one of 1"),
    (HYBRID_SHAPE, {"tp": 2, "cp": 4}, "cp", "their product is one of 1, 2, 4"),
]


@pytest.mark.parametrize(("shape", "layout", "setting", "remedy"), UNFIT)
def test_layout_that_does_not_divide_is_refused(
    shape: PolicyShape, layout: dict[str, Any], setting: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=remedy) as caught:
        check_layout(shape, LayoutConfig(**layout))
    assert caught.value.setting == f"layout.{setting}"


def test_padding_of_the_vocabulary_does_not_depend_on_tp() -> None:
    assert {padded_vocab(151_936, tp) for tp in (1, 2, 4, 8)} == {151_936}
    assert {padded_vocab(131, tp) for tp in (1, 2, 4, 128)} == {256}
    assert padded_vocab(131, 3) == 384


def test_delta_networks_need_a_newer_megatron_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = read_shape(write_family(tmp_path, HYBRID))
    monkeypatch.setattr(shapes, "version", lambda package: "0.19.0")
    check_megatron(shape)
    monkeypatch.setattr(shapes, "version", lambda package: "0.18.0")
    with pytest.raises(UserError, match=r"Megatron-Core 0.18.0 cannot train"):
        check_megatron(shape)

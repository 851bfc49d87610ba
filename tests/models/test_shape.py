"""What a config.json says, what is refused, and which layouts a shape allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, check_layout, padded_vocab, read_shape

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
    rms_eps=1e-5,
    max_positions=512,
)

MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32}
MOE |= {"num_experts": 6, "num_experts_per_tok": 2}


def write_config(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A config.json as transformers writes it, with changes."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ).save_pretrained(path)
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    return path


def test_shape_is_read_from_what_transformers_writes(tmp_path: Path) -> None:
    assert read_shape(write_config(tmp_path)) == SHAPE


def test_rotary_base_is_read_from_files_older_than_transformers_5(tmp_path: Path) -> None:
    path = write_config(tmp_path, drop=("rope_parameters",), rope_theta=5e5, rope_scaling=None)
    assert read_shape(path) == SHAPE


def test_experts_are_read_under_either_name(tmp_path: Path) -> None:
    expected = replace(SHAPE, architecture="Qwen3MoeForCausalLM", ffn=32, experts=6, experts_per_token=2)
    fields = {key: value for key, value in MOE.items() if key != "num_experts"}
    for name in ("num_experts", "num_local_experts"):
        for renormalises in (True, False):
            path = write_config(tmp_path, **fields, **{name: 6}, norm_topk_prob=renormalises)
            assert read_shape(path) == replace(expected, renormalises_experts=renormalises)


def test_a_qwen2_has_biases_and_no_head_size_of_its_own(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    shape = read_shape(write_config(tmp_path, drop=("head_dim",), **qwen2))
    assert shape == replace(SHAPE, architecture="Qwen2ForCausalLM", head_dim=6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"hidden_act": "gelu"}, "gelu"),
        (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "a single expert, always of weight one"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_shape(write_config(tmp_path, **changes))
    assert caught.value.setting == "model.path"


def test_a_directory_that_is_none_or_holds_no_readable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: is not a directory"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_shape(tmp_path)
    with pytest.raises(UserError, match="has no 'head_dim'"):
        read_shape(write_config(tmp_path, drop=("head_dim",)))
    for text, words in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        ("3", "no JSON object"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            read_shape(tmp_path)


COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "max_position_embeddings")  # fmt: skip
ODD = (None, "16", 0, -1, 1.5, True, [], {}, float("nan"))


@pytest.mark.parametrize("key", [*COUNTS, "rms_norm_eps"])
def test_a_size_that_is_none_is_named(tmp_path: Path, key: str) -> None:
    folder = write_config(tmp_path)
    good = json.loads((folder / "config.json").read_text())
    for value in ODD:
        if key == "rms_norm_eps" and value == 1.5:
            continue
        (folder / "config.json").write_text(json.dumps(good | {key: value}))
        with pytest.raises(UserError, match=rf"its config\.json has {key} = .*which is no"):
            read_shape(folder)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("model_type", "llama", 'Qwen3ForCausalLM is of model_type "llama"'),
        ("num_hidden_layers", 10**6, "num_hidden_layers = 1e+06, which is more than 10,000"),
        ("vocab_size", 10**12, "vocab_size = 1e+12, which is more than 1,000,000,000"),
        ("rope_theta", 0, "rope_theta = 0, which is no number above 0"),
    ],
)
def test_what_no_model_can_be_is_refused(tmp_path: Path, field: str, value: object, problem: str) -> None:
    path = write_config(tmp_path, drop=("rope_parameters",), **{field: value})
    with pytest.raises(UserError) as caught:
        read_shape(path)
    assert problem in caught.value.problem


@pytest.mark.parametrize("key", ["architectures", "rope_parameters", "model_type", "hidden_act", "mlp_only_layers"])
def test_odd_values_elsewhere_are_passed_over_or_named(tmp_path: Path, key: str) -> None:
    folder = write_config(tmp_path)
    good = json.loads((folder / "config.json").read_text())
    for value in (*ODD, ["a"], [None]):
        (folder / "config.json").write_text(json.dumps(good | {key: value}))
        try:
            read_shape(folder)
        except UserError as error:
            assert error.setting == "model.path"


@pytest.mark.parametrize(
    ("layout", "setting", "remedy"),
    [
        (LayoutConfig(tp=3), "layout.tp", "one of 1, 2, 4"),
        (LayoutConfig(tp=8), "layout.tp", "one of 1, 2, 4"),
        (LayoutConfig(pp=4), "layout.pp", "one of 1, 2, 3, 6"),
        (LayoutConfig(pp=10**30), "layout.pp", "one of 1, 2, 3, 6"),
        (LayoutConfig(pp=2, vpp=2), "layout.pp", "one of 3, or set layout.vpp to one of 1, 3"),
        (LayoutConfig(pp=4, first_stage_layers=2), "layout.pp", "one of 2, 3, 5, or leave layout.first_stage_layers"),
        (LayoutConfig(pp=2, first_stage_layers=6), "layout.pp", "Leave layout.first_stage_layers out"),
        (LayoutConfig(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=4), "layout.pp", "layout.vpp to one of 1"),
        (LayoutConfig(vpp=2), "layout.vpp", "set layout.pp to 2 or more"),
        (LayoutConfig(last_stage_layers=2), "layout.last_stage_layers", "set layout.pp to 2 or more"),
        (LayoutConfig(ep=2), "layout.ep", "Leave it out"),
        (LayoutConfig(etp=2), "layout.etp", "Leave it out"),
    ],
)
def test_a_layout_that_does_not_divide_names_those_that_do(layout: LayoutConfig, setting: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy) as caught:
        check_layout(SHAPE, layout)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("layout", "setting", "remedy"),
    [
        (LayoutConfig(ep=4), "layout.ep", "one of 1, 2, 3, 6"),
        (LayoutConfig(etp=3), "layout.etp", "layout.etp to one of 1, 2, 4,"),
        (LayoutConfig(tp=2, etp=1, ep=3, sequence_parallel=True), "layout.ep", "layout.etp to one of 2, 4"),
    ],
)
def test_experts_that_a_layout_does_not_divide_are_named(layout: LayoutConfig, setting: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy) as caught:
        check_layout(replace(SHAPE, architecture="Qwen3MoeForCausalLM", experts=6, experts_per_token=2), layout)
    assert caught.value.setting == setting


def test_layouts_that_divide_pass() -> None:
    for layout in (LayoutConfig(), LayoutConfig(tp=4, pp=3), LayoutConfig(cp=5), LayoutConfig(sequence_parallel=True)):
        check_layout(SHAPE, layout)


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    shape = replace(SHAPE, architecture="Qwen3MoeForCausalLM", experts=4, experts_per_token=2)
    with pytest.raises(UserError, match=r"experts with layout\.tp = 2 under sequence parallelism only") as caught:
        check_layout(shape, LayoutConfig(tp=2))
    assert caught.value.setting == "layout.sequence_parallel"
    for layout in (LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(pp=2)):
        check_layout(shape, layout)


def test_padding_of_the_vocabulary_does_not_depend_on_the_layout() -> None:
    assert {padded_vocab(151_936, tp) for tp in (1, 2, 4, 8)} == {151_936}
    assert {padded_vocab(131, tp) for tp in (1, 2, 4, 128)} == {256}
    assert padded_vocab(131, 3) == 384

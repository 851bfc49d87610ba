"""Qwen3.5's mixtures: the two forms of experts in files, the expert that every token goes to, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from megatron_dppo.bridge.hf_directory import plan_files
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import PUBLISHED, check_layout, read_shape
from tests.bridge.conversions import contents, policy_tensors, same, to_hf, to_megatron, weights
from tests.policies import write_family

MIXTURE = "Qwen3_5MoeForCausalLM"


def write_apart(source: Path, out: Path) -> Path:
    """The same policy with a tensor for each expert, as published FP8 directories have it."""
    out.mkdir()
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(policy_tensors(source), out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_both_forms_of_experts_are_read_as_one_policy(tmp_path: Path) -> None:
    policy = write_family(tmp_path / "policy", MIXTURE)
    apart = write_apart(policy, tmp_path / "apart")
    experts = load_file(policy / "model.safetensors")["model.layers.2.mlp.experts.gate_up_proj"]
    gate, up = experts[3].chunk(2)
    found = policy_tensors(policy)
    assert torch.equal(found["model.layers.2.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(found["model.layers.2.mlp.experts.3.up_proj.weight"], up)
    assert same(policy_tensors(apart), found)
    for source in (policy, apart):
        assert to_megatron(source, tmp_path / f"megatron-{source.name}", "--verify", "tensors") == 0
    of_each = [contents(tmp_path / f"megatron-{name}/release") for name in ("policy", "apart")]
    assert of_each[0] == of_each[1]
    assert to_hf(tmp_path / "megatron-apart", tmp_path / "back") == 0
    assert same(weights(tmp_path / "back"), weights(policy))


def test_the_experts_of_a_layer_are_in_one_file(tmp_path: Path) -> None:
    """Whatever the limit, since they are one tensor there."""
    shape = read_shape(write_family(tmp_path, MIXTURE))
    plan = plan_files(shape, torch.bfloat16, max_shard_bytes=20_000)
    homes = {name: file for file, names in plan.files.items() for name in names}
    assert len(plan.files) > 10
    for projection in ("gate_proj", "down_proj"):
        found = {homes[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"] for expert in range(4)}
        assert len(found) == 1
    assert homes.keys() == expected_tensors(shape).keys()


def test_experts_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    policy = write_family(tmp_path, MIXTURE)
    tensors = load_file(policy / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:, :, :40].contiguous()
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} has shape \[4, 48, 40\].*makes it \[4, 48, 80\]"):
        check_weights(policy, read_shape(policy))


def test_the_published_sizes_are_transformers_defaults() -> None:
    theirs, ours = Qwen3_5MoeTextConfig(), PUBLISHED["qwen3.5-35b-a3b"]
    family = FAMILIES[ours.architecture]
    unlike = {"attention_interval", "rotary_fraction", "rope_theta", "max_positions", "ffn"}
    names = {field: name for field, name in family.keys.items() if field not in unlike}
    assert {field: getattr(ours, field) for field in names} == {
        field: getattr(theirs, name) for field, name in names.items()
    }
    assert (ours.num_layers, ours.hidden, ours.heads, ours.kv_heads, ours.head_dim) == (
        *(theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads, theirs.num_key_value_heads),
        theirs.head_dim,
    )
    assert (ours.ffn, ours.vocab_size) == (theirs.moe_intermediate_size, theirs.vocab_size)
    assert ours.layer_types == theirs.layer_types and ours.tied is Qwen3_5MoeConfig().tie_word_embeddings


def test_the_shared_expert_limits_tensor_parallelism(tmp_path: Path) -> None:
    shape = read_shape(write_family(tmp_path, MIXTURE, shared_expert_intermediate_size=25))
    check_layout(shape, LayoutConfig())
    with pytest.raises(UserError, match=r"layout.tp = 2.*does not divide the 25 units of the shared expert"):
        check_layout(shape, LayoutConfig(tp=2, sequence_parallel=True))

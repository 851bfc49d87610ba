"""Qwen3.5: types of weights, vision towers beside the policy, two forms of experts, and
refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge.export import export_hf
from megatron_dppo.bridge.hf_directory import copy_config_and_tokenizer, plan_files
from megatron_dppo.bridge.load import load_policy
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import CARRIED
from megatron_dppo.compress.cut import Recipe
from megatron_dppo.config import Config, LayoutConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Policy
from megatron_dppo.models.layer_specs import choose_sharing
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from tests.bridge.conversions import contents, policy_tensors, same, to_hf, to_megatron, weights
from tests.policies import trains, write_family
from tests.ranks import RankPool

TEXT, WHOLE = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
MIXTURE, WHOLE_MIXTURE = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
EXACT = ("A_log", "linear_attn.norm.weight")


def write_mixed(path: Path, architecture: str) -> Path:
    """Write a policy in bf16 but for decays and the norms behind the delta rule, as published
    checkpoints are."""
    write_family(path, architecture)
    tensors = load_file(path / "model.safetensors")
    mixed = {
        name: tensor if name.endswith(EXACT) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    save_file(mixed, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("architecture", [MIXTURE, WHOLE])
def test_mixed_types_convert_back_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    policy = write_mixed(tmp_path / "policy", architecture)
    assert to_megatron(policy, tmp_path / "megatron", "--verify", "tensors") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "tensors") == 0
    assert same(weights(tmp_path / "back"), weights(policy))


def exported(rank: int, size: int, policy: Path, out: Path, layout: LayoutConfig) -> None:
    """Load as a run in bf16, after Megatron has cast the model, and export."""
    world = initialize(layout, seed=1, timeout_s=60)
    model = ModelConfig(path=str(policy), dtype="bf16", spec="torch")
    made = Policy(read_shape(policy), model, layout, world, temperature=1.0)
    load_policy(made.chunks, policy, world)
    export_hf(made.chunks, world, source=policy, out=out, dtype=torch.bfloat16)


@pytest.mark.parametrize("architecture", [TEXT, WHOLE_MIXTURE])
def test_run_in_bf16_exports_the_bits_of_its_policy(
    architecture: str, ranks: RankPool, tmp_path: Path
) -> None:
    policy = write_mixed(tmp_path / "policy", architecture)
    if not trains(policy):
        pytest.skip("this Megatron-Core cannot train it")
    layouts = LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(pp=2, first_stage_layers=1)
    ranks.in_turn(2, *((exported, policy, tmp_path / f"{layout.tp}", layout) for layout in layouts))
    for layout in layouts:
        assert same(weights(tmp_path / f"{layout.tp}"), weights(policy)), layout
    assert (tmp_path / "1" / CARRIED).exists() is (architecture != TEXT)


def test_vision_tower_stays_beside_the_policy(tmp_path: Path) -> None:
    policy = write_family(tmp_path / "policy", WHOLE)
    assert to_megatron(policy, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    of_tower = [name for name in weights(policy) if name.startswith(("model.visual.", "mtp."))]
    assert len(of_tower) > 10
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights(policy).keys()
    assert [name for name, file in index.items() if file == CARRIED] == of_tower
    settings = [
        (folder / "preprocessor_config.json").read_bytes() for folder in (tmp_path / "back", policy)
    ]
    assert settings[0] == settings[1]
    (tmp_path / "megatron/hf" / CARRIED).unlink()
    assert to_hf(tmp_path / "megatron", tmp_path / "lost") == 2


def test_carried_tensors_may_have_any_type(tmp_path: Path) -> None:
    policy, copy = write_family(tmp_path / "policy", TEXT), tmp_path / "copy"
    carried = {
        "mtp.flags": torch.tensor([True, False, True]),
        "mtp.scales": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
        "mtp.weight": torch.tensor([[-128], [127]], dtype=torch.int8),
    }
    save_file(load_file(policy / "model.safetensors") | carried, policy / "model.safetensors")
    copy.mkdir()
    copy_config_and_tokenizer(policy, copy, torch.bfloat16)
    written = load_file(copy / CARRIED)
    assert written.keys() == carried.keys()
    for name, tensor in carried.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].tolist() == tensor.tolist()
    assert to_megatron(policy, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    total = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["metadata"][
        "total_size"
    ]
    assert total == plan_files(read_shape(policy), torch.float32).total_bytes + 7


def test_both_forms_of_experts_are_one_policy(tmp_path: Path) -> None:
    """Published FP8 directories have a tensor for each expert."""
    policy, apart = write_family(tmp_path / "policy", MIXTURE), tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").write_bytes((policy / "config.json").read_bytes())
    found = policy_tensors(policy)
    save_file(found, apart / "model.safetensors", metadata={"format": "pt"})
    experts = load_file(policy / "model.safetensors")["model.layers.2.mlp.experts.gate_up_proj"]
    for projection, half in zip(("gate_proj", "up_proj"), experts[3].chunk(2), strict=True):
        assert torch.equal(found[f"model.layers.2.mlp.experts.3.{projection}.weight"], half)
    for source in (policy, apart):
        assert to_megatron(source, tmp_path / f"megatron-{source.name}", "--verify", "tensors") == 0
    of_each = [contents(tmp_path / f"megatron-{name}/release") for name in ("policy", "apart")]
    assert of_each[0] == of_each[1]


def test_experts_of_a_layer_are_in_one_file(tmp_path: Path) -> None:
    """A file may exceed the limit: experts of a layer are one tensor."""
    shape = read_shape(write_family(tmp_path, MIXTURE))
    plan = plan_files(shape, torch.bfloat16, max_shard_bytes=20_000)
    homes = {name: place.file for name, place in plan.places.items()}
    assert len(plan.frames) > 10
    for projection in ("gate_proj", "down_proj"):
        assert (
            len(
                {
                    homes[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"]
                    for expert in range(4)
                }
            )
            == 1
        )
    assert homes.keys() == expected_tensors(shape).keys()


def test_delta_networks_share_no_prefix_and_lose_no_part(tmp_path: Path) -> None:
    shape = read_shape(write_family(tmp_path, TEXT))
    assert choose_sharing(Config(), shape).pack.share_prefixes == "off"
    with pytest.raises(UserError, match="Qwen3_5ForCausalLM, which has gated delta networks"):
        Recipe("depth", "random", 0.5).check(shape)

"""Policies with gated delta networks: types of their weights, the models that they are a part of, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge.export import export_hf
from megatron_dppo.bridge.load import load_policy
from megatron_dppo.bridge.safetensors_files import CARRIED
from megatron_dppo.compress.cut import check_cut
from megatron_dppo.config import Config, DataConfig, LayoutConfig, ModelConfig, PackConfig, exclusions, replace
from megatron_dppo.data.examples import Source, read_examples
from megatron_dppo.errors import UserError
from megatron_dppo.models import shape as shapes
from megatron_dppo.models.actor import Policy
from megatron_dppo.models.layer_specs import choose_sharing
from megatron_dppo.models.shape import check_layout, check_megatron, read_shape
from megatron_dppo.parallel.world import initialize
from tests.bridge.conversions import same, to_hf, to_megatron, weights
from tests.policies import trains, write_family
from tests.ranks import RankPool

TEXT, WHOLE = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
MIXTURE, WHOLE_MIXTURE = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
EXACT = ("A_log", "linear_attn.norm.weight")


def write_mixed(path: Path, architecture: str) -> Path:
    """As published checkpoints are: bf16, but for decays and the norms behind the delta rule."""
    write_family(path, architecture)
    tensors = load_file(path / "model.safetensors")
    mixed = {name: tensor if name.endswith(EXACT) else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(mixed, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("architecture", [TEXT, WHOLE, MIXTURE, WHOLE_MIXTURE])
def test_mixed_types_convert_there_and_back_bit_by_bit(tmp_path: Path, architecture: str) -> None:
    policy = write_mixed(tmp_path / "policy", architecture)
    assert to_megatron(policy, tmp_path / "megatron", "--verify", "tensors") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "tensors") == 0
    assert same(weights(tmp_path / "back"), weights(policy))


def exported(rank: int, size: int, policy: Path, out: Path, layout: LayoutConfig) -> None:
    """Loaded as a run in bf16 loads it, after Megatron has cast the model, and exported."""
    world = initialize(layout, seed=1, timeout_s=60)
    model = ModelConfig(path=str(policy), dtype="bf16", spec="torch")
    made = Policy(read_shape(policy), model, layout, world, temperature=1.0)
    load_policy(made.chunks, policy, world)
    export_hf(made.chunks, world, source=policy, out=out, dtype=torch.bfloat16)


@pytest.mark.parametrize("architecture", [TEXT, WHOLE, WHOLE_MIXTURE])
def test_a_run_in_bf16_exports_the_bits_that_it_began_with(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    policy = write_mixed(tmp_path / "policy", architecture)
    if not trains(policy):
        pytest.skip("this Megatron-Core cannot train it")
    layouts = LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(pp=2, first_stage_layers=1)
    ranks.in_turn(2, *((exported, policy, tmp_path / f"{layout.tp}", layout) for layout in layouts))
    for layout in layouts:
        assert same(weights(tmp_path / f"{layout.tp}"), weights(policy)), layout
    assert (tmp_path / "1" / CARRIED).exists() is (architecture != TEXT)


def test_a_whole_models_tensors_and_files_stay_beside_the_policy(tmp_path: Path) -> None:
    policy = write_family(tmp_path / "policy", WHOLE)
    assert to_megatron(policy, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    of_tower = [name for name in weights(policy) if name.startswith(("model.visual.", "mtp."))]
    assert len(of_tower) > 10 and all(weights(policy)[name].dtype is torch.bfloat16 for name in of_tower)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights(policy).keys()
    assert [name for name, file in index.items() if file == CARRIED] == of_tower
    assert (tmp_path / "back/preprocessor_config.json").read_bytes() == (
        policy / "preprocessor_config.json"
    ).read_bytes()
    (tmp_path / "megatron/hf" / CARRIED).unlink()
    assert to_hf(tmp_path / "megatron", tmp_path / "lost") == 2


@pytest.mark.parametrize("installed, refused", [("0.16.1", True), ("0.18.0", True), ("0.19.0", False)])
def test_an_earlier_megatron_core_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, refused: bool
) -> None:
    shape = read_shape(write_family(tmp_path, TEXT))
    monkeypatch.setattr(shapes, "version", lambda package: installed)
    if refused:
        with pytest.raises(UserError, match=rf"Megatron-Core {installed} cannot train.*Python 3.12"):
            check_megatron(shape)
    else:
        check_megatron(shape)


def test_key_heads_limit_the_layout(tmp_path: Path) -> None:
    shape = read_shape(write_family(tmp_path, TEXT))
    check_layout(shape, LayoutConfig(tp=2, cp=2))
    with pytest.raises(UserError, match=r"layout.cp = 4.*does not divide the 4 key heads.*one of 1, 2, 4"):
        check_layout(shape, LayoutConfig(tp=2, cp=4))


@pytest.mark.parametrize(
    "kinds", [["full_attention"] * 4, ["linear_attention"] * 4, ["full_attention", *["linear_attention"] * 3]]
)
def test_layers_that_change_in_another_way_are_refused(tmp_path: Path, kinds: list[str]) -> None:
    with pytest.raises(UserError, match="layer_types"):
        read_shape(write_family(tmp_path, TEXT, layer_types=kinds))


def test_prefixes_are_not_shared(tmp_path: Path) -> None:
    shape = read_shape(write_family(tmp_path, TEXT))
    assert choose_sharing(Config(), shape).pack.share_prefixes == "off"
    shared = replace(Config(), pack=PackConfig(share_prefixes="on"))
    with pytest.raises(UserError, match=r"pack.share_prefixes = on.*gated delta networks of Qwen3_5ForCausalLM"):
        for check in exclusions.checks(shared, "train", shape):
            check()


def test_images_in_prompts_are_refused(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": parts}], "label": "a cat"}) + "\n")
    with pytest.raises(UserError, match=r"an image or a video.*vision towers are not trained"):
        read_examples(Source(str(file), "data.train"), DataConfig(), "train")


def test_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Qwen3_5ForCausalLM, which has gated delta networks"):
        check_cut(read_shape(write_family(tmp_path, TEXT)), "depth", 0.5)

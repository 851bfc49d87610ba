"""The tables against Megatron's own layout, written out once more by hand, and back. No processes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dppo.bridge.load import fill_parameter
from megatron_dppo.bridge.mapping import Entry, entries, expected_tensors
from megatron_dppo.bridge.stream import fill_tensors
from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import PolicyShape, padded_vocab
from megatron_dppo.parallel.layout import stage_layers

SHAPE = PolicyShape(
    num_layers=4,
    hidden=12,
    heads=8,
    kv_heads=4,
    head_dim=6,
    ffn=16,
    vocab_size=131,
    tied=False,
    rope_theta=1e6,
    rms_eps=1e-6,
    max_positions=128,
)
EXPERTS = {"experts": 3, "experts_per_token": 2}
SHAPES = {
    name: replace(SHAPE, architecture=name, **(EXPERTS if "experts" in family.keys else {}))
    for name, family in FAMILIES.items()
    if "attention_interval" not in family.keys
}
"""Policies with attention in every layer; ``tests/models/test_delta_net.py`` has the others."""
of_every_family = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@st.composite
def shapes(draw: st.DrawFn, tp: int, stages: int) -> PolicyShape:
    """Any small policy of any family that the numbers divide; the vocabulary is divisible by nothing in particular."""
    architecture = draw(st.sampled_from(sorted(SHAPES)))
    moe = bool(SHAPES[architecture].experts)
    groups = tp * draw(st.integers(1, 3))
    return PolicyShape(
        num_layers=stages * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 9)),
        heads=groups * draw(st.integers(1, 3)),
        kv_heads=groups,
        head_dim=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 300)),
        tied=draw(st.booleans()),
        rope_theta=1e6,
        rms_eps=1e-6,
        max_positions=128,
        architecture=architecture,
        experts=draw(st.integers(1, 3)) if moe else 0,
        experts_per_token=1 if moe else 0,
    )


def random_policy(shape: PolicyShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in expected_tensors(shape).items()}


def entries_of(shape: PolicyShape, stage: int, stages: int) -> list[Entry]:
    return list(entries(shape, stage_layers(shape.num_layers, stage, LayoutConfig(pp=stages))))


def shards_of(shape: PolicyShape, policy: dict[str, torch.Tensor], tp: int, pp: int) -> dict:
    """Every rank's parameters as the bridge fills them, {(tp_rank, stage): {name in the torch layers: tensor}}."""

    def read(name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        return policy[name].narrow(axis, start, stop - start)

    ranks: dict = {}
    for stage in range(pp):
        for tp_rank in range(tp):
            own = ranks[tp_rank, stage] = {}
            for entry in entries_of(shape, stage, pp):
                own[entry.megatron[0]] = torch.full(entry.shard_shape(tp), torch.nan)
                fill_parameter(entry, own[entry.megatron[0]], read, tp_rank, tp)
    return ranks


def megatron_shards(shape: PolicyShape, policy: dict[str, torch.Tensor], name: str, tp: int) -> list[torch.Tensor]:
    """A parameter on every rank, as Megatron-Core lays it out: equal chunks of a whole, except for the gated MLP.

    ``SelfAttention.get_query_key_value_tensors`` views the mixed projection as [groups, (queries a group + 2) · head];
    ``MLP`` halves its rank's fused projection into gate and up, and so does each of the experts.
    """
    layer = "model." + name.removeprefix("decoder.").split("self_attention")[0].split("mlp")[0]
    if name.startswith(("embedding", "output_layer")):
        source = "model.embed_tokens.weight" if name.startswith("embedding") or shape.tied else "lm_head.weight"
        missing = padded_vocab(shape.vocab_size, tp) - shape.vocab_size
        return list(torch.cat([policy[source], torch.zeros(missing, shape.hidden)]).chunk(tp))
    if qkv := re.search(r"linear_qkv\.(weight|bias)$", name):
        parts = (policy[f"{layer}self_attn.{x}_proj.{qkv[1]}"] for x in "qkv")
        grouped = [part.view(shape.kv_heads, part.shape[0] // shape.kv_heads, *part.shape[1:]) for part in parts]
        return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp))
    if name.endswith("linear_proj.weight"):
        return list(policy[layer + "self_attn.o_proj.weight"].chunk(tp, dim=1))
    if mlp := re.search(r"(linear_fc[12])\.weight(\d*)$", name):
        mlp_name = f"{layer}mlp.experts.{mlp[2]}." if mlp[2] else f"{layer}mlp."
        if mlp[1] == "linear_fc2":
            return list(policy[mlp_name + "down_proj.weight"].chunk(tp, dim=1))
        gates, ups = (policy[f"{mlp_name}{half}_proj.weight"].chunk(tp) for half in ("gate", "up"))
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    whole = {
        "mlp.router": "mlp.gate",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "decoder.final_layernorm": "model.norm",
        "decoder.": "model.",
    }
    for old, new in whole.items():
        name = name.replace(old, new)
    return [policy[name]] * tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_shards_are_megatrons_and_the_way_back_is_the_identity(tp: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 3))
    shape = data.draw(shapes(tp, pp))
    policy = random_policy(shape)
    ranks = shards_of(shape, policy, tp, pp)
    returned = {name: torch.full(size, torch.nan) for name, size in expected_tensors(shape).items()}
    for stage in range(pp):
        for entry in entries_of(shape, stage, pp):
            name = entry.megatron[0]
            shards = [ranks[tp_rank, stage][name] for tp_rank in range(tp)]
            assert all(map(torch.equal, shards, megatron_shards(shape, policy, name, tp))), name
            if not entry.mapping.is_copy:
                fill_tensors(entry, shards, returned)
    assert all(torch.equal(returned[name], policy[name]) for name in policy)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 4])
@of_every_family
def test_every_tensor_has_one_home_and_tied_embeddings_a_second_one(shape: PolicyShape, pp: int, tied: bool) -> None:
    shape = replace(shape, tied=tied)
    placed = [entry for stage in range(pp) for entry in entries_of(shape, stage, pp)]
    own = [name for entry in placed if not entry.mapping.is_copy for name in entry.tensors]
    assert sorted(own) == sorted(expected_tensors(shape))
    copies = [entry.tensors for entry in placed if entry.mapping.is_copy]
    assert copies == ([{"model.embed_tokens.weight": (131, 12)}] if tied and pp > 1 else [])
    assert len({name for entry in placed for name in entry.megatron}) == sum(len(entry.megatron) for entry in placed)


@of_every_family
def test_norms_that_transformer_engine_fuses_into_the_next_linear_are_the_same_tensors(shape: PolicyShape) -> None:
    tensors = {name: list(entry.tensors) for entry in entries(shape) for name in entry.megatron}
    before_mlp = "pre_mlp_layernorm.weight" if shape.experts else "mlp.linear_fc1.layer_norm_weight"  # a router's stays
    assert tensors["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"] == [
        "model.layers.3.input_layernorm.weight"
    ]
    assert tensors[f"decoder.layers.3.{before_mlp}"] == ["model.layers.3.post_attention_layernorm.weight"]


def test_experts_one_by_one_are_the_same_tensors_as_grouped() -> None:
    tensors = {name: list(entry.tensors) for entry in entries(SHAPES["Qwen3MoeForCausalLM"]) for name in entry.megatron}
    mlp = "layers.3.mlp.experts."
    for name in ("linear_fc2.weight2", "local_experts.2.linear_fc2.weight"):
        assert tensors[f"decoder.{mlp}{name}"] == [f"model.{mlp}2.down_proj.weight"]


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_layers_are_where_megatron_puts_them(pp: int) -> None:
    config = TransformerConfig(
        num_layers=12,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    for stage in range(pp):
        first = get_transformer_layer_offset(config, pp_rank=stage)
        layers = {entry.layer for entry in entries_of(replace(SHAPE, num_layers=12), stage, pp)} - {None}
        assert layers == set(range(first, first + 12 // pp))


def test_layers_are_counted_over_all_stages() -> None:
    names = {name for entry in entries_of(SHAPE, 1, 2) for name in entry.megatron}
    assert "decoder.layers.2.mlp.linear_fc2.weight" in names
    assert "decoder.layers.1.mlp.linear_fc2.weight" not in names


def test_a_split_that_does_not_divide_is_refused() -> None:
    entry = next(entry for entry in entries(SHAPE) if entry.megatron[0].endswith("linear_qkv.weight"))
    with pytest.raises(ValueError, match="query groups"):
        entry.slices(0, 8)
    with pytest.raises(ValueError, match="layers"):
        entries_of(SHAPE, 0, 3)


def test_mapping_and_checks_need_no_torch() -> None:
    modules = "megatron_dppo.bridge.checkpoint_folder, megatron_dppo.bridge.safetensors_files"
    program = f"import sys, {modules}; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True)

"""The table against Megatron's own layout, written out once more by hand, and back. No processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.bridge.mapping import QWEN3, TIED_OUTPUT, UNTIED_OUTPUT, entries, expected_tensors, stage_layers
from megatron_dppo.bridge.shards import fill_parameter, fill_tensors, whole_tensors
from megatron_dppo.models.shape import PolicyShape, padded_vocab

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


@st.composite
def shapes(draw: st.DrawFn, tp: int, pp: int) -> PolicyShape:
    """Any small Qwen3 that ``tp`` and ``pp`` divide; the vocabulary is divisible by nothing in particular."""
    groups = tp * draw(st.integers(1, 3))
    return PolicyShape(
        num_layers=pp * draw(st.integers(1, 2)),
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
    )


def random_policy(shape: PolicyShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in expected_tensors(shape).items()}


def shards_of(shape: PolicyShape, policy: dict[str, torch.Tensor], tp: int, pp: int) -> dict:
    """Every rank's parameters as the bridge fills them, {(tp_rank, stage): {name in the torch layers: tensor}}."""

    def read(name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        return policy[name].narrow(axis, start, stop - start)

    ranks: dict = {}
    for stage in range(pp):
        for tp_rank in range(tp):
            own = ranks[tp_rank, stage] = {}
            for entry in entries(shape, stage, pp):
                own[entry.megatron[0]] = torch.full(entry.shard_shape(tp), torch.nan)
                fill_parameter(entry, own[entry.megatron[0]], read, tp_rank, tp)
    return ranks


def megatron_shards(shape: PolicyShape, policy: dict[str, torch.Tensor], name: str, tp: int) -> list[torch.Tensor]:
    """A parameter on every rank, as Megatron-Core lays it out: equal chunks of a whole, except for the gated MLP.

    ``SelfAttention.get_query_key_value_tensors`` views the mixed projection as [groups, (queries a group + 2) · head];
    ``MLP`` halves its rank's fused projection into gate and up.
    """
    layer = "model." + name.removeprefix("decoder.").split("self_attention")[0].split("mlp")[0]
    if name.startswith(("embedding", "output_layer")):
        source = "model.embed_tokens.weight" if name.startswith("embedding") or shape.tied else "lm_head.weight"
        missing = padded_vocab(shape.vocab_size, tp) - shape.vocab_size
        return list(torch.cat([policy[source], torch.zeros(missing, shape.hidden)]).chunk(tp))
    if name.endswith("linear_qkv.weight"):
        q, k, v = (policy[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
        q, k, v = (x.view(shape.kv_heads, -1, shape.hidden) for x in (q, k, v))
        return list(torch.cat([q, k, v], dim=1).flatten(0, 1).chunk(tp))
    if name.endswith("linear_fc1.weight"):
        gates, ups = (policy[f"{layer}mlp.{half}_proj.weight"].chunk(tp) for half in ("gate", "up"))
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    if name.endswith("linear_proj.weight"):
        return list(policy[layer + "self_attn.o_proj.weight"].chunk(tp, dim=1))
    if name.endswith("linear_fc2.weight"):
        return list(policy[layer + "mlp.down_proj.weight"].chunk(tp, dim=1))
    norms = {
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "decoder.final_layernorm": "model.norm",
        "decoder.": "model.",
    }
    for old, new in norms.items():
        name = name.replace(old, new)
    return [policy[name]] * tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shards_are_megatrons_and_the_way_back_is_the_identity(tp: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 3))
    shape = data.draw(shapes(tp, pp))
    policy = random_policy(shape)
    ranks = shards_of(shape, policy, tp, pp)
    returned = {name: torch.full(size, torch.nan) for name, size in expected_tensors(shape).items()}
    for stage in range(pp):
        for entry in entries(shape, stage, pp):
            name = entry.megatron[0]
            shards = [ranks[tp_rank, stage][name] for tp_rank in range(tp)]
            assert all(map(torch.equal, shards, megatron_shards(shape, policy, name, tp))), name
            if not entry.row.copies:
                fill_tensors(entry, shards, returned)
    assert all(torch.equal(returned[name], policy[name]) for name in policy)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_tensor_has_one_home_and_tied_embeddings_a_second_one(tied: bool, pp: int) -> None:
    shape = replace(SHAPE, tied=tied)
    placed = [entry for stage in range(pp) for entry in entries(shape, stage, pp)]
    own = [name for entry in placed if not entry.row.copies for name in entry.tensors]
    assert sorted(own) == sorted(expected_tensors(shape))
    copies = [entry.tensors for entry in placed if entry.row.copies]
    assert copies == ([{"model.embed_tokens.weight": (131, 12)}] if tied and pp > 1 else [])
    assert len({name for entry in placed for name in entry.megatron}) == sum(len(entry.megatron) for entry in placed)


def test_the_table_is_of_a_dozen_rows() -> None:
    assert len({*QWEN3, UNTIED_OUTPUT, TIED_OUTPUT}) == 12


def test_norms_that_transformer_engine_fuses_into_the_next_linear_are_the_same_tensors() -> None:
    tensors = {name: list(entry.tensors) for entry in entries(SHAPE) for name in entry.megatron}
    fused = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}
    fused["mlp.linear_fc1.layer_norm_weight"] = "post_attention_layernorm.weight"
    for name, norm in fused.items():
        assert tensors[f"decoder.layers.3.{name}"] == [f"model.layers.3.{norm}"]


def test_layers_are_counted_over_all_stages() -> None:
    assert [list(stage_layers(6, stage, 3)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]
    names = {name for entry in entries(SHAPE, 1, 2) for name in entry.megatron}
    assert "decoder.layers.2.mlp.linear_fc2.weight" in names
    assert "decoder.layers.1.mlp.linear_fc2.weight" not in names


def test_an_unsplit_parameter_is_viewed_and_not_copied_except_for_qkv() -> None:
    for (name, parameter), entry in zip(
        shards_of(SHAPE, random_policy(SHAPE), 1, 1)[0, 0].items(), entries(SHAPE), strict=True
    ):
        storages = {t.untyped_storage().data_ptr() for t in whole_tensors(entry, parameter, torch.float32).values()}
        assert (storages == {parameter.untyped_storage().data_ptr()}) == (not name.endswith("linear_qkv.weight"))


def test_a_split_that_does_not_divide_is_refused() -> None:
    entry = next(entry for entry in entries(SHAPE) if entry.megatron[0].endswith("linear_qkv.weight"))
    with pytest.raises(ValueError, match="query groups"):
        entry.pieces(0, 8)
    with pytest.raises(ValueError, match="layers"):
        stage_layers(4, 0, 3)


def test_mapping_and_checks_need_no_torch() -> None:
    program = "import sys, megatron_dppo.bridge.safetensors_files; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True)

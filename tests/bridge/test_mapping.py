"""The tables against Megatron's own layout, written out by hand, and back. No processes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.bridge.load import fill_parameter
from megatron_dppo.bridge.mapping import (
    Entry,
    expected_tensors,
    list_adapter_entries,
    list_entries,
)
from megatron_dppo.bridge.stream import fill_tensors
from megatron_dppo.config import LayoutConfig, LoraConfig
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.family import Split
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.layout import list_stage_layers

SHAPE = PolicyShape(4, 12, 8, 4, 6, 16, 131, False, 1e6, 1e-6, 128)
MORE = {
    "experts": {"experts": 4, "experts_per_token": 2},
    "shared_ffn": {"shared_ffn": 4},
    "delta_keys": {
        "attention_interval": 2,
        "delta_keys": 4,
        "delta_values": 8,
        "delta_key_dim": 1,
        "delta_value_dim": 1,
        "delta_taps": 2,
    },
}


def of_family(shape: PolicyShape, architecture: str) -> PolicyShape:
    """Return the same sizes in another family, with the sizes that only this family has."""
    more = [sizes for key, sizes in MORE.items() if key in FAMILIES[architecture].keys]
    return replace(
        shape,
        architecture=architecture,
        **{name: size for sizes in more for name, size in sizes.items()},
    )


SMALL = replace(SHAPE, num_layers=2, heads=4, kv_heads=2, head_dim=1, ffn=4)
HYBRID = of_family(SMALL, "Qwen3_5MoeForCausalLM")


@st.composite
def shapes(draw: st.DrawFn, tp: int, stages: int) -> PolicyShape:
    """Draw a small policy of any family, with a vocabulary of any size."""
    groups = tp * draw(st.integers(1, 3))
    shape = PolicyShape(
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
    )
    return of_family(shape, draw(st.sampled_from(sorted(FAMILIES))))


def entries_of(shape: PolicyShape, stage: int, stages: int) -> list[Entry]:
    return list(
        list_entries(shape, list_stage_layers(shape.num_layers, stage, LayoutConfig(pp=stages)))
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@settings(max_examples=40)
@given(data=st.data())
def test_shards_and_back_is_the_identity(tp: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 3))
    shape = data.draw(shapes(tp, pp))
    policy = {name: torch.randn(size) for name, size in expected_tensors(shape).items()}
    returned = {name: torch.full_like(tensor, torch.nan) for name, tensor in policy.items()}
    for entry in [entry for stage in range(pp) for entry in entries_of(shape, stage, pp)]:
        shards = [torch.full(entry.shard_shape(tp), torch.nan) for _ in range(tp)]
        for rank, shard in enumerate(shards):
            fill_parameter(entry, shard, policy, rank, tp)
            assert not shard.isnan().any()
        if entry.mapping.split is Split.VOCABULARY:
            assert not torch.cat(shards)[shape.vocab_size :].any()
        if not entry.mapping.is_copy:
            fill_tensors(entry, shards, returned)
    assert all(torch.equal(returned[name], policy[name]) for name in policy)


SLICES: list[tuple[PolicyShape, str, list[str]]] = [
    (
        SMALL,
        "word_embeddings.weight",
        ["embed_tokens 0:128", "embed_tokens 128:131, zeros 131:256"],
    ),
    (
        SMALL,
        "linear_qkv.weight",
        ["q_proj 0:2, k_proj 0:1, v_proj 0:1", "q_proj 2:4, k_proj 1:2, v_proj 1:2"],
    ),
    # The groups of a rank follow each other.
    (
        SMALL,
        "linear_qkv.weight",
        ["q_proj 0:2, k_proj 0:1, v_proj 0:1, q_proj 2:4, k_proj 1:2, v_proj 1:2"],
    ),
    # A head of q_proj has its query, then its gate. A group has all queries, then all gates.
    (
        HYBRID,
        "linear_qkv.weight",
        [
            "q_proj 0:1, q_proj 2:3, q_proj 1:2, q_proj 3:4, k_proj 0:1, v_proj 0:1",
            "q_proj 4:5, q_proj 6:7, q_proj 5:6, q_proj 7:8, k_proj 1:2, v_proj 1:2",
        ],
    ),
    (HYBRID, "linear_proj.weight", ["o_proj 0:2", "o_proj 2:4"]),
    (HYBRID, "q_layernorm.weight", ["q_norm 0:1", "q_norm 0:1"]),
    (
        HYBRID,
        "conv1d.weight",
        ["conv1d 0:2, conv1d 4:6, conv1d 8:12", "conv1d 2:4, conv1d 6:8, conv1d 12:16"],
    ),
    (
        HYBRID,
        "experts.linear_fc1.weight3",
        ["gate_proj 0:2, up_proj 0:2", "gate_proj 2:4, up_proj 2:4"],
    ),
]
"""A parameter of a policy, and the slices of each rank in Megatron's order."""


@pytest.mark.parametrize(("shape", "name", "by_rank"), SLICES)
def test_slices_of_a_rank_are_in_megatrons_order(
    shape: PolicyShape, name: str, by_rank: list[str]
) -> None:
    entry = next(entry for entry in list_entries(shape) if entry.megatron_names[0].endswith(name))
    for rank, expected in enumerate(by_rank):
        slices = entry.list_slices(rank, len(by_rank))
        modules = [part.name.split(".")[-2] if part.name else "zeros" for part in slices]
        found = [
            f"{module} {part.start}:{part.stop}"
            for module, part in zip(modules, slices, strict=True)
        ]
        assert ", ".join(found) == expected


def test_expert_parallel_ranks_hold_consecutive_experts() -> None:
    ranks = {
        entry.expert: entry.expert_rank(2)
        for entry in list_entries(HYBRID)
        if entry.expert is not None
    }
    assert ranks == {0: 0, 1: 0, 2: 1, 3: 1}


def outer_tensors(shape: PolicyShape, stage: int, stages: int) -> list[str]:
    outer = [entry for entry in entries_of(shape, stage, stages) if entry.layer is None]
    return [next(iter(entry.tensors)).split(".")[-2] for entry in outer]


@pytest.mark.parametrize(("tied", "output"), [(False, "lm_head"), (True, "embed_tokens")])
def test_output_layer_is_on_the_last_stage_alone(tied: bool, output: str) -> None:
    shape = replace(SMALL, tied=tied)
    assert outer_tensors(shape, 0, 2) == ["embed_tokens"]
    assert outer_tensors(shape, 1, 2) == ["norm", output]


def test_adapters_are_beside_their_matrices() -> None:
    """B is [outputs, rank], A is [rank, inputs]; every expert has its own."""
    lora, found = LoraConfig(rank=3, targets=("down_proj",)), {}
    for shape in (SMALL, HYBRID):
        for entry in list_adapter_entries(shape, lora, [range(1)]):
            name = entry.megatron_names[0].removeprefix("decoder.layers.0.mlp.")
            found[name] = next(iter(entry.tensors.values()))
    assert found["linear_fc2.lora.down_proj.b"] == (12, 3)
    assert found["linear_fc2.lora.down_proj.a"] == (3, 4)
    assert found["experts.linear_fc2.lora.3.down_proj.b"] == (12, 3)

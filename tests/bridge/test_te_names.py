"""Recorded names of Transformer Engine's layers against the mapping and against torch's layers.

With Transformer Engine installed, the recording is made again, and the round trip is run through its layers.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.load import load_policy
from megatron_dppo.bridge.mapping import entries, expected_tensors
from megatron_dppo.bridge.stream import weight_stream
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.models.layer_specs import transformer_engine_installed
from megatron_dppo.models.policy import build_policy
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from tests.bridge.record_te import POLICIES, RECORDING, TPS, layout_of, making, names, record
from tests.ranks import RankPool

RECORDED: dict[str, Any] = json.loads(RECORDING.read_text())
needs_transformer_engine = pytest.mark.skipif(
    not transformer_engine_installed(),
    reason="Transformer Engine is not installed; its names are known from a recording",
)


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("family", POLICIES)
def test_every_parameter_of_te_is_a_row_of_the_table(tmp_path: Path, family: str, tp: int) -> None:
    recorded = {name: tuple(by_tp[TPS.index(tp)]) for name, by_tp in RECORDED[family]["parameters"].items()}
    mapped = list(entries(POLICIES[family](tmp_path)))
    rows = {name: [entry.shard_shape(tp) for entry in mapped if name in entry.megatron] for name in recorded}
    assert rows == {name: [size] for name, size in recorded.items()}
    assert [entry.megatron for entry in mapped if len(recorded.keys() & set(entry.megatron)) != 1] == []


@pytest.mark.parametrize("family", POLICIES)
def test_a_checkpoint_of_torch_layers_has_te_keys_and_shapes(ranks: RankPool, tmp_path: Path, family: str) -> None:
    recorded = {key: tuple(size) for key, size in RECORDED[family]["checkpoint"].items()}
    POLICIES[family](tmp_path / "policy")
    layouts = layout_of(tp=2), layout_of(tp=1, pp=2)
    calls = [(names, tmp_path / "policy", each, "torch", tmp_path / f"tp{each.tp}") for each in layouts]
    assert [found.checkpoint for found in chain.from_iterable(ranks.in_turn(2, *calls))] == [recorded] * 4


@needs_transformer_engine
@pytest.mark.parametrize("family", POLICIES)
def test_transformer_engine_still_has_the_recorded_names(ranks: RankPool, family: str) -> None:
    assert record(ranks, POLICIES[family]) == RECORDED[family]


def through_te(rank: int, size: int, path: Path, layout: LayoutConfig) -> list[str]:
    """Return the tensors that come back changed, or not at all, from layers of Transformer Engine's."""
    world, shape = initialize(layout, seed=1, timeout_s=60.0), read_shape(path)
    with making("te"):
        (model,) = build_policy(shape, ModelConfig(spec="te"), layout, temperature=1.0)
    model.to(world.device)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    world.together(lambda: load_policy([model], path, world))
    left = load_file(path / "model.safetensors")
    assert left.keys() == expected_tensors(shape).keys()
    for bucket in weight_stream([model], world):
        for name in [name for name, tensor in bucket.items() if torch.equal(tensor.cpu(), left[name])]:
            del left[name]
    return list(left)


@needs_transformer_engine
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("family", POLICIES)
def test_round_trip_through_te_is_the_identity(ranks: RankPool, tmp_path: Path, family: str, tp: int) -> None:
    POLICIES[family](tmp_path)
    assert ranks.run(tp, through_te, tmp_path, layout_of(tp)) == [[]] * tp

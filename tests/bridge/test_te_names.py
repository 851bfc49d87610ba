"""Recorded names of Transformer Engine's layers against the mapping and against torch's layers.

With Transformer Engine installed, the recording is made again.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.bridge.mapping import list_entries
from megatron_dppo.models.layer_specs import has_transformer_engine
from tests.bridge.record_te import POLICIES, RECORDING, TPS, layout_of, names, record
from tests.ranks import RankPool

RECORDED: dict[str, Any] = json.loads(RECORDING.read_text())


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("family", POLICIES)
def test_every_parameter_of_te_is_a_row_of_the_table(tmp_path: Path, family: str, tp: int) -> None:
    recorded = {
        name: tuple(by_tp[TPS.index(tp)]) for name, by_tp in RECORDED[family]["parameters"].items()
    }
    mapped = list(list_entries(POLICIES[family](tmp_path)))
    rows = {
        name: [entry.shard_shape(tp) for entry in mapped if name in entry.megatron_names]
        for name in recorded
    }
    assert rows == {name: [size] for name, size in recorded.items()}
    assert [
        entry.megatron_names
        for entry in mapped
        if len(recorded.keys() & set(entry.megatron_names)) != 1
    ] == []


@pytest.mark.parametrize("family", POLICIES)
def test_a_checkpoint_of_torch_layers_has_te_keys_and_shapes(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    recorded = {key: tuple(size) for key, size in RECORDED[family]["checkpoint"].items()}
    POLICIES[family](tmp_path / "policy")
    layouts = layout_of(tp=2), layout_of(tp=1, pp=2)
    calls = [
        (names, tmp_path / "policy", each, "torch", tmp_path / f"tp{each.tp}") for each in layouts
    ]
    assert [found.checkpoint for found in chain.from_iterable(ranks.in_turn(2, *calls))] == [
        recorded
    ] * 4


@pytest.mark.skipif(not has_transformer_engine(), reason="needs Transformer Engine")
@pytest.mark.parametrize("family", POLICIES)
def test_transformer_engine_still_has_the_recorded_names(ranks: RankPool, family: str) -> None:
    assert record(ranks, POLICIES[family]) == RECORDED[family]

"""The trace of a chosen step holds its phases, its operators and its backward pass; other steps leave none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.train import train
from tests.ranks import RankPool
from tests.small_runs import configure, write_run


def _train(rank: int, size: int, config: Config) -> None:
    train(config)


def test_a_chosen_step_is_traced_and_no_other(ranks: RankPool, tmp_path: Path) -> None:
    config = configure(write_run(tmp_path), tmp_path / "run", LayoutConfig(tp=2, dp=1), steps=2)
    ranks.run(2, _train, replace(config, run=replace(config.run, profile=(2,)), eval=replace(config.eval, problems=0)))
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [file.name for file in files] == ["step_0000002-rank_0.json.gz", "step_0000002-rank_1.json.gz"]
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X"}
        assert spans.keys() >= {"step", "actor_train", "update_weights", "aten::mm", "aten::embedding"}
        backward = [name for name in spans if "Backward" in name]
        assert backward
        begins, ends = spans["actor_train"]
        assert all(begins <= spans[name][0] <= ends for name in backward)

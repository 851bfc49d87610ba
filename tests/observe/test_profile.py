"""The trace of a chosen step holds its phases, its operators and its backward pass; other steps
leave none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.train import train
from tests.ranks import RankPool
from tests.small_runs import small_run, write_run


def _train(rank: int, size: int, config: Config) -> None:
    train(config)


def test_only_chosen_steps_are_traced(ranks: RankPool, tmp_path: Path) -> None:
    own = ("layout.tp=2", "layout.dp=1", "run.steps=2", "run.profile=[2]", "eval.problems=0")
    ranks.run(2, _train, small_run(write_run(tmp_path), tmp_path / "run", *own))
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [file.name for file in files] == [
        "step_0000002-rank_0.json.gz",
        "step_0000002-rank_1.json.gz",
    ]
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spans = {
            event["name"]: (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("ph") == "X"
        }
        assert spans.keys() >= {
            "step",
            "actor_train",
            "update_weights",
            "aten::mm",
            "aten::embedding",
        }
        backward = [name for name in spans if "Backward" in name]
        assert backward
        begins, ends = spans["actor_train"]
        assert all(begins <= spans[name][0] <= ends for name in backward)

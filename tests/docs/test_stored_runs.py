"""A stored run of a benchmark is found by all of its settings, and by no other's."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import ROOT

WORDS = ("pruning.max_weight=7", "optimizer.lr=1e-4")
QUICKSTART = str(ROOT / "configs/quickstart.yaml")


@pytest.fixture
def timed_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import timed_runs

    return timed_runs


@pytest.fixture
def file(timed_runs: Any, tmp_path: Path) -> Path:
    """A store of one run."""
    store = timed_runs.Store(tmp_path / "runs.jsonl")
    point = timed_runs.Point(3, 0.5, 10.0, 20.0, 1.5, 96)
    settings = timed_runs.read_settings(QUICKSTART, WORDS)
    store.add(timed_runs.Run("sums 1", "arm", 2, settings, [point], {"longer": 0.25}))
    return tmp_path / "runs.jsonl"


def find(timed_runs: Any, file: Path, *more: str, task: str = "sums 1", seed: int = 2) -> Any:
    settings = timed_runs.read_settings(QUICKSTART, WORDS + more)
    return timed_runs.Store(file).find(task, seed, settings)


def test_a_run_is_found_by_task_seed_and_all_settings(timed_runs: Any, file: Path) -> None:
    found = find(timed_runs, file)
    assert (found.lr, found.points[0].considered, found.figures) == (1e-4, 96, {"longer": 0.25})
    assert find(timed_runs, file, "run.dir=elsewhere", "model.path=elsewhere") == found
    assert not find(timed_runs, file, task="sums 2")
    assert not find(timed_runs, file, seed=1)
    for other in ("pruning.max_weight=10", "loss.clip_high=0.5", "rollout.prompts_per_step=16"):
        assert not find(timed_runs, file, other), other


def test_a_run_is_not_found_under_another_default(
    timed_runs: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = timed_runs.read_settings(QUICKSTART, WORDS)
    now = timed_runs.read_defaults() | {"optimizer.beta2": 0.99}
    monkeypatch.setattr(timed_runs, "read_defaults", lambda: now)
    assert not timed_runs.Store(file).find("sums 1", 2, settings)


def test_a_run_outlives_settings_that_come_and_go_at_their_default(
    timed_runs: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = timed_runs.read_settings(QUICKSTART, WORDS)
    now = timed_runs.read_defaults() | {"loss.new": 0}
    del now["optimizer.beta2"]
    monkeypatch.setattr(timed_runs, "read_defaults", lambda: now)
    assert timed_runs.Store(file).find("sums 1", 2, settings)
    assert not timed_runs.Store(file).find("sums 1", 2, settings | {"loss.new": 1})

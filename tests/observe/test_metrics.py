"""The logs of a run: exact, and the same after a resume as without one."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.observe.metrics import MetricsLog, StepLog, read_metrics, read_rows


def _run(folder: Path, steps: range, *, resume_step: int) -> None:
    log = MetricsLog(folder, resume_step)
    for step in steps:
        log.write(step, {"train/loss": math.sqrt(step) / 3, "rollout/raw_reward": 0.1 * step, "eval/accuracy": 1})
    log.close()


def test_a_row_is_one_line_with_the_step_first_and_keys_sorted(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"train/loss": 0.5, "eval/accuracy": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "eval/accuracy": 1.0, "train/loss": 0.5}\n'
    log.close()


def test_floats_come_back_with_the_same_bits(tmp_path: Path) -> None:
    values = {f"x/{i}": float(value) for i, value in enumerate(np.random.default_rng(0).normal(size=50) * 1e-7)}
    log = MetricsLog(tmp_path, 0)
    log.write(1, values | {"x/numpy": np.float64(1 / 3)})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, **values, "x/numpy": 1 / 3}]


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    _run(tmp_path / "whole", range(1, 7), resume_step=0)
    _run(tmp_path / "cut", range(1, 6), resume_step=0)  # the checkpoint is of step 3: two rows too many
    _run(tmp_path / "cut", range(4, 7), resume_step=3)
    whole, cut = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert cut.read_bytes() == whole.read_bytes()


def test_a_log_of_tables_is_resumed_like_the_metrics(tmp_path: Path) -> None:
    tables = [[0.125, -1.0, 7, 3.5 + 0.1 * step, 4] for step in range(7)]
    for name, runs in (("whole", [(0, range(1, 7))]), ("cut", [(0, range(1, 6)), (3, range(4, 7))])):
        for resume_step, steps in runs:
            log = StepLog(tmp_path / name / "tables.jsonl", resume_step)
            for step in steps:
                log.write(step, {"by_group": [tables[step]]})
            log.close()
    whole, cut = (tmp_path / name / "tables.jsonl" for name in ("whole", "cut"))
    assert cut.read_bytes() == whole.read_bytes()
    assert [row["by_group"] for row in read_rows(cut)] == [[table] for table in tables[1:]]


def test_a_row_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 4), resume_step=0)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 4, "train/lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    MetricsLog(tmp_path, 3).close()
    assert file.read_bytes() == whole


def test_a_start_from_nothing_drops_every_row(tmp_path: Path) -> None:
    _run(tmp_path, range(0, 3), resume_step=0)
    MetricsLog(tmp_path, 0).close()
    assert read_metrics(tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 6), resume_step=0)
    time.sleep(1.1)  # event files are read in the order of the seconds in their names
    _run(tmp_path, range(4, 7), resume_step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, round(event.value, 6)) for event in events.Scalars("train/loss")]
    assert shown == [(step, round(math.sqrt(step) / 3, 6)) for step in range(1, 7)]


def test_rows_are_on_the_disk_before_the_next_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"a": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["a"] == 1.0
    log.close()

"""What people read while a run goes on."""

from __future__ import annotations

import io
import time

import pytest

from megatron_dppo.observe.console import Console
from megatron_dppo.observe.timers import PhaseTimers, breakdown
from tests.observe.made_up import made_up_rows


def _said(rows: list[dict[str, float]], total: int) -> list[str]:
    file = io.StringIO()
    console = Console(total, file=file)
    for row in rows:
        console.step(int(row["step"]), row)
    return file.getvalue().splitlines()


def test_a_step_is_one_plain_line_under_its_titles_where_there_is_no_terminal() -> None:
    lines = _said(made_up_rows(2)[1:], 40)
    assert len(lines) == 3
    titles, first, second = (line.split() for line in lines)
    assert "\x1b" not in "".join(lines)
    assert first[0] == "1/40"
    for title, value in (
        ("prompts", "75%"),
        ("tokens", "50%"),
        ("noise", "1.25x"),
        ("fill", "98%"),
        ("seconds", "2.00"),
        ("left", "1:18"),
    ):
        assert first[titles.index(title)] == value
    assert (first[titles.index("held-out")], second[titles.index("held-out")]) == ("-", "0.750")
    assert lines[1].endswith("rollout 50%  train 25%  other 25%")


def test_a_warm_up_has_the_columns_it_can_fill() -> None:
    titles, row = _said([{"step": 1, "train/loss": 2.5, "train/lr": 1e-3, "perf/step_time": 1.0}], 10)
    assert "reward" not in titles
    assert "2.500" in row


def test_numbers_stand_under_their_titles() -> None:
    titles, row = _said(made_up_rows(1)[1:], 1000)
    assert titles.index("left") + len("left") == row.index("33:18") + len("33:18")
    for title, value in (("tokens", "50%"), ("noise", "1.25x"), ("grad", "1.50")):
        assert titles.index(title) + len(title) >= row.index(value) + len(value) > titles.index(title)


def test_words_are_said_once() -> None:
    file = io.StringIO()
    console = Console(3, file=file)
    for _ in range(3):
        console.note("a biased rule")
    assert file.getvalue() == "note  a biased rule\n"


def test_a_phase_is_timed_and_what_is_left_is_other() -> None:
    timers = PhaseTimers()
    with timers("step"):
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.01)
        with pytest.raises(ValueError), timers("actor_train"):
            raise ValueError
    metrics = timers.take()
    assert set(metrics) == {"perf/step_time", "perf/rollout_time", "perf/actor_train_time"}
    assert metrics["perf/step_time"] >= metrics["perf/rollout_time"] >= 0.02
    assert sum(breakdown(metrics).values()) == pytest.approx(metrics["perf/step_time"])
    assert timers.take() == {}

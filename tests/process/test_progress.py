"""A bar is for whoever waits at a terminal; elsewhere a line says now and then how far it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from megatron_dppo.process.streams import Unit, progress

BAR = """
from megatron_dppo.process.streams import progress_bar
with progress_bar("problems", 4, done=1) as advance, progress_bar("others", 1, shown=False) as silent:
    print(advance is None, silent is None)
    if advance:
        advance(3, "50.0% right")
"""


def said(errors: int) -> str:
    command, environ = [sys.executable, "-c", BAR], {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_at_a_terminal_it_tells_what_is_done_and_how_it_goes() -> None:
    ours, theirs = os.openpty()
    try:
        assert said(theirs) == "False True", "not above the bar"
        shown = os.read(ours, 2**16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert all(words in shown for words in ("problems", "1/4", "4/4", "50.0% right")), shown


def test_elsewhere_nothing_is_drawn() -> None:
    read, write = os.pipe()
    assert said(write) == "True True"
    os.close(write)
    with os.fdopen(read) as drawn:
        assert drawn.read() == ""


@pytest.mark.parametrize(
    ("unit", "total", "steps", "lines"),
    [
        ("count", 2000, (500, 1500), ["work: 500 of 2,000, well, 0 s left", "work: 2,000 of 2,000, well, 0 s left"]),
        ("bytes", 4e9, (1e9,), ["work: 1.00 of 4.00 GB, well, 0 s left"]),
        ("share", 1.0, (0.25,), ["work: 25%, well, 0 s left"]),
    ],
)
def test_elsewhere_lines_say_how_far_it_is(
    unit: Unit, total: float, steps: tuple[float, ...], lines: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("megatron_dppo.process.streams.SAY_EVERY_S", 0.0)
    with progress("work", total, unit=unit) as advance, progress("others'", 1, shown=False) as silent:
        for step in steps:
            advance(step, "well")
        silent(1)
    *said, end = capsys.readouterr().err.splitlines()
    assert said == lines
    assert end.startswith(
        {"count": "work: 2,000 in 0", "bytes": "work: 4.00 GB in 0", "share": "work: done in 0"}[unit]
    )


def test_what_is_to_do_may_become_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron_dppo.process.streams.SAY_EVERY_S", 0.0)
    with progress("work", 2) as advance:
        advance(0, to_do=2)
        advance(4)
    said, end = capsys.readouterr().err.splitlines()
    assert said == "work: 4 of 4, 0 s left" and end.startswith("work: 4 in 0")


def test_what_was_done_at_the_start_takes_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_dppo.process.streams.SAY_EVERY_S", 0.0)
    with progress("work", 1000, done=999) as advance:
        time.sleep(0.1)
        advance(0.1)
    first, end = capsys.readouterr().err.splitlines()
    assert first.startswith("work: 999 of 1,000, ") and not first.endswith(" 0 s left")
    assert end.startswith("work: 1 in 0")

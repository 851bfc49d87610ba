"""A run outlives the readers of its log, writes ASCII to terminals of ASCII, and reports its progress."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.process.streams import Unit, progress

SAYS = """
import os, sys, time
from megatron_dppo.process.streams import outlive_readers
from megatron_dppo.observe.console import Console
outlive_readers()
sys.stdin.readline()
console = Console(3)
for step in range(3):
    console.step(step + 1, {"rollout/raw_reward": 0.5, "perf/step_time": 1.0})
    print("a reward function's words", flush=True)
with open(sys.argv[1], "w") as file:  # must not have become the standard output
    print("words", flush=True)
    if "child" in sys.argv:
        os.write(1, b"a child's")
    file.write("went on")
sys.exit(5)
"""


@pytest.mark.parametrize("words", ["child >&-", ">/dev/full", "child"])
def test_a_run_outlives_its_output(words: str, tmp_path: Path) -> None:
    """An output is closed, full, or a pipe without a reader."""
    command = ["bash", "-c", f'exec "$0" -c "$1" "$2" {words}', sys.executable, SAYS, tmp_path / "file"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        _, said = process.communicate("go on\n", timeout=60)
    assert process.returncode == 5, said
    assert (tmp_path / "file").read_text() == "went on"
    assert "Traceback" not in said
    if words == "child":
        assert said == "note  standard output cannot be written to (Broken pipe): the run goes on without it\n"


SHOWS = """
from rich.console import Console
from rich.table import Table
from megatron_dppo.process.streams import outlive_readers, speak_plainly
if "rank" in __import__("sys").argv:
    outlive_readers()
speak_plainly()
table = Table("step")
table.add_row("1 – ⏎ █ né")
Console().print(table)
"""


@pytest.mark.parametrize(
    ("program", "locale", "row"),
    [
        ("command", {"LANG": "C"}, "| 1 - / # n\xc3\xa9 |"),
        ("rank", {"LC_ALL": "POSIX"}, "| 1 - / # n\xc3\xa9 |"),
        ("rank", {"LANG": "C.UTF-8"}, "│ 1 – ⏎ █ né │"),
        ("command", {"PYTHONIOENCODING": "latin-1", "LANG": "C.UTF-8"}, "| 1 - / # n\xe9 |"),
    ],
    ids=str,
)
def test_a_terminal_of_ascii_is_sent_ascii(program: str, locale: dict[str, str], row: str) -> None:
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | locale
    shown = subprocess.run([sys.executable, "-c", SHOWS, program], env=environ, capture_output=True, check=True).stdout
    expected = row.encode("latin-1") if row.startswith("|") else row.encode()
    assert expected in shown.splitlines(), shown
    letters = shown.decode("utf-8", errors="replace").replace("é", "").replace("\ufffd", "")
    assert letters.isascii() == row.startswith("|")


BAR = """
from megatron_dppo.process.streams import progress_bar
with progress_bar("problems", 4, done=1) as advance, progress_bar("others", 1, shown=False) as silent:
    print(advance is None, silent is None)
    if advance:
        advance(3, "50.0% right")
"""


@pytest.mark.parametrize("open_pair", [os.openpty, os.pipe])
def test_a_bar_is_drawn_at_a_terminal_alone(open_pair: object) -> None:
    ours, theirs = open_pair()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", BAR]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.write(theirs, b".")
    shown = os.read(ours, 2**16).decode()
    if open_pair is os.pipe:
        assert (done.stdout, shown) == ("True True\n", ".")
    else:
        assert done.stdout == "False True\n", "nothing is printed above the bar"
        assert all(words in shown for words in ("problems", "1/4", "4/4", "50.0% right")), shown


@pytest.fixture
def always_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.process.streams.SAY_EVERY_S", 0.0)


@pytest.mark.usefixtures("always_say")
@pytest.mark.parametrize(
    ("unit", "total", "steps", "lines", "last"),
    [
        ("count", 2000, (500, 1500), ["500 of 2,000, well", "2,000 of 2,000, well"], "2,000 in 0"),
        ("bytes", 4e9, (1e9,), ["1.00 of 4.00 GB, well"], "4.00 GB in 0"),
        ("share", 1.0, (0.25,), ["25%, well"], "done in 0"),
    ],
)
def test_lines_report_progress_in_their_unit(
    unit: Unit,
    total: float,
    steps: tuple[float, ...],
    lines: list[str],
    last: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("work", total, unit=unit) as advance, progress("others'", 1, shown=False) as silent:
        for step in steps:
            advance(step, "well")
        silent(1)
    *said, end = capsys.readouterr().err.splitlines()
    assert said == [f"work: {line}, 0 s left" for line in lines]
    assert end.startswith(f"work: {last}")

"""A run outlives the readers of its log, escapes letters that a terminal lacks, and reports its
progress."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.process.streams import report_progress

SAYS = """
import os, sys, time
from megatron_dppo.process.streams import ignore_broken_streams
from megatron_dppo.observe.console import Console
ignore_broken_streams()
sys.stdin.readline()
console = Console(3)
for step in range(3):
    console.print_step(step + 1, {"rollout/raw_reward": 0.5, "perf/step_time": 1.0})
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
    command = [
        "bash",
        "-c",
        f'exec "$0" -c "$1" "$2" {words}',
        sys.executable,
        SAYS,
        tmp_path / "file",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        _, said = process.communicate("go on\n", timeout=60)
    assert process.returncode == 5, said
    assert (tmp_path / "file").read_text() == "went on"
    assert "Traceback" not in said
    if words == "child":
        assert (
            said
            == "note  standard output cannot be written to (Broken pipe): the run continues without "
            "it\n"
        )


SHOWS = """
from megatron_dppo.process.streams import escape_unencodable, ignore_broken_streams
if "rank" in __import__("sys").argv:
    ignore_broken_streams()
escape_unencodable()
print("né –")
"""


@pytest.mark.parametrize("program", ["command", "rank"])
def test_letters_that_a_terminal_lacks_are_escaped(program: str) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(
        [sys.executable, "-c", SHOWS, program], env=environ, capture_output=True, check=True
    ).stdout
    assert shown == b"n\xe9 \\u2013\n"


BAR = """
from megatron_dppo.process.streams import make_progress_bar
with make_progress_bar("problems", 4, initial=1) as advance:
    if advance:
        advance(3, "50.0% right")
"""


@pytest.mark.parametrize("open_pair", [os.openpty, os.pipe])
def test_a_bar_is_drawn_at_a_terminal_alone(open_pair: object) -> None:
    ours, theirs = open_pair()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", BAR], env=environ, stderr=theirs, check=True)
    os.write(theirs, b".")
    shown = os.read(ours, 2**16).decode()
    if open_pair is os.pipe:
        assert shown == "."
    else:
        assert "1/4" in shown and "4/4" in shown and "50.0% right" in shown


def test_lines_report_progress_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_dppo.process.streams.SAY_EVERY_S", 0.0)
    with (
        report_progress("work", 2000) as advance,
        report_progress("others'", 1, enabled=False) as silent,
    ):
        advance(500, "well")
        silent(1)
    said, end = capsys.readouterr().err.splitlines()
    assert said.startswith("work: 500 of 2,000, well, ")
    assert end.startswith("work: 2,000 in ")

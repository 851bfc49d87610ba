"""A run whose log nobody reads any more goes on; on a terminal of ASCII it says the same in ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
CLOSED, FULL = 'exec "$0" -c "$1" "$2" child >&-', 'exec "$0" -c "$1" "$2" >/dev/full'


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS, tmp_path / "file", "child"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        _, said = process.communicate("go on\n", timeout=60)
    assert process.returncode == 5, said
    assert (tmp_path / "file").read_text() == "went on"
    assert said == "note  standard output cannot be written to (Broken pipe): the run goes on without it\n"


@pytest.mark.parametrize("how", [CLOSED, FULL])
def test_a_run_outlives_an_output_that_takes_nothing(how: str, tmp_path: Path) -> None:
    command = ["bash", "-c", how, sys.executable, SAYS, tmp_path / "file"]
    ended = subprocess.run(command, input="go on\n", capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 5, ended.stderr
    assert (tmp_path / "file").read_text() == "went on"
    assert "Traceback" not in ended.stderr


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
    ("as_a", "locale", "row"),
    [
        ("command", {"LANG": "C"}, "| 1 - / # n\xc3\xa9 |"),
        ("rank", {"LANG": "C"}, "| 1 - / # n\xc3\xa9 |"),
        ("rank", {"LC_ALL": "POSIX"}, "| 1 - / # n\xc3\xa9 |"),
        ("rank", {"LANG": "C.UTF-8"}, "│ 1 – ⏎ █ né │"),
        ("command", {}, "│ 1 – ⏎ █ né │"),
        ("command", {"PYTHONIOENCODING": "latin-1", "LANG": "C.UTF-8"}, "| 1 - / # n\xe9 |"),
    ],
    ids=str,
)
def test_a_terminal_of_ascii_is_shown_no_other_signs(as_a: str, locale: dict[str, str], row: str) -> None:
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | locale
    command = [sys.executable, "-c", SHOWS, as_a]
    shown = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True).stdout
    expected = row.encode("latin-1") if row.startswith("|") else row.encode()
    assert expected in shown.splitlines(), shown
    letters = shown.decode("utf-8", errors="replace").replace("é", "").replace("\ufffd", "")
    assert letters.isascii() == row.startswith("|")

"""A bar is for whoever waits at a terminal, and for nobody else."""

from __future__ import annotations

import os
import subprocess
import sys

SHOWS = """
from megatron_dppo.observe.progress import progress_bar
with progress_bar("problems", 4, done=1) as advance, progress_bar("others", 1, shown=False) as silent:
    print(advance is None, silent is None)
    if advance:
        advance(3, "50.0% right")
"""


def said(errors: int) -> str:
    command, environ = [sys.executable, "-c", SHOWS], {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
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

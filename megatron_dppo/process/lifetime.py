"""Processes that do not outlive their parent: the kernel or the parent ends them. Needs the standard library only.

Only Linux has this (``prctl``). Elsewhere a process only sees whether its parent has ended already. The kernel takes
the *thread* that started a process for its parent, so start processes on a thread that lives as long as they may.
Children do not inherit the setting: each process makes it for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Looked up here, since a process that was just forked from one with threads is not to load anything.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends; end at once if that has happened already.

    Args:
        parent: process id, as the parent knew it before it started this process.
        number: of the signal; another one than SIGKILL is for those that have to end others first.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all orphans among this process's descendants, also of those in another session."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill and reap children until there are none. After ``adopt_orphans`` these are all descendants."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Ids of this process's children. All processes are looked at, because not every kernel lists children."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name, in brackets, may hold brackets and spaces; behind it stand the state and the parent.
            if int(place.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(place.parent.name))
    return found

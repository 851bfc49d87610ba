"""Processes that do not outlive their parent: the kernel ends them, however the parent ended. Standard library only.

Linux alone knows such a wish; elsewhere a process finds out only whether its parent is there already. The kernel takes
the *thread* that started a process for its parent: start processes on a thread that lives as long as they may. The wish
is not inherited: each process states its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
    """Become the parent of what this process's descendants leave behind, whatever session they have moved to."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

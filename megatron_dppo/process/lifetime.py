"""Processes that do not outlive their parent: the kernel ends them, or the parent itself. Standard library only.

Linux alone knows such a wish; elsewhere a process finds out only whether its parent is there already. The kernel takes
the *thread* that started a process for its parent: start processes on a thread that lives as long as they may. The wish
is not inherited: each process states its own.

Run as a file, ``python -IS lifetime.py TRAINER COMMAND…``, it is the supervisor of one server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Looked up here, since a process that was just forked from one with threads is not to load anything.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

LOOK_S = 0.2
"""Seconds between looks whether the trainer is still there."""
GRACE_S = 3.0
"""How long a server may take to end by itself."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


def end_children() -> None:
    """Kill and reap children until there are none; after ``adopt_orphans`` that is every process this one led to."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Of this process, by looking through all: not every kernel lists them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name, in brackets, may hold brackets and spaces; behind it stand the state and the parent.
            if int(place.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(place.parent.name))
    return found


def supervise(trainer: int, command: list[str]) -> int:
    """Run a server's command until it ends, the trainer does, or this process is told to end.

    A server is several processes, and whoever dies first must leave none of the others: not the trainer, even by
    SIGKILL, nor the server's main process, whose children need not notice. So this process stands between the two. It
    adopts what its descendants leave behind, whatever session they have moved to, and ends only when it has no child
    left. If it is killed itself, the kernel kills the server.

    Returns:
        The command's exit code, negative for the signal that ended it.
    """
    adopt_orphans()
    awaited = {signal.SIGCHLD, *ENDING}
    # Slurm's word that time is short comes to every process of a step, and is the trainer's to answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGUSR1})

    ours = os.getpid()

    def before_the_command() -> None:
        die_with(ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

    server = subprocess.Popen(command, preexec_fn=before_the_command)
    try:
        while server.poll() is None and os.getppid() == trainer:
            heard = signal.sigtimedwait(awaited, LOOK_S)
            if heard is not None and heard.si_signo in ENDING:
                break
        if os.getppid() == trainer and server.poll() is None:
            _ask_to_end(server, awaited)
    finally:
        server.kill()
        code = server.wait()  # before ``end_children`` can reap it and lose its exit code
        end_children()
    return code


def _ask_to_end(server: subprocess.Popen[bytes], awaited: set[signal.Signals]) -> None:
    server.terminate()
    until = time.monotonic() + GRACE_S
    while server.poll() is None and (left := until - time.monotonic()) > 0:
        signal.sigtimedwait(awaited, min(left, LOOK_S))


if __name__ == "__main__":
    code = supervise(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)

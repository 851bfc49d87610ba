"""End processes with the parent or on request. Needs the standard library only.

The kernel or the parent ends each process at the parent's end:

- Only Linux has ``prctl``. Elsewhere a process only checks whether the parent has ended already.
- The kernel's parent is the *thread* that starts a process: the thread must outlive the process.
- Children do not inherit the setting: each process calls :func:`set_parent_death_signal`.

SIGUSR1, to any rank or the launcher, makes a run save at the end of the step and exit. Slurm sends
SIGUSR1 before a job's time limit. SIGTERM ends a process at once: Slurm sends SIGTERM to cancelled
jobs and jobs with a failed rank, which must not wait for a step.

``python -IS lifetime.py TRAINER COMMAND…`` supervises a server.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Look up here, because a fresh fork of a process with threads must not load libraries.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

LOOK_S = 0.2
"""Seconds between checks of the trainer."""
GRACE_S = 3.0
"""Seconds for a server to end after SIGTERM."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def set_parent_death_signal(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process at the parent's end; exit if the parent has ended.

    Args:
        parent: process id, read by the parent before this process starts.
        number: signal; not SIGKILL for a process that must end other processes first.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent may have ended before prctl.
    if os.getppid() != parent:
        os._exit(1)


def exit_now(code: int, text: str) -> NoReturn:
    """Print a reason and end this process at once, from any thread.

    A rank replaces this function: only the first failing rank prints a reason.
    """
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def end_fork(process: int) -> None:
    """End this process if a user's code forked it from ``process``."""
    # A fork would continue the work of the original process.
    if os.getpid() != process:
        os._exit(0)


EXIT_S = 30.0
"""Seconds for the interpreter's exit after a successful command."""


def exit_process(code: int) -> NoReturn:
    """Exit, even if a user's thread or coroutine never ends.

    - After a failure: at once.
    - After a success: the interpreter waits for threads and exit handlers, at most ``EXIT_S``.
    """
    if code:
        for stream in (sys.stdout, sys.stderr):
            # A stream may be closed, perhaps by the reader.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    text = (
        f"note: a user's thread or exit handler still ran {EXIT_S:g} s after the command had "
        "ended, and was ended"
    )
    limit = threading.Timer(EXIT_S, exit_now, (code, text))
    limit.daemon = True
    limit.start()
    sys.exit(code)


def adopt_orphans() -> None:
    """Adopt all orphans among this process's descendants, in any session."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill and reap all children; after ``adopt_orphans``, all descendants."""
    while True:
        for child in _list_children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _list_children() -> list[int]:
    found = []
    # Not every kernel lists children: check all processes.
    for place in Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile.
        with suppress(OSError):
            # The name, in brackets, may contain brackets and spaces. State and parent follow.
            if int(place.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(place.parent.name))
    return found


def supervise(trainer: int, command: list[str]) -> int:
    """Run a server's command until the command or the trainer ends, or a signal arrives.

    A server is several processes, and children may not notice the end of the main process. No
    process of the server remains after the end, even by SIGKILL, of

    - the trainer;
    - the server's main process: this process adopts orphans of any session, and exits only without
      children;
    - this process: the kernel kills the server.

    Returns:
        The command's exit code, negative for the signal that ended the command.
    """
    adopt_orphans()
    awaited = {signal.SIGCHLD, *ENDING}
    # Slurm sends SIGUSR1 to every process of a step, and only the trainer must react.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGUSR1})

    pid = os.getpid()

    def prepare_child() -> None:
        set_parent_death_signal(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

    server = subprocess.Popen(command, preexec_fn=prepare_child)
    try:
        while server.poll() is None and os.getppid() == trainer:
            received = signal.sigtimedwait(awaited, LOOK_S)
            if received is not None and received.si_signo in ENDING:
                break
        if os.getppid() == trainer and server.poll() is None:
            _stop_server(server, awaited)
    finally:
        server.kill()
        # Wait first, because ``end_children`` would reap the server and lose the exit code.
        code = server.wait()
        end_children()
    return code


def _stop_server(server: subprocess.Popen[bytes], signals: set[signal.Signals]) -> None:
    server.terminate()
    until = time.monotonic() + GRACE_S
    while server.poll() is None and (left := until - time.monotonic()) > 0:
        signal.sigtimedwait(signals, min(left, LOOK_S))


MARKER = "MEGATRON_DPPO_FAILURE"
"""Environment variable, set by the launcher or the job script: path of the failure marker, where
the first failing rank writes its reason. Each rank that reached the job's end creates a file beside
the marker."""

SAVED = 75
"""Exit code of a run that saved and should be started again (EX_TEMPFAIL of sysexits.h)."""

SIGNAL = signal.SIGUSR1

_stop_requested = False
_handlers: dict[signal.Signals, object] = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
"""Signal handlers before the import of a user's code, and SIGUSR1's from
:func:`install_stop_handler`."""


class StoppedError(Exception):
    """End of a run on request, before the last step, after a save."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"stopped on request after step {step}, and saved: run the same command again to resume"
        )


def install_stop_handler() -> None:
    """Record requests to stop from now on. Call on the main thread."""
    # Threads that started earlier do not block the signal, and call the handler.
    _handle(_record_stop)
    _handlers[SIGNAL] = signal.getsignal(SIGNAL)
    # Slurm sends the signal to every process of a step: children inherit the block, and do not die.
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def list_replaced_handlers() -> list[str]:
    """Return a note per signal whose handler a user's code replaced. On the main thread, restore
    SIGUSR1's handler."""
    taken = [
        number for number, handler in _handlers.items() if signal.getsignal(number) is not handler
    ]
    if SIGNAL in taken and threading.current_thread() is threading.main_thread():
        install_stop_handler()
    effects = {
        SIGNAL: "a request to save and stop may have been lost",
        signal.SIGTERM: "it may not end this run",
    }
    return [f"code of the user handles {number.name}: {effects[number]}" for number in taken]


def is_stop_requested() -> bool:
    # A blocked signal stays pending.
    return _stop_requested or SIGNAL in signal.sigpending()


@contextmanager
def forward_stop(children: Callable[[], list[int]]) -> Iterator[None]:
    """Forward requests to stop to other processes within the block.

    Only the main thread receives signals; another thread forwards no request.

    Args:
        children: returns the current process ids; a process may have ended.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children():
            with suppress(ProcessLookupError):
                os.kill(child, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle(forward)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def _record_stop(number: int, frame: FrameType | None) -> None:
    global _stop_requested
    _stop_requested = True


def _handle(handler: Callable[[int, FrameType | None], object]) -> signal._HANDLER:
    before = signal.signal(SIGNAL, handler)
    # Restart system calls: calls within torch must not fail after a signal.
    signal.siginterrupt(SIGNAL, False)
    return before


if __name__ == "__main__":
    code = supervise(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)

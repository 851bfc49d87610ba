"""How processes end: with their parent, or on request. Needs the standard library only.

A process does not outlive its parent: the kernel or the parent ends it. Only Linux has this
(``prctl``). Elsewhere a process only sees whether its parent has ended already. The kernel takes
the *thread* that started a process for its parent, so start processes on a thread that lives as
long as they may. Children do not inherit the setting: each process makes it for itself.

After SIGUSR1, to any rank or to the launcher, a run saves at the end of the step and ends. Slurm
sends such a signal before a job's time is up. SIGTERM is left as it is, an end at once: what Slurm
ends by it, a cancelled job or one of which a rank has failed, is not to wait for a step.

Run as a file, ``python -IS lifetime.py TRAINER COMMAND…``, it is the supervisor of one server.
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

# Looked up here, since a process that was just forked from one with threads is not to load
# anything.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

LOOK_S = 0.2
"""Seconds between looks whether the trainer is still there."""
GRACE_S = 3.0
"""How long a server may take to end by itself."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process."""


def set_parent_death_signal(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends; end at once if that has
    happened already.

    Args:
        parent: process id, as the parent knew it before it started this process.
        number: of the signal; another one than SIGKILL is for those that have to end others first.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def exit_now(code: int, text: str) -> NoReturn:
    """Print a reason and end this process at once, from any thread. A rank replaces this function,
    because only the first failing rank prints a reason."""
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def end_fork(process: int) -> None:
    """End this process if a user's code forked it from ``process``, because it would continue the
    work of that one."""
    if os.getpid() != process:
        os._exit(0)


EXIT_S = 30.0
"""Seconds for the interpreter's exit after a successful command."""


def exit_process(code: int) -> NoReturn:
    """Exit, though a thread or a coroutine of a user's code may never end.

    - After a failure the process ends at once.
    - After a success the interpreter waits for threads and calls exit handlers, for at most
      ``EXIT_S``.
    """
    if code:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, perhaps by its reader
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
    """Become the parent of all orphans among this process's descendants, also of those in another
    session."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill and reap children until there are none. After ``adopt_orphans`` these are all
    descendants."""
    while True:
        for child in _list_children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _list_children() -> list[int]:
    """Ids of this process's children. All processes are looked at, because not every kernel lists
    children."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # The name, in brackets, may hold brackets and spaces; behind it stand the state and the
            # parent.
            if int(place.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(place.parent.name))
    return found


def supervise(trainer: int, command: list[str]) -> int:
    """Run a server's command until it ends, the trainer does, or this process is told to end.

    A server is several processes, and whoever dies first must leave none of the others: not the
    trainer, even by SIGKILL, nor the server's main process, whose children need not notice. So this
    process stands between the two. It adopts what its descendants leave behind, whatever session
    they have moved to, and ends only when it has no child left. If it is killed itself, the kernel
    kills the server.

    Returns:
        The command's exit code, negative for the signal that ended it.
    """
    adopt_orphans()
    awaited = {signal.SIGCHLD, *ENDING}
    # Slurm's word that time is short comes to every process of a step, and is the trainer's to
    # answer.
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
        code = server.wait()  # before ``end_children`` can reap it and lose its exit code
        end_children()
    return code


def _stop_server(server: subprocess.Popen[bytes], signals: set[signal.Signals]) -> None:
    server.terminate()
    until = time.monotonic() + GRACE_S
    while server.poll() is None and (left := until - time.monotonic()) > 0:
        signal.sigtimedwait(signals, min(left, LOOK_S))


MARKER = "MEGATRON_DPPO_FAILURE"
"""Environment variable with the path of the failure marker, set by the launcher or the job script.
The first failing rank writes its reason there. Each rank whose job reached its end creates a file
beside the marker."""

SAVED = 75
"""Exit code of a run that has saved its state and is to be started again (EX_TEMPFAIL of
sysexits.h)."""

SIGNAL = signal.SIGUSR1

_stop_requested = False
_handlers: dict[signal.Signals, object] = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
"""Signal handlers before a user's code is imported, and the handler of SIGUSR1 from
:func:`install_stop_handler`."""


class StoppedError(Exception):
    """A run has saved and ends before its last step, because it was asked to."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"stopped on request after step {step}, and saved: run the same command again to resume"
        )


def install_stop_handler() -> None:
    """From now on, remember that a stop was asked for. Called on the main thread.

    Slurm sends the signal to every process of a step. It is held back rather than handled, which
    children inherit: what a rank has started, or is starting, does not die of it. The handler is
    for threads that were there before.
    """
    _handle(_record_stop)
    _handlers[SIGNAL] = signal.getsignal(SIGNAL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def list_replaced_handlers() -> list[str]:
    """Return a note for each signal whose handler a user's code has replaced. On the main thread,
    restore the handler of SIGUSR1."""
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
    """Whether this process was asked to stop."""
    return _stop_requested or SIGNAL in signal.sigpending()


@contextmanager
def forward_stop(children: Callable[[], list[int]]) -> Iterator[None]:
    """Within it, a request to stop goes on to other processes; each may have ended by then. Outside
    of the main thread, which alone gets signals, nothing goes on.

    Args:
        children: gives their ids at that moment.
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
    signal.siginterrupt(SIGNAL, False)  # no system call of torch's is to fail because of it
    return before


if __name__ == "__main__":
    code = supervise(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)

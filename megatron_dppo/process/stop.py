"""Stopping a run on request: after SIGUSR1, to any rank or to the launcher, it saves at the end of the step and ends.

Slurm sends such a signal before a job's time is up. SIGTERM is left as it is, an end at once: what Slurm ends by it, a
cancelled job or one of which a rank has failed, is not to wait for a step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SAVED = 75
"""Exit code of a run that has saved its state and is to be started again (EX_TEMPFAIL of sysexits.h)."""

SIGNAL = signal.SIGUSR1

_asked = False


class StoppedError(Exception):
    """A run has saved and ends before its last step, because it was asked to."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped on request after step {step}, and saved: run the same command again to go on")


def listen() -> None:
    """From now on, remember that a stop was asked for. Called on the main thread.

    Slurm sends the signal to every process of a step. It is held back rather than handled, which children inherit: what
    a rank has started, or is starting, does not die of it. The handler is for threads that were there before.
    """
    _handle(lambda number, frame: _remember())
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def asked() -> bool:
    """Whether this process was asked to stop."""
    return _asked or SIGNAL in signal.sigpending()


@contextmanager
def handed_on(children: Callable[[], list[int]]) -> Iterator[None]:
    """Within it, a request to stop goes on to other processes; each may have ended by then. Outside of the main thread,
    which alone gets signals, nothing goes on.

    Args:
        children: gives their ids at that moment.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        for child in children():
            with suppress(ProcessLookupError):
                os.kill(child, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle(hand_on)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def _remember() -> None:
    global _asked
    _asked = True


def _handle(handler: Callable[[int, FrameType | None], object]) -> signal._HANDLER:
    before = signal.signal(SIGNAL, handler)
    signal.siginterrupt(SIGNAL, False)  # no system call of torch's is to fail because of it
    return before

"""A command in a child process, so that an end that Python does not see is no success.

A user's reward or conversation, or a C library below it, may call ``_exit(0)`` or replace the process by ``execv``. A
shell, or a chain of jobs, would then go on as if the run had reached its end. Needs the standard library only, and is
called before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from megatron_dppo.process.lifetime import SIGNAL, adopt_orphans, die_with, end_children
from megatron_dppo.process.streams import tell

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, SIGNAL)
END = b"ended"
CUT_SHORT = (
    "error: the command's process ended with exit code 0 before the command had ended. Code that it calls (a reward, a "
    "conversation, a library in C) called _exit, or replaced the process by another program"
)


def run_guarded(command: Callable[[], int]) -> NoReturn:
    """Run a command in a child process, and end as it does; with exit code 1 if it ended below Python with 0.

    Signals that end this process, or ask a run to stop, go on to the child, whose session is its own: Ctrl-C comes
    once. The child does not outlive this process, and nothing that the child's descendants leave behind outlives it.
    """
    heard = {number for number in HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN} | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    parent, (reader, writer) = os.getpid(), os.pipe()
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        try:
            sys.exit(command())
        finally:  # also where a parser exits after --help
            os.write(writer, END)
    os.close(writer)
    while (found := os.waitpid(-1, os.WNOHANG))[0] != child:
        if found[0]:  # an orphan
            continue
        number = signal.sigwait(heard)
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(child, number)
    code = os.waitstatus_to_exitcode(found[1])
    end_children()
    if code == 0 and os.read(reader, len(END)) != END:
        tell(CUT_SHORT)
        code = 1
    if code < 0:  # this process is to have ended by the same signal
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(parent, -code)
    os._exit(code)

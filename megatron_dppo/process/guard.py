"""Run a command in a child process, and report an exit with 0 before the command's end.

A user's conversation or a C library may call ``_exit(0)`` or ``execv``. Without a report, a shell
or a chain of jobs would continue as after a complete run. This module imports only the standard
library, because the fork must precede large imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from megatron_dppo.process.lifetime import (
    ENDING,
    SIGNAL,
    adopt_orphans,
    end_children,
    exit_process,
    set_parent_death_signal,
)
from megatron_dppo.process.streams import print_message


def run_guarded(command: Callable[[], int]) -> NoReturn:
    """Run a command in a child process, and end with its exit code or signal.

    - Exit code 1 if the child ended with 0 before the command.
    - Signals that end a process, or request a save and a stop, are forwarded to the child.
    - All descendants of the child end with this process.
    """
    awaited = {
        number for number in (*ENDING, SIGNAL) if signal.getsignal(number) is not signal.SIG_IGN
    } | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = os.getpid()
    reader, writer = os.pipe()
    adopt_orphans()
    child = os.fork()
    if child == 0:
        # In a separate session, the child receives Ctrl-C only once, from this process.
        os.setsid()
        set_parent_death_signal(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        try:
            code = command()
        # A command may raise SystemExit, as argparse does after --help.
        finally:
            os.write(writer, b"ended")
        exit_process(code)
    os.close(writer)
    while (found := os.waitpid(-1, os.WNOHANG))[0] != child:
        if found[0]:  # an orphan
            continue
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
    code = os.waitstatus_to_exitcode(found[1])
    end_children()
    if code == 0 and not os.read(reader, 1):
        print_message(format_early_exit("the command's process", "the command"))
        code = 1
    if code < 0:  # end by the child's signal
        if -code in awaited:
            signal.signal(-code, signal.SIG_DFL)
        else:
            print_message(format_signal_exit("the command's process", -code))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(parent, -code)
    os._exit(code)


def format_early_exit(process: str, work: str) -> str:
    """Return the error about a process that ended with exit code 0 before its work."""
    return (
        f"error: {process} ended with exit code 0 before {work} had ended. A conversation, a rule "
        "or a C library called _exit, or replaced the process by another program"
    )


def format_signal_exit(process: str, number: int) -> str:
    hint = " (was the machine out of memory?)" if number == signal.SIGKILL else ""
    # Most real-time signals have no name.
    named = number in set(signal.Signals)
    name = signal.Signals(number).name if named else f"signal {number}"
    return f"error: {process} was ended by {name}{hint}"

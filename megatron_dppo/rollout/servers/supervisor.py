"""Runs one server and sees to its end: ``python supervisor.py TRAINER COMMAND…``. Needs the standard library only.

A server is several processes, and whoever dies first must leave none of the others: not the trainer, even by SIGKILL,
nor the server's main process, whose children need not notice. So this process stands between the two. It adopts what
its descendants leave behind, whatever session they have moved to, and ends only when it has no child left; and if it
is killed itself, the kernel kills the server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if not __package__:  # run as a file by an isolated interpreter, which knows of no package
    sys.path.append(str(Path(__file__).parents[3]))

from megatron_dppo.process.lifetime import adopt_orphans, die_with, end_children

LOOK_S = 0.2
"""Seconds between looks whether the trainer is still there."""
GRACE_S = 3.0
"""How long a server may take to end by itself."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(trainer: int, command: list[str]) -> int:
    """Run the command until it ends, the trainer does, or this process is told to end.

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

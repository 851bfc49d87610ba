"""``megatron-dppo`` commands that take torch and Megatron, in forks of a process that has imported them.

What is imported takes ten seconds of each such command. A command of one rank runs in its own process to the end, and
so in the fork. Commands that start ranks, or that must do without torch, are to be typed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.ranks import forks

LIMIT_S = 240.0


def _run(words: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> None:
    import torch

    from megatron_dppo.cli import main

    os.setsid()
    os.chdir(folder)
    os.environ.update(environ)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(out, number)
    sys.argv = ["megatron-dppo", *words]
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def start(words: Sequence[str], log: Path, folder: Path | None = None, **environ: str) -> BaseProcess:
    """Begin a command, as a session of its own.

    Args:
        words: after ``megatron-dppo``.
        log: gets all that it says, behind what is there.
        folder: that it is typed in.
    """
    process: BaseProcess = forks().Process(target=_run, args=([*words], folder or Path.cwd(), environ, log))
    process.start()
    return process


def exit_code(words: Sequence[str], log: Path, folder: Path | None = None, **environ: str) -> int:
    """Run a command to its end."""
    process = start(words, log, folder, **environ)
    process.join(LIMIT_S)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return process.exitcode or 0

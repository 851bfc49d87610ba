"""Run commands in forks of a process that has imported torch and Megatron, which takes five
seconds.

Where ``tests.ranks`` starts fresh processes, all of these are fresh, too.

- A command of one rank runs in the fork.
- A command of several ranks starts each rank as a process with its own environment, session and
  files. These processes are forks, too.
- A script is a function, whose ranks are forks.
- Commands that must run without torch are to be run by ``subprocess``.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from tests.ranks import forks

LIMIT_S = 300.0
POPEN = subprocess.Popen
PACKAGES = ("megatron_dppo", "tests")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and its surroundings.

    Args:
        words: ``megatron-dppo …``, ``python FILE …`` or ``python -c CODE …``.
        log: file that all output is appended to.
        folder: working directory.
        environ: further environment variables.
        package: folder with another ``megatron_dppo`` and other ``tests``.
        before: called first in the process.
    """

    words: Sequence[str]
    log: Path
    folder: Path | None = None
    environ: Mapping[str, str] | None = None
    package: Path | None = None
    before: Callable[[], object] | None = None

    def start(self) -> BaseProcess:
        """Start the command in a session of its own."""
        process: BaseProcess = forks().Process(target=self._run, args=(self.folder or Path.cwd(),))
        process.start()
        return process

    def exit_code(self) -> int:
        """Run the command to its end."""
        process = self.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        return process.exitcode or 0

    def _run(self, folder: Path) -> None:
        import_module("torch").set_num_threads(1)
        os.setsid()
        os.chdir(folder)
        os.environ.update(self.environ or {})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(out, number)
        if self.package:
            for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
                del sys.modules[name]
            sys.path.insert(0, str(self.package))
        gc.freeze()
        if forks().get_start_method() != "spawn":
            processes = import_module("megatron_dppo.launch.processes")
            processes.subprocess = SimpleNamespace(
                Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired
            )
        if self.before:
            self.before()
        sys.exit(_exit_code(partial(_python, self.words)))


def run_script(function: Callable[..., object], *arguments: object, log: Path) -> None:
    """Call a module's function in a process of its own, as a script that starts ranks.

    Args:
        function: may fail by an assertion.
        arguments: arguments of the function.
        log: file for the output of the script and its ranks.

    Raises:
        AssertionError: the script failed; the message is its output.
    """
    script = Command(["python", "-c", ""], log, before=partial(function, *arguments))
    assert script.exit_code() == 0, log.read_text()


def run_command(
    command: Sequence[str], *, log: Path, **_: object
) -> subprocess.CompletedProcess[bytes]:
    """Stand in for ``subprocess.run`` of ``python -m megatron_dppo …``, for code that runs commands
    itself."""
    assert list(command[1:3]) == ["-m", "megatron_dppo"], command
    code = Command(["megatron-dppo", *command[3:]], log).exit_code()
    return subprocess.CompletedProcess(command, code)


def _python(words: Sequence[str]) -> int:
    program, *rest = words
    if program == "megatron-dppo":
        sys.argv = [program, *rest]
        return _command(rest)
    assert program == "python", program
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return 0
    main = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # spawned processes look there
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        exec(rest[1], vars(main))
    else:
        sys.argv, main.__file__ = rest, rest[0]
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        exec(compile(Path(rest[0]).read_text(), rest[0], "exec"), vars(main))
    return 0


class Forked(POPEN[bytes]):
    """``python -m megatron_dppo …`` or ``python -m megatron_dppo.launch.rank JOB CONFIG`` without
    Python's start.

    The function that ``Popen`` calls before the command in the new process never returns.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **more: Any,
    ) -> None:
        _, option, module, *words = command
        main = {"megatron_dppo": _command, "megatron_dppo.launch.rank": _rank}[module]
        assert option == "-m", command
        sys.stdout.flush()
        sys.stderr.flush()
        begin = partial(_begin, partial(main, words), env or dict(os.environ), [0, 1, 2, *pass_fds])
        super().__init__(command, env=env, pass_fds=pass_fds, preexec_fn=begin, **more)


def _begin(main: Callable[[], int], environ: Mapping[str, str], held: Sequence[int]) -> NoReturn:
    for low, high in zip(sorted(held), [*sorted(held)[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)  # the launcher's Popen waits for the end of one of these
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does at its start
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    _resource_tracker._fd = (
        None  # the other process's file is closed, and another file has its number soon
    )
    subprocess.Popen = POPEN
    os._exit(_exit_code(main))


def _command(words: Sequence[str]) -> int:
    return int(import_module("megatron_dppo.cli").main(words))


def _rank(words: Sequence[str]) -> int:
    return int(import_module("megatron_dppo.launch.rank").main(*words))


def _exit_code(main: Callable[[], int]) -> int:
    """Return Python's exit code for a returned value or an exception."""
    try:
        code = main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code

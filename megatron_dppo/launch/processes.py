"""Start and end the ranks of one machine together, and report the first rank that failed.

Only the first failing rank prints a reason: later failures are consequences, or have the same
reason.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatron_dppo.parallel.meeting import LISTENER, LOOPBACK, open_listener
from megatron_dppo.process import lifetime
from megatron_dppo.process.guard import format_early_exit, format_signal_exit
from megatron_dppo.process.lifetime import MARKER
from megatron_dppo.process.streams import print_message

LOOK_S = 0.05
"""Seconds between polls of the ranks."""
GRACE_S = 30.0
"""Seconds for ranks to end after SIGTERM, before SIGKILL; also after a save, before SIGTERM."""


class _SignalError(Exception):
    """Signal that ends this process."""

    def __init__(self, number: int) -> None:
        self.number = number


def run_ranks(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    failure: FirstFailure,
    on_poll: Callable[[], None] = lambda: None,
) -> int:
    """Run a command as several ranks, and return when all ranks have ended.

    Args:
        environ: environment of all ranks, without the variables of the process group.
        failure: marker that the first failing rank creates, unless a signal kills the rank.
        on_poll: function that is called between polls of the ranks; an exception ends the ranks.

    Returns:
        0; or the exit code of the rank that failed first; or 128 + the signal that ended a rank or
        this process.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with (
        _handle_ending_signals() as ignore_them,
        lifetime.forward_stop(lambda: [process.pid for process in processes]),
        open_listener(LOOPBACK) as place,
    ):
        try:
            for rank in range(ranks):
                held = {LISTENER: str(place.fileno())} if rank == 0 else {}
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(place.getsockname()[1]),
                }
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**environ, **variables, **held},
                        pass_fds=[place.fileno()] if rank == 0 else [],
                        # Ctrl-C is for this process alone, because this process ends the ranks.
                        start_new_session=True,
                    )
                )
            return _watch(processes, failure, on_poll)
        except _SignalError as ended:
            return 128 + ended.number
        finally:
            # Ignore further signals, because the ranks are ending already.
            ignore_them()
            _end(processes)


def _watch(
    processes: Sequence[subprocess.Popen[bytes]],
    failure: FirstFailure,
    on_poll: Callable[[], None],
) -> int:
    before = time.time()
    while True:
        now = time.time()
        codes = {rank: process.poll() for rank, process in enumerate(processes)}
        if failed := {rank: code for rank, code in codes.items() if code}:
            code = _first_cause(failed, failure, previous_poll=before)
            if code == lifetime.SAVED:
                # The remaining ranks have saved as well, and are closing files.
                _wait(processes, GRACE_S)
            return code
        if None not in codes.values():
            return _check_ends(failure, ranks=len(processes))
        before = now
        on_poll()
        time.sleep(LOOK_S)


def _check_ends(failure: FirstFailure, *, ranks: int) -> int:
    """Return 0 if the job of every rank reached its end, else 1."""
    for rank in range(ranks):
        if not failure.has_ended(rank):
            failure.report(format_early_exit(f"rank {rank}", "its job"))
            return 1
    return 0


def _first_cause(failed: Mapping[int, int], failure: FirstFailure, *, previous_poll: float) -> int:
    """Print which rank failed first, unless that rank has printed a reason. Return the run's exit
    code.

    Args:
        failed: exit codes by rank; a negative code is the signal that ended the rank.
        previous_poll: time of the previous poll, when all ranks were alive, in seconds since the
            epoch.
    """
    killed = {rank: -code for rank, code in failed.items() if code < 0}
    reported = failure.get_code()
    # A killed rank cannot print a reason, and its peers fail as a consequence. The peers delay
    # their messages, so that the launcher usually polls the killed rank first. If one poll finds a
    # killed rank and a marker, the killed rank is the cause, unless the marker is older than the
    # previous poll. SIGABRT is a consequence, because libraries abort a process that has lost its
    # peers.
    only_aborted = set(killed.values()) <= {signal.SIGABRT}
    if reported is not None and (only_aborted or failure.is_older_than(previous_poll)):
        return reported
    killed = {rank: number for rank, number in killed.items() if number != signal.SIGABRT} or killed
    for rank, number in killed.items():
        failure.report(format_signal_exit(f"rank {rank}", number))
    if killed:
        return 128 + next(iter(killed.values()))
    rank, code = next(iter(failed.items()))
    failure.report(f"error: rank {rank} ended with exit code {code} without a message")
    return code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    _wait(processes, GRACE_S)
    for process in processes:
        process.kill()
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(deadline - time.monotonic())


@contextmanager
def _handle_ending_signals() -> Iterator[Callable[[], None]]:
    """Raise ``_SignalError`` for the first ending signal, until the yielded function is called."""

    def ignore_them() -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)

    def raise_once(number: int, frame: FrameType | None) -> None:
        ignore_them()
        raise _SignalError(number)

    # Python sets handlers on the main thread only; the kernel of a notebook may run another thread.
    endings = lifetime.ENDING if threading.current_thread() is threading.main_thread() else ()
    # SIGHUP stays ignored under nohup.
    handled = [number for number in endings if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, raise_once) for number in handled}
    try:
        yield ignore_them
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CLOCK_S = 1.0
"""Largest lag of a file's time behind the clock of this process, in seconds."""


class FirstFailure:
    """Marker file of the first failing rank: the run's exit code on the first line, then the
    reason.

    A file suffices even if the failing rank can do little else, and if its peers hang in a
    collective.

    Args:
        marker: path of the file, the same for every rank, on a shared disk if possible.
    """

    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self._start = time.time()
        self._messages: list[str] = []

    def report(self, text: str) -> None:
        """Print the reason for a failed rank that could not print."""
        self._messages.append(text)
        print_message(text)

    def get_message(self) -> str:
        """Return the printed reason why the run failed; empty if unknown."""
        return "\n".join(self._messages) or self._read().partition("\n")[2]

    def claim(self, code: int, text: str) -> int:
        """Print why this rank fails, if no rank has failed before. Return the run's exit code."""
        try:
            # A marker older than this rank is left from an earlier run, and would suppress the
            # message.
            if self._marker.exists() and self._marker.stat().st_mtime < self._start - CLOCK_S:
                self._marker.unlink(missing_ok=True)
            descriptor = os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return self.get_code() or code
        except OSError:
            # Print the reason without a marker: a repeated reason is better than a lost reason.
            pass
        else:
            os.write(descriptor, f"{code}\n{text}".encode(errors="backslashreplace"))
            os.close(descriptor)
        print_message(text)
        return code

    def get_code(self) -> int | None:
        """Return the exit code of the first failure; None without a failure."""
        # Retry, because the content is written a moment after the file is created.
        for _ in range(20):
            if not self._marker.exists():
                return None
            if "\n" in (text := self._read()):
                return int(text.partition("\n")[0])
            time.sleep(0.01)
        return 1

    def _read(self) -> str:
        with suppress(FileNotFoundError):
            return self._marker.read_text(encoding="utf-8", errors="replace")
        return ""

    def is_older_than(self, timestamp: float) -> bool:
        """Return whether a rank had failed before ``timestamp``, in seconds since the epoch."""
        try:
            return self._marker.stat().st_mtime < timestamp
        except FileNotFoundError:
            return False

    def wait(self, seconds: float) -> None:
        """Wait until a rank has failed, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self._marker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def record_end(self, rank: int) -> None:
        """Record that the job of a rank reached its end, because an exit code of 0 is no proof."""
        self._end_mark(rank).touch()

    def has_ended(self, rank: int) -> bool:
        return self._end_mark(rank).exists()

    def _end_mark(self, rank: int) -> Path:
        return self._marker.with_name(f"{self._marker.name}.end-{rank}")

    def remove_marker(self) -> None:
        """Remove the marker of a run of one rank, which no further process reads."""
        self._marker.unlink(missing_ok=True)


def resolve_marker(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the marker's path: set by the launcher, else in the directory of the run.

    Before the directory exists, and under torchrun without Slurm, only the ranks of one node share
    a marker.
    """
    if MARKER in environ:
        return Path(environ[MARKER])
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [str(run_dir.absolute()), *(environ.get(name, "") for name in names)]
    if "SLURM_STEP_ID" not in environ:
        # Add the process id of torchrun's agent, because run ids and ports repeat between runs.
        parts.append(str(os.getppid()))
    run = "/".join(parts)
    folder = run_dir if run_dir.is_dir() else _make_user_folder()
    return folder / f".megatron-dppo-failure-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


def _make_user_folder() -> Path:
    """Return a temporary folder that only this user can write to."""
    folder = Path(tempfile.gettempdir(), f"megatron-dppo-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    # Another user made the folder. Without a common marker every rank prints a reason.
    return Path(tempfile.mkdtemp())

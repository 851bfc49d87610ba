"""The ranks of one machine as processes: they start together and end together, and the first that failed is named.

Only that one says why: the others fail because of it, or for the same reason.
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

from megatron_dppo.parallel.meeting import LISTENER, LOOPBACK, listen
from megatron_dppo.process import lifetime
from megatron_dppo.process.guard import cut_short, ended_by
from megatron_dppo.process.lifetime import MARKER
from megatron_dppo.process.streams import tell

LOOK_S = 0.05
"""Seconds between looks at the ranks."""
GRACE_S = 30.0
"""How long ranks may take to end, those that were told to and those that have saved, before they are killed."""


class _SignalError(Exception):
    """This process was sent a signal that ends it."""

    def __init__(self, number: int) -> None:
        self.number = number


def run_ranks(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    failure: FirstFailure,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run a command as so many ranks, to the end of all of them.

    Args:
        command: of every rank.
        environ: what all of them are told; their places come on top.
        ranks: how many.
        failure: the marker that a rank which fails and can still speak makes.
        meanwhile: called between looks at the ranks; what it raises ends them.

    Returns:
        0; or the exit code of the rank that failed first; or 128 + the signal that ended a rank or this process.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with (
        _ending_signals() as ignore_them,
        lifetime.stop_handed_on(lambda: [process.pid for process in processes]),
        listen(LOOPBACK) as place,
    ):
        try:
            for rank in range(ranks):
                held = {LISTENER: str(place.fileno())} if rank == 0 else {}
                ours = {
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
                        env={**environ, **ours, **held},
                        pass_fds=[place.fileno()] if rank == 0 else [],
                        start_new_session=True,  # Ctrl-C is this process's to answer
                    )
                )
            return _watch(processes, failure, meanwhile)
        except _SignalError as ended:
            return 128 + ended.number
        finally:
            ignore_them()  # ranks are being ended already
            _end(processes)


def _watch(processes: Sequence[subprocess.Popen[bytes]], failure: FirstFailure, meanwhile: Callable[[], None]) -> int:
    before = time.time()
    while True:
        now = time.time()
        codes = {rank: process.poll() for rank, process in enumerate(processes)}
        if failed := {rank: code for rank, code in codes.items() if code}:
            code = _first_cause(failed, failure, all_lived=before)
            if code == lifetime.SAVED:
                _wait(processes, GRACE_S)  # the others have saved as well, and are closing what they hold
            return code
        if None not in codes.values():
            return _check_ends(failure, ranks=len(processes))
        before = now
        meanwhile()
        time.sleep(LOOK_S)


def _check_ends(failure: FirstFailure, *, ranks: int) -> int:
    """Return 0 if the job of every rank reached its end, else 1."""
    for rank in range(ranks):
        if not failure.has_ended(rank):
            failure.say(cut_short(f"rank {rank}", "its job"))
            return 1
    return 0


def _first_cause(failed: Mapping[int, int], failure: FirstFailure, *, all_lived: float) -> int:
    """Say which rank failed first, unless it has spoken itself. Returns the exit code of the run.

    A rank that is killed cannot speak, and others fail because of it. They hold their words back for so long that its
    end is seen before; where both are seen at once, the one that was killed is the cause, if all lived when looked at
    last (``all_lived``, in seconds since the epoch) before anyone spoke. Only SIGABRT is always the consequence then:
    libraries end a process by it which has lost its peers.

    Args:
        failed: exit codes by rank; negative: the signal that ended it.
    """
    killed = {rank: -code for rank, code in failed.items() if code < 0}
    spoken = failure.code()
    if spoken is not None and (set(killed.values()) <= {signal.SIGABRT} or failure.made_before(all_lived)):
        return spoken
    killed = {rank: number for rank, number in killed.items() if number != signal.SIGABRT} or killed
    for rank, number in killed.items():
        failure.say(ended_by(f"rank {rank}", number))
    if killed:
        return 128 + next(iter(killed.values()))
    rank, code = next(iter(failed.items()))
    failure.say(f"error: rank {rank} ended with exit code {code}, and did not say why")
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
def _ending_signals() -> Iterator[Callable[[], None]]:
    """Within it the first signal that ends this process raises, until what it gives is called. What was ignored, SIGHUP
    under nohup, stays so. Signals are the main thread's: another one, as of a notebook's kernel, is left without."""

    def ignore_them() -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)

    def raise_once(number: int, frame: FrameType | None) -> None:
        ignore_them()
        raise _SignalError(number)

    ours = lifetime.ENDING if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in ours if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, raise_once) for number in heard}
    try:
        yield ignore_them
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CLOCK_S = 1.0
"""By how much a file's time may lag behind this process's clock."""


class FirstFailure:
    """A marker file that the first failing rank makes. Its first line is the exit code of the run; the reason follows.

    A file works even if a rank can do no more than that, and if others hang in a collective.

    Args:
        marker: the same for every rank of the run, on a disk that they share if they can.
    """

    def __init__(self, marker: Path) -> None:
        self._marker, self._start = marker, time.time()
        self._said: list[str] = []

    def say(self, text: str) -> None:
        """Print why a rank failed that could not say it itself."""
        self._said.append(text)
        tell(text)

    def said(self) -> str:
        """Why the run failed, as it was printed; empty where nobody knows."""
        return "\n".join(self._said) or self._read().partition("\n")[2]

    def claim(self, code: int, text: str) -> int:
        """Print why this rank fails, if no other rank has failed before. Return the exit code of the run."""
        try:
            # A marker that is older than this rank would silence it: an earlier run left it.
            if self._marker.exists() and self._marker.stat().st_mtime < self._start - CLOCK_S:
                self._marker.unlink(missing_ok=True)
            descriptor = os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return self.code() or code
        except OSError:
            pass  # better said twice than not at all
        else:
            os.write(descriptor, f"{code}\n{text}".encode(errors="backslashreplace"))
            os.close(descriptor)
        tell(text)
        return code

    def code(self) -> int | None:
        """The exit code of the first failure; None if no rank has failed."""
        for _ in range(20):  # the file exists a moment before its content does
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

    def made_before(self, moment: float) -> bool:
        """Whether a rank had failed by then, in seconds since the epoch."""
        try:
            return self._marker.stat().st_mtime < moment
        except FileNotFoundError:
            return False

    def wait(self, seconds: float) -> None:
        """Wait until a rank has failed, at most for so long."""
        deadline = time.monotonic() + seconds
        while not self._marker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def note_end(self, rank: int) -> None:
        """Note that the job of a rank reached its end, which an exit code of 0 does not prove."""
        self._end_mark(rank).touch()

    def has_ended(self, rank: int) -> bool:
        """Return whether the job of a rank reached its end."""
        return self._end_mark(rank).exists()

    def _end_mark(self, rank: int) -> Path:
        return self._marker.with_name(f"{self._marker.name}.end-{rank}")

    def forget(self) -> None:
        """Remove the marker, which a rank alone leaves to nobody."""
        self._marker.unlink(missing_ok=True)


def marker_for(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """The path of the marker: as the launcher said, else in the run's own directory.

    Before that directory exists, and under torchrun without Slurm, only the ranks of one node share a marker.
    """
    if MARKER in environ:
        return Path(environ[MARKER])
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [str(run_dir.absolute()), *(environ.get(name, "") for name in names)]
    if "SLURM_STEP_ID" not in environ:
        parts.append(str(os.getppid()))  # torchrun's agent: its run ids and ports are the same run after run
    run = "/".join(parts)
    folder = run_dir if run_dir.is_dir() else _own_folder()
    return folder / f".megatron-dppo-failure-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


def _own_folder() -> Path:
    """Return a temporary folder that nobody but this user writes to, the same for all of the user's processes."""
    folder = Path(tempfile.gettempdir(), f"megatron-dppo-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp())  # somebody else made it: every rank speaks

"""Replace files and directories atomically, and lock a folder for a single process.

A file is written under another name, and renamed at the end. Two marks lock a folder:

- A POSIX lock on ``.lock``. The kernel releases the lock at any end of the process. Unlike flock's,
  children do not inherit the lock: a checkpoint writer that outlives the rank holds no lock.
- ``lock.json`` names the holder, which touches the file every few seconds. This heartbeat counts if
  a file system has no locks, or other machines do not see locks.

A holder on another machine is regarded as dead after ``LEASE_S`` without heartbeat, by the file
system's clock, common to all machines. A process that finds a younger heartbeat waits for the next.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.errors import UserError


def raise_file_limit() -> None:
    """Raise the limit of open files, for children as well, to the system's maximum."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # The system may have a lower limit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_file_limit_error(error: BaseException) -> UserError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    problem = f"allows a process too few open files ({error})"
    return UserError(
        "ulimit -n", limit, problem, "Raise it, for example to 4096, in the shell or for the user"
    )


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Yield a path beside ``file`` to write to, which replaces ``file`` at the end of the block.
    ``file`` is unchanged if the block raises or the process is killed."""
    partial = file.with_name(file.name + ".partial")
    yield partial
    partial.replace(file)


def replace_text(file: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically; only the owner can read a private file."""
    with replace_file(file) as partial:
        # A killed process may have left the file with another mode.
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600 if private else 0o666)
        partial.write_text(text, encoding="utf-8")


def file_digest(file: Path) -> str:
    """Return the BLAKE2 digest of a file, cached until the file changes."""
    return _compute_digest(file, *get_file_state(file))


def get_file_state(file: Path) -> tuple[int, int, int]:
    """Return a state that changes when a file is replaced or written to."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def _compute_digest(file: Path, *state: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


@contextmanager
def replace_directory(out: Path) -> Iterator[Path]:
    """Yield a new directory, and replace ``out`` by it at the end of the block.

    - ``out`` is unchanged, or absent, if the block raises or the process is killed.
    - The next call removes a killed process's files.
    - The disk's cache is not flushed.

    Raises:
        OSError: the disk is full, or another process is writing to ``out``.
    """
    # Replace the target of a link, not the link.
    out = out.resolve()
    draft, former = (out.parent / f".{out.name}.{state}" for state in ("writing", "former"))
    with _prepare_draft(draft, out):
        # An earlier process was killed between the two renames below.
        if former.exists() and not out.exists():
            former.rename(out)
        for stale in (former, *draft.iterdir()):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        try:
            yield draft
            # A rename cannot replace a non-empty directory.
            if out.exists():
                out.rename(former)
            draft.rename(out)
        except BaseException:
            if former.exists() and not out.exists():
                former.rename(out)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def _prepare_draft(draft: Path, out: Path) -> Iterator[None]:
    """Make the draft, or take over a killed process's. Lock out other processes."""
    draft.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        locked = _acquire_flock(descriptor)
        # Another process may have renamed the draft to ``out`` between open and lock.
        is_mine = locked and draft.exists() and os.path.samestat(os.fstat(descriptor), draft.stat())
        if not is_mine:
            raise FileExistsError(errno.EEXIST, "another process is writing there", str(out))
        yield
    finally:
        # Closing releases the lock; the kernel does the same for a killed process.
        os.close(descriptor)


def _acquire_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # A file system may have no locks, such as Lustre with some mount options.
    except OSError:
        return True
    return True


def check_folder(folder: Path, setting: str) -> None:
    """Check that a folder exists or can be made, without writing.

    Raises:
        UserError: a file or a dangling link is in the way, or the name is invalid. The error names
            ``setting``.
    """
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(
            setting, folder, f"cannot be made ({error.strerror})", "Name another directory"
        ) from error
    place = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place)
    )
    if not place.is_dir():
        problem = (
            f"{place} is a file" if place.exists() else f"{place} is a link that leads nowhere"
        )
        raise UserError(setting, folder, problem, "Name a directory, or remove what is in the way")


def make_folder(folder: Path, setting: str) -> None:
    """Make a folder and its parents.

    Raises:
        UserError: an error of :func:`check_folder`, or the folder cannot be written.
    """
    check_folder(folder, setting)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
        raise UserError(
            setting, folder, problem, "Name a directory that you may write to"
        ) from error


class DirectoryKind(NamedTuple):
    """Kind of directory made, and perhaps replaced, by a command."""

    name: str
    """Name for messages, such as ``model directory``."""
    mark: str
    """File that every directory of the kind has."""
    files: tuple[str, ...]
    """Patterns of all allowed files."""


def check_replaceable(
    out: Path,
    size: int,
    setting: str,
    kind: DirectoryKind,
    *,
    sources: Sequence[Path] = (),
    overwrite: bool = True,
) -> None:
    """Check that a directory can be written at ``out``, or replace a directory of the same kind.

    Args:
        size: bytes to write.
        setting: setting that names ``out``.
        sources: directories that are read meanwhile.
        overwrite: whether a directory may be replaced.

    Raises:
        UserError: ``out`` is not replaceable, or the disk has too little space. The error names
            ``setting``.
    """
    check_folder(out, setting)
    place = out.resolve()
    # The replacement would delete a source at or below ``out``.
    for source in sources:
        if place in (source.resolve(), *source.resolve().parents):
            raise UserError(setting, out, f"{source} is read from there", "Name another directory")
    if out.is_mount():
        raise UserError(
            setting, out, "is a whole file system", "name a directory in it, which is made"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if out.is_dir() and not overwrite:
            raise UserError(
                setting, out, "is there already", "Name another directory, or give --overwrite"
            )
        if not (out / kind.mark).is_file():
            raise UserError(
                setting,
                out,
                f"is there already and is no {kind.name}",
                "name another, or remove it",
            )
        foreign = [path.name for path in out.iterdir() if not _matches_any(path.name, kind.files)]
        if foreign:
            problem = (
                f"has {min(foreign)} in it, which is no part of a {kind.name} and would be lost"
            )
            raise UserError(setting, out, problem, "name another directory, or move that elsewhere")
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        problem = (
            f"{size / 2**30:.2f} GiB are to be written, and {parent} has {free / 2**30:.2f} "
            "GiB free"
        )
        raise UserError(
            setting, out, problem, "free some space, or name a directory on another disk"
        )


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def write_directory(out: Path, setting: str) -> Iterator[Path]:
    """Replace a directory by :func:`replace_directory`.

    Raises:
        UserError: a file or the disk fails. The error names ``setting``.
    """
    try:
        with replace_directory(out) as draft:
            yield draft
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = (
            "Free some space, or name a directory on another disk"
            if full
            else "Correct the cause, and try again"
        )
        raise UserError(
            setting, out, f"was not written ({error}); nothing is left of this attempt", remedy
        ) from error


def write_json(file: Path, content: object) -> None:
    """Write JSON in the form of Hugging Face's files."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


LOCK = ".lock"
HOLDER = "lock.json"
BEAT_S = 5.0
"""Seconds between heartbeats."""
LEASE_S = 60.0
"""Seconds without heartbeat before a holder is regarded as dead, as file systems may delay some."""
REMEDY = "Wait for its end, or end it; or name another folder"
_held: set[Path] = set()
"""Folders held by this process: POSIX locks do not exclude the holder's own process."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Process that holds a folder, with data to check whether the process is alive."""

    host: str
    pid: int
    started: str
    """Start time; another process may get the same id later."""
    kernel: str
    """Boot id of the machine, whose processes see each other's locks."""
    ids: str
    """PID namespace of ``pid``, such as a container's."""
    since: str = field(compare=False)
    """Time of the lock, for messages."""

    @classmethod
    def get_current(cls) -> Holder:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(
            socket.gethostname(),
            os.getpid(),
            _get_start_time(os.getpid()),
            *_get_machine(),
            since=now,
        )

    def is_alive(self) -> bool | None:
        """Return whether the holder is alive; None for another machine or container."""
        if (self.kernel, self.ids) != _get_machine():
            return None
        return _get_start_time(self.pid) == self.started


def check_not_held(folder: Path) -> None:
    """Check, before a start and without writing, that ``run.dir`` is not held on this machine.

    Raises:
        UserError: another process of this machine holds the folder; the error names the process.
    """
    holder = _read_holder(folder)
    if holder is not None and holder != Holder.get_current() and holder.is_alive():
        raise _make_held_error(folder, "run.dir", holder)


class FolderLock:
    """Exclusive lock of a folder until :meth:`close`.

    Args:
        folder: made if absent.
        setting: setting that names the folder.
        log: log function for the wait for another machine's heartbeat.

    Raises:
        UserError: another process holds the folder, or the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        setting: str,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        make_folder(folder, setting)
        self._folder = folder.resolve()
        self._setting = setting
        self._log = log
        if self._folder in _held:
            raise _make_held_error(folder, setting, Holder.get_current())
        self._file = (folder / LOCK).open("ab")
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        _held.add(self._folder)
        self._lost: Holder | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """
        Raises:
            UserError: another process took the folder, because this process sent no heartbeat for
                too long.
        """
        if self._lost is not None:
            raise _make_held_error(self._folder, self._setting, self._lost)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        if _read_holder(self._folder) == self._me:
            (self._folder / HOLDER).unlink(missing_ok=True)
        self._file.close()
        _held.discard(self._folder)

    def _take(self) -> None:
        self._me = Holder.get_current()
        deadline = time.monotonic() + 2.0
        while not self._is_free():
            if time.monotonic() > deadline:
                problem = "is held by another process, which has not written its name"
                raise UserError(self._setting, self._folder, problem, REMEDY)
            # Another process has just locked the folder, and is about to write ``lock.json``.
            time.sleep(0.1)
        self._write()

    def _is_free(self) -> bool:
        locked = self._try_lock()
        holder = _read_holder(self._folder)
        lives = False if holder is None or holder == self._me else holder.is_alive()
        # A lock is reliable among processes of the same machine.
        if holder is None or lives is False or (locked and holder.kernel == self._me.kernel):
            return locked is not False
        if lives or not self._wait_for_expiry(holder):
            raise _make_held_error(self._folder, self._setting, holder)
        # Ignore the lock: a file server may keep a dead machine's lock for long.
        return True

    def _try_lock(self) -> bool | None:
        """Return whether the lock is acquired; None if the file system has no locks."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            return False if error.errno in (errno.EAGAIN, errno.EACCES) else None

    def _wait_for_expiry(self, holder: Holder) -> bool:
        """Wait; return False at the next heartbeat, True after ``LEASE_S`` without one."""
        seen = _read_beat_time(self._folder)
        logged = False
        while seen is not None and (left := LEASE_S - (_get_disk_time(self._folder) - seen)) > 0:
            if not logged:
                self._log(
                    f"{_format_holder(holder)} holds {self._folder}, or held it when it died: "
                    "waiting for a sign of life"
                )
                logged = True
            time.sleep(min(left + 0.1, 1.0))
            now = _read_beat_time(self._folder)
            if now is not None and now != seen:
                return False
            seen = now
        return True

    def _run_heartbeat(self) -> None:
        while not self._end.wait(BEAT_S):
            # The disk may work again at the next beat.
            with suppress(OSError):
                holder = _read_holder(self._folder)
                if holder is None:
                    self._write()
                elif holder != self._me:
                    self._lost = holder
                    return
                else:
                    # Unlike a write, a touch succeeds on a full disk.
                    os.utime(self._folder / HOLDER)

    def _write(self) -> None:
        partial = self._folder / f"{HOLDER}.{self._me.host}.{self._me.pid}"
        partial.write_text(json.dumps(asdict(self._me)) + "\n", encoding="utf-8")
        partial.replace(self._folder / HOLDER)


def _make_held_error(folder: Path, setting: str, holder: Holder) -> UserError:
    return UserError(
        setting, folder, f"is held by {_format_holder(holder)}, since {holder.since}", REMEDY
    )


def _format_holder(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}"


def _read_holder(folder: Path) -> Holder | None:
    """Return the holder; None for an absent, foreign or incomplete file."""
    try:
        return Holder(**json.loads((folder / HOLDER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _read_beat_time(folder: Path) -> float | None:
    try:
        # NFS refreshes cached times only at an open.
        with (folder / HOLDER).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _get_disk_time(folder: Path) -> float:
    """Return the time of the file system's clock, the source of files' times."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.utime(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime


def _get_machine() -> tuple[str, str]:
    if sys.platform != "linux":
        return socket.gethostname(), ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _get_start_time(pid: int) -> str:
    """Return the start time of a process; empty if the process has ended."""
    # Linux counts from boot, unaffected by changes of the clock.
    if sys.platform != "linux":
        import psutil

        with suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return ""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except OSError:
        return ""

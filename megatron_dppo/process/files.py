"""Files and directories that are there whole or not at all, and folders that one process at a time
writes to.

A file is written under another name, and renamed at the end. Two things say that a folder is taken.
A POSIX lock on ``.lock``, which the kernel takes back when its process ends, however that ends;
children do not inherit it, as they do flock's: a writer of checkpoints that outlives its rank holds
nothing. And ``lock.json``, which names the holder, and which the holder touches every few seconds:
it counts where a file system has no locks, or other machines do not see them. A holder on another
machine that has given no sign of life for ``LEASE_S`` is taken to be dead, by the clock of the file
system, which all machines share. Whoever finds a younger sign waits for another one.
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
    """Let this process, and those that it starts, have as many files open as the system allows
    it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a limit of the system's own below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_file_limit_error(error: BaseException) -> UserError:
    """The error for a process that may not open another file."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    problem = f"allows a process too few open files ({error})"
    return UserError(
        "ulimit -n", limit, problem, "Raise it, for example to 4096, in the shell or for the user"
    )


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """A path beside ``file`` to write to, which takes the place of ``file`` at the end of the
    block.

    Until then ``file`` is as it was, and stays so if the block raises or the process is killed.
    """
    partial = file.with_name(file.name + ".partial")
    yield partial
    partial.replace(file)


def replace_text(file: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, or leave the old one as it is. A private one can be read by its owner
    alone."""
    with replace_file(file) as partial:
        partial.unlink(missing_ok=True)  # a killed process's, of another mode
        partial.touch(mode=0o600 if private else 0o666)
        partial.write_text(text, encoding="utf-8")


def file_digest(file: Path) -> str:
    """BLAKE2 of a file's bytes. A process reads a file once, unless it changes."""
    return _compute_digest(file, *get_file_state(file))


def get_file_state(file: Path) -> tuple[int, int, int]:
    """State that changes when a file is replaced or written to."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def _compute_digest(file: Path, *state: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


@contextmanager
def replace_directory(out: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``out`` at the end of the block.

    Until then ``out`` is as it was, absent or the old one, and stays so if the block raises or the
    process is killed. The next call removes what a killed process left behind. The disk's cache is
    not flushed.

    Raises:
        OSError: if the disk is full, or another process is writing there.
    """
    out = out.resolve()  # behind a link
    draft, former = (out.parent / f".{out.name}.{state}" for state in ("writing", "former"))
    with _prepare_draft(draft, out):
        if former.exists() and not out.exists():  # killed between the two renames below
            former.rename(out)
        for stale in (former, *draft.iterdir()):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        try:
            yield draft
            if (
                out.exists()
            ):  # a directory with something in it cannot be renamed over: it steps aside first
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
    """Make the draft, or take over the one that a killed process left, and keep other processes
    from doing the same."""
    draft.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        locked = _acquire_flock(descriptor)
        # Else it was put in place between our opening and locking it.
        is_mine = locked and draft.exists() and os.path.samestat(os.fstat(descriptor), draft.stat())
        if not is_mine:
            raise FileExistsError(errno.EEXIST, "another process is writing there", str(out))
        yield
    finally:
        os.close(descriptor)  # and so the lock, which a killed process loses too


def _acquire_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as Lustre may be mounted
        return True
    return True


def check_folder(folder: Path, setting: str) -> None:
    """Check that a folder is there or can be made, without writing.

    Raises:
        UserError: naming ``setting``, if a file or a link to nowhere is in the way, or no folder
            can have that name.
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
    """Make a folder and those above it.

    Raises:
        UserError: as :func:`check_folder`, and if the folder cannot be written.
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
    """Directories that a command makes, and may replace."""

    name: str
    """For messages: ``model directory``."""
    mark: str
    """A file that each has, by which an old one is known."""
    files: tuple[str, ...]
    """Patterns of all that may stand in one."""


def check_replaceable(
    out: Path,
    size: int,
    setting: str,
    kind: DirectoryKind,
    *,
    sources: Sequence[Path] = (),
    overwrite: bool = True,
) -> None:
    """Check that a directory can be written at ``out``, and that what it replaces is a directory of
    the same kind.

    Args:
        size: bytes to be written.
        sources: directories that are read meanwhile.
        overwrite: whether one may be replaced.

    Raises:
        UserError: naming ``setting``, if ``out`` is something else than such a directory, or its
            disk has too little room.
    """
    check_folder(out, setting)
    place = out.resolve()
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
        foreign = [
            p.name
            for p in out.iterdir()
            if not any(fnmatch(p.name, allowed) for allowed in kind.files)
        ]
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


@contextmanager
def write_directory(out: Path, setting: str) -> Iterator[Path]:
    """As :func:`replace_directory`; a failing file or disk becomes a UserError that names
    ``setting``."""
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
    """Write JSON as Hugging Face's files have it."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


LOCK = ".lock"
HOLDER = "lock.json"
BEAT_S = 5.0
LEASE_S = 60.0
"""A holder may be held up for so long, by its file system perhaps, and is not taken to be dead."""
REMEDY = "Wait for its end, or end it; or name another folder"
_held: set[Path] = set()
"""By this process, which its own locks do not keep out."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a folder, so that another process can tell whether it lives."""

    host: str
    pid: int
    started: str
    """When the process began: another one may get its id."""
    kernel: str
    """The start of its machine, whose processes see each other's locks."""
    ids: str
    """The container, within which ``pid`` says who it is."""
    since: str = field(compare=False)
    """For people."""

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
        """None where that cannot be seen from here."""
        if (self.kernel, self.ids) != _get_machine():
            return None
        return _get_start_time(self.pid) == self.started


def check_not_held(folder: Path) -> None:
    """For before anything is started: whether a process of this very machine holds ``run.dir``.
    Writes nothing.

    Raises:
        UserError: naming it.
    """
    holder = _read_holder(folder)
    if holder is not None and holder != Holder.get_current() and holder.is_alive():
        raise _make_held_error(folder, "run.dir", holder)


class FolderLock:
    """A folder that is this process's until :meth:`close`.

    Args:
        folder: made where there is none.
        setting: that names it, for errors.
        log: told in words while it waits for a sign of life from another machine.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """

    def __init__(
        self, folder: Path, setting: str, log: Callable[[str], None] = lambda text: None
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
            UserError: another process has taken it, since this one gave no sign of life for too
                long.
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
            time.sleep(0.1)  # somebody has just taken it, and says so in a moment
        self._write()

    def _is_free(self) -> bool:
        locked = self._try_lock()
        holder = _read_holder(self._folder)
        lives = False if holder is None or holder == self._me else holder.is_alive()
        if holder is None or lives is False or (locked and holder.kernel == self._me.kernel):
            return locked is not False
        if lives or not self._wait_for_expiry(holder):
            raise _make_held_error(self._folder, self._setting, holder)
        return True  # a file server may keep a dead machine's lock for long

    def _try_lock(self) -> bool | None:
        """None where the file system has no locks."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            return False if error.errno in (errno.EAGAIN, errno.EACCES) else None

    def _wait_for_expiry(self, holder: Holder) -> bool:
        """Wait until it gives a sign of life, or has not given one for the time of the lease."""
        seen = _read_beat_time(self._folder)
        logged = False
        while seen is not None and (left := LEASE_S - (_get_disk_time(self._folder) - seen)) > 0:
            if not logged:
                self._log(
                    f"{_format_holder(holder)} holds {self._folder}, or held it when it died: "
                    "waiting for a "
                    "sign of life"
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
            with suppress(OSError):  # the next beat may find the disk well again
                holder = _read_holder(self._folder)
                if holder is None:
                    self._write()
                elif holder != self._me:
                    self._lost = holder
                    return
                else:
                    os.utime(self._folder / HOLDER)  # a full disk takes that, too

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
    """Also of a file that something else has written, or torn, there is none."""
    try:
        return Holder(**json.loads((folder / HOLDER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _read_beat_time(folder: Path) -> float | None:
    try:
        with (folder / HOLDER).open("rb") as file:  # where a file is opened, NFS asks its server
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _get_disk_time(folder: Path) -> float:
    """By the clock that the folder's files get their times from."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.utime(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime


def _get_machine() -> tuple[str, str]:
    if sys.platform != "linux":
        return socket.gethostname(), ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(
        Path("/proc/self/ns/pid").readlink()
    )


def _get_start_time(pid: int) -> str:
    """Empty of a process that has ended. Linux counts from its own start, which no change of the
    clock moves."""
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

"""One writer in a folder at a time: a second one is refused, and told who the first is. A dead one keeps nobody out.

Two things say that a folder is taken. A POSIX lock on ``.lock``, which the kernel takes back when its process ends,
however that ends; children do not inherit it, as they do flock's: a writer of checkpoints that outlives its rank holds
nothing. And ``lock.json``, which names the holder, and which the holder touches every few seconds: it counts where a
file system has no locks, or other machines do not see them. A holder on another machine that has given no sign of life
for ``LEASE_S`` is taken to be dead, by the clock of the file system, which all machines share. Whoever finds a younger
sign waits for another one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from megatron_dppo.errors import UserError

LOCK, HOLDER = ".lock", "lock.json"
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
    def this(cls) -> Holder:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()), *_machine(), since=now)

    def lives(self) -> bool | None:
        """None where that cannot be seen from here."""
        if (self.kernel, self.ids) != _machine():
            return None
        return _started(self.pid) == self.started


def refuse_if_held(folder: Path, setting: str) -> None:
    """For before anything is started: whether a process of this very machine holds the folder. Writes nothing.

    Raises:
        UserError: naming it.
    """
    holder = _read(folder)
    if holder is not None and holder != Holder.this() and holder.lives():
        raise _taken(folder, setting, holder)


class FolderLock:
    """A folder that is this process's until :meth:`close`.

    Args:
        folder: made where there is none.
        setting: that names it, for errors.
        say: told in words while it waits for a sign of life from another machine.

    Raises:
        UserError: another process holds it.
    """

    def __init__(self, folder: Path, setting: str, say: Callable[[str], None] = lambda text: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._setting, self._say = folder.resolve(), setting, say
        if self._folder in _held:
            raise _taken(folder, setting, Holder.this())
        self._file = (folder / LOCK).open("ab")
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        _held.add(self._folder)
        self._lost: Holder | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """
        Raises:
            UserError: another process has taken it, since this one gave no sign of life for too long.
        """
        if self._lost is not None:
            raise _taken(self._folder, self._setting, self._lost)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        if _read(self._folder) == self._me:
            (self._folder / HOLDER).unlink(missing_ok=True)
        self._file.close()
        _held.discard(self._folder)

    def _take(self) -> None:
        self._me = Holder.this()
        deadline = time.monotonic() + 2.0
        while not self._is_free():
            if time.monotonic() > deadline:
                problem = "is held by another process, which has not said who it is"
                raise UserError(self._setting, self._folder, problem, REMEDY)
            time.sleep(0.1)  # somebody has just taken it, and says so in a moment
        self._write()

    def _is_free(self) -> bool:
        locked, holder = self._try_lock(), _read(self._folder)
        lives = False if holder is None or holder == self._me else holder.lives()
        if holder is None or lives is False or (locked and holder.kernel == self._me.kernel):
            return locked is not False
        if lives or not self._has_fallen_silent(holder):
            raise _taken(self._folder, self._setting, holder)
        return True  # a file server may keep a dead machine's lock for long

    def _try_lock(self) -> bool | None:
        """None where the file system has no locks."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            return False if error.errno in (errno.EAGAIN, errno.EACCES) else None

    def _has_fallen_silent(self, holder: Holder) -> bool:
        """Wait until it gives a sign of life, or has not given one for the time of the lease."""
        seen, said = _written(self._folder), False
        while seen is not None and (left := LEASE_S - (_now(self._folder) - seen)) > 0:
            if not said:
                self._say(f"{_who(holder)} holds {self._folder}, or held it when it died: waiting for a sign of life")
                said = True
            time.sleep(min(left + 0.1, 1.0))
            now = _written(self._folder)
            if now is not None and now != seen:
                return False
            seen = now
        return True

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            with suppress(OSError):  # the next beat may find the disk well again
                holder = _read(self._folder)
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


def _taken(folder: Path, setting: str, holder: Holder) -> UserError:
    return UserError(setting, folder, f"is held by {_who(holder)}, since {holder.since}", REMEDY)


def _who(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}"


def _read(folder: Path) -> Holder | None:
    """Also of a file that something else has written, or torn, there is none."""
    try:
        return Holder(**json.loads((folder / HOLDER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _written(folder: Path) -> float | None:
    try:
        with (folder / HOLDER).open("rb") as file:  # where a file is opened, NFS asks its server
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _now(folder: Path) -> float:
    """By the clock that the folder's files get their times from."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.utime(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime


def _machine() -> tuple[str, str]:
    if sys.platform != "linux":
        return socket.gethostname(), ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> str:
    """Empty of a process that has ended. Linux counts from its own start, which no change of the clock moves."""
    try:
        if sys.platform != "linux":
            return str(psutil.Process(pid).create_time())
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, psutil.Error):
        return ""

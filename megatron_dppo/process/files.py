"""Files and directories that are there whole or not at all: written under another name, and renamed at the end."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from megatron_dppo.errors import UserError


def open_more_files() -> None:
    """Let this process, and those that it starts, have as many files open as the system allows it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a limit of the system's own below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def too_few_files(error: BaseException) -> UserError:
    """The error for a process that may not open another file."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    problem = f"allows a process too few open files ({error})"
    return UserError("ulimit -n", limit, problem, "Raise it, for example to 4096, in the shell or for the user")


@contextmanager
def replacing_file(file: Path) -> Iterator[Path]:
    """A path beside ``file`` to write to, which takes the place of ``file`` at the end of the block.

    Until then ``file`` is as it was, and stays so if the block raises or the process is killed.
    """
    partial = file.with_name(file.name + ".partial")
    yield partial
    partial.replace(file)


def replace_text(file: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, or leave the old one as it is. A private one can be read by its owner alone."""
    with replacing_file(file) as partial:
        partial.unlink(missing_ok=True)  # a killed process's, of another mode
        partial.touch(mode=0o600 if private else 0o666)
        partial.write_text(text, encoding="utf-8")


def file_digest(file: Path) -> str:
    """BLAKE2 of a file's bytes. A process reads a file once, unless it changes."""
    return _digest(file, *state_of(file))


def state_of(file: Path) -> tuple[int, int, int]:
    """State that changes when a file is replaced or written to."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def _digest(file: Path, *state: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


@contextmanager
def replacing_directory(out: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``out`` at the end of the block.

    Until then ``out`` is as it was, absent or the old one, and stays so if the block raises or the process is killed.
    The next call removes what a killed process left behind. The disk's cache is not flushed.

    Raises:
        OSError: if the disk is full, or another process is writing there.
    """
    out = out.resolve()  # behind a link
    draft, former = (out.parent / f".{out.name}.{state}" for state in ("writing", "former"))
    with _locked_draft(draft, out):
        if former.exists() and not out.exists():  # killed between the two renames below
            former.rename(out)
        for stale in (former, *draft.iterdir()):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        try:
            yield draft
            if out.exists():  # a directory with something in it cannot be renamed over: it steps aside first
                out.rename(former)
            draft.rename(out)
        except BaseException:
            if former.exists() and not out.exists():
                former.rename(out)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def _locked_draft(draft: Path, out: Path) -> Iterator[None]:
    """Make the draft, or take over the one that a killed process left, and keep other processes from doing the same."""
    draft.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        locked = _lock(descriptor)
        # Else it was put in place between our opening and locking it.
        ours = locked and draft.exists() and os.path.samestat(os.fstat(descriptor), draft.stat())
        if not ours:
            raise FileExistsError(errno.EEXIST, "another process is writing there", str(out))
        yield
    finally:
        os.close(descriptor)  # and so the lock, which a killed process loses too


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as Lustre may be mounted
        return True
    return True


def check_replaceable(
    out: Path, size: int, setting: str, *, mark: str, what: str, files: Sequence[str] | None = None
) -> None:
    """Check that a directory can be written at ``out``, and that what it replaces is a directory of the same kind.

    Args:
        size: bytes to be written.
        mark: a file that such a directory has, by which an old one is known, and may be replaced.
        what: such a directory, for the message: ``model directory``.
        files: patterns of all that may stand in an old one; None: anything may.

    Raises:
        UserError: naming ``setting``, if ``out`` is something else than such a directory, or its disk has too little
            room.
    """
    if out.is_mount():
        raise UserError(setting, out, "is a whole file system", "name a directory in it, which is made")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (out / mark).is_file():
            raise UserError(setting, out, f"is there already and is no {what}", "name another, or remove it")
        foreign = [p.name for p in out.iterdir() if files and not any(fnmatch(p.name, allowed) for allowed in files)]
        if foreign:
            problem = f"has {min(foreign)} in it, which is no part of a {what} and would be lost"
            raise UserError(setting, out, problem, "name another directory, or move that elsewhere")
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        problem = f"{size / 2**30:.2f} GiB are to be written, and {parent} has {free / 2**30:.2f} GiB free"
        raise UserError(setting, out, problem, "free some space, or name a directory on another disk")

"""Directories that are there whole or not at all: written beside their place, and put there by one rename."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from megatron_dppo.errors import UserError


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``out`` at the end of the block.

    Until then ``out`` is as it was, absent or the old one, and stays so if the block raises or the process is killed.
    What a killed process left behind goes with the next call. The disk's cache is not flushed.

    Raises:
        OSError: if the disk is full, or another process has begun to replace ``out`` meanwhile.
    """
    out = out.resolve()  # behind a link
    draft, former = (out.parent / f".{out.name}.{state}" for state in ("writing", "former"))
    if former.exists() and not out.exists():  # killed between the two renames below
        former.rename(out)
    for stale in (draft, former):
        shutil.rmtree(stale, ignore_errors=True)
    draft.mkdir(parents=True)
    ours = os.open(draft, os.O_RDONLY)  # as long as it is open, no other directory is taken for it
    try:
        yield draft
        if not _same(ours, draft):
            raise FileExistsError(errno.EEXIST, "another process writes there too", str(out))
        if out.exists():  # a directory with something in it cannot be renamed over: it steps aside first
            out.rename(former)
        draft.rename(out)
    except BaseException:
        if former.exists() and not out.exists():
            former.rename(out)
        raise
    finally:
        if _same(ours, draft):
            shutil.rmtree(draft, ignore_errors=True)
        os.close(ours)
        if out.exists():
            shutil.rmtree(former, ignore_errors=True)


def check_place(
    out: Path, size: int, setting: str, *, mark: str, what: str, files: Sequence[str] | None = None
) -> None:
    """Refuse to write where it can be known not to work.

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
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        problem = f"{size / 2**30:.2f} GiB are to be written, and {place} has {free / 2**30:.2f} GiB free"
        raise UserError(setting, out, problem, "free some space, or name a directory on another disk")


def _same(descriptor: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())

"""Find checkpoints in a folder, and read and write the checksums of a checkpoint's files.

Settings name the parent folder, whose tracker file names the latest checkpoint. Needs no torch, so
that settings are checked before heavy imports.

``checksums.json`` in the folder of an iteration lists size and CRC-32 of each file, which a reader
compares first. CRC-32 detects damage, but does not authenticate the writer. A thread computes
CRC-32 at 2.5 GB/s, twice as fast as SHA-256.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.errors import UserError
from megatron_dppo.process.streams import print_message

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of the tracker, and name of the folder, for converted weights."""
FORMAT = "metadata.json"
"""Megatron's marker of a checkpoint in the distributed format, written last."""
METADATA = ".metadata"
"""Torch's index of a checkpoint."""
CHECKSUMS = "checksums.json"
HF_FOLDER = "hf"
"""Folder beside the checkpoints with the policy's configuration and tokenizer, for conversion
back."""


def format_iteration_name(step: int) -> str:
    """Return Megatron's folder name of a step."""
    return f"iter_{step:07d}"


def parse_step(checkpoint: Path) -> int | None:
    """Return the step in a folder's name; ``None`` for converted weights."""
    text = checkpoint.name.removeprefix("iter_")
    return int(text) if _is_step(text) else None


def list_steps(folder: Path) -> list[int]:
    """Return the steps with a checkpoint in ``folder``, in order; folders with other forms of names
    are skipped."""
    steps = {parse_step(path) for path in folder.iterdir()} if folder.is_dir() else set()
    return sorted(
        step
        for step in steps
        if step is not None and (folder / format_iteration_name(step)).is_dir()
    )


def find_latest_step(folder: Path) -> int | None:
    """Return the step of a run's last good checkpoint in ``folder``; ``None`` without a checkpoint.

    A run writes the tracker after every checkpoint, and the tracker names the step. Without a
    tracker, the newest intact checkpoint is taken.

    Raises:
        UserError: naming ``run.dir``, if the folder was not written by a run, or if all checkpoints
            are damaged.
    """
    if folder.exists() and not folder.is_dir():
        problem = f"{folder} is no folder"
        raise UserError("run.dir", folder.parent, problem, "Move it away, or name another run.dir")
    tracker = folder / TRACKER
    if not os.path.lexists(tracker):
        # Resume, because a fresh start would overwrite all checkpoints.
        if not (steps := list_steps(folder)):
            return None
        if (step := _find_latest_intact(folder)) is not None:
            return step
        problem = (
            f"{folder} has no {TRACKER}, and no complete checkpoint "
            f"({_find_corruption(folder / format_iteration_name(steps[-1]))})"
        )
        raise UserError(
            "run.dir", folder.parent, problem, "Fetch its files again, or name another run.dir"
        )
    text = _read_tracker(tracker)
    if text == RELEASE:
        problem = f"{tracker} contains {text!r}, and a run cannot resume from converted weights"
        remedy = (
            f"Name another run.dir; start from converted weights with model.checkpoint={folder}"
        )
        raise UserError("run.dir", folder.parent, problem, remedy)
    if not _is_step(text):
        problem = f"{tracker} contains {text[:40]!r}, which is not a step"
        remedy = "Name another run.dir"
        if (step := _find_latest_intact(folder)) is not None:
            remedy = f"Write {step} (a complete checkpoint) into that file, or name another run.dir"
        raise UserError("run.dir", folder.parent, problem, remedy)
    return int(text)


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint to resume a run; ``None`` without a checkpoint.

    Raises:
        UserError: like :func:`find_latest_step`; also if the tracker names a missing checkpoint.
    """
    if (step := find_latest_step(folder)) is None:
        return None
    if (folder / TRACKER).exists():
        return find_checkpoint(folder, "run.dir")
    return folder / format_iteration_name(step)


def find_checkpoint(folder: Path, setting: str = "model.checkpoint") -> Path:
    """Return the folder of a checkpoint: ``folder`` itself, or the folder named by its tracker.

    Raises:
        UserError: naming ``setting``, without a checkpoint in the distributed format.
    """
    if (folder / FORMAT).is_file():
        return folder
    if not folder.is_dir():
        # The folders of the nearest existing parent help with a mistyped path.
        above = next(parent for parent in folder.absolute().parents if parent.is_dir())
        siblings = sorted(p.name for p in above.iterdir() if p.is_dir() and p.name[0] != ".")
        there = ", ".join(siblings) or "no folder"
        problem = f"is no folder; {above} has {there}"
        raise UserError(setting, folder, problem, f"Name the folder that holds {TRACKER}")
    tracker = folder / TRACKER
    if not tracker.is_file():
        inside = [p.parent for p in sorted(folder.glob(f"*/{TRACKER}"))]
        if (step := _find_latest_intact(folder)) is not None:
            inside.append(folder / format_iteration_name(step))
        problem = (
            f"holds neither {TRACKER} nor a checkpoint in Megatron's distributed format ({FORMAT})"
        )
        remedy = f"Name {inside[0]}" if inside else f"Name one that has {TRACKER}"
        raise UserError(setting, folder, problem, remedy)
    text = _read_tracker(tracker)
    if text != RELEASE and not _is_step(text):
        problem = f"{TRACKER} contains {text[:40]!r}, which is neither a step nor {RELEASE!r}"
        remedy = "Write a step into that file, or name the folder of the step"
        raise UserError(setting, folder, problem, remedy)
    checkpoint = folder / (RELEASE if text == RELEASE else format_iteration_name(int(text)))
    if not (checkpoint / FORMAT).is_file():
        lacking = f"which has no checkpoint in Megatron's distributed format ({FORMAT})"
        problem = f"{TRACKER} names {checkpoint.name}, {lacking}"
        others = [p.parent.name for p in sorted(folder.glob(f"*/{FORMAT}"))]
        remedy = (
            f"Write one of these into that file: {', '.join(others)}"
            if others
            else "Name another folder"
        )
        raise UserError(setting, folder, problem, remedy)
    return checkpoint


def build_corruption_error(checkpoint: Path, setting: str, problem: str) -> UserError:
    """Return the error for a damaged checkpoint, with an intact checkpoint to use instead, if
    any."""
    step = _find_latest_intact(checkpoint.parent, excluded=checkpoint)
    if step is None:
        remedy = "Fetch its files again; no other checkpoint beside it is complete"
        return UserError(setting, checkpoint, problem, remedy)
    instead = (
        f"write {step} into {checkpoint.parent / TRACKER}: {format_iteration_name(step)} beside "
        "it is complete"
    )
    return UserError(setting, checkpoint, problem, f"Fetch its files again, or {instead}")


@contextmanager
def convert_corruption_errors(checkpoint: Path, setting: str) -> Iterator[None]:
    """Raise a ``CorruptCheckpointError`` as a ``UserError`` that names ``setting``."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise build_corruption_error(checkpoint, setting, str(error)) from error


@cache
def warn_missing_checksums(checkpoint: Path) -> None:
    """Print once that a checkpoint's files cannot be checked."""
    text = f"note: {checkpoint} has no {CHECKSUMS} of this version: damage to it may go unnoticed"
    print_message(text)


def _find_latest_intact(folder: Path, excluded: Path | None = None) -> int | None:
    """Return the last step with an intact checkpoint, except ``excluded``."""
    for step in reversed(list_steps(folder)):
        checkpoint = folder / format_iteration_name(step)
        if checkpoint != excluded and _find_corruption(checkpoint) is None:
            return step
    return None


def _find_corruption(checkpoint: Path) -> str | None:
    """Return a problem of a checkpoint; ``None`` if intact."""
    try:
        # Content of small files and sizes of all files, because reading large files takes long.
        checksums = Checksums.read(checkpoint)
        if checksums is not None:
            checksums.check_small_files()
    except CorruptCheckpointError as error:
        return f"{checkpoint.name}: {error}"
    for name in (FORMAT, METADATA):
        if not (checkpoint / name).is_file() or not (checkpoint / name).stat().st_size:
            return f"{checkpoint.name} has no {name}"
    return None


def _read_tracker(tracker: Path) -> str:
    """Return the content of a tracker; empty if unreadable."""
    try:
        return tracker.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _is_step(text: str) -> bool:
    # Reject numbers that do not fit a 64-bit integer.
    return text.isascii() and text.isdigit() and len(text) < 19


_CHECKSUMS_FORMAT = 2
_BUFFER_BYTES = 1 << 20
"""Bytes per read: the buffer stays in the processor's cache."""
_SMALL_FILE_BYTES = 1 << 20


class CorruptCheckpointError(Exception):
    """A file's content differs from the written content; begins with the file's name."""


class FileChecksum(NamedTuple):
    """Size of a file in bytes, and CRC-32 of the content."""

    size: int
    crc: int

    @classmethod
    def from_file(cls, file: Path) -> FileChecksum:
        """Compute the checksum of a file.

        Raises:
            OSError: if the file cannot be read.
        """
        size = 0
        crc = 0
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                size += count
                crc = zlib.crc32(buffer[:count], crc)
        return cls(size, crc)


class Checksums:
    """Checksums of a checkpoint's files, as in ``checksums.json``.

    Args:
        folder: folder of an iteration.
        files: checksums by path in the folder.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileChecksum]) -> None:
        self._folder = folder
        self._files = dict(files)

    @classmethod
    def read(cls, folder: Path) -> Checksums | None:
        """Read the checksums of a folder; ``None`` without checksums of this version.

        Raises:
            CorruptCheckpointError: if the file cannot be read.
        """
        if not os.path.lexists(folder / CHECKSUMS):
            return None
        try:
            stored = json.loads((folder / CHECKSUMS).read_bytes())
            if stored["format"] < _CHECKSUMS_FORMAT:
                # Earlier versions computed checksums of blocks.
                return None
            files = {
                name: FileChecksum(int(size), int(crc))
                for name, (size, crc) in stored["files"].items()
            }
            # The file has a CRC-32 of its content, because no other file has its checksum.
            found = (stored["format"], stored["crc32"])
            is_whole = found == (_CHECKSUMS_FORMAT, _compute_crc(files))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})"
            ) from error
        if not is_whole:
            raise CorruptCheckpointError(f"{CHECKSUMS} is not what was written")
        return cls(folder, files)

    def write(self) -> None:
        """Write ``checksums.json``."""
        # Files without a known checksum are read first.
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in self._files and name != CHECKSUMS:
                self._files[name] = FileChecksum.from_file(path)
        content = {
            "format": _CHECKSUMS_FORMAT,
            "crc32": _compute_crc(self._files),
            "files": self._files,
        }
        (self._folder / CHECKSUMS).write_text(json.dumps(content, separators=(",", ":")))

    def check_small_files(self) -> None:
        """Compare the sizes of all files, and the content of small files.

        Raises:
            CorruptCheckpointError: naming the first file that differs.
        """
        for name in self._files:
            self._check_size(name)
        small = [name for name, entry in self._files.items() if entry.size <= _SMALL_FILE_BYTES]
        self.check(small)

    def check(
        self,
        names: Iterable[str] | None = None,
        *,
        share: int = 0,
        num_shares: int = 1,
    ) -> None:
        """Read files and compare the content with the checksums.

        Args:
            names: files to check; files without a checksum are skipped; ``None``: all.
            share: index of the first checked file; every ``num_shares``-th file from there is
                checked.

        Raises:
            CorruptCheckpointError: naming the first file that differs.
        """
        candidates = self._files if names is None else names
        listed = [name for name in candidates if name in self._files]
        # Ranks or threads check files in parallel, each every num_shares-th file.
        for name in listed[share::num_shares]:
            self._check_size(name)
            try:
                found = FileChecksum.from_file(self._folder / name)
            except OSError as error:
                raise CorruptCheckpointError(f"{name} cannot be read ({error})") from error
            if found != self._files[name]:
                raise CorruptCheckpointError(
                    f"{name} is damaged: its content is not what was written"
                )

    def _check_size(self, name: str) -> None:
        path = self._folder / name
        size = self._files[name].size
        if not path.is_file():
            raise CorruptCheckpointError(
                f"{name} is {'no file' if os.path.lexists(path) else 'missing'}"
            )
        if (found := path.stat().st_size) != size:
            change = "truncated" if found < size else "longer than it was"
            raise CorruptCheckpointError(f"{name} is {change}: {found:,} bytes of {size:,}")


def _compute_crc(files: Mapping[str, FileChecksum]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True, separators=(",", ":")).encode())

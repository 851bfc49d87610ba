"""Checksums of a checkpoint's files, taken while the files are written and compared when they are read.

``checksums.json`` in the folder of one iteration lists each file as consecutive blocks. In a file of shards a block is
what one tensor takes, so that weights can be checked without the optimizer's state. Any other file is one block. The
checksum is CRC-32, which finds damage; it does not prove who wrote a file. One thread computes it at 2.5 GB a second,
twice as fast as SHA-256.

Needs no torch.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "checksums.json"
_FORMAT = 1
_BUFFER_BYTES = 1 << 20
"""Bytes that are taken at a time: what is still in the processor's cache when it is written."""


class DamagedError(Exception):
    """A file does not hold what was written; the message begins with its name."""


class Block(NamedTuple):
    """A stretch of a file, from where the block before it ends."""

    end: int
    """The byte after its last one."""
    crc: int


class BlockWriter:
    """A new file, for ``torch.save`` among others to write to, that takes the checksum of each block on the way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._end = self._crc = 0
        self.blocks: list[Block] = []

    def write(self, data: Any) -> int:
        """Append what has the form of a buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BUFFER_BYTES):
            buffer = view[start : start + _BUFFER_BYTES]
            self._crc = zlib.crc32(buffer, self._crc)
            self._file.write(buffer)
        self._end += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def end_block(self) -> tuple[int, int]:
        """Close a block here. Returns its first byte, and how many it has."""
        start = self.blocks[-1].end if self.blocks else 0
        self.blocks.append(Block(self._end, self._crc))
        self._crc = 0
        return start, self._end - start

    def close(self, *, durable: bool = False) -> None:
        """Close the file; with ``durable`` only after the disk itself has it."""
        with self._file:
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())


class Checksums:
    """Checksums of a checkpoint's files, as in ``checksums.json``.

    Args:
        folder: of one iteration.
        files: the blocks of each file, by its path in the folder.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[Block]]) -> None:
        self._folder = folder
        self._files = {name: dict(_starts(blocks)) for name, blocks in files.items()}

    @classmethod
    def read(cls, folder: Path) -> Checksums | None:
        """None for a folder that has none.

        Raises:
            DamagedError: if they cannot be read.
        """
        if not os.path.lexists(folder / FILE):
            return None
        try:
            stored = json.loads((folder / FILE).read_bytes())
            files = {name: [Block(int(end), int(crc)) for end, crc in of] for name, of in stored["files"].items()}
            whole = (stored["format"], stored["crc32"]) == (_FORMAT, _crc_of(files)) and all(files.values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{FILE} cannot be read ({type(error).__name__}: {error})") from error
        if not whole:
            raise DamagedError(f"{FILE} is not what was written")
        return cls(folder, files)

    def write(self) -> None:
        """Write them, and those of all files in the folder that they do not list: small ones, which are read."""
        listed = {name: list(blocks.values()) for name, blocks in self._files.items()}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in listed and name != FILE:
                data = path.read_bytes()
                listed[name] = [Block(len(data), zlib.crc32(data))]
        content = {"format": _FORMAT, "crc32": _crc_of(listed), "files": listed}
        (self._folder / FILE).write_text(json.dumps(content, separators=(",", ":")))

    def check_small_files(self) -> None:
        """Check files of one block, and of all others whether they are there with their sizes.

        Raises:
            DamagedError: for the first that is not what was written.
        """
        self._check_sizes()
        self.check([name for name, blocks in self._files.items() if len(blocks) == 1])

    def _check_sizes(self, names: Sequence[str] | None = None) -> None:
        for name in self._files if names is None else names:
            path, size = self._folder / name, list(self._files[name].values())[-1].end
            if not path.is_file():
                raise DamagedError(f"{name} is {'no file' if os.path.lexists(path) else 'missing'}")
            if (found := path.stat().st_size) != size:
                what = "truncated" if found < size else "longer than it was"
                raise DamagedError(f"{name} is {what}: {found:,} bytes of {size:,}")

    def check(self, names: Sequence[str] | None = None, *, share: int = 0, of: int = 1) -> None:
        """Read blocks and hold them against their checksums.

        Args:
            names: of files; None: all.
            share: take every ``of``-th block, from this one on.

        Raises:
            DamagedError: for the first that differs, or for a file of another size.
        """
        self._check_sizes(names)
        chosen = self._files if names is None else names
        blocks = [(name, start, block) for name in chosen for start, block in self._files[name].items()]
        for name, start, block in blocks[share::of]:
            self._check(name, start, block)

    def check_file(self, name: str) -> None:
        """Check a file, if it is listed.

        Raises:
            DamagedError: if it differs.
        """
        if name in self._files:
            self.check([name])

    def check_block(self, name: str, start: int) -> None:
        """Check the block that begins there.

        Raises:
            DamagedError: if it differs, or no block begins there.
        """
        if (block := self._files.get(name, {}).get(start)) is None:
            raise DamagedError(f"{name} has no tensor at byte {start:,}, by {FILE}")
        self._check(name, start, block)

    def _check(self, name: str, start: int, block: Block) -> None:
        crc, left, buffer = 0, block.end - start, memoryview(bytearray(_BUFFER_BYTES))
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                file.seek(start)
                while left and (read := file.readinto(buffer[: min(left, _BUFFER_BYTES)])):
                    crc, left = zlib.crc32(buffer[:read], crc), left - read
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error})") from error
        if left or crc != block.crc:
            raise DamagedError(f"{name} is damaged: bytes {start:,} to {block.end:,} are not what was written")


def _starts(blocks: Sequence[Block]) -> Iterator[tuple[int, Block]]:
    """Each block with its first byte."""
    start = 0
    for block in blocks:
        yield start, block
        start = block.end


def _crc_of(files: Mapping[str, Sequence[Block]]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True, separators=(",", ":")).encode())

"""What may become of a file: the one list for the tests of all that read files."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (old,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([old ^ 1 << bit % 8]))


def replaced(path: Path, data: bytes) -> None:
    """Another file, so that what is linked to the first stays whole."""
    path.unlink()
    path.write_bytes(data)


def with_a_folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


UNUSABLE: dict[str, Callable[[Path, random.Random], object]] = {
    "truncated": lambda path, rng: replaced(path, path.read_bytes()[: rng.randrange(path.stat().st_size)]),
    "a byte short": lambda path, rng: replaced(path, path.read_bytes()[:-1]),
    "four bytes": lambda path, rng: replaced(path, path.read_bytes()[:4]),
    "empty": lambda path, rng: replaced(path, b""),
    "zeros": lambda path, rng: replaced(path, bytes(path.stat().st_size)),
    "foreign": lambda path, rng: replaced(path, rng.randbytes(path.stat().st_size)),
    "another pickle": lambda path, rng: replaced(path, pickle.dumps([1])),
    "missing": lambda path, rng: path.unlink(),
    "a folder": lambda path, rng: with_a_folder_instead(path),
}
"""What no reader can overlook."""
DAMAGE = UNUSABLE | {
    "flipped": lambda path, rng: flip(path, rng.randrange(8 * path.stat().st_size)),
    "longer": lambda path, rng: replaced(path, path.read_bytes() + b"\0"),
}
"""With what only a checksum is certain to notice."""

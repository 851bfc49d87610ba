"""Damage of files: the list for the tests of every reader."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], object]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def replace_file(path: Path, data: bytes) -> None:
    """Write another file, so that hard links of the first stay whole."""
    path.unlink()
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


UNUSABLE: dict[str, Damage] = {
    "truncated": lambda path, rng: replace_file(
        path, path.read_bytes()[: rng.randrange(path.stat().st_size)]
    ),
    "a byte short": lambda path, rng: replace_file(path, path.read_bytes()[:-1]),
    "four bytes": lambda path, rng: replace_file(path, path.read_bytes()[:4]),
    "empty": lambda path, rng: replace_file(path, b""),
    "zeros": lambda path, rng: replace_file(path, bytes(path.stat().st_size)),
    "foreign": lambda path, rng: replace_file(path, rng.randbytes(path.stat().st_size)),
    "another pickle": lambda path, rng: replace_file(path, pickle.dumps([1])),
    "missing": lambda path, rng: path.unlink(),
    "a folder": lambda path, rng: replace_by_folder(path),
}
"""Damage that no reader can overlook."""
DAMAGE = UNUSABLE | {
    "flipped": lambda path, rng: flip(path, rng.randrange(8 * path.stat().st_size)),
    "longer": lambda path, rng: replace_file(path, path.read_bytes() + b"\0"),
}
"""With damage that only a checksum is certain to notice."""

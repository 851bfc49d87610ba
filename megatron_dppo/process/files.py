"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing_file(file: Path) -> Iterator[Path]:
    """A path beside ``file`` to write to, which takes the place of ``file`` at the end of the block.

    Until then ``file`` is as it was, and stays so if the block raises or the process is killed.
    """
    partial = file.with_name(file.name + ".partial")
    yield partial
    partial.replace(file)

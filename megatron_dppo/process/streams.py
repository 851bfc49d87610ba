"""Standard output and error for a run that goes on when nobody reads them any more."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from typing import TextIO


class _Stream(io.FileIO):
    """Standard output or error. What cannot be written is thrown away."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = False

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if not self._lost:
                self._lost = True
                if error.errno == errno.EPIPE:  # servers and libraries write there, too
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())
                    os.close(nowhere)
                if self.fileno() == 1:
                    words = f"note  standard output cannot be written to ({error.strerror}): the run goes on without it"
                    print(words, file=sys.stderr)
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """From now on, if the reader of a standard stream has gone, its descriptor is closed or its disk is full, what is
    printed there is lost and the process goes on. Called before any thread or child is started."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # or the next file that is opened gets its number, and with it what is printed
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)


def quieten() -> None:
    """Silence what upstream code says to its own developers on every rank, and nothing else.

    Megatron-Core warns of every optional package that is absent (``doctor`` tells of those) and of its own deprecated
    defaults; torch of collectives' old names, which Megatron-Core still calls.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r".*ShardedTensor", category=FutureWarning)


def _outliving(stream: TextIO | None, descriptor: int) -> TextIO:
    """What replaces a stream of Python's. One that is not that descriptor's file, as in a test, is left as it is."""
    if stream is not None:
        try:
            ours = isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Stream)
            if ours or stream.fileno() != descriptor:
                return stream
        except (OSError, ValueError):
            return stream
        stream.flush()
    buffered = io.BufferedWriter(_Stream(descriptor))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    by_line = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(buffered, encoding, errors="backslashreplace", line_buffering=by_line)

"""Standard output and error, and progress as a bar or as lines.

- A run continues if a stream has no reader.
- Characters outside a terminal's encoding are escaped.
- Long work calls :func:`record_progress`: the watchdog distinguishes slow from hung work.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TextIO

from megatron_dppo.errors import sanitize_text


def escape_unencodable() -> None:
    """Escape characters outside the encoding of standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="backslashreplace")


class _Stream(io.FileIO):
    """Standard output or error that discards the output of a failed write."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = False

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if not self._lost:
                self._lost = True
                # Servers and libraries write to the descriptor, too.
                if error.errno == errno.EPIPE:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())
                    os.close(nowhere)
                if self.fileno() == 1:
                    words = (
                        f"note  standard output cannot be written to ({error.strerror}): the run "
                        "continues without it"
                    )
                    print_message(words)
            return memoryview(data).nbytes  # type: ignore[arg-type]


def print_message(text: str) -> None:
    """Print text for the user on standard error; results of commands go to standard output, lines
    of a run to its console."""
    print(sanitize_text(text), file=sys.stderr, flush=True)


def ignore_broken_streams() -> None:
    """Discard output after a broken pipe, a closed descriptor or a full disk, and continue. Call
    before any thread or child starts."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        # Occupy a closed descriptor: the next opened file would get its number, and the output.
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _wrap_stream(sys.stdout, 1), _wrap_stream(sys.stderr, 2)


IGNORED_LOG_MESSAGES = {
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "distributed.distributed_data_parallel": "full_param_layout not provided",
    "dist_checkpointing.strategies.torch": "async save is deprecated",
    "dist_checkpointing.strategies.common": "load_common is deprecated",
}
"""Log messages by Megatron-Core's module (0.19 and later)."""


def filter_upstream_warnings() -> None:
    """Silence the warnings for upstream developers, which every rank would print.

    - Megatron-Core: absent optional packages (listed by ``doctor``), deprecated defaults and
      classes.
    - torch: old names of collectives, because Megatron-Core still calls them; checkpoints read
      without a process group.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    warnings.filterwarnings("ignore", message=r".*ShardedTensor", category=FutureWarning)
    for message in (
        "The argument order of load",
        r"torch\.distributed is disabled, unavailable or uninitialized",
    ):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    for module, message in IGNORED_LOG_MESSAGES.items():
        logger = logging.getLogger(f"megatron.core.{module}")
        if not logger.filters:
            logger.addFilter(lambda record, message=message: message not in record.getMessage())  # type: ignore[misc]


def _wrap_stream(stream: TextIO | None, descriptor: int) -> TextIO:
    """Replace Python's stream; unchanged if the stream does not write to ``descriptor``, as in a
    test."""
    if stream is not None:
        try:
            is_stream = isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Stream)
            if is_stream or stream.fileno() != descriptor:
                return stream
        except (OSError, ValueError):
            return stream
        stream.flush()
    buffered = io.BufferedWriter(_Stream(descriptor))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    by_line = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(buffered, encoding, errors="backslashreplace", line_buffering=by_line)


SAY_EVERY_S = 10.0
"""Seconds between lines of progress without a terminal."""
GB = 10**9

Unit = Literal["count", "bytes", "share"]

_last = time.monotonic()


def record_progress() -> None:
    global _last
    _last = time.monotonic()


def get_progress_time() -> float:
    """Return the ``time.monotonic`` of the last recorded progress."""
    return _last


class ProgressCallback(Protocol):
    """Advance by ``count`` and show ``message``; ``added`` increases the total."""

    def __call__(self, count: float, message: str = "", *, added: float = 0) -> None: ...


@contextmanager
def report_progress(
    label: str,
    total: float,
    *,
    unit: Unit = "count",
    initial: int = 0,
    enabled: bool = True,
) -> Iterator[ProgressCallback]:
    """Show a bar; without a terminal, print a line every ten seconds and at the end.

    Args:
        label: name of the work or of the counted things.
        total: amount of the whole work, in ``unit``; 1 for a share.
        initial: amount done before the start, included in ``total``.
        enabled: False for silent ranks.
    """
    from rich import progress as bars
    from rich.console import Console

    amounts: tuple[bars.ProgressColumn, ...] = {
        "count": (bars.MofNCompleteColumn(),),
        "bytes": (bars.DownloadColumn(), bars.TransferSpeedColumn()),
        "share": (bars.TaskProgressColumn(),),
    }[unit]
    times = "in", bars.TimeElapsedColumn(), "left", bars.TimeRemainingColumn()
    columns: tuple[str | bars.ProgressColumn, ...]
    columns = "{task.description}", bars.BarColumn(), *amounts, *times, "{task.fields[message]}"
    drawn = sys.stderr.isatty()
    began = time.monotonic()
    spoke = began
    # A bar would move lines of standard output from a file to the terminal.
    to_file = not sys.stdout.isatty()
    console = Console(stderr=True)
    hidden = not (drawn and enabled)
    with bars.Progress(
        *columns, console=console, redirect_stdout=not to_file, disable=hidden
    ) as bar:
        task = bar.add_task(label, total=total, completed=initial, message="")

        def advance(count: float, message: str = "", *, added: float = 0) -> None:
            nonlocal spoke, total
            record_progress()
            total += added
            bar.update(task, advance=count, total=total, message=message)
            now = time.monotonic()
            completed = bar.tasks[0].completed
            if enabled and not drawn and now - spoke >= SAY_EVERY_S and completed > initial:
                spoke = now
                left = f"{(now - began) * (total - completed) / (completed - initial):.0f} s left"
                amount = _format_amount(completed, total, unit)
                words = ", ".join(filter(None, (amount, message, left)))
                print_message(f"{label}: {words}")

        yield advance
    if enabled and not drawn:
        amount = {
            "count": f"{total - initial:,.0f}",
            "bytes": f"{(total - initial) / GB:.2f} GB",
            "share": "done",
        }[unit]
        print_message(f"{label}: {amount} in {time.monotonic() - began:.2f} s")


@contextmanager
def make_progress_bar(
    label: str,
    total: int,
    *,
    initial: int = 0,
    enabled: bool = True,
) -> Iterator[ProgressCallback | None]:
    """Yield :func:`report_progress`'s bar, or None without a terminal, for callers with their own
    lines of progress."""
    if not (enabled and sys.stderr.isatty()):
        yield None
        return
    with report_progress(label, total, initial=initial) as advance:
        yield advance


def _format_amount(done: float, total: float, unit: Unit) -> str:
    texts = {
        "count": f"{done:,.0f} of {total:,.0f}",
        "bytes": f"{done / GB:.2f} of {total / GB:.2f} GB",
        "share": f"{done:.0%}",
    }
    return texts[unit]

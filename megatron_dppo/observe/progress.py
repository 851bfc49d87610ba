"""A bar for whoever waits at a terminal. Where standard error is none, nothing is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]
"""So many more are done; words on how it goes."""


@contextmanager
def progress_bar(what: str, total: int, *, done: int = 0, shown: bool = True) -> Iterator[Advance | None]:
    """A bar on standard error, with the time that it took and that is left; None where there is no terminal.

    Args:
        what: is counted.
        total: of them.
        done: of them at the start.
        shown: False for ranks that say nothing.
    """
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    times = TextColumn("in"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    counts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    to_file = not sys.stdout.isatty()  # what is printed goes there, and not above the bar
    columns = *counts, *times, TextColumn("{task.fields[said]}")
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=not to_file) as progress:
        task = progress.add_task(what, total=total, completed=done, said="")
        yield lambda count, said: progress.update(task, advance=count, said=said)

"""How far something is: a bar on standard error for whoever waits at a terminal, elsewhere a line now and then.

Long work also says that it moves, :func:`moved`, so that a watchdog can tell slow work from work that hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from megatron_dppo.process.streams import tell

SAY_EVERY_S = 10.0
"""Between two lines, where there is no terminal for a bar."""
GB = 10**9

Unit = Literal["count", "bytes", "share"]

_last = time.monotonic()


def moved() -> None:
    """Note that this process has come further in whatever it does."""
    global _last
    _last = time.monotonic()


def last_moved() -> float:
    """When it last did, by ``time.monotonic``."""
    return _last


class Advance(Protocol):
    """So much more is done; words on how it goes; so much more than ``total`` is to be done, as is known now."""

    def __call__(self, count: float, said: str = "", *, to_do: float = 0) -> None: ...


@contextmanager
def progress(what: str, total: float, *, unit: Unit = "count", done: int = 0, shown: bool = True) -> Iterator[Advance]:
    """A bar, or where standard error is no terminal a line every ten seconds and one at the end.

    Args:
        what: is done, or counted.
        total: of it; of a share 1.
        unit: of ``total``.
        done: of it at the start.
        shown: False for ranks that say nothing.
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
    columns = "{task.description}", bars.BarColumn(), *amounts, *times, "{task.fields[said]}"
    drawn, began = sys.stderr.isatty(), time.monotonic()
    spoke = began
    to_file = not sys.stdout.isatty()  # what is printed goes there, and not above the bar
    console, hidden = Console(stderr=True), not (drawn and shown)
    with bars.Progress(*columns, console=console, redirect_stdout=not to_file, disable=hidden) as bar:
        task = bar.add_task(what, total=total, completed=done, said="")

        def advance(count: float, said: str = "", *, to_do: float = 0) -> None:
            nonlocal spoke, total
            moved()
            total += to_do
            bar.update(task, advance=count, total=total, said=said)
            now, so_far = time.monotonic(), bar.tasks[0].completed
            if shown and not drawn and now - spoke >= SAY_EVERY_S and so_far > done:
                spoke = now
                left = f"{(now - began) * (total - so_far) / (so_far - done):.0f} s left"
                words = ", ".join(filter(None, (_of(so_far, total, unit), said, left)))
                tell(f"{what}: {words}")

        yield advance
    if shown and not drawn:
        amount = {"count": f"{total - done:,.0f}", "bytes": f"{(total - done) / GB:.2f} GB", "share": "done"}[unit]
        tell(f"{what}: {amount} in {time.monotonic() - began:.2f} s")


@contextmanager
def progress_bar(what: str, total: int, *, done: int = 0, shown: bool = True) -> Iterator[Advance | None]:
    """The bar of :func:`progress` alone, for those who say elsewhere what they do: None where there is no terminal."""
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    with progress(what, total, done=done) as advance:
        yield advance


def _of(done: float, total: float, unit: Unit) -> str:
    texts = {
        "count": f"{done:,.0f} of {total:,.0f}",
        "bytes": f"{done / GB:.2f} of {total / GB:.2f} GB",
        "share": f"{done:.0%}",
    }
    return texts[unit]

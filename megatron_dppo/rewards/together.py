"""Several completions awaited at once in a scoring process, with a reward function written ``async def``.

The trainer decides how many are open (``reward.concurrency``); here each is a task of one event loop. The limits hold
for each completion: its steps' processor time ends the process, as with other functions, and its time on the clock
cancels its task. Processor time of tasks that the function starts by itself counts on the clock alone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megatron_dppo.rewards.adapters import AsyncScorer, ScoreItem
from megatron_dppo.rewards.answers import Answer, failed, scored


def score_together(function: AsyncScorer, pipe: Connection, timeout_s: float, clock_s: float) -> None:
    """Score what comes, each completion from the moment it comes, until the pipe closes.

    Args:
        timeout_s: processor time for a completion, in seconds.
        clock_s: what it may take on the clock.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    asyncio.run(_serve(pipe, lambda unit, item: _score(function, pipe, unit, item, (timeout_s, clock_s))))


async def _serve(pipe: Connection, score: Callable[[range, ScoreItem], Coroutine[Any, Any, None]]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def begin(chunk: Sequence[tuple[range, Sequence[bytes]]]) -> None:
        for unit, (item,) in chunk:
            task = loop.create_task(score(unit, pickle.loads(item)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def receive() -> None:
        with suppress(EOFError, ConnectionResetError):
            while True:
                loop.call_soon_threadsafe(begin, pipe.recv())
        loop.call_soon_threadsafe(ended.set)

    # On a thread of its own: the trainer sends while completions are open, and must not wait until a function that
    # computes lets the loop read.
    threading.Thread(target=receive, daemon=True).start()
    await ended.wait()


async def _score(
    function: AsyncScorer, pipe: Connection, unit: range, item: ScoreItem, limits: tuple[float, float]
) -> None:
    scorer, (timeout_s, clock_s) = os.getpid(), limits
    answer: Answer
    try:
        async with asyncio.timeout(clock_s) as limit:
            returned = await _Metered(function.begin(item), timeout_s)
        answer = scored(unit, [returned])
    except BaseException as error:  # a function that calls sys.exit, or cancels itself, has failed like any other
        answer = failed(unit, [item], error)
    if os.getpid() != scorer:  # the function has forked, and this is the child, which came back, too
        os._exit(0)
    with suppress(OSError):  # the trainer has ended
        pipe.send(("timeout", unit) if limit.expired() else answer)


class _Metered:
    """Awaits a coroutine whose own steps may take ``limit_s`` seconds of processor time in all; past them the kernel
    ends the process."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], limit_s: float) -> None:
        self._coroutine, self._left_s = coroutine, limit_s

    def __await__(self) -> Generator[Any, Any, Any]:
        step = partial(self._coroutine.send, None)
        while True:
            signal.setitimer(signal.ITIMER_PROF, self._left_s)
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self._left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0.0)
            try:
                yield waits_for
                step = partial(self._coroutine.send, None)
            except BaseException as error:  # it is cancelled
                step = partial(self._coroutine.throw, error)

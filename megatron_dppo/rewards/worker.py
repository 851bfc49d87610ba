"""Scoring process of ``RewardWorkers``. The command line has the arguments of ``main``, in order.

- The scorer is a process that imports only the reward function, without torch and the trainer's
  main module.
- The keeper forks the scorer and runs no code of the user. The keeper inherits all processes left
  behind by the function, in any session, and ends them when the scorer ends, on SIGTERM from the
  trainer, and when the trainer has died. The keeper's exit status is the scorer's.
- Messages to the trainer are ("ready", True if the function takes groups, True if completions are
  awaited concurrently), ("refused", UserError) and (unit, [Score, …], kind of error).
- A message to the scorer is a list of (unit, pickled :class:`ScoreItem` objects). A unit is the
  range of the numbers of a group, or of a single completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megatron_dppo.errors import UserError
from megatron_dppo.process.lifetime import adopt_orphans, end_children, set_parent_death_signal
from megatron_dppo.process.streams import ignore_broken_streams
from megatron_dppo.rewards.adapters import GroupScorer, ScoreItem, Scorer, run_awaitable
from megatron_dppo.rewards.functions import InvalidScoreError, read_score, resolve
from megatron_dppo.rl.score import Score

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of ``reward`` for a scoring process."""

    memory_mib: int
    timeout_s: float
    """Processor time for a completion, in seconds."""
    clock_s: float
    """Time on the clock, in seconds, for concurrent completions; otherwise measured by the
    trainer."""
    concurrency: int


class _TerminatedError(BaseException):
    """Request to the keeper to end."""


def main(descriptor: int, parent: int, limits: Limits, spec: str, tags: Sequence[str]) -> None:
    """Run a keeper, with a scorer that scores completions until the pipe closes."""
    # The trainer handles Ctrl-C and Slurm's signal, and then closes the pipe.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    set_parent_death_signal(parent, signal.SIGTERM)
    adopt_orphans()
    keeper = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        _run_scorer(keeper, Connection(descriptor), limits, spec, tags)
    # The trainer sees the scorer's end only if no other process holds this end of the pipe.
    os.close(descriptor)
    try:
        status = _wait_for(scorer)
    except _TerminatedError:
        status = signal.SIGTERM
        # The scorer may have ended at the same moment.
        with contextlib.suppress(ProcessLookupError):
            os.kill(scorer, signal.SIGKILL)
    _end_all(scorer)
    _exit_with_status(status)


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _TerminatedError


def _wait_for(scorer: int) -> int:
    """Wait for the scorer, reap inherited processes that end earlier, and return the scorer's wait
    status."""
    while True:
        pid, status = os.wait()
        if pid == scorer:
            return status


def _end_all(scorer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Kill at least the scorer's own group on systems without inheritance of orphans.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(scorer, signal.SIGKILL)
    end_children()


def _exit_with_status(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The scorer's memory image is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _run_scorer(
    keeper: int,
    pipe: Connection,
    limits: Limits,
    spec: str,
    tags: Sequence[str],
) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Leave the trainer's process group, because a function may kill its process group.
        os.setsid()
        set_parent_death_signal(keeper, signal.SIGKILL)
        # A function that prints has not failed if no process reads the output.
        ignore_broken_streams()
        _score_all(pipe, limits, spec, tags)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # The reader of the streams may have ended.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _score_all(pipe: Connection, limits: Limits, spec: str, tags: Sequence[str]) -> None:
    try:
        function = resolve(spec, tags)
    except UserError as error:
        pipe.send(("refused", error))
        return
    set_memory_limit(limits.memory_mib)
    together = inspect.iscoroutinefunction(function) and limits.concurrency > 1
    pipe.send(("ready", isinstance(function, GroupScorer), together))
    if together:
        _score_concurrently(function, pipe, limits.timeout_s, limits.clock_s)
        return
    scorer = os.getpid()
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, ConnectionResetError):
            # The trainer has ended, perhaps before it read all answers.
            return
        for unit, items in chunk:
            # Unpickle each item separately, because a function may change a row's objects.
            loaded = [pickle.loads(item) for item in items]
            scores, kind = _score(function, loaded, limits.timeout_s)
            # If the function has forked, the child process may return here as well.
            if os.getpid() != scorer:
                os._exit(0)
            pipe.send((unit, scores, kind))


def make_failed_scores(items: Sequence[ScoreItem], error: BaseException) -> tuple[list[Score], str]:
    """Return the scores of completions after an error in scoring, and the kind of the error."""
    if isinstance(error, InvalidScoreError):
        kind = error.kind
        text = f"{error}\nfor the completion {items[0].solution!r:.300}"
    else:
        kind = get_error_kind(error)
        text = "".join(traceback.format_exception(error))
    return [Score.from_failure("error", text)] * len(items), kind


def get_error_kind(error: BaseException) -> str:
    """Return the type and location of an error."""
    # Without the message, because the message may quote a completion.
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join(
        [type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)]
    )


def _score(
    function: Scorer | GroupScorer,
    items: Sequence[ScoreItem],
    timeout_s: float,
) -> tuple[list[Score], str]:
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        limit_s = timeout_s * len(items)
        # The timer's signal ends the process in the kernel, even during a call of C code.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            returned = (
                function(items)
                if isinstance(function, GroupScorer)
                else [run_awaitable(function(items[0]))]
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return [read_score(each) for each in returned], ""
    except BaseException as error:
        # A function that calls sys.exit has failed like any other function.
        return make_failed_scores(items, error)


def _score_concurrently(
    function: Callable[..., Any],
    pipe: Connection,
    timeout_s: float,
    clock_s: float,
) -> None:
    """Score completions, each from the moment of arrival, until the pipe closes.

    - Each completion is a task of one event loop; the trainer limits their number.
    - If the steps of a task exceed the processor time, the process ends, as with functions that are
      not async. A task that exceeds the time on the clock is cancelled.
    - Tasks started by the function itself have only the limit on the clock.

    Args:
        timeout_s: processor time for a completion, in seconds.
        clock_s: time on the clock for a completion, in seconds.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def score(unit: range, item: ScoreItem) -> Coroutine[Any, Any, None]:
        return _score_async(function, pipe, unit, item, (timeout_s, clock_s))

    asyncio.run(_serve(pipe, score))


async def _serve(
    pipe: Connection, score: Callable[[range, ScoreItem], Coroutine[Any, Any, None]]
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def begin(chunk: Sequence[tuple[range, Sequence[bytes]]]) -> None:
        for unit, (item,) in chunk:
            task = loop.create_task(score(unit, pickle.loads(item)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def receive() -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                loop.call_soon_threadsafe(begin, pipe.recv())
        loop.call_soon_threadsafe(ended.set)

    # On a separate thread, because the trainer must not wait for the loop while a function
    # computes.
    threading.Thread(target=receive, daemon=True).start()
    await ended.wait()


async def _score_async(
    function: Callable[..., Any],
    pipe: Connection,
    unit: range,
    item: ScoreItem,
    limits: tuple[float, float],
) -> None:
    scorer = os.getpid()
    timeout_s, clock_s = limits
    try:
        async with asyncio.timeout(clock_s) as limit:
            returned = await _CpuLimitedAwaitable(function(item), timeout_s)
        scores = [read_score(returned)]
        kind = ""
    except BaseException as error:
        # Includes sys.exit and a cancellation of the task by the function.
        scores, kind = make_failed_scores([item], error)
    # If the function has forked, the child process may return here as well.
    if os.getpid() != scorer:
        os._exit(0)
    # The trainer may have ended.
    with contextlib.suppress(OSError):
        pipe.send((unit, [Score.from_failure("timeout")] if limit.expired() else scores, kind))


class _CpuLimitedAwaitable:
    """Awaitable of a coroutine whose steps may use ``limit_s`` seconds of processor time in all;
    past this limit the kernel ends the process."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], limit_s: float) -> None:
        self._coroutine = coroutine
        self._left_s = limit_s

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
            except BaseException as error:
                # Pass a cancellation of the task on to the coroutine.
                step = partial(self._coroutine.throw, error)


def set_memory_limit(max_mib: int) -> None:
    """Limit the memory for scoring to ``max_mib`` MiB beyond the imports; larger allocations
    fail."""
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = taken + max_mib * MEBIBYTE
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # Address space, because resident memory could exceed the machine's memory before a check.
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    try:
        descriptor, parent, memory_mib, timeout_s, clock_s, concurrency, spec, *tags = sys.argv[1:]
        limits = Limits(int(memory_mib), float(timeout_s), float(clock_s), int(concurrency))
        main(int(descriptor), int(parent), limits, spec, tags)
    except _TerminatedError:
        # SIGTERM came before the start of the scorer.
        os._exit(1)

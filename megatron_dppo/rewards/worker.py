"""A scoring process of ``RewardWorkers``: its arguments are those of ``main``, in their order.

Two processes. The one that scores imports the reward function and what that needs, and nothing
else: neither torch nor the trainer's main module. The keeper, which forks it and runs nothing of
the user's, inherits whatever processes the function leaves behind, in whatever sessions, and ends
them with the scoring: when that ends, when the trainer says so (SIGTERM), and when the trainer has
died. It ends as the scoring ended.

Messages out are ("ready", whether the function takes groups, whether completions are awaited
together), ("refused", UserError) and (unit, [Score, …], kind), kind telling errors apart. A message
in is a list of (unit, pickled items). A unit is the range of one completion's number, or of those
of a group; an item is a :class:`ScoreItem`.
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
    """Settings of ``reward`` that hold in a scoring process."""

    memory_mib: int
    timeout_s: float
    """Processor time for a completion."""
    clock_s: float
    """On the clock for a completion that is awaited beside others; the trainer looks after the
    rest."""
    concurrency: int


class _TerminatedError(BaseException):
    """The keeper was told to end."""


def main(descriptor: int, parent: int, limits: Limits, spec: str, tags: Sequence[str]) -> None:
    """Keep a process that scores what comes, until the pipe closes."""
    # Ctrl-C, and Slurm's word that time is short, are the trainer's to answer; it closes the pipe.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    set_parent_death_signal(parent, signal.SIGTERM)
    adopt_orphans()
    keeper = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        _run_scorer(keeper, Connection(descriptor), limits, spec, tags)
    os.close(descriptor)  # so that the trainer sees the scorer's end
    try:
        status = _wait_for(scorer)
    except _TerminatedError:
        status = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):  # it ended at that very moment
            os.kill(scorer, signal.SIGKILL)
    _end_all(scorer)
    _exit_with_status(status)


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _TerminatedError


def _wait_for(scorer: int) -> int:
    """The wait status of the scorer. What it has left behind so far and ends by itself is reaped on
    the way."""
    while True:
        pid, status = os.wait()
        if pid == scorer:
            return status


def _end_all(scorer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(
        ProcessLookupError
    ):  # where nothing is inherited: the scorer's own group at least
        os.killpg(scorer, signal.SIGKILL)
    end_children()


def _exit_with_status(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, 0)
        )  # one memory image, the scorer's, is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _run_scorer(
    keeper: int, pipe: Connection, limits: Limits, spec: str, tags: Sequence[str]
) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # a function that ends its process group ends no trainer
        set_parent_death_signal(keeper, signal.SIGKILL)
        ignore_broken_streams()  # a function that prints has not failed where nobody reads it
        _score_all(pipe, limits, spec, tags)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # whoever read them may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _score_all(pipe: Connection, limits: Limits, spec: str, tags: Sequence[str]) -> None:
    try:
        function = resolve(spec, tags)
    except UserError as error:
        pipe.send(("refused", error))
        return
    _set_memory_limit(limits.memory_mib)
    together = inspect.iscoroutinefunction(function) and limits.concurrency > 1
    pipe.send(("ready", isinstance(function, GroupScorer), together))
    if together:
        _score_concurrently(function, pipe, limits.timeout_s, limits.clock_s)
        return
    scorer = os.getpid()
    while True:
        try:
            chunk = pipe.recv()
        except (
            EOFError,
            ConnectionResetError,
        ):  # the trainer has ended, perhaps with answers that it had not read
            return
        for unit, items in chunk:
            # Each is unpickled by itself: what a function does to a row's objects does not reach
            # the next completion.
            scores, kind = _score(
                function, [pickle.loads(item) for item in items], limits.timeout_s
            )
            if (
                os.getpid() != scorer
            ):  # the function has forked, and this is the child, which came back, too
                os._exit(0)
            pipe.send((unit, scores, kind))


def make_failed_scores(items: Sequence[ScoreItem], error: BaseException) -> tuple[list[Score], str]:
    """Scores of completions whose scoring raised ``error``, and its kind."""
    if isinstance(error, InvalidScoreError):
        kind = error.kind
        text = f"{error}\nfor the completion {items[0].solution!r:.300}"
    else:
        kind = _get_error_kind(error)
        text = "".join(traceback.format_exception(error))
    return [Score.from_failure("error", text)] * len(items), kind


def _get_error_kind(error: BaseException) -> str:
    """Where it was raised, and what: the same for two errors whose messages differ in the
    completion they quote."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join(
        [type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)]
    )


def _score(
    function: Scorer | GroupScorer, items: Sequence[ScoreItem], timeout_s: float
) -> tuple[list[Score], str]:
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        limit_s = timeout_s * len(items)
        signal.setitimer(
            signal.ITIMER_PROF, limit_s
        )  # the kernel ends the process, also within a call of C
        try:
            returned = (
                function(items)
                if isinstance(function, GroupScorer)
                else [run_awaitable(function(items[0]))]
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return [read_score(each) for each in returned], ""
    except BaseException as error:  # a function that calls sys.exit has failed like any other
        return make_failed_scores(items, error)


def _score_concurrently(
    function: Callable[..., Any], pipe: Connection, timeout_s: float, clock_s: float
) -> None:
    """Score what comes, each completion from the moment it comes, until the pipe closes.

    The trainer decides how many are open (``reward.concurrency``); here each is a task of one event
    loop. The limits hold for each completion: its steps' processor time ends the process, as with
    other functions, and its time on the clock cancels its task. Processor time of tasks that the
    function starts by itself counts on the clock alone.

    Args:
        timeout_s: processor time for a completion, in seconds.
        clock_s: what it may take on the clock.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    asyncio.run(
        _serve(
            pipe,
            lambda unit, item: _score_async(function, pipe, unit, item, (timeout_s, clock_s)),
        )
    )


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

    # On a thread of its own: the trainer sends while completions are open, and must not wait until
    # a function that computes lets the loop read.
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
    (timeout_s, clock_s) = limits
    try:
        async with asyncio.timeout(clock_s) as limit:
            returned = await _CpuLimitedAwaitable(function(item), timeout_s)
        scores = [read_score(returned)]
        kind = ""
    except (
        BaseException
    ) as error:  # a function that calls sys.exit, or cancels itself, has failed like any other
        scores, kind = make_failed_scores([item], error)
    if (
        os.getpid() != scorer
    ):  # the function has forked, and this is the child, which came back, too
        os._exit(0)
    with contextlib.suppress(OSError):  # the trainer has ended
        pipe.send((unit, [Score.from_failure("timeout")] if limit.expired() else scores, kind))


class _CpuLimitedAwaitable:
    """Awaits a coroutine whose own steps may take ``limit_s`` seconds of processor time in all;
    past them the kernel ends the process."""

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
            except BaseException as error:  # it is cancelled
                step = partial(self._coroutine.throw, error)


def _set_memory_limit(max_mib: int) -> None:
    """Let scoring take so much more than the imports did; past it an allocation fails, and a
    completion with it.

    Address space, which the kernel counts at once; what is resident could pass the machine's before
    anyone looked.
    """
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = taken + max_mib * MEBIBYTE
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


if __name__ == "__main__":
    try:
        descriptor, parent, memory_mib, timeout_s, clock_s, concurrency, spec, *tags = sys.argv[1:]
        limits = Limits(int(memory_mib), float(timeout_s), float(clock_s), int(concurrency))
        main(int(descriptor), int(parent), limits, spec, tags)
    except _TerminatedError:  # before there was anything to end
        os._exit(1)

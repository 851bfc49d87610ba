"""Scoring in processes that can be killed: a verifier that hangs costs its completion, never the
run.

Each worker is a fresh interpreter with one pipe: no fork of a process that holds threads, gloo or
CUDA, and no second import of the trainer's main module, as multiprocessing and the pools built on
it would do. Completions travel in chunks, answers come one by one, so that the time limits hold for
each while the exchange costs microseconds.

A function has so many seconds of processor time, which the kernel counts (``worker.py``), and ten
times as many on the clock, which are counted here: a machine that is busy with something else makes
no answer a wrong one.

Completions of a function written ``async def`` are awaited together: a worker has up to
``reward.concurrency`` of them and is given the next one as soon as one is answered.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from megatron_dppo.config import RewardConfig
from megatron_dppo.errors import UserError
from megatron_dppo.process.streams import record_progress
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.math.completion import THINKING_TAGS
from megatron_dppo.rl.score import Score

START_LIMIT_S = 300.0
"""How long the import of a reward function may take. Does not count against the time limit of a
completion."""
ON_THE_CLOCK = 10
"""Times ``reward.timeout_s`` until a function that waits, or has others compute, is ended. 1.3 s of
processor time have been seen to take 11.5 s on a machine that was busy otherwise."""
END_LIMIT_S = 5.0
"""How long a worker may take to end what its function has started, before it is killed itself."""
CHUNK = 32
"""Most completions that a worker is given at once."""


class _Worker:
    """One process and what it has been given to do."""

    def __init__(self, arguments: Sequence[str], *, is_retry: bool = False) -> None:
        self.again = is_retry
        """Whether one before it was killed while it imported."""
        self.pipe, theirs = Pipe()
        inherited = [str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dppo.rewards.worker", *inherited, *arguments],
            env=_build_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.ready = False
        self.takes_groups = self.awaits = False
        """Known once it is ready. ``awaits``: its completions are awaited together."""
        self.pending: deque[range] = deque()
        self.deadline = time.monotonic() + START_LIMIT_S

    def end(self) -> None:
        """End it, with all that its function has started."""
        self.process.terminate()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


class RewardWorkers:
    """Processes that score completions with one reward function.

    Make it on a thread that lives as long as the workers shall: on Linux they end with the thread
    that started them.
    """

    def __init__(
        self,
        spec: str,
        *,
        workers: int,
        timeout_s: float,
        memory_mib: int = 4096,
        concurrency: int = 32,
        thinking_tags: Sequence[str] = THINKING_TAGS,
    ) -> None:
        """Start the workers, without waiting for their imports.

        Args:
            spec: of the run's ``RewardConfig``.
            workers: processes.
            timeout_s: processor time for one completion, in seconds; a tenth of what it may take on
                the clock. A function of groups has as much for each completion of a group.
            memory_mib: what scoring may take more than the function's imports did, in MiB; past it
                a completion fails.
            concurrency: completions that a worker awaits at once, if the function is written
                ``async def``.
            thinking_tags: ``reward.thinking_tags``.
        """
        self._spec = spec
        self._clock_s = ON_THE_CLOCK * timeout_s
        self._concurrency = concurrency
        self.thinking_tags = thinking_tags
        limits = memory_mib, timeout_s, self._clock_s, concurrency
        self._arguments = [*map(str, limits), spec, *thinking_tags]
        self._workers = [_Worker(self._arguments) for _ in range(workers)]
        self._reported: set[str] = set()

    def wait_ready(self) -> None:
        """Wait until every worker has imported the reward function.

        Raises:
            UserError: if it cannot be found, imported or called, or its import does not end.
        """
        while starting := [w for w in self._workers if not w.ready]:
            wait(
                [w.pipe for w in starting],
                timeout=max(min(w.deadline for w in starting) - time.monotonic(), 0.0),
            )
            for worker in starting:
                self._check_ready(worker)

    def score(self, items: Sequence[ScoreItem], *, max_failures: int | None = None) -> list[Score]:
        """Score all items. A worker that hangs or dies is replaced, and what it had not begun goes
        to another.

        Args:
            items: what to score; one group, where the function takes groups.
            max_failures: past so many the rest is left unscored, for the run is about to stop; a
                function that always hangs would else be waited for once per completion. None: all
                are scored.

        Raises:
            UserError: as ``wait_ready``.
        """
        scoring = self.begin(len(items) if max_failures is None else max_failures)
        scoring.add(items)
        return scoring.finish()

    def begin(self, max_failures: int) -> Scoring:
        """Score the completions of prompts as they come up; nothing else may be scored before its
        end.

        Args:
            max_failures: as in ``score``.
        """
        return Scoring(self, max_failures)

    @classmethod
    def from_config(cls, reward: RewardConfig, function: str | None = None) -> RewardWorkers:
        """The workers that a run's settings ask for, of their function or another one."""
        return cls(
            function or reward.spec,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
            memory_mib=reward.memory_mib,
            concurrency=reward.concurrency,
            thinking_tags=reward.thinking_tags,
        )

    def close(self) -> None:
        """Kill the workers, and all that they have started. Safe to call twice."""
        for worker in self._workers:
            worker.process.terminate()  # all at once
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _check_ready(self, worker: _Worker) -> None:
        if not worker.pipe.poll(0):
            if time.monotonic() > worker.deadline:
                raise self._make_import_error(
                    f"its import did not end within {START_LIMIT_S:.0f} s"
                )
            return
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            code = _get_exit_code(worker)
            if (
                code is not None and code < 0 and not worker.again
            ):  # as in scoring: one death may have another cause
                self._replace(worker, is_retry=True)
                return
            raise self._make_import_error(
                f"its process {_describe_exit(code)} while importing it"
            ) from error
        if kind == "refused":
            raise rest[0]
        worker.ready = True
        (worker.takes_groups, worker.awaits) = rest

    def _make_import_error(self, problem: str) -> UserError:
        return UserError("reward.function", self._spec, problem, "Import it by hand and see why")

    def _replace(self, worker: _Worker, *, is_retry: bool = False) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._arguments, is_retry=is_retry)


class Scoring:
    """Items under way in a set of workers, in units: an item by itself, or a group where the
    function takes groups."""

    def __init__(self, owner: RewardWorkers, max_failures: int) -> None:
        self._owner = owner
        self._most_failures = max_failures
        self._items: list[ScoreItem] = []
        self._queue: deque[range] = deque()
        self._scores: list[Score] = []
        self._failures = 0
        self._lost_once: set[int] = set()

    def add(self, items: Sequence[ScoreItem]) -> None:
        """Have these scored, too, the completions of one prompt."""
        if items:
            self._queue.append(range(len(self._items), len(self._items) + len(items)))
        self._items.extend(items)
        self._scores.extend([Score.from_failure("unscored")] * len(items))

    def step(self, wait_s: float = 0.0) -> bool:
        """Give out what waits, and take what is done.

        Args:
            wait_s: how long to wait for an answer.

        Returns:
            whether there is more to wait for. There is none past ``most_failures``.

        Raises:
            UserError: as ``RewardWorkers.wait_ready``.
        """
        workers = self._owner._workers  # whose dead are replaced in place
        if self._has_too_many_failures:
            return False
        for worker in list(workers):
            if worker.ready:
                self._send(
                    worker,
                    self._next_concurrent_chunk(worker)
                    if worker.awaits
                    else self._next_chunk(worker),
                )
        if not self._queue and not any(worker.pending for worker in workers):
            return False
        busy = [w for w in workers if w.pending or not w.ready]
        soonest = min(w.deadline for w in busy)
        wait([w.pipe for w in busy], timeout=min(max(soonest - time.monotonic(), 0.0), wait_s))
        for worker in busy:
            self._receive(worker)
        return True

    def finish(self) -> list[Score]:
        """Wait for all of them; their scores in the order in which they were added.

        Raises:
            UserError: as ``advance``.
        """
        while self.step(math.inf):
            record_progress()
        self.cancel()
        return self._scores

    def cancel(self) -> None:
        """End what is under way: it is of no use any more."""
        for worker in [w for w in self._owner._workers if w.pending]:
            self._owner._replace(worker)

    @property
    def _has_too_many_failures(self) -> bool:
        return self._failures > self._most_failures

    def _next_chunk(self, worker: _Worker) -> list[range]:
        """Units that an idle worker scores next, one after another."""
        # Small enough that the last chunks leave no worker idle for long.
        size = max(1, min(CHUNK, len(self._items) // (4 * len(self._owner._workers))))
        chunk: list[range] = []
        while self._queue and not worker.pending and sum(map(len, chunk)) < size:
            chunk.append(self._queue.popleft() if worker.takes_groups else self._next_item())
        return chunk

    def _next_concurrent_chunk(self, worker: _Worker) -> list[range]:
        """Units that bring a worker to its share of all that is open or waits. A completion that a
        process was lost over is alone in the next one, so that it is known which completion it
        was."""
        ready = [w for w in self._owner._workers if w.ready]
        unanswered = sum(map(len, self._queue)) + sum(len(w.pending) for w in ready)
        share = min(self._owner._concurrency, math.ceil(unanswered / len(ready)))
        chunk: list[range] = []
        while self._queue and (taken := len(worker.pending) + len(chunk)) < share:
            together = [self._queue[0], *worker.pending, *chunk]
            if taken and any(unit.start in self._lost_once for unit in together):
                break
            chunk.append(self._next_item())
        return chunk

    def _next_item(self) -> range:
        unit = self._queue.popleft()
        if len(unit) > 1:
            self._queue.appendleft(unit[1:])
        return unit[:1]

    def _send(self, worker: _Worker, chunk: list[range]) -> None:
        if not chunk:
            return
        worker.pending.extend(chunk)
        self._set_deadline(worker)
        try:
            # The worker is idle, thus reading, or reads on a thread of its own: this cannot block
            # on a full pipe.
            worker.pipe.send(
                [(unit, [pickle.dumps(self._items[i]) for i in unit]) for unit in chunk]
            )
        except (BrokenPipeError, ConnectionResetError):
            if len(worker.pending) == len(chunk):
                self._put_back(worker)  # it died while it had nothing to do

    def _set_deadline(self, worker: _Worker) -> None:
        """By which it is to have answered once more. One that awaits several ends each by itself,
        unless it hangs."""
        items = len(worker.pending[0]) if worker.pending else 1
        slack_s = END_LIMIT_S if worker.awaits else 0.0
        worker.deadline = time.monotonic() + items * self._owner._clock_s + slack_s

    def _receive(self, worker: _Worker) -> None:
        if not worker.ready:
            self._owner._check_ready(worker)
            return
        while worker.pending:
            # What has arrived counts, however late this process comes to look; only then is a limit
            # over.
            if not worker.pipe.poll(0):
                if time.monotonic() > worker.deadline:
                    self._time_out(worker)
                return
            try:
                answer = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._replace_dead(worker)
                return
            self._record(worker, *answer)

    def _record(self, worker: _Worker, unit: range, scores: list[Score], kind: str) -> None:
        worker.pending.remove(unit)
        self._set_deadline(worker)
        self._store_scores(unit, scores, kind)

    def _store_scores(self, unit: range, scores: list[Score], kind: str = "") -> None:
        if scores[0].failure == "error":
            place = self._items[unit.start].place
            told = ""
            if kind not in self._owner._reported:
                of = f", for {place}" if place else ""
                told = f"reward.function = {self._owner._spec}{of}: {scores[0].traceback}"
            self._owner._reported.add(kind)
            scores = [Score.from_failure("error", told)] * len(unit)
        self._failures += sum(score.failure is not None for score in scores)
        self._scores[unit.start : unit.stop] = scores

    def _time_out(self, worker: _Worker) -> None:
        if worker.awaits and len(worker.pending) > 1:  # any of them may be what hangs
            self._lost_once.update(unit.start for unit in worker.pending)
        else:
            unit = worker.pending.popleft()
            self._store_scores(unit, [Score.from_failure("timeout")] * len(unit))
        self._put_back(worker)

    def _replace_dead(self, worker: _Worker) -> None:
        code = _get_exit_code(worker)
        if code == -signal.SIGPROF or (worker.awaits and len(worker.pending) > 1):
            self._time_out(worker)
            return
        unit = worker.pending[0]
        end = _describe_exit(code)
        if unit.start in self._lost_once:
            solution = self._items[worker.pending.popleft().start].solution
            told = f"the scoring process {end}, scoring the completion {solution!r:.300}"
            self._store_scores(unit, [Score.from_failure("error", told)] * len(unit), end)
        # One death may have another cause, such as the kernel's need of memory; the second is the
        # completion's own.
        self._lost_once.add(unit.start)
        self._put_back(worker)

    def _put_back(self, worker: _Worker) -> None:
        """Give what a worker has not done to others, and end it."""
        self._queue.extendleft(reversed(worker.pending))
        worker.pending.clear()
        self._owner._replace(worker)


def _get_exit_code(worker: _Worker) -> int | None:
    """None: it has closed its pipe and goes on."""
    try:
        return worker.process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )


def _build_environment() -> dict[str, str]:
    """This process's environment, one thread to a worker, and the same places to import from."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {
        **os.environ,
        **threads,
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
    }

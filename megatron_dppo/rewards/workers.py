"""Scoring in processes that can be killed: a verifier that hangs costs a completion, never the run.

- Each worker is a fresh interpreter with one pipe. multiprocessing would fork a process that holds
  threads, gloo or CUDA, or would import the trainer's main module again.
- Completions are sent in chunks, to save exchanges, and answered one by one, because the time
  limits apply to each completion.
- A function has a limit of processor time, measured by the kernel (``worker.py``), and ten times
  this limit on the clock, measured here: other work on a busy machine makes no answer wrong.
- Completions of an ``async def`` function are awaited concurrently. A worker has up to
  ``reward.concurrency`` completions, and gets the next completion after each answer.
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
"""Seconds for the import of a reward function, not counted in a completion's limits."""
ON_THE_CLOCK = 10
"""Limit on the clock, in units of ``reward.timeout_s``, for functions that wait or have other
processes compute. On a busy machine, 1.3 s of processor time took 11.5 s."""
END_LIMIT_S = 5.0
"""Seconds for a worker to end the function's processes, before the worker is killed."""
CHUNK = 32
"""Most completions sent to a worker at once."""


class _Worker:
    """Worker process and the worker's pending units."""

    def __init__(self, arguments: Sequence[str], *, is_retry: bool = False) -> None:
        self.is_retry = is_retry
        """Whether a predecessor was killed during the import."""
        self.pipe, child_end = Pipe()
        inherited = [str(child_end.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dppo.rewards.worker", *inherited, *arguments],
            env=build_environment(),
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
        )
        child_end.close()
        self.ready = False
        self.takes_groups = self.awaits = False
        """Set when the worker is ready. ``awaits``: completions are awaited concurrently."""
        self.pending: deque[range] = deque()
        self.deadline = time.monotonic() + START_LIMIT_S

    def end(self) -> None:
        """End the worker and all processes started by the function."""
        self.process.terminate()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


class RewardWorkers:
    """Processes that score completions with one reward function.

    Create workers on a long-lived thread, because on Linux workers end with that thread.
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
        """Start the workers, without waiting for imports.

        Args:
            spec: ``RewardConfig.spec`` of the run.
            workers: number of processes.
            timeout_s: processor time for one completion, in seconds; a tenth of the limit on the
                clock. A group's limit is multiplied by the number of completions.
            memory_mib: memory for scoring beyond the function's imports, in MiB; past this limit a
                completion fails.
            concurrency: completions awaited at once, if the function is ``async def``.
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
            UserError: the function cannot be found, imported or called, or the import does not end.
        """
        while starting := [w for w in self._workers if not w.ready]:
            soonest = min(w.deadline for w in starting)
            wait([w.pipe for w in starting], timeout=max(soonest - time.monotonic(), 0.0))
            for worker in starting:
                self._check_ready(worker)

    def score(self, items: Sequence[ScoreItem], *, max_failures: int | None = None) -> list[Score]:
        """Score all items. A worker that hangs or dies is replaced, and units not yet begun are
        sent to other workers.

        Args:
            items: completions to score. A function that takes groups gets all items as one group.
            max_failures: largest number of failures; past this number the remaining items stay
                unscored, because the run is about to stop, and a function that always hangs would
                take the time limit for each completion. None: all items are scored.

        Raises:
            UserError: under the conditions of ``wait_ready``.
        """
        scoring = self.begin(len(items) if max_failures is None else max_failures)
        scoring.add(items)
        return scoring.finish()

    def begin(self, max_failures: int) -> Scoring:
        """Open a scoring for completions added later, see :meth:`Scoring.add`. Only one scoring may
        be open at a time."""
        return Scoring(self, max_failures)

    @classmethod
    def from_config(cls, reward: RewardConfig, function: str | None = None) -> RewardWorkers:
        """Return workers with a run's settings. ``function`` replaces the run's reward function."""
        return cls(
            function or reward.spec,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
            memory_mib=reward.memory_mib,
            concurrency=reward.concurrency,
            thinking_tags=reward.thinking_tags,
        )

    def close(self) -> None:
        """Kill the workers and all processes started by workers. Idempotent."""
        # Signal all workers first, so that all workers end at the same time.
        for worker in self._workers:
            worker.process.terminate()
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
            code = _wait_for_exit_code(worker)
            # Try again once, because a first death may have another cause.
            if code is not None and code < 0 and not worker.is_retry:
                self._replace(worker, is_retry=True)
                return
            raise self._make_import_error(
                f"its process {describe_exit(code)} while importing it"
            ) from error
        if kind == "refused":
            raise rest[0]
        worker.ready = True
        worker.takes_groups, worker.awaits = rest

    def _make_import_error(self, problem: str) -> UserError:
        return UserError("reward.function", self._spec, problem, "Import it by hand and see why")

    def _replace(self, worker: _Worker, *, is_retry: bool = False) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._arguments, is_retry=is_retry)


class Scoring:
    """Scoring of items by the workers of ``owner``.

    Items are sent in units. A unit is a single item, or a group if the function takes groups.
    """

    def __init__(self, owner: RewardWorkers, max_failures: int) -> None:
        self._owner = owner
        self._max_failures = max_failures
        self._items: list[ScoreItem] = []
        self._queue: deque[range] = deque()
        self._scores: list[Score] = []
        self._failures = 0
        self._lost_once: set[int] = set()

    def add(self, items: Sequence[ScoreItem]) -> None:
        """Add the completions of one prompt."""
        if items:
            self._queue.append(range(len(self._items), len(self._items) + len(items)))
        self._items.extend(items)
        self._scores.extend([Score.from_failure("unscored")] * len(items))

    def step(self, wait_s: float = 0.0) -> bool:
        """Send queued units to workers, and receive finished scores.

        Args:
            wait_s: longest wait for an answer, in seconds.

        Returns:
            Whether scores are pending; False past ``max_failures``.

        Raises:
            UserError: under the conditions of ``RewardWorkers.wait_ready``.
        """
        # Refers to the owner's list, because dead workers are replaced there.
        workers = self._owner._workers
        if self._has_too_many_failures:
            return False
        for worker in list(workers):
            if worker.ready:
                take_chunk = self._take_concurrent_chunk if worker.awaits else self._take_chunk
                self._send(worker, take_chunk(worker))
        if not self._queue and not any(worker.pending for worker in workers):
            return False
        busy = [w for w in workers if w.pending or not w.ready]
        soonest = min(w.deadline for w in busy)
        wait([w.pipe for w in busy], timeout=min(max(soonest - time.monotonic(), 0.0), wait_s))
        for worker in busy:
            self._receive(worker)
        return True

    def finish(self) -> list[Score]:
        """Wait for all items, and return the scores in order; errors as in ``step``."""
        while self.step(math.inf):
            record_progress()
        self.cancel()
        return self._scores

    def cancel(self) -> None:
        """Abandon pending units: end each worker with a pending unit, and start a new worker."""
        for worker in [w for w in self._owner._workers if w.pending]:
            self._owner._replace(worker)

    @property
    def _has_too_many_failures(self) -> bool:
        return self._failures > self._max_failures

    def _take_chunk(self, worker: _Worker) -> list[range]:
        """Take the next units, scored in sequence, from the queue for an idle worker."""
        # Small chunks, so that the last chunks leave no worker idle for long.
        size = max(1, min(CHUNK, len(self._items) // (4 * len(self._owner._workers))))
        chunk: list[range] = []
        while self._queue and not worker.pending and sum(map(len, chunk)) < size:
            chunk.append(self._queue.popleft() if worker.takes_groups else self._take_unit())
        return chunk

    def _take_concurrent_chunk(self, worker: _Worker) -> list[range]:
        """Take units that fill a worker up to an equal share of all open completions."""
        ready = [w for w in self._owner._workers if w.ready]
        unanswered = sum(map(len, self._queue)) + sum(len(w.pending) for w in ready)
        share = min(self._owner._concurrency, math.ceil(unanswered / len(ready)))
        chunk: list[range] = []
        while self._queue and (taken := len(worker.pending) + len(chunk)) < share:
            # Send a completion alone after a lost process, because a second loss then identifies
            # the completion.
            together = [self._queue[0], *worker.pending, *chunk]
            if taken and any(unit.start in self._lost_once for unit in together):
                break
            chunk.append(self._take_unit())
        return chunk

    def _take_unit(self) -> range:
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
            # A full pipe cannot block: the worker is idle and reads, or reads on its own thread.
            worker.pipe.send([(unit, self._pickle_items(unit)) for unit in chunk])
        except (BrokenPipeError, ConnectionResetError):
            # The worker died while idle, so that no completion is the cause.
            if len(worker.pending) == len(chunk):
                self._put_back(worker)

    def _pickle_items(self, unit: range) -> list[bytes]:
        return [pickle.dumps(self._items[number]) for number in unit]

    def _set_deadline(self, worker: _Worker) -> None:
        items = len(worker.pending[0]) if worker.pending else 1
        # A worker that awaits completions cancels each completion itself, unless the worker hangs.
        slack_s = END_LIMIT_S if worker.awaits else 0.0
        worker.deadline = time.monotonic() + items * self._owner._clock_s + slack_s

    def _receive(self, worker: _Worker) -> None:
        if not worker.ready:
            self._owner._check_ready(worker)
            return
        while worker.pending:
            # Arrived answers count even after the deadline, because this process may poll late.
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
            traceback = ""
            if kind not in self._owner._reported:
                context = f", for {place}" if place else ""
                traceback = f"reward.function = {self._owner._spec}{context}: {scores[0].traceback}"
            self._owner._reported.add(kind)
            scores = [Score.from_failure("error", traceback)] * len(unit)
        self._failures += sum(score.failure is not None for score in scores)
        self._scores[unit.start : unit.stop] = scores

    def _time_out(self, worker: _Worker) -> None:
        if worker.awaits and len(worker.pending) > 1:
            # Any of the pending completions may hang.
            self._lost_once.update(unit.start for unit in worker.pending)
        else:
            unit = worker.pending.popleft()
            self._store_scores(unit, [Score.from_failure("timeout")] * len(unit))
        self._put_back(worker)

    def _replace_dead(self, worker: _Worker) -> None:
        code = _wait_for_exit_code(worker)
        if code == -signal.SIGPROF or (worker.awaits and len(worker.pending) > 1):
            self._time_out(worker)
            return
        unit = worker.pending[0]
        end = describe_exit(code)
        if unit.start in self._lost_once:
            solution = self._items[worker.pending.popleft().start].solution
            problem = f"the scoring process {end}, scoring the completion {solution!r:.300}"
            self._store_scores(unit, [Score.from_failure("error", problem)] * len(unit), end)
        # The first death may have another cause, such as the kernel's out-of-memory killer.
        self._lost_once.add(unit.start)
        self._put_back(worker)

    def _put_back(self, worker: _Worker) -> None:
        """Queue the pending units for other workers, and replace the worker."""
        self._queue.extendleft(reversed(worker.pending))
        worker.pending.clear()
        self._owner._replace(worker)


def _wait_for_exit_code(worker: _Worker) -> int | None:
    """Wait for the exit code; None: the worker has closed the pipe and still runs."""
    try:
        return worker.process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def build_environment() -> dict[str, str]:
    """Return this process's environment, with the same import paths."""
    # Give each worker one thread, because the workers share the processors.
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return {**os.environ, **threads, "PYTHONPATH": paths}

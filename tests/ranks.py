"""Real ranks for tests: processes on gloo that stay up between tests, since importing Megatron takes seconds.

def claim(rank, size, argument): ...      # a module-level function; the process group is up when it is called
results = ranks.run(4, claim, argument)   # one return value per rank; an exception on any rank fails the test
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NO_GROUP = "connectFullMesh failed"
"""What gloo says where a rank met a stranger at a port that it was told: tests run beside each other. Nothing of a test
has begun then."""

MOST_THREADS = 250
"""Of a rank. Hooks and autograd keep some process groups alive after a test, each with three threads that gloo wakes a
hundred times a second: hundreds of them slow everything down. Such ranks are started anew."""


def _serve(pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        function, arguments, rank, size, rendezvous = job
        # Megatron collects garbage with every checkpoint, which takes a quarter of a second with all that is imported.
        gc.collect()
        gc.freeze()
        try:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
            pipe.send((function(rank, size, *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                from megatron.core import parallel_state

                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()


def _threads(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


class RankPool:
    """Up to four processes that run a function as the ranks of one process group, again and again."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[Any]:
        try:
            return self._run(size, function, arguments, timeout)
        except AssertionError as error:
            if NO_GROUP not in str(error):
                raise
            return self._run(size, function, arguments, timeout)

    def _run(self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        if any(_threads(process.pid) > MOST_THREADS for process, _ in self._workers):
            self.close()
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = Path(folder, "rendezvous").as_posix()
            for rank, (_, pipe) in enumerate(self._workers[:size]):
                pipe.send((function, arguments, rank, size, rendezvous))
            return self._collect(size, time.monotonic() + timeout)

    def _collect(self, size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < size:
            for rank, (process, pipe) in enumerate(self._workers[:size]):
                if rank in results:
                    continue
                if pipe.poll(0.02):
                    try:
                        results[rank], error = pipe.recv()
                    except EOFError:
                        error = f"the process ended with exit code {process.exitcode}"
                elif time.monotonic() > deadline:
                    error = "no answer in time"
                else:
                    continue
                if error is not None:
                    self.close()  # the other ranks may hang in a collective with this one
                    raise AssertionError(f"rank {rank} of {size}: {error}")
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()

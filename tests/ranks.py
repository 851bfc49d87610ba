"""Real ranks for tests: processes on gloo, forked from one that has imported Megatron, which takes
seconds.

Where torch is built for CUDA, each is a fresh process: Megatron's import asks for CUDA, which a
fork cannot use after that. The environment variable RANKS_ARE, spawn or forkserver, chooses
otherwise.

def claim(rank, size, argument): ...      # a module-level function; the process group is up when it
is called results = ranks.run(4, claim, argument)   # one return value per rank; an exception on any
rank fails the test
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_dppo.parallel.meeting import LOOPBACK, open_store

IMPORTED = (
    "hypothesis",
    "pytest",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_dppo.eval",
    "megatron_dppo.report.render",
    "megatron_dppo.sft",
    "megatron_dppo.train",
    "tests.policies",
    "tests.steps",
    "torch.distributed.checkpoint",
)
"""What takes long to import, and starts no thread."""

STORE_TIMEOUT = timedelta(minutes=30)
"""More than any test takes: the pool has limits of its own."""
NO_GROUP = "connectFullMesh failed"
"""What gloo says where a rank met a stranger at a port that it was told: tests run beside each
other. Nothing of a test has begun then."""


def _be_a_rank(
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    size: int,
    rendezvous: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Megatron collects garbage with every checkpoint, which takes a quarter of a second with all
    # that is imported.
    gc.freeze()
    try:
        dist.init_process_group(
            "gloo", store=_meet(Path(rendezvous), rank, size), rank=rank, world_size=size
        )
        answer = (function(rank, size, *arguments), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    pipe.send(answer)
    pipe.recv()  # until all have answered: a rank that is gone ends what others still do with it
    os._exit(0)  # gloo's threads are not waited for


def _meet(place: Path, rank: int, size: int) -> Any:
    """A store of rank 0, which writes its port to a file. With a store in the file itself, which is
    looked at every 10 ms, two ranks take a tenth of a second longer to make the groups of a
    layout."""
    from torch.distributed import HashStore, TCPStore

    if size == 1:
        return HashStore()
    if rank == 0:
        store = open_store(LOOPBACK, STORE_TIMEOUT, size)
        draft = place.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.replace(place)
        return store
    while not place.exists():
        time.sleep(0.002)
    return TCPStore(LOOPBACK, int(place.read_text()), size, is_master=False, timeout=STORE_TIMEOUT)


def in_turn_on_a_rank(rank: int, size: int, calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [function(rank, size, *arguments) for function, *arguments in calls]


def forks() -> Any:
    """Processes that are forked from one which has imported everything, or fresh ones."""
    import torch

    default = "spawn" if torch.backends.cuda.is_built() else "forkserver"
    context: Any = multiprocessing.get_context(os.environ.get("RANKS_ARE", default))
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([*IMPORTED])
    return context


class RankPool:
    """Runs functions as the ranks of process groups."""

    def __init__(self) -> None:
        self._context = forks()

    def run(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0
    ) -> list[Any]:
        try:
            return self._run(size, function, arguments, timeout)
        except AssertionError as error:
            if NO_GROUP not in str(error):
                raise
            return self._run(size, function, arguments, timeout)

    def in_turn(
        self, size: int, *calls: tuple[Any, ...], timeout: float = 240.0
    ) -> list[list[Any]]:
        """Several calls, each a function and its arguments, in the same processes: a process takes
        as long to start as most calls take. The results of each call, one per rank. Of functions
        that leave nothing behind but what they return; their layouts may differ. Each may take
        ``timeout`` seconds.
        """
        return [
            list(of_call)
            for of_call in zip(
                *self.run(size, in_turn_on_a_rank, calls, timeout=len(calls) * timeout), strict=True
            )
        ]

    def _run(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        workers: list[tuple[BaseProcess, Connection]] = []
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = Path(folder, "rendezvous").as_posix()
            try:
                for rank in range(size):
                    ours, theirs = self._context.Pipe()
                    process = self._context.Process(
                        target=_be_a_rank,
                        args=(theirs, function, arguments, rank, size, rendezvous),
                    )
                    process.start()
                    theirs.close()
                    workers.append((process, ours))
                results = _collect(workers, time.monotonic() + timeout)
                for _, pipe in workers:
                    pipe.send(None)
                return results
            except BaseException:
                for process, _ in workers:
                    process.kill()  # they may hang in a collective
                raise
            finally:
                for process, pipe in workers:
                    process.join()
                    pipe.close()


def _collect(workers: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        for rank, (process, pipe) in enumerate(workers):
            if rank in results:
                continue
            if pipe.poll(0.02):
                try:
                    results[rank], error = pipe.recv()
                except EOFError:
                    process.join()
                    error = f"the process ended with exit code {process.exitcode}"
            elif time.monotonic() > deadline:
                error = "no answer in time"
            else:
                continue
            assert error is None, f"rank {rank} of {len(workers)}: {error}"
    return [results[rank] for rank in range(len(workers))]

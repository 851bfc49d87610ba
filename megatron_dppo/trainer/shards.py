"""Save a checkpoint's shards with Megatron: immediately, or in a background process."""

from __future__ import annotations

import inspect
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import FileChecksum
from megatron_dppo.parallel.world import World
from megatron_dppo.process.lifetime import set_parent_death_signal

_POLL_S = 0.05
_parent: int | None = None
"""Process whose end also ends forked children, while Megatron forks writers; else ``None``."""


def _end_with_parent() -> None:
    global _parent
    if _parent is not None:
        set_parent_death_signal(_parent)
        # A writer forks further processes, which must end with the writer.
        _parent = os.getpid()


os.register_at_fork(after_in_child=_end_with_parent)


@contextmanager
def _end_writers_with_rank() -> Iterator[None]:
    """Make processes that are forked in the block end with this process."""
    # Megatron's writers would outlive a killed rank.
    global _parent
    _parent = os.getpid()
    try:
        yield
    finally:
        _parent = None


class ShardSave:
    """The save of a checkpoint's shards. Construction and :meth:`finish` are collective.

    Args:
        state: sharded state, each rank with its part.
        folder: existing, empty folder.
        background: return before the files are written.
        limit_s: seconds for background files after :meth:`finish` starts to wait, shorter than the
            timeout of a collective.

    Raises:
        OSError, RuntimeError, CheckpointException: on every rank, if any rank could not write.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: Path,
        world: World,
        *,
        background: bool,
        limit_s: float,
    ) -> None:
        self.folder = folder
        self._limit_s = limit_s
        self._calls = AsyncCallsQueue()
        self._results = _Results(folder, world.rank)
        # Replace Megatron's queue, because the queue is a process that outlives a killed rank.
        filesystem_async._results_queue = self._results
        # Megatron has the argument from 0.19 on.
        parameters = inspect.signature(dist_checkpointing.save).parameters
        strategy = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
        request = dist_checkpointing.save(
            state, str(folder), validate_access_integrity=False, async_sharded_save=True, **strategy
        )
        with _end_writers_with_rank():
            if background:
                self._calls.schedule_async_request(request)
            else:
                self._raise_local(request.execute_sync)

    def is_written(self) -> bool:
        """Return whether this rank's files are written, so that :meth:`finish` does not wait."""
        calls = self._calls.async_calls
        return all(
            call.async_caller.is_current_async_call_done(blocking=False, no_dist=True)
            for call in calls
        )

    def finish(self) -> Mapping[str, FileChecksum]:
        """Wait for the files, and write the index of all shards. Collective.

        Returns:
            Checksums of this rank's files, by name.

        Raises:
            RuntimeError, CheckpointException: on every rank, if any rank could not write.
        """
        # The late rank reports first, because the limit is shorter than the timeout of a
        # collective.
        deadline = time.monotonic() + self._limit_s
        while not self.is_written() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not self.is_written():
            self._results.failure = RuntimeError(
                f"a rank's shards were not written within {self._limit_s} s"
            )
            for call in self._calls.async_calls:
                call.async_caller.close(abort=True)
        self._raise_local(
            lambda: self._calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
        )
        return self._results.checksums

    def _raise_local(self, write: Callable[[], object]) -> None:
        """Raise this rank's failure instead of Megatron's."""
        try:
            # Megatron gives its failures to a single rank.
            write()
        except CheckpointException as error:
            raise self._results.failure or error from error


class _Results:
    """Results of a rank's writer: Megatron's writer puts, and the rank takes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._file = folder / f".results_{rank}"
        self.checksums: dict[str, FileChecksum] = {}
        self.failure: Exception | None = None

    def put(self, results: Any) -> None:
        """Store Megatron's results, with the checksums of the rank's files."""
        files = sorted(self._folder.glob(f"__{self._rank}_*"))
        self._file.write_bytes(
            pickle.dumps((results, {file.name: FileChecksum.from_file(file) for file in files}))
        )

    def get_nowait(self) -> Any:
        """Return Megatron's results, or the exception that ended the writer."""
        if self._file.exists():
            results, self.checksums = pickle.loads(self._file.read_bytes())
            self._file.unlink()
        else:
            results = self.failure or RuntimeError(
                "the process that wrote a rank's shards was ended"
            )
        if isinstance(results, Exception):
            self.failure = results
        return results

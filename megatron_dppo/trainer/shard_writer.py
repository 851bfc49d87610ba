"""Writing a checkpoint's shards in Megatron's format: at once, or by a forked process while training goes on.

Megatron plans what each rank writes, and into which files; the files themselves are written here, by a thread for each,
with checksums taken on the way. Megatron 0.16 forks a process for each instead, which nobody ends where the rank is
killed.

A fork has the state as it was when it was made, since memory is copied when it is written to: tensors on a GPU are
copied to the host before, those on the host when training first changes them.

CUDA does not survive a fork: in the child nothing may be freed that belongs to it. The child drops no tensor, ends
without destructors, and collects no garbage, among which tensors, events or handles of the trainer may be.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dppo.bridge.checkpoint_folder import Block, BlockWriter
from megatron_dppo.errors import UserError
from megatron_dppo.models.pinned import offsets_of, pinned_buffer
from megatron_dppo.process.lifetime import die_with

Bucket = tuple[str, str, tuple[Sequence[tuple[Any, Any]], Sequence[tuple[Any, torch.Tensor]]]]
"""Content of a file for Megatron: its path, its name, and items with bytes and with tensors."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's shards."""

    results: Mapping[int, Sequence[WriteResult]]
    """Megatron's results of each file."""
    blocks: Mapping[str, Sequence[Block]]
    """The checksums of each file, by its name."""


class Stage:
    """Host memory that tensors of a checkpoint are copied to from a GPU, as large as the largest checkpoint so far.

    Megatron would copy each tensor into a block of torch's pinned memory, which takes up to twice as much. A forked
    process reads the same memory: only one checkpoint at a time has it.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def copy(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Copy the tensors that are on a GPU, and wait for all copies. Tensors of the host stay as they are."""
        on_device = [tensor for _, _, (_, found) in buckets for _, tensor in found if tensor.device.type == "cuda"]
        if not on_device:
            return list(buckets)
        offsets, size = offsets_of(on_device)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # before there is another
            try:
                self._buffer = pinned_buffer(size, on_device[0].device, shared=True)
            except UserError:  # the copies then wait for staging, and the checkpoint is the same
                self._buffer = pinned_buffer(size, torch.device("cpu"), shared=True)
        memory, starts = self._buffer.numpy(), iter(offsets)

        def staged(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cuda":
                return tensor
            start = next(starts)
            if not tensor.nbytes:  # a buffer cannot give nothing
                return tensor.cpu()
            # With a storage of its own: ``torch.save`` writes the whole storage of a tensor.
            slot = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            return slot.view(tensor.shape).copy_(tensor, non_blocking=True)

        copied: list[Bucket] = [
            (path, name, (data, [(item, staged(tensor)) for item, tensor in tensors]))
            for path, name, (data, tensors) in buckets
        ]
        torch.cuda.synchronize(on_device[0].device)
        return copied


class ShardWriter:
    """One checkpoint's shards on their way to the disk. Made, and finished, by all ranks together.

    Args:
        state: sharded, each rank its own part.
        folder: exists.
        background: whether to come back before they are written.
        durable: whether shards count as written only once the disk itself has them.
        limit_s: how long a rank's shards may take in the background, once they are waited for; less than other ranks
            wait for it in a collective, so that this rank reports first.
        stage: of the checkpoint before, which must be finished.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: Path,
        *,
        background: bool,
        durable: bool = True,
        limit_s: float | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.folder = folder
        self._stage = stage or Stage()
        # Megatron would start a process that hands over what writers say, and that outlives a rank which is killed. A
        # queue within this process will do.
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        filesystem_async._results_queue = self._said
        parameters = inspect.signature(dist_checkpointing.save).parameters
        strategy = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}  # from 0.19 on
        self._request: AsyncRequest = dist_checkpointing.save(
            state, str(folder), validate_access_integrity=False, async_sharded_save=True, **strategy
        )
        self._background, self._durable, self._limit_s = background, durable, limit_s
        self._child: BaseProcess | None = None
        if background and self._request.async_fn is not None:
            self._fork()

    def _fork(self) -> None:
        buckets = self._on_host()
        context = multiprocessing.get_context("fork")
        self._pipe: Connection
        self._pipe, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_write_and_tell, args=(buckets, self._durable, theirs, os.getpid()))
        collecting = gc.isenabled()
        gc.disable()  # from before the fork on: the child allocates before it gets to a line of ours
        try:
            child.start()
        finally:
            if collecting:
                gc.enable()
        self._child = child
        theirs.close()

    def _on_host(self) -> list[Bucket]:
        """Buckets of this rank, copied off its GPU."""
        return self._stage.copy(self._request.async_fn_args[1])

    def written(self) -> bool:
        """Whether :meth:`finish` would not have to wait for this rank's shards."""
        return self._child is None or self._pipe.poll()

    def finish(self) -> Mapping[str, Sequence[Block]]:
        """Wait for what is being written, and write the index of all shards. Collective.

        Returns:
            The checksums of this rank's files, by their names.

        Raises:
            OSError, RuntimeError, CheckpointException: on every rank, where one could not write; there it says why.
        """
        outcome = self._outcome()
        self._said.put(outcome.results if isinstance(outcome, _Written) else outcome)
        try:
            for finalize in self._request.finalize_fns:  # one of them compares what all ranks have to say
                finalize()
        except CheckpointException as error:
            raise outcome if isinstance(outcome, Exception) else error from None
        return outcome.blocks if isinstance(outcome, _Written) else {}

    def _outcome(self) -> _Written | Exception | None:
        """None of a rank that has nothing to write."""
        if self._request.async_fn is None:
            return None
        if self._child is not None:
            return self._outcome_of(self._child)
        try:
            return _write(self._on_host(), durable=self._durable)
        except Exception as error:
            return error

    def _outcome_of(self, child: BaseProcess) -> Any:
        try:
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv()
            child.kill()
            return RuntimeError(f"a rank's shards were not written within {self._limit_s} s")
        except EOFError:
            return RuntimeError("the process that wrote a rank's shards was ended")
        finally:
            child.join()


def _write_and_tell(buckets: Sequence[Bucket], durable: bool, outcome: Connection, parent: int) -> None:
    """The forked process, from its first line to its last."""
    die_with(parent)
    gc.freeze()  # from whoever collects by name
    try:
        outcome.send(_write(buckets, durable=durable))
    except Exception as error:
        outcome.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(0)  # what else the rank would do at its end is not for its copy


def _write(buckets: Sequence[Bucket], *, durable: bool) -> _Written:
    """Write files side by side: checksums and the disk leave the interpreter to the other threads."""
    # Torch takes a checksum of each tensor as well, which costs as much as ours, and which no reader of these files
    # looks at: neither torch's nor an unzip, for they are many archives in a row. Newer torch keeps the wish by thread.
    theirs = torch.serialization.get_crc32_options()
    set_theirs = torch.serialization.set_crc32_options
    try:
        with ThreadPoolExecutor(max(len(buckets), 1), initializer=set_theirs, initargs=(False,)) as pool:
            files = list(pool.map(partial(_write_file, durable=durable), buckets))
    finally:
        set_theirs(theirs)
    results = {number: written for number, (written, _) in enumerate(files)}
    return _Written(results, {name: blocks for (_, name, _), (_, blocks) in zip(buckets, files, strict=True)})


def _write_file(bucket: Bucket, *, durable: bool) -> tuple[list[WriteResult], list[Block]]:
    path, name, (objects, tensors) = bucket
    file, results = BlockWriter(Path(path)), []
    try:
        for item, data in (*objects, *tensors):
            if isinstance(data, torch.Tensor):
                torch.save(data, cast(IO[bytes], file))
            else:
                file.write(data.getbuffer())
            start, length = file.end_block()
            results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
    finally:
        file.close(durable=durable)
    return results, file.blocks

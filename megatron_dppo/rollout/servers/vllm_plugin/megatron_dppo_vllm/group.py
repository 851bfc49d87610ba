"""The server's end of a process group for weights; the sender is rank 0.

It is built as SGLang builds its own, behind a store of the sender, so that one sender serves both
kinds of server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _new_process_group_helper, _world


class ReceiverGroup:
    """One group; it returns once all of its ranks have joined.

    Args:
        name: never used before in this process.
        host, port: of the sender's store.
        backend: ``gloo`` or ``nccl``.
        rank: of this process in the group.
        size: ranks in the group, the sender included.
        timeout_s: how long joining, and one bucket, may take.
        device: where buckets arrive.

    Raises:
        RuntimeError: the sender is not there; or vLLM was started so that NCCL would split the
            group off its own.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        port: int,
        backend: str,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        if backend == "nccl" and _get_default_group().bound_device_id is not None:
            raise RuntimeError(
                "the group would be split off vLLM's: set VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0 for it"
            )
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._store = dist.TCPStore(
            host, port, size, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        with _disable_watchdog():
            self._group, _ = _new_process_group_helper(
                size,
                rank,
                [],
                dist.Backend(backend),
                dist.PrefixStore(name, self._store),
                group_name=name,
                timeout=self._timeout,
            )
        _world.pg_group_ranks[self._group] = {other: other for other in range(size)}

    def receive(self, size: int) -> torch.Tensor:
        """So many bytes from the sender, ``[size]``, uint8.

        Raises:
            RuntimeError: the sender is gone, or silent for too long.
        """
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([flat], options).wait(self._timeout)
        return flat

    def close(self) -> None:
        """Leave, whatever state the group is in. Others who wait in it find it broken."""
        with suppress(RuntimeError):  # what is broken already need not be broken off
            self._group.abort()  # destroying alone may wait for a peer that is gone
        dist.destroy_process_group(self._group)


@contextmanager
def _disable_watchdog() -> Iterator[None]:
    """NCCL groups made meanwhile have no watchdog, which would end the worker where the trainer
    breaks off a bucket."""
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before

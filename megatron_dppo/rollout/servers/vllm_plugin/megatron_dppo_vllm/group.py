"""Server's end of a process group for weights; the sender is rank 0.

The group is built like SGLang's, with a store of the sender, so that the same sender serves both
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
    """Membership in a group; construction returns after all ranks have joined.

    Args:
        name: name not used before in this process.
        host: host of the sender's store.
        port: port of the sender's store.
        backend: ``gloo`` or ``nccl``.
        size: number of ranks, including the sender.
        timeout_s: seconds for joining, and for each bucket.
        device: destination device of buckets.

    Raises:
        RuntimeError: the sender is absent, or vLLM's settings would make NCCL split the group off
            vLLM's group.
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
        """Receive ``size`` bytes from the sender: [size], uint8.

        Raises:
            RuntimeError: the sender is gone, or silent for too long.
        """
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([flat], options).wait(self._timeout)
        return flat

    def close(self) -> None:
        """Leave the group in any state. Other waiting ranks find the group broken."""
        # A broken group need not be aborted.
        with suppress(RuntimeError):
            # Abort first, because destroying alone may wait for a dead peer.
            self._group.abort()
        dist.destroy_process_group(self._group)


@contextmanager
def _disable_watchdog() -> Iterator[None]:
    """Create NCCL groups without a watchdog."""
    # A watchdog would end the worker if the trainer aborts a bucket.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before

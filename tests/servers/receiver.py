"""One rank of a group for weights, in a process of its own. Light to import: it is spawned for every test."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper


def serve(pipe: Connection) -> None:
    """A server's rank: joins, receives, and says what became of it."""
    torch.set_num_threads(1)
    group: Any = None
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        try:
            if not isinstance(order, int):
                name, host, port, rank, size = order
                prefix = dist.PrefixStore(name, dist.TCPStore(host, port, size, timeout=timedelta(seconds=60)))
                group, _ = _new_process_group_helper(
                    size, rank, [], dist.Backend("gloo"), prefix, group_name=name, timeout=timedelta(seconds=60)
                )
                pipe.send(None)
            else:
                flat = torch.empty(order, dtype=torch.uint8)
                options = dist.BroadcastOptions()
                options.rootRank = 0
                group.broadcast([flat], options).wait()
                pipe.send(flat.numpy().tobytes())
        except RuntimeError as error:
            pipe.send(error)

"""One rank of a server, as far as weights go, in a process of its own. Light to import: tests spawn
it."""

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
    device = torch.device("cpu")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        try:
            if not isinstance(order, int):
                name, host, port, rank, size, backend = order
                device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
                prefix = dist.PrefixStore(
                    name, dist.TCPStore(host, port, size, timeout=timedelta(seconds=60))
                )
                group, _ = _new_process_group_helper(
                    size,
                    rank,
                    [],
                    dist.Backend(backend),
                    prefix,
                    group_name=name,
                    timeout=timedelta(seconds=60),
                )
                pipe.send(None)
            else:
                flat = torch.empty(order, dtype=torch.uint8, device=device)
                group.broadcast(flat, 0).wait()
                pipe.send(flat.cpu().numpy().tobytes())
        except RuntimeError as error:
            pipe.send(error)

"""Rendezvous of the ranks. A run on one machine is unreachable from other machines.

A ``TCPStore`` listens on all addresses, unless given a socket that already listens. Ranks trust the
contents of the store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LISTENER = "MEGATRON_DPPO_LISTENER"
"""Environment variable with the descriptor of rank 0's socket. The launcher holds the port from the
start, so that no other process takes the port."""
LOST_CONTACT = "contact with another rank was lost"
"""Start of an error that is not a timeout."""


def is_single_node(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks are on this node."""
    world = environ.get("WORLD_SIZE", "1")
    return (
        world in ("1", environ.get("LOCAL_WORLD_SIZE"))
        or environ.get("SLURM_STEP_NUM_NODES") == "1"
    )


def is_loopback(address: str) -> bool:
    """Return whether no other machine can reach an address."""
    return address.startswith("127.") or address == "::1"


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Open a socket that listens on one address; port 0: any free port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def open_store(host: str, timeout: timedelta, size: int | None = None) -> dist.TCPStore:
    """Open a store in this process for clients that reach it at ``host``."""
    import torch.distributed as dist

    # Off loopback, the store listens on all addresses.
    if not is_loopback(host):
        return dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    return _create_store(open_listener(host), timeout, size)


def build_rendezvous_args(environ: Mapping[str, str], timeout: timedelta) -> dict[str, object]:
    """Return the rendezvous arguments of ``init_process_group``."""
    import torch.distributed as dist

    if (
        "RANK" not in environ
        or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        or not is_single_node(environ)
    ):
        # Without arguments torch finds the rendezvous under torchrun and on several machines.
        return {}
    rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size == 1:
        # A single rank needs no network.
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if rank:
        store = dist.TCPStore(LOOPBACK, port, size, is_master=False, timeout=timeout)
    else:
        given = environ.get(LISTENER)
        listener = socket.socket(fileno=int(given)) if given else open_listener(LOOPBACK, port)
        store = _create_store(listener, timeout, size)
    return {"store": store, "rank": rank, "world_size": size}


def find_loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if unknown."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def _create_store(listener: socket.socket, timeout: timedelta, size: int | None) -> dist.TCPStore:
    import torch.distributed as dist

    host, port, *_ = listener.getsockname()
    os.set_inheritable(listener.fileno(), False)
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

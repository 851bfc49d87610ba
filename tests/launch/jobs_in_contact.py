"""Jobs whose ranks are in real exchanges when one of them is ended by a signal, for the launcher's
tests."""

import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.parallel.world import World, initialize

WHILE_OTHERS_WAIT_S = 0.3


def _world() -> World:
    return initialize(LayoutConfig(tp=2), seed=1, timeout_s=60.0)


def _end(number: signal.Signals) -> None:
    time.sleep(WHILE_OTHERS_WAIT_S)
    os.kill(os.getpid(), number)
    time.sleep(60)


def killed_before_a_barrier(config: Config) -> None:
    """The leader waits, and would blame ``rollout.timeout_s``."""
    world = _world()
    if world.rank == 1:
        _end(signal.SIGKILL)
    world.barrier("part")


def terminated_before_a_sum(config: Config) -> None:
    """The rank that is left learns of it in a collective of training."""
    world = _world()
    if world.rank == 0:
        _end(signal.SIGTERM)
    with world.training("a sum"):
        dist.all_reduce(torch.ones(1))


def say_where_it_listens(config: Config) -> None:
    """Write the addresses at which this rank listens, once all stores and groups are there."""
    from megatron_dppo.observe.timers import PhaseTimers
    from megatron_dppo.observe.watchdog import Watchdog

    world = _world()
    watchdog = Watchdog(world, PhaseTimers(), 60.0, 60.0)
    dist.all_reduce(torch.ones(1))
    sockets = [
        socket
        for socket in psutil.Process().net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    ]
    launcher = [
        socket
        for socket in psutil.Process(os.getppid()).net_connections("inet")
        if not socket.raddr
    ]
    Path(config.run.dir, f"rank{world.rank}").write_text(
        " ".join(at.laddr.ip for at in [*sockets, *launcher])
    )
    world.barrier("look at its sockets")
    watchdog.close()

"""From a run's settings to servers that serve it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World
from megatron_dppo.rollout.servers.allocation import SECRET
from megatron_dppo.rollout.servers.custom import conversations_of
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.rollout.servers.fleet import Fleet
from megatron_dppo.rollout.servers.handles import Handles
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import new_secret
from megatron_dppo.rollout.servers.nccl import loaded
from megatron_dppo.rollout.servers.place import servers_to_start
from megatron_dppo.rollout.servers.transports import Collective, Disk, Transport

BUCKET_MIB = {"cuda": 512, "cpu": 30}


def open_servers(config: Config, world: World, shape: PolicyShape, say: Callable[[str], None]) -> ServerEngine:
    """Start the servers of ``rollout.launch``, or meet those of ``rollout.servers``, and wait for them. Collective.

    Args:
        config: of the run.
        world: the ranks.
        shape: of the policy.
        say: takes words for the log, on the leader.

    Raises:
        UserError: on every rank, if the servers cannot serve this run; none is left behind then.
    """
    # One word tells this run's versions from another's, and one secret opens its servers.
    run, secret = world.from_leader(lambda: (new_secret()[:8], os.environ.get(SECRET) or None))
    starts = config.rollout.launch.count > 0
    ours = world.from_leader(new_secret) if starts else ""
    secret = ours or secret
    processes = world.together(lambda: servers_to_start(config, ours) if starts and world.leads else [])
    http = Http()
    fleet = None
    by_nccl = config.rollout.sync.transport == "collective" and world.device.type == "cuda"
    our_nccl = loaded() if by_nccl else None
    if world.leads:
        fleet = Fleet(
            config,
            http,
            architecture=shape.architecture,
            secret=secret,
            processes=processes,
            say=say,
            our_nccl=our_nccl,
        )
    conversations = None
    try:
        conversations = world.together(lambda: conversations_of(config), what="import of a conversation")
        transport = _transport(config, world, http, shape, run, our_nccl)
        return ServerEngine(config, world, http, fleet, transport, conversations, run=run, secret=secret, say=say)
    except BaseException:
        http.close()
        if conversations is not None:
            conversations.close()
        if fleet is not None:
            fleet.close()
        raise


def _transport(
    config: Config, world: World, http: Http, shape: PolicyShape, run: str, our_nccl: str | None
) -> Transport:
    sync = config.rollout.sync
    bucket_mib = sync.bucket_mib or BUCKET_MIB[world.device.type]
    if sync.transport == "collective":
        return Collective(http, world, run=run, bucket_mib=bucket_mib, timeout_s=sync.timeout_s, our_nccl=our_nccl)
    if sync.transport == "tensor":
        return Handles(http, world, bucket_mib=bucket_mib)
    folder = Path(sync.folder or Path(config.run.dir) / "sync")
    return Disk(http, world, shape=shape, model=config.model, folder=folder)

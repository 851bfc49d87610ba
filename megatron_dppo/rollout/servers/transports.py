"""Transports of weights to the servers: a process group, files, and, for adapters, a request.

- A transport only moves tensors. ``sync.py`` pauses servers, opens and closes the update, and
  repeats failed updates.
- Every transport is collective, and reports failed servers on every rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import torch

from megatron_dppo.bridge.export import describe_policy, write_stream
from megatron_dppo.bridge.hf_directory import (
    build_adapter_config,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
)
from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.config import Config, ModelConfig
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World
from megatron_dppo.rollout.engine import WeightSource
from megatron_dppo.rollout.servers.client import ServerClient, call_servers
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import sync_folder, uses_file_sync
from megatron_dppo.rollout.servers.sender import Sender, SyncFailedError, find_local_address

BUCKET_MIB = {"cuda": 512, "cpu": 30}
"""Default of ``rollout.sync.bucket_mib``, by the weights' device."""


class Transport(Protocol):
    """Transport of weights to all servers."""

    def send(self, clients: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        """Make every server, paused with an open update, load every tensor; return the bytes sent
        to each server. Collective.

        Raises:
            SyncFailedError: on every rank.
        """
        ...

    def close(self) -> None:
        """Release this rank's resources. Not collective."""
        ...


class CollectiveTransport:
    """Transport through a process group per pipeline stage: the stage's first rank, then all ranks
    of all servers.

    - Stages send in turn, since a server accepts a single update at a time.
    - Within a stage, the next bucket is gathered and copied while a bucket is being sent.
    """

    def __init__(
        self,
        http: Http,
        world: World,
        *,
        run: str,
        bucket_mib: int,
        timeout_s: float,
    ) -> None:
        self._http = http
        self._world = world
        self._run = run
        self._bucket_mib = bucket_mib
        self._timeout_s = timeout_s
        self._sender: Sender | None = None
        self._joined: list[ServerClient] = []
        self._groups = count()

    def send(self, clients: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        try:
            # The same condition on every rank, because all ranks have the same lists.
            if self._joined != list(clients):
                self.close()
                _run_by_stage(self._world, lambda: self._join(clients))
                self._joined = list(clients)
            return _run_by_stage(
                self._world,
                lambda: self._send_stage(source, version if self._world.is_last_stage else None),
            )
        except SyncFailedError:
            self.close()
            raise

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._joined = []

    def _join(self, clients: Sequence[ServerClient]) -> int:
        number = next(self._groups)
        if self._world.shard_group_rank == 0:
            self._sender = Sender(
                self._http,
                clients,
                name=f"{self._run}-{self._world.pp_rank}-{number}",
                host=find_local_address(client.url for client in clients),
                device=self._world.device,
                timeout_s=self._timeout_s,
            )
        return 0

    def _send_stage(self, source: WeightSource, version: str | None) -> int:
        """Send the stage's buckets, with ``version`` in the last; return the number of bytes.
        Collective over the stage."""
        buckets = source(to=Consumers.STAGE_LEADERS, bucket_mib=self._bucket_mib)
        if self._sender is None:
            for _ in buckets:
                pass
            return 0
        sent = 0
        bucket = next(buckets, None)
        try:
            while bucket is not None:
                # Copied first, because the next bucket may reuse the memory; and only the next
                # request shows whether this bucket is the last.
                staged = self._sender.stage(bucket)
                sent += staged.flat.nbytes
                bucket = next(buckets, None)
                self._sender.send(staged, version if bucket is None else None)
            self._sender.wait_loaded()
        finally:
            # Even after an error, because the stage's other ranks would wait.
            for _ in buckets:
                pass
        return sent


class DiskTransport:
    """Transport through a directory of the policy, or of PEFT adapters, written by rank 0 on a file
    system shared with the servers."""

    def __init__(
        self,
        http: Http,
        world: World,
        *,
        shape: PolicyShape,
        model: ModelConfig,
        folder: Path,
        adapter: bool,
    ) -> None:
        self._http = http
        self._world = world
        self._folder = folder
        self._adapter = adapter
        dtype = model.torch_dtype
        self._plan = (
            plan_adapter_file(shape, model.lora, dtype) if adapter else plan_files(shape, dtype)
        )
        self._describe: Callable[[Path], None] = (
            partial(write_adapter_config, base=model.path, lora=model.lora)
            if adapter
            else partial(describe_policy, model.folder, dtype=dtype)
        )

    def send(self, clients: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        place = self._folder.absolute() / version
        buckets = source(to=Consumers.LEADER) if self._world.is_in_first_shard_group else iter(())
        write_stream(buckets, self._world, self._plan, place, self._describe, "rollout.sync.folder")
        try:
            problems = call_servers(
                self._world, self._http, clients, lambda client: self._load(client, place, version)
            )
        finally:
            # Not reused after a failure: each update writes a new directory.
            if self._world.is_rank0:
                shutil.rmtree(place, ignore_errors=True)
        if problems:
            raise SyncFailedError(problems, "a server did not load the written weights")
        return self._plan.total_bytes

    def close(self) -> None:
        pass

    async def _load(self, client: ServerClient, place: Path, version: str) -> None:
        if self._adapter:
            await client.load_adapter_from(place)
        else:
            await client.update_from_disk(place, version)


class AdapterTransport:
    """Transport of adapters in a request from rank 0 to each server, which already has the rest
    of the policy."""

    def __init__(self, http: Http, world: World, *, shape: PolicyShape, model: ModelConfig) -> None:
        self._http = http
        self._world = world
        self._config = build_adapter_config(model.path, model.lora)
        self._plan = plan_adapter_file(shape, model.lora, model.torch_dtype)

    def send(self, clients: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        tensors: dict[str, torch.Tensor] = {}
        for bucket in source(to=Consumers.LEADER) if self._world.is_in_first_shard_group else ():
            # The next bucket may reuse the memory.
            tensors |= {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket.items()
            }
        problems = call_servers(
            self._world,
            self._http,
            clients,
            lambda client: client.load_adapter(self._config, tensors),
        )
        if problems:
            raise SyncFailedError(problems, "a server did not load the adapters")
        return self._plan.total_bytes

    def close(self) -> None:
        pass


def open_transport(
    config: Config,
    world: World,
    http: Http,
    shape: PolicyShape,
    *,
    run: str,
) -> Transport:
    """Create the transport of ``rollout.sync``; ``run``: part of process groups' names."""
    sync = config.rollout.sync
    if sync.adapter and not uses_file_sync(config.rollout):
        return AdapterTransport(http, world, shape=shape, model=config.model)
    bucket_mib = sync.bucket_mib or BUCKET_MIB[world.device.type]
    if sync.transport == "collective" and not sync.adapter:
        return CollectiveTransport(
            http, world, run=run, bucket_mib=bucket_mib, timeout_s=sync.timeout_s
        )
    folder = sync_folder(config)
    return DiskTransport(
        http, world, shape=shape, model=config.model, folder=folder, adapter=sync.adapter
    )


def _run_by_stage(world: World, attempt: Callable[[], int]) -> int:
    """Run ``attempt`` on rank 0's copy of the policy, for each pipeline stage in turn. Collective.

    Args:
        attempt: returns the number of bytes sent. An error ends the update.

    Returns:
        Number of bytes, summed over ranks.

    Raises:
        SyncFailedError: on every rank: servers failed for a rank.
        Exception: on every rank: any further error of ``attempt``.
    """
    total = 0
    for stage in range(world.layout.pp):
        mine: int | Exception = 0
        if stage == world.pp_rank and world.is_in_first_shard_group:
            try:
                mine = attempt()
            except Exception as error:
                mine = error
        found = world.gather(mine)
        failed = [each for each in found if isinstance(each, SyncFailedError)]
        # Raised first, because only failed servers can be retried.
        if other := next(
            (each for each in found if isinstance(each, Exception) and each not in failed), None
        ):
            raise other
        if failed:
            problems = {url: problem for each in failed for url, problem in each.problems.items()}
            raise SyncFailedError(problems, failed[0].problem)
        total += sum(each for each in found if isinstance(each, int))
    return total

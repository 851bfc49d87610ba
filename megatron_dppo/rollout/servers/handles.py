"""Buckets that servers on this machine read out of the trainer's own memory: what travels are handles to it.

On a GPU a server's rank opens memory of the very GPU that it runs on, so that every rank of the trainer that has a
server's rank on its GPU holds each bucket. Without CUDA the same handles are to POSIX shared memory, which any rank can
open: the ranks of a server then take them from the trainer's ranks in turn.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.multiprocessing import reductions

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rollout.engine import Bucket, WeightSource
from megatron_dppo.rollout.servers.api import Handle, Manifest, ServerApi
from megatron_dppo.rollout.servers.beats import while_leader_waits
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.place import visible_gpus
from megatron_dppo.rollout.servers.sender import fill, gathered
from megatron_dppo.rollout.servers.transports import Moved, Sent

HANDLE = 7
"""Where the words of the handle begin in what torch makes of a tensor on a GPU; the device's number is before them."""

Taker = tuple[str, int]
"""A server's rank: the server's URL, and the rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank of the trainer is."""

    machine: str
    gpu: str | None
    """As CUDA_VISIBLE_DEVICES would name it; None without CUDA."""


class Handles:
    """Every rank of the trainer lays buckets out in its memory; the leader tells servers where they lie.

    While servers load a bucket, the next one is gathered and laid out. A bucket's memory is its own and never used
    again: a server answers once its first rank has loaded a bucket, and the copies of its other ranks may still be on
    their way. Torch keeps memory that was handed out until whoever opened it has let go of it, which a receiver does
    once its stream has come so far.
    """

    def __init__(self, http: Http, world: World, *, bucket_mib: int) -> None:
        self._http, self._world, self._bucket_mib = http, world, bucket_mib
        self._loading: Future[dict[str, str]] | None = None
        """On the leader: what goes wrong at servers that load a bucket, by URL."""

    def send(self, apis: Sequence[ServerApi], source: WeightSource, version: str) -> Sent:
        givers = self._givers(apis)
        mine = [(api, rank) for api in apis for rank in range(api.ranks) if givers[api.url, rank] == self._world.rank]
        buckets = source(to=Consumers.EVERYONE, bucket_mib=self._bucket_mib)
        bucket, moved, problems = next(buckets, None), Moved(), dict[str, str]()
        laid_out: list[torch.Tensor] = []
        loading = False
        try:
            while bucket is not None and not problems:
                if self._world.leads:
                    moved.count(bucket)
                handles, failure = self._hand_out(bucket, mine, laid_out)
                bucket = next(buckets, None)  # servers load the one before meanwhile
                problems = self._loaded() if loading else {}
                del laid_out[:-1]
                offered = self._offered(handles, failure)
                if loading := not problems:
                    self._load(apis, offered, version if bucket is None else None)
            problems = self._loaded() if loading else problems
        finally:
            for _ in buckets:  # the others of the replica wait for whoever does not take it to the end
                pass
        return Sent(problems, "a bucket was not loaded" if problems else None, self._world.from_leader(lambda: moved))

    def close(self) -> None:
        pass

    def _givers(self, apis: Sequence[ServerApi]) -> dict[Taker, int]:
        """See :func:`givers`. Collective; what it raises is raised on every rank."""
        device = self._world.device
        gpu = None if device.type == "cpu" else visible_gpus(os.environ)[device.index]
        places = self._world.gather(Place(socket.gethostname(), gpu))
        return self._world.from_leader(lambda: givers(apis, places))

    def _hand_out(
        self, bucket: Bucket, to: Sequence[tuple[ServerApi, int]], laid_out: list[torch.Tensor]
    ) -> tuple[dict[Taker, Handle], Exception | None]:
        """Handles to a copy of the bucket, each to be opened once; or what went wrong. Not collective."""
        try:
            if not to:
                return {}, None
            flat = lay_out(bucket, self._world.device)
            laid_out.append(flat)
            manifest = Manifest.of(bucket)
            return {(api.url, rank): api.handle(manifest, shared(flat)) for api, rank in to}, None
        except Exception as error:
            return {}, error

    def _offered(self, handles: Mapping[Taker, Handle], failure: Exception | None) -> dict[Taker, Handle]:
        """What all ranks hand out. Collective.

        Raises:
            Exception: on every rank, what went wrong on one of them.
        """
        offered: dict[Taker, Handle] = {}
        for part, failed in self._world.gather((handles, failure)):
            if failed is not None:
                raise failed
            offered |= part
        return offered

    def _load(self, apis: Sequence[ServerApi], offered: Mapping[Taker, Handle], version: str | None) -> None:
        if self._world.leads:
            taken = {api.url: api.take([offered[api.url, i] for i in range(api.ranks)], version) for api in apis}
            self._loading = self._http.start(gathered(taken))

    def _loaded(self) -> dict[str, str]:
        """Wait until servers have loaded what they were told of; what went wrong, by URL. Collective."""

        def started() -> Future[dict[str, str]]:
            assert self._loading is not None
            return self._loading

        return while_leader_waits(self._world, started)


def givers(apis: Sequence[ServerApi], places: Sequence[Place]) -> dict[Taker, int]:
    """The rank of the trainer whose memory each server's rank opens.

    Args:
        apis: the servers.
        places: where each rank of the trainer is; this process is the first of them.

    Raises:
        UserError: there is none for one of them.
    """
    here = [rank for rank, place in enumerate(places) if place.machine == places[0].machine]
    found: dict[Taker, int] = {}
    for api in apis:
        if not _is_here(api.url):
            raise _unreachable(f"server {api.url} is on another machine than the run's first rank")
        for rank in range(api.ranks):
            if places[0].gpu is None:
                found[api.url, rank] = here[rank % len(here)]
                continue
            gpu = api.gpus[rank] if api.gpus else None
            of_it = [giver for giver in here if gpu is not None and places[giver].gpu == gpu]
            if not of_it:
                where = "an unknown GPU" if gpu is None else f"GPU {gpu}"
                raise _unreachable(
                    f"rank {rank} of server {api.url} is on {where}, and no rank of the trainer is there"
                )
            found[api.url, rank] = of_it[0]
    return found


def lay_out(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """The bucket's tensors one after the other in memory that can be handed out: [bytes], uint8."""
    size = sum(tensor.nbytes for tensor in bucket.values())
    if device.type == "cpu":
        flat = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_using_filename_cpu(size))
    else:
        flat = torch.empty(size, dtype=torch.uint8, device=device)
    fill(flat, bucket)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # whoever opens it waits for nothing
    return flat


def shared(flat: torch.Tensor) -> tuple[Any, ...]:
    """The words by which another process opens the memory of a flat tensor, once for each call.

    Without CUDA those of ``UntypedStorage._new_shared_filename_cpu``. With it the UUID of the device and, behind it,
    those of ``reductions.rebuild_cuda_tensor``: processes number their devices each in a way of its own.
    """
    if flat.device.type == "cpu":
        storage = flat.untyped_storage()
        words = storage._share_filename_cpu_()
        storage._shared_incref()  # until it is opened
        return tuple(words)
    _, words = reductions.reduce_tensor(flat)
    return str(torch.cuda.get_device_properties(flat.device).uuid), *words[HANDLE:]


def _is_here(url: str) -> bool:
    """Whether a URL's host is this machine: only then can a socket be bound to its address."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as trial:
                trial.bind(address)
    except OSError:
        return False
    return True


def _unreachable(problem: str) -> UserError:
    remedy = (
        "Have rollout.launch start the servers, on GPUs with rollout.colocated=true; or set it to collective or disk"
    )
    return UserError("rollout.sync.transport", "tensor", f"hands memory over where it lies: {problem}", remedy)

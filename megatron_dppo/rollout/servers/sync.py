"""Update of the servers' weights: pause, begin, buckets, end, flush, check, and then resume.

After a failure a server's weights are unknown. The server is reported and left paused, and receives
no request before the next successful update.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.parallel.world import World
from megatron_dppo.rollout.engine import Bucket, WeightSource
from megatron_dppo.rollout.servers.client import InFlight, ServerClient, call_servers
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sender import SyncFailedError
from megatron_dppo.rollout.servers.transports import Transport

SHA256_DIGITS = 64
"""Number of hex digits."""
ABORT_TIMEOUT_S = 15.0
"""Timeout in seconds for closing an update that failed elsewhere."""


@dataclass(slots=True)
class Timings:
    """Seconds of each part of a successful update, on rank 0."""

    pause: float = 0.0
    """Until every server is paused with an open update."""
    transfer: float = 0.0
    """From joining the first group to loading the last bucket."""
    end: float = 0.0
    """Closing the update, flushing caches, reading the version."""
    resume: float = 0.0
    bytes: int = 0
    """Bytes of tensors sent to each server."""


@dataclass(slots=True)
class Sync:
    """Updates of the servers in service. Every method is collective.

    Args:
        http: client for rank 0's requests.
        in_flight: fate of unfinished requests.
    """

    world: World
    http: Http
    transport: Transport
    in_flight: InFlight
    timings: Timings = field(default_factory=Timings)
    _without_weights: set[ServerClient] = field(default_factory=set)
    _without_cache: set[ServerClient] = field(default_factory=set)
    """Colocated servers without a cache since :meth:`release`; filled on rank 0 only."""

    def release(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Make colocated servers release their memory; return problems by URL."""

        async def release(client: ServerClient) -> None:
            if client not in self._without_cache:
                # Not rollout.sync.in_flight, because SGLang, paused in place, may still hold the
                # last batch, and would die on releasing the memory.
                await client.pause("retract")
                await client.release_memory()
                self._without_weights.add(client)
                self._without_cache.add(client)

        return self._call_servers(clients, release)

    def update(
        self,
        clients: Sequence[ServerClient],
        source: WeightSource,
        version: str,
        *,
        verify: bool,
    ) -> Mapping[str, str] | None:
        """Update servers to a version, and leave the servers paused.

        Args:
            source: weights of the version.
            verify: whether to compare checksums, if supported by the server.

        Returns:
            None if all servers have the version. Otherwise problems by URL of servers known to be
            at fault; servers without a problem can be tried again at once.
        """
        began = time.perf_counter()
        if problems := self._call_servers(clients, self._begin):
            return problems
        paused = time.perf_counter()
        digests = _Digests(source)
        try:
            sent = self.transport.send(clients, digests if verify else source, version)
        except SyncFailedError as failed:
            stuck = self._call_servers(
                [client for client in clients if client.url not in failed.problems], _abort_update
            )
            return {**stuck, **failed.problems} or {"the failed server is unknown:": failed.problem}
        loaded = time.perf_counter()
        if problems := self._call_servers(clients, lambda client: self._end(client, version)):
            return problems
        ended = time.perf_counter()
        if verify and (problems := self._verify(clients, digests.gather_all(self.world))):
            return problems
        self.timings = Timings(paused - began, loaded - paused, ended - loaded, bytes=sent)
        return None

    def abort(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Make the servers abort all requests and pause; return problems by URL."""
        return self._call_servers(clients, lambda client: client.pause("abort"))

    def resume(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Make the servers generate; return problems by URL."""
        began = time.perf_counter()

        async def resume(client: ServerClient) -> None:
            if client in self._without_cache:
                await client.resume_kv_cache()
                self._without_cache.remove(client)
            await client.resume()

        problems = self._call_servers(clients, resume)
        self.timings.resume = time.perf_counter() - began
        return problems

    async def _begin(self, client: ServerClient) -> None:
        await client.pause(self.in_flight)
        if client in self._without_weights:
            await client.resume_weights()
            self._without_weights.remove(client)
        try:
            await client.begin_update()
        except ServerError as error:
            if not error.alive:
                raise
            # An earlier client may have left an unfinished update.
            await client.abort_update()
            await client.begin_update()

    async def _end(self, client: ServerClient, version: str) -> None:
        await client.end_update(version)
        # Kept requests still need their cache.
        if self.in_flight != "keep":
            await client.flush()
        if (reported := await client.get_version()) != version:
            raise ServerError(
                client.url,
                f"reports weights of version {reported!r} after an update",
                alive=True,
            )

    def _verify(
        self,
        clients: Sequence[ServerClient],
        expected: Mapping[str, str],
    ) -> dict[str, str]:
        """Return problems of servers by URL: checksums that differ from the actor's, or from other
        servers with the same number of ranks.

        A checksum shorter than a SHA-256 comes from SGLang:

        - on CPU, a truncated SHA-256
        - on GPU, a checksum of another kind, comparable only between servers
        """
        on_cpu = self.world.device.type == "cpu"
        first: dict[int, Mapping[str, str]] = {}

        async def verify(client: ServerClient) -> None:
            seen = await client.get_checksums()
            # The first server with this number of ranks is the reference.
            others = first.setdefault(client.ranks, seen)
            for name, checksum in seen.items():
                known = on_cpu or len(checksum) == SHA256_DIGITS
                of_actor = expected.get(name.partition("@")[0], checksum)
                if known and not of_actor.startswith(checksum):
                    raise ServerError(
                        client.url,
                        f"holds another {name} than the actor after an update",
                        alive=True,
                    )
                if others.get(name) != checksum:
                    raise ServerError(
                        client.url,
                        f"holds another {name} than other servers after an update",
                        alive=True,
                    )

        return self._call_servers(clients, verify)

    def _call_servers(
        self,
        clients: Sequence[ServerClient],
        call: Callable[[ServerClient], Awaitable[None]],
    ) -> dict[str, str]:
        return call_servers(self.world, self.http, clients, call)


async def _abort_update(client: ServerClient) -> None:
    try:
        await asyncio.wait_for(client.abort_update(), ABORT_TIMEOUT_S)
    except TimeoutError:
        raise ServerError(
            client.url, f"hangs in an update that failed, for {ABORT_TIMEOUT_S:g} s", alive=False
        ) from None


class _Digests:
    """Stream of the actor's weights that records the SHA-256 in hex of every vector (norm)."""

    # Vectors suffice to distinguish versions, and on a GPU each hash waits for the device.

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._seen: dict[str, str] = {}

    def __call__(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        for bucket in self._source(to=to, bucket_mib=bucket_mib):
            for name, tensor in bucket.items():
                if tensor.dim() == 1:
                    data = tensor.detach().cpu().contiguous().view(torch.uint8)
                    self._seen[name] = hashlib.sha256(data.numpy()).hexdigest()
            yield bucket

    def gather_all(self, world: World) -> Mapping[str, str]:
        """Return all ranks' digests by Hugging Face name. Collective."""
        return {name: digest for seen in world.gather(self._seen) for name, digest in seen.items()}

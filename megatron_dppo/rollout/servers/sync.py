"""An update of the servers' weights: pause, begin, buckets, end, flush, check, and then resume.

It is not known which weights a server holds that fails in one of these. It is named and left
paused, and gets no request before an update has brought it up to date.
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
"""In hex."""
ABORT_TIMEOUT_S = 15.0
"""How long a server may take to close an update that failed elsewhere."""


@dataclass(slots=True)
class Timings:
    """Seconds of the parts of an update that succeeded, on the leader."""

    pause: float = 0.0
    """Until every server has paused and opened an update."""
    transfer: float = 0.0
    """From the first group that is joined to the last bucket that is loaded."""
    end: float = 0.0
    """Closing the update, flushing caches, reading the version back."""
    resume: float = 0.0
    bytes: int = 0
    """Bytes of tensors, to each server."""


@dataclass(slots=True)
class Sync:
    """Updates of servers that serve. Every method is collective.

    Args:
        world: the ranks.
        http: through which the leader speaks to the servers.
        transport: moves the tensors.
        in_flight: what becomes of unfinished requests.
    """

    world: World
    http: Http
    transport: Transport
    in_flight: InFlight
    timings: Timings = field(default_factory=Timings)
    _without_weights: set[ServerClient] = field(default_factory=set)
    _without_cache: set[ServerClient] = field(default_factory=set)
    """Colocated servers that gave their memory back; known to the leader."""

    def release(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Have colocated servers give their memory back; what went wrong, by URL."""

        async def release(client: ServerClient) -> None:
            if client not in self._without_cache:
                # Not as rollout.sync.in_flight says: nothing is in flight, and SGLang, paused in
                # place, may still hold the batch that ended last. It would end over that.
                await client.pause("retract")
                await client.release_memory()
                self._without_weights.add(client)
                self._without_cache.add(client)

        return self._call_servers(clients, release)

    def update(
        self, clients: Sequence[ServerClient], source: WeightSource, version: str, *, verify: bool
    ) -> Mapping[str, str] | None:
        """Bring servers to a version, and leave them paused.

        Args:
            clients: the servers.
            source: the weights.
            version: what they are to call them.
            verify: whether to compare checksums, where servers have them.

        Returns:
            None if all of them have it. Else what went wrong, by URL, as far as it is known whose
            fault it was; the others can be tried again at once.
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
            return {**stuck, **failed.problems} or {
                "nobody knows which server failed:": failed.problem
            }
        loaded = time.perf_counter()
        if problems := self._call_servers(clients, lambda client: self._end(client, version)):
            return problems
        ended = time.perf_counter()
        if verify and (problems := self._verify(clients, digests.gather_all(self.world))):
            return problems
        self.timings = Timings(paused - began, loaded - paused, ended - loaded, bytes=sent)
        return None

    def abort(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Have the servers break off what they are at, and pause; what went wrong, by URL."""
        return self._call_servers(clients, lambda client: client.pause("abort"))

    def resume(self, clients: Sequence[ServerClient]) -> Mapping[str, str]:
        """Have the servers generate; what went wrong, by URL."""
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
            await client.abort_update()  # of an update that somebody began, and did not end
            await client.begin_update()

    async def _end(self, client: ServerClient, version: str) -> None:
        await client.end_update(version)
        if self.in_flight != "keep":
            await client.flush()
        if (told := await client.get_version()) != version:
            raise ServerError(
                client.url,
                f"says that its weights are of version {told!r} after an update",
                alive=True,
            )

    def _verify(
        self, clients: Sequence[ServerClient], expected: Mapping[str, str]
    ) -> dict[str, str]:
        """Servers whose checksums are not the actor's, or not those of others with as many ranks,
        with the reason.

        A checksum that is shorter than a SHA-256 is SGLang's. On a CPU it is the beginning of one.
        On a GPU SGLang has a checksum of its own, which only tells whether servers hold the same.
        """
        on_cpu = self.world.device.type == "cpu"
        first: dict[int, Mapping[str, str]] = {}

        async def verify(client: ServerClient) -> None:
            seen = await client.get_checksums()
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
        self, clients: Sequence[ServerClient], call: Callable[[ServerClient], Awaitable[None]]
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
    """The actor's weights, with the SHA-256 in hex of every vector (norm) that has passed.

    That is enough to tell one version from another. On a GPU each hash waits for the device.
    """

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
        """By Hugging Face's names, of all ranks. Collective."""
        return {name: digest for seen in world.gather(self._seen) for name, digest in seen.items()}

"""The servers of a run, as its leader knows them: which serve, which are lost, and which have come back.

A server that is lost serves again only after the next update of the weights: until then nobody knows what it would
generate with. One that we started is killed and started again meanwhile; one that was given is asked, now and then,
whether it is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import nccl
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import DTYPES, base_command, server_urls
from megatron_dppo.rollout.servers.processes import ServerProcess, stop_all, wait_ready

ASK_AGAIN_S = 3.0
"""Seconds between questions to a given server that is lost."""
MISSES = 2
"""Health checks in a row that a server may not fail."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that serves, as every rank knows it."""

    url: str
    ranks: int
    seeded: bool
    """Whether its requests may carry a seed."""
    life: int
    """How often it has come back: nothing of an earlier life, connections and groups, is there any more."""


@dataclass(slots=True)
class _Place:
    """One server that was given or started, whatever has become of it."""

    client: ServerClient
    process: ServerProcess | None
    life: int = 0
    serves: bool = True
    returning: Future[ServerClient] | None = None
    """Where it is lost: done when it can generate again."""
    misses: int = 0


class Pool:
    """Every server of a run. Made and used on the leader alone.

    Args:
        config: of the run.
        http: through which to speak to them.
        architecture: of the policy; a server that says it has another is refused.
        secret: to be shown to them.
        processes: the servers that the run starts itself, not yet started.
        our_nccl: version of the trainer's NCCL; None where it is not what brings weights to the servers.
        say: takes words for the log.
    """

    def __init__(
        self,
        config: Config,
        http: Http,
        *,
        architecture: str,
        secret: str | None,
        processes: Sequence[ServerProcess],
        say: Callable[[str], None],
        our_nccl: str | None = None,
    ) -> None:
        self._config, self._http, self._architecture, self._our_nccl = config, http, architecture, our_nccl
        self._secret, self._processes, self._say = secret, processes, say
        self._places: list[_Place] = []
        self._restarts = 0
        self._closed = False

    async def open(self) -> tuple[Server, ...]:
        """Start the servers that are ours, and wait until they and the given ones can generate.

        Raises:
            UserError: one of them ends, takes too long, is of another model, has another NCCL or is too small for the
                run.
        """
        wait_s = self._config.rollout.launch.wait_s
        if self._our_nccl is not None and self._processes:
            command, environ = base_command(self._config.rollout), self._processes[0].environment(os.environ)
            theirs = await asyncio.to_thread(nccl.of_command, command, environ)
            nccl.refuse_two("rollout.launch.command", shlex.join(command), self._our_nccl, theirs)
        for process in self._processes:
            process.start()
        ours = [wait_ready(process, self._client, wait_s) for process in self._processes]
        given = [self._given(url, wait_s) for url in server_urls(self._config)]
        started, found = await asyncio.gather(asyncio.gather(*ours), asyncio.gather(*given))
        self._places = [_Place(client, process) for client, process in zip(started, self._processes, strict=True)]
        self._places += [_Place(client, None) for group in found for client in group]
        for place in self._places:
            await self._check_server(place.client)
        return self.servers()

    def servers(self) -> tuple[Server, ...]:
        """Who serves now."""
        return tuple(
            Server(place.client.url, place.client.ranks, place.client.seeded, place.life)
            for place in self._places
            if place.serves
        )

    def lose(self, problems: Mapping[str, str]) -> tuple[Server, ...]:
        """Take servers out, by URL and each for its reason, and have them come back if they can. Who serves then."""
        for place in self._places:
            if place.serves and place.client.url in problems:
                place.serves, place.misses = False, 0
                self._say(f"server {place.client.shown} is taken out: it {problems[place.client.url]}")
                self._recall(place)
        return self.servers()

    def welcome(self) -> tuple[Server, ...]:
        """Count servers in that can generate again; the next update brings them up to date. Who serves then."""
        for place in self._places:
            if place.returning is None or not place.returning.done():
                continue
            try:
                place.client = place.returning.result()
            except Exception as error:  # whatever went wrong with one server is no reason to stop
                self._say(f"server {place.client.shown} did not come back: {error}")
                self._recall(place)
            else:
                place.serves, place.returning, place.life = True, None, place.life + 1
                self._say(f"server {place.client.shown} is back")
        return self.servers()

    @property
    def hopeless(self) -> bool:
        """Whether none serves and none can come back."""
        return not any(place.serves or place.returning for place in self._places)

    @property
    def starting(self) -> bool:
        """Whether one of ours is being started again."""
        return any(place.process is not None and place.returning is not None for place in self._places)

    async def check(self, timeout_s: float) -> dict[str, str]:
        """Ask those that serve whether they can still generate; what is wrong with those that cannot."""
        serving = [place for place in self._places if place.serves]
        answers = await asyncio.gather(*(place.client.health(timeout_s) for place in serving), return_exceptions=True)
        unfit = {}
        for place, answer in zip(serving, answers, strict=True):
            place.misses = place.misses + 1 if isinstance(answer, ServerError) else 0
            if isinstance(answer, ServerError) and place.misses >= MISSES:
                unfit[place.client.url] = answer.problem
        return unfit

    def close(self) -> None:
        """End what was started."""
        self._closed = True
        for place in self._places:
            if place.returning is not None:
                place.returning.cancel()
        stop_all(self._processes)

    async def _given(self, url: str, wait_s: float) -> list[ServerClient]:
        """A given server, or the servers behind it if it is a router, once each can generate.

        A router is spoken to no more after that: it would go on asking a server that is not up to date.

        Raises:
            UserError: at the timeout.
        """
        last = "nobody said anything"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        workers = await self._workers(self._client(url))
                        clients = [self._client(worker) for worker in ([url] if workers is None else workers)]
                        await asyncio.gather(*(self._come_to_life(client) for client in clients))
                        if clients:
                            if workers is not None:
                                self._say(f"{url} is a router; its {len(clients)} workers serve")
                            return clients
                        last = "it is a router without workers"
                    except ServerError as error:
                        last = str(error)
                    await asyncio.sleep(ASK_AGAIN_S)
        raise UserError(
            "rollout.servers",
            url,
            f"cannot generate after {wait_s:g} s: {last}",
            "Start it, mend the URL, or raise rollout.launch.wait_s",
        )

    async def _workers(self, door: ServerClient) -> list[str] | None:
        """The URLs of a router's servers; None if it is a server itself.

        Raises:
            ServerError: nobody is there.
        """
        try:
            answer = await door.get("/workers")
        except ServerError as error:
            if not error.alive:
                raise
            return None
        return [worker["url"].rstrip("/") for worker in answer["workers"]]

    async def _come_to_life(self, client: ServerClient) -> None:
        """See to it that a given server can generate: an update that nobody ended has left it paused.

        Raises:
            ServerError: it cannot.
        """
        await client.resume()
        await client.health(self._config.rollout.health_timeout_s)

    def _recall(self, place: _Place) -> None:
        """Set about having a lost server again."""
        rollout = self._config.rollout
        if place.process is None:
            place.returning = self._http.start(self._return(place.client))
        elif self._restarts < rollout.launch.restarts:
            self._restarts += 1
            place.returning = self._http.start(self._restart(place.process))
        else:
            place.returning = None
            words = place.process.last_words()
            self._say(
                f"rollout.launch.restarts = {rollout.launch.restarts} are used up" + (f":\n{words}" if words else "")
            )

    async def _return(self, client: ServerClient) -> ServerClient:
        """A given server, once it can generate again; it may take as long as it likes."""
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            with contextlib.suppress(ServerError):
                await self._come_to_life(client)
                await self._check_server(client)
                return client

    async def _restart(self, process: ServerProcess) -> ServerClient:
        await asyncio.to_thread(self._restart_unless_closed, process)
        client = await wait_ready(process, self._client, self._config.rollout.launch.wait_s)
        await self._check_server(client)
        return client

    def _restart_unless_closed(self, process: ServerProcess) -> None:
        process.stop()
        if not self._closed:
            process.start()
        if self._closed:  # meanwhile
            process.stop()

    def _client(self, url: str) -> ServerClient:
        rollout = self._config.rollout
        return connect(rollout.engine, url, self._http, secret=self._secret, timeout_s=rollout.sync.timeout_s)

    async def _check_server(self, client: ServerClient) -> None:
        """
        Raises:
            UserError: the server cannot serve this run.
        """
        setting = "rollout.launch.flags" if self._processes else "rollout.servers"
        try:
            info = await client.info()
        except ServerError as error:
            raise UserError(
                setting, client.url, error.problem, "Start it as that says, or name another server"
            ) from None
        nccl.refuse_two(setting, client.url, self._our_nccl, info.nccl)
        rollout, dtype = self._config.rollout, DTYPES[self._config.model.dtype]
        longest = self._config.data.max_prompt_tokens + rollout.max_response_tokens
        if info.architecture not in (None, self._architecture):
            problem = f"serves another model: {info.architecture} from {info.model}, the policy is {self._architecture}"
            remedy = "Start it with model.path, or name another server"
        elif info.max_tokens is not None and info.max_tokens < longest:
            problem = f"takes {info.max_tokens} tokens, and the longest prompt with its response has {longest}"
            remedy = "Start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        elif info.dtype not in (None, dtype):
            problem = f"holds its weights in {info.dtype}, and model.dtype is {self._config.model.dtype}"
            remedy = f"Start it with --dtype {dtype}, or set model.dtype"
        else:
            return
        raise UserError(setting, client.url, problem, remedy)


def connect(
    kind: Literal["local", "sglang", "vllm"],
    url: str,
    http: Http,
    *,
    secret: str | None,
    timeout_s: float,
    ranks: int = 1,
    seeded: bool = True,
) -> ServerClient:
    """See :class:`ServerClient` for the arguments.

    Raises:
        ValueError: for the local engine, which is no server.
    """
    client: type[ServerClient]
    if kind == "sglang":
        from megatron_dppo.rollout.servers.sglang import SglangClient

        client = SglangClient
    elif kind == "vllm":
        from megatron_dppo.rollout.servers.vllm import VllmClient

        client = VllmClient
    else:
        raise ValueError(f"{kind!r} is no server")
    return client(url, http, secret=secret, timeout_s=timeout_s, ranks=ranks, seeded=seeded)

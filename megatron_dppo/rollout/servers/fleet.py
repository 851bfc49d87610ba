"""The servers of a run, as its leader knows them: which serve, which are lost, and which have come back.

A server that is lost serves again only after the next update of the weights: until then nobody knows what it would
generate with. One that we started is killed and started again meanwhile; one that was given is asked, now and then,
whether it is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.allocation import server_urls
from megatron_dppo.rollout.servers.api import Facts, ServerApi
from megatron_dppo.rollout.servers.connect import api_for
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import ServerProcess, stop_all, wait_ready

ASK_AGAIN_S = 3.0
"""Seconds between questions to a given server that is lost."""
MISSES = 2
"""Health checks in a row that a server may not fail."""


@dataclass(frozen=True, slots=True)
class Member:
    """A server that serves, as every rank knows it."""

    url: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Who serves, the same on every rank."""

    members: tuple[Member, ...]
    """Whose weights are updated."""
    doors: tuple[str, ...]
    """Who is asked for completions: the members, or the routers before them."""


@dataclass(slots=True)
class _Place:
    """One server that was given or started, whatever has become of it."""

    api: ServerApi
    process: ServerProcess | None
    router: str | None
    """Through which it is asked for completions."""
    serves: bool = False
    returning: Future[ServerApi] | None = None
    """Where it is lost: done when it can generate again."""
    misses: int = 0


class Fleet:
    """Every server of a run. Made and used on the leader alone.

    Args:
        config: what is to be started or was given.
        http: through which to speak to them.
        architecture: of the policy; a server that says it has another is refused.
        secret: for servers that we start, and shown to all.
        hosts: makes the processes of the servers that we start.
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
    ) -> None:
        self._config, self._http, self._architecture = config, http, architecture
        self._secret, self._processes, self._say = secret, processes, say
        self._places: list[_Place] = []
        self._restarts = 0
        self.losses = 0
        """Servers that were lost, since the beginning."""

    def open(self) -> Roster:
        """Start the servers that are ours and wait until all of them can generate.

        Raises:
            UserError: one of them ends, takes too long, is of another model or too small for the run.
        """
        for process in self._processes:
            process.start()
        self._places = self._http.run(self._meet())
        for place in self._places:
            place.serves = True
        return self.roster()

    def roster(self) -> Roster:
        """Who serves now."""
        serving = [place for place in self._places if place.serves]
        return Roster(
            members=tuple(Member(place.api.url, place.api.ranks) for place in serving),
            doors=tuple(dict.fromkeys(place.router or place.api.url for place in serving)),
        )

    def lose(self, problems: dict[str, str]) -> None:
        """Take servers out, each for its reason, and have them come back if they can."""
        for place in self._places:
            why = problems.get(place.api.url) or problems.get(place.router or "")
            if why is None or not place.serves:
                continue
            place.serves, place.misses = False, 0
            self.losses += 1
            self._say(f"server {place.api.shown} is taken out: it {why}")
            self._recall(place)

    def welcome(self) -> bool:
        """Count servers in that can generate again; the next update brings them up to date. Whether any serves then."""
        for place in self._places:
            if place.serves or place.returning is None or not place.returning.done():
                continue
            try:
                place.api = place.returning.result()
            except (UserError, ServerError) as error:
                self._say(f"server {place.api.shown} did not come back: {error}")
                self._recall(place)
            else:
                place.serves, place.returning = True, None
                self._say(f"server {place.api.shown} is back")
        return any(place.serves for place in self._places)

    @property
    def hopeless(self) -> bool:
        """Whether none serves and none can come back."""
        return not any(place.serves or place.returning for place in self._places)

    async def check(self, timeout_s: float) -> dict[str, str]:
        """Ask those that serve whether they can still generate; what is wrong with those that cannot."""
        serving = [place for place in self._places if place.serves]
        answers = await asyncio.gather(*(place.api.health(timeout_s) for place in serving), return_exceptions=True)
        unfit = {}
        for place, answer in zip(serving, answers, strict=True):
            place.misses = place.misses + 1 if isinstance(answer, ServerError) else 0
            if isinstance(answer, ServerError) and place.misses >= MISSES:
                unfit[place.api.url] = answer.problem
        return unfit

    def close(self) -> None:
        """End what was started."""
        stop_all(self._processes)

    async def _meet(self) -> list[_Place]:
        """All servers, ours and given ones, once each can generate."""
        wait_s = self._config.rollout.launch.wait_s
        ours = [wait_ready(process, self._api, wait_s) for process in self._processes]
        urls = server_urls(self._config)
        given = [self._given(url, wait_s) for url in urls]
        started, found = await asyncio.gather(asyncio.gather(*ours), asyncio.gather(*given))
        places = [_Place(api, process, None) for api, process in zip(started, self._processes, strict=True)]
        places += [place for group in found for place in group]
        for place in places:
            try:
                self._check_facts(place.api, await place.api.facts())
            except ServerError as error:
                remedy = "Start it as its own words ask for, or name another server"
                raise UserError("rollout.servers", place.api.url, error.problem, remedy) from None
        return places

    async def _given(self, url: str, wait_s: float) -> list[_Place]:
        """A given server; or the servers behind it, if it is a router."""
        door = self._api(url)
        if workers := await self._workers(door):
            return [_Place(await self._answering(self._api(worker), wait_s), None, url) for worker in workers]
        return [_Place(await self._answering(door, wait_s), None, None)]

    async def _workers(self, door: ServerApi) -> list[str]:
        """The URLs of a router's servers; none if it is no router."""
        try:
            answer = await door.get("/workers")
        except ServerError:
            return []
        return [worker["url"].rstrip("/") for worker in answer["workers"]] if isinstance(answer, dict) else []

    async def _answering(self, api: ServerApi, wait_s: float) -> ServerApi:
        """The server, once it can generate.

        Raises:
            UserError: at the timeout, with what it said last.
        """
        last = "nothing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        await api.health(self._config.rollout.health_timeout_s)
                        return api
                    except ServerError as error:
                        last = error.problem
                    await asyncio.sleep(ASK_AGAIN_S)
        raise UserError(
            "rollout.servers",
            api.url,
            f"cannot generate after {wait_s:g} s: it {last}",
            "Start it, mend the URL, or raise rollout.launch.wait_s",
        )

    def _recall(self, place: _Place) -> None:
        """Set about having a lost server again."""
        rollout = self._config.rollout
        if place.process is None:
            place.returning = self._http.start(self._return(place.api))
        elif self._restarts < rollout.launch.restarts:
            self._restarts += 1
            place.returning = self._http.start(self._restart(place.process))
        else:
            place.returning = None
            words = place.process.last_words()
            self._say(
                f"rollout.launch.restarts = {rollout.launch.restarts} are used up" + (f":\n{words}" if words else "")
            )

    async def _return(self, api: ServerApi) -> ServerApi:
        """A given server, once it can generate again; it may take as long as it likes."""
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            with contextlib.suppress(ServerError):
                await api.health(self._config.rollout.health_timeout_s)
                self._check_facts(api, await api.facts())
                return api

    async def _restart(self, process: ServerProcess) -> ServerApi:
        await asyncio.to_thread(process.restart)
        api = await wait_ready(process, self._api, self._config.rollout.launch.wait_s)
        self._check_facts(api, await api.facts())
        return api

    def _api(self, url: str) -> ServerApi:
        rollout = self._config.rollout
        return api_for(rollout.engine, url, self._http, secret=self._secret, timeout_s=rollout.sync.timeout_s)

    def _check_facts(self, api: ServerApi, facts: Facts) -> None:
        """
        Raises:
            UserError: the server cannot serve this run.
        """
        rollout = self._config.rollout
        longest = self._config.data.max_prompt_tokens + rollout.max_response_tokens
        dtypes = {"fp32": "float32", "bf16": "bfloat16"}
        if facts.architecture not in (None, self._architecture):
            problem = (
                f"serves another model: {facts.architecture} from {facts.model}, the policy is {self._architecture}"
            )
            remedy = "Start it with model.path, or name another server"
        elif facts.max_tokens is not None and facts.max_tokens < longest:
            problem = f"takes {facts.max_tokens} tokens, and the longest prompt with its response has {longest}"
            remedy = "Start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        elif facts.dtype not in (None, dtypes[self._config.model.dtype]):
            problem = f"holds its weights in {facts.dtype}, and model.dtype is {self._config.model.dtype}"
            remedy = f"Start it with --dtype {dtypes[self._config.model.dtype]}, or set model.dtype"
        else:
            return
        raise UserError("rollout.launch.flags" if self._processes else "rollout.servers", api.url, problem, remedy)

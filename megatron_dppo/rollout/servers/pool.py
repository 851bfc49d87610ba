"""Pool of a run's servers: serving, lost and recovered servers. Only rank 0 keeps the pool.

- A lost server serves again only after the next update, because the weights are unknown until then.
- In the meantime the run's own server is killed and restarted, and an externally managed server is
  probed every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from megatron_dppo.config import DTYPES, Config, LoraConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.client import ROUTING_FLAG, ServerClient, ServerInfo
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import load_engine_spec, server_urls
from megatron_dppo.rollout.servers.processes import (
    ServerProcess,
    create_processes,
    stop_all,
    wait_ready,
)

ASK_AGAIN_S = 3.0
"""Seconds between two probes of an externally managed server."""
SAY_AFTER_S = 10.0
"""Seconds until the first log line about waiting for a server."""
SAY_EVERY_S = 60.0
"""Seconds between later log lines about waiting for a server."""
NOTHING = "it has given no answer"
MISSES = 2
"""Consecutive failed health checks before a server counts as lost."""

T = TypeVar("T")


class ServerPool:
    """All servers of a run. Created and used on rank 0 only.

    Args:
        architecture: architecture of the policy; a server that reports another architecture is
            refused.
        secret: secret sent with requests.
        log: function that logs a message.
    """

    def __init__(
        self,
        config: Config,
        http: Http,
        *,
        architecture: str,
        secret: str | None,
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._http = http
        self._architecture = architecture
        self._secret = secret
        self._log = log
        self.processes: list[ServerProcess] = []
        """The run's own servers."""
        self._serving: list[ServerClient] = []
        self._returning: dict[ServerClient, Future[ServerClient]] = {}
        """Lost servers; a future is done when its server can generate again."""
        # Reason of the removal, by URL of each unrecovered server.
        self._lost: dict[str, str] = {}
        self._misses = Counter[ServerClient]()
        self._last_reports: dict[str, str] = {}
        """Last report of an externally managed server, by URL, until generation."""
        self._restarts = 0
        self._closed = False

    async def open(self) -> None:
        """Start the run's own servers, and wait until all servers can generate.

        Raises:
            UserError: a server ends, takes too long, serves another model or is too small for the
                run.
        """
        launch = self._config.rollout.launch
        if launch.count:
            self.processes = create_processes(self._config, self._secret or "")
        for process in self.processes:
            process.start()
        starting = [
            self._wait_with_log(
                wait_ready(process, partial(self._make_client, process=number), launch.wait_s),
                self._make_wait_message(process.name, f"its log is {process.log}"),
            )
            for number, process in enumerate(self.processes)
        ]
        given = [
            self._wait_with_log(
                self._connect_external(url, launch.wait_s), self._make_wait_message(url, NOTHING)
            )
            for url in server_urls(self._config)
        ]
        started, found = await asyncio.gather(asyncio.gather(*starting), asyncio.gather(*given))
        for client in [*started, *(client for group in found for client in group)]:
            await self._check(client)
            self._serving.append(client)

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Servers in service."""
        return tuple(self._serving)

    def remove_unhealthy(self, problems: Mapping[str, str]) -> tuple[ServerClient, ...]:
        """Remove servers (reasons by URL), and start recoveries if possible; return the rest."""
        for server in [server for server in self._serving if server.url in problems]:
            self._log(f"server {server.name} is removed: it {problems[server.url]}")
            self._lost[server.url] = problems[server.url]
            self._serving.remove(server)
            self._start_recovery(server)
        return self.servers

    @property
    def failures(self) -> str:
        """Lost servers with reasons, as text."""
        return "; ".join(f"server {url} {problem}" for url, problem in self._lost.items())

    def admit_ready(self) -> tuple[ServerClient, ...]:
        """Admit recovered servers, which need an update of the weights; return all servers in
        service."""
        for server, returning in list(self._returning.items()):
            if not returning.done():
                continue
            del self._returning[server]
            try:
                client = returning.result()
            # Any error, because a single server is no reason to stop the run.
            except Exception as error:
                self._log(f"server {server.name} did not recover: {error}")
                self._start_recovery(server)
            else:
                self._serving.append(client)
                self._lost.pop(client.url, None)
                self._log(f"server {client.name} is back")
        return self.servers

    @property
    def is_exhausted(self) -> bool:
        """Whether no server is in service or in recovery."""
        return not self._serving and not self._returning

    @property
    def is_restarting(self) -> bool:
        """Whether the run restarts a server."""
        return any(server.process is not None for server in self._returning)

    async def check(self, timeout_s: float) -> dict[str, str]:
        """Check the servers in service; return problems by URL. A silent server is logged."""
        serving = self.servers

        def silent(server: ServerClient, taken: float) -> str:
            limit = f"rollout.health_timeout_s = {timeout_s:g}"
            return (
                f"server {server.name} is silent: no answer to a health check for {taken:.0f} s "
                f"({limit})"
            )

        first = min(SAY_AFTER_S, timeout_s / 2)
        checks = [
            self._wait_with_log(server.health(timeout_s), partial(silent, server), first)
            for server in serving
        ]
        answers = await asyncio.gather(*checks, return_exceptions=True)
        unfit = {}
        for server, answer in zip(serving, answers, strict=True):
            failed = isinstance(answer, ServerError)
            # Only failures in a row count.
            self._misses[server] = self._misses[server] + 1 if failed else 0
            if isinstance(answer, ServerError) and self._misses[server] >= MISSES:
                unfit[server.url] = answer.problem
        return unfit

    def close(self) -> None:
        """Cancel recoveries and stop the servers started by the run."""
        self._closed = True
        for returning in self._returning.values():
            returning.cancel()
        stop_all(self.processes)

    def _make_wait_message(self, server: str, default: str) -> Callable[[float], str]:
        """Return a function from elapsed seconds to the log message about waiting for a server.

        Args:
            server: name or URL.
            default: text of the message until the server's first report.
        """
        most = self._config.rollout.launch.wait_s

        def describe_wait(taken: float) -> str:
            report = self._last_reports.get(server, default)
            return (
                f"waiting for {taken:.0f} s, of rollout.launch.wait_s = {most:g}, for server "
                f"{server}: {report}"
            )

        return describe_wait

    async def _wait_with_log(
        self,
        work: Coroutine[Any, Any, T],
        message: Callable[[float], str],
        wait_s: float | None = None,
    ) -> T:
        """Wait for a server, and log long waits.

        Args:
            message: log message for a number of elapsed seconds.
            wait_s: seconds until the first message; None: ``SAY_AFTER_S``.
        """
        began = time.monotonic()
        task = asyncio.ensure_future(work)
        wait_s = SAY_AFTER_S if wait_s is None else wait_s
        try:
            while not (await asyncio.wait([task], timeout=wait_s))[0]:
                self._log(message(time.monotonic() - began))
                wait_s = SAY_EVERY_S
            return task.result()
        finally:
            # Unfinished only after the failure of another server.
            task.cancel()

    async def _connect_external(self, url: str, wait_s: float) -> list[ServerClient]:
        """Wait until an externally managed server, or every server behind a router, can generate.

        Raises:
            UserError: at the timeout.
        """
        self._last_reports[url] = NOTHING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        # A router would send requests to servers with old weights: use the
                        # servers behind it.
                        workers = await self._list_workers(self._make_client(url))
                        urls = [url] if workers is None else workers
                        clients = [self._make_client(worker) for worker in urls]
                        await asyncio.gather(*(self._ensure_ready(client) for client in clients))
                        if clients:
                            if workers is not None:
                                self._log(f"{url} is a router; its {len(clients)} workers serve")
                            return clients
                        self._last_reports[url] = "it is a router without workers"
                    except ServerError as error:
                        self._last_reports[url] = str(error)
                    await asyncio.sleep(ASK_AGAIN_S)
        remedy = "Start it, correct the URL, or raise rollout.launch.wait_s"
        problem = f"cannot generate after {wait_s:g} s: {self._last_reports[url]}"
        raise UserError("rollout.servers", url, problem, remedy)

    async def _list_workers(self, client: ServerClient) -> list[str] | None:
        """Return the URLs of a router's servers; None if ``client`` is not a router.

        Raises:
            ServerError: no server answers at the URL.
        """
        try:
            answer = await client.get("/workers")
        except ServerError as error:
            if not error.alive:
                raise
            return None
        return [worker["url"].rstrip("/") for worker in answer["workers"]]

    async def _ensure_ready(self, client: ServerClient) -> None:
        """Resume an externally managed server, perhaps paused in an unfinished update, and check
        generation.

        Raises:
            ServerError: the server cannot generate.
        """
        await client.resume()
        await client.health(self._config.rollout.health_timeout_s)

    def _start_recovery(self, server: ServerClient) -> None:
        connect = partial(self._make_client, process=server.process, life=server.life + 1)
        restarts = self._config.rollout.launch.restarts
        if server.process is None:
            self._returning[server] = self._http.start(self._wait_until_ready(connect(server.url)))
        # All servers of the run share the restarts.
        elif self._restarts < restarts:
            self._restarts += 1
            self._returning[server] = self._http.start(
                self._restart(self.processes[server.process], connect)
            )
        else:
            words = self.processes[server.process].read_log_tail()
            tail = f":\n{words}" if words else ""
            self._log(f"rollout.launch.restarts = {restarts} are used up{tail}")

    async def _wait_until_ready(self, client: ServerClient) -> ServerClient:
        """Wait without a limit until a server can generate again."""
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            with contextlib.suppress(ServerError):
                await self._ensure_ready(client)
                await self._check(client)
                return client

    async def _restart(
        self,
        process: ServerProcess,
        connect: Callable[[str], ServerClient],
    ) -> ServerClient:
        await asyncio.to_thread(self._restart_process, process)
        client = await wait_ready(process, connect, self._config.rollout.launch.wait_s)
        await self._check(client)
        return client

    def _restart_process(self, process: ServerProcess) -> None:
        process.stop()
        if not self._closed:
            process.start()
        # ``close`` may have run in another thread during the start.
        if self._closed:
            process.stop()

    def _make_client(self, url: str, process: int | None = None, life: int = 0) -> ServerClient:
        sync = self._config.rollout.sync
        return load_engine_spec(self._config.rollout.engine).client(
            url,
            self._http,
            secret=self._secret,
            timeout_s=sync.timeout_s,
            adapted=sync.adapter,
            process=process,
            life=life,
        )

    async def _check(self, client: ServerClient) -> None:
        """Check that a server fits the run.

        Raises:
            UserError: the server cannot serve this run.
        """
        setting = "rollout.launch.flags" if self.processes else "rollout.servers"
        try:
            info = await client.get_info()
        except ServerError as error:
            remedy = "Start it accordingly" if error.alive else "Read its log"
            remedy += ", or name another server"
            raise UserError(setting, client.url, error.problem, remedy) from None
        rollout = self._config.rollout
        dtype = DTYPES[self._config.model.dtype]
        longest = self._config.longest_context
        if info.architecture not in (None, self._architecture):
            problem = (
                f"serves another model: {info.architecture} from {info.model}, the policy is "
                f"{self._architecture}"
            )
            remedy = "Start it with model.path, or name another server"
        elif info.max_tokens is not None and info.max_tokens < longest:
            problem = (
                f"takes {info.max_tokens} tokens, and the longest prompt with its response "
                f"has {longest}"
            )
            # Name the setting that causes the longest context.
            limit = "eval" if longest > self._config.longest else "rollout"
            remedy = (
                "Start it with a longer context, or lower data.max_prompt_tokens or "
                f"{limit}.max_response_tokens"
            )
        elif info.stages > 1 and rollout.sync.transport == "collective":
            problem = (
                f"has {info.stages} pipeline stages, and each stage would join the group as the "
                "first stage"
            )
            remedy = "Start it with --pp-size 1, or set rollout.sync.transport to disk"
        elif info.dtype not in (None, dtype):
            problem = (
                f"holds its weights in {info.dtype}, and model.dtype is {self._config.model.dtype}"
            )
            remedy = f"Start it with --dtype {dtype}, or set model.dtype"
        elif self._config.loss.replay_routing == "rollout" and not info.routing:
            problem = (
                "does not report the chosen experts, and loss.replay_routing = rollout replays them"
            )
            remedy = f"Start it with {ROUTING_FLAG}, or set loss.replay_routing"
        elif rollout.top_k is not None and not info.sampling_mask:
            problem = "does not report kept ids, and rollout.top_k replays them in training"
            words = shlex.join(load_engine_spec(rollout.engine).mask_flags)
            remedy = f"Start it with {words or 'a later version'}, or remove rollout.top_k"
        elif rollout.sync.adapter and not _supports_adapters(info, self._config.model.lora):
            takes = f"up to rank {info.lora_rank} on {', '.join(sorted(info.lora_targets))}"
            problem = (
                f"takes {takes if info.lora_rank else 'no'} adapters, and rollout.sync.adapter "
                "sends other adapters"
            )
            spec = load_engine_spec(rollout.engine)
            words = shlex.join(spec.adapter_flags(self._config.model.lora))
            for name, value in spec.adapter_environment.items():
                words += f" and {name}={value} in its environment"
            remedy = f"Start it with {words}, or leave that setting out"
        else:
            return
        raise UserError(setting, client.url, problem, remedy)


def _supports_adapters(info: ServerInfo, lora: LoraConfig) -> bool:
    return info.lora_rank >= lora.rank and (
        "all" in info.lora_targets or info.lora_targets.issuperset(lora.targets)
    )

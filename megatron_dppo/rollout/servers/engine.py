"""Rollout engine of servers: every rank requests its own part of the rollouts, and rank 0
supervises the servers.

- All ranks must agree on servers in service, on lost servers, and on whether to continue. While
  waiting, the ranks exchange this state over gloo in small messages.
- Weights and completions travel by other channels.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.conversation_functions import load_rollout_function
from megatron_dppo.rollout.engine import (
    Completions,
    GroupCallback,
    PartialRollout,
    Sampling,
    WeightSource,
)
from megatron_dppo.rollout.servers.batch import RequestBatch, wait
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.dispatch import Dispatcher
from megatron_dppo.rollout.servers.http import EXCHANGE_S, Http
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.servers.pool import ServerPool
from megatron_dppo.rollout.servers.processes import new_secret
from megatron_dppo.rollout.servers.sync import Sync, Timings
from megatron_dppo.rollout.servers.transports import open_transport

ABORT_TIMEOUT_S = 10.0
"""Seconds to wait for the answers of aborted requests. Then the requests are cancelled, because a
request that arrives at a paused server is never answered."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Progress of a rank, sent to all ranks."""

    unfinished: int
    lost: Mapping[str, str]
    error: Exception | None
    idle_s: float
    """Seconds since the last finished prompt, or the start of the wait."""
    late: str
    """Description of a conversation pending for ``run.stall_warning_s``; or empty."""


class ServerEngine:
    """Implementation of :class:`RolloutEngine`. Construction is collective.

    Starts the servers of ``rollout.launch``, or connects to ``rollout.servers``, and waits for all
    servers.

    Args:
        log: function that logs a message, called on rank 0.

    Raises:
        UserError: on every rank: the servers cannot serve this run. Started servers are stopped.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        shape: PolicyShape,
        log: Callable[[str], None],
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._world = world
        self._log = log
        # The prefix distinguishes this run's versions from another run's.
        run, given, new = world.broadcast(
            lambda: (new_secret()[:8], os.environ.get(SECRET) or None, new_secret())
        )
        self._run = run
        self.secret = new if rollout.launch.count else given
        sync = rollout.sync
        self.servers: tuple[ServerClient, ...] = ()
        """Servers in service."""
        self._source: WeightSource | None = None
        self._version = -1
        self._checking: Future[dict[str, str]] | None = None
        self._checked = self._spoke = 0.0
        self._resubmitted = self._retries = 0
        self._synced = self._is_stalled = False
        with ExitStack() as opened:
            self._http = Http()
            opened.callback(self._http.close)
            self._conversations: Conversations | None = None
            if function := world.run_on_all_ranks(
                lambda: load_rollout_function(config), description="import of a rollout function"
            ):
                self._conversations = Conversations(function, timeout_s=rollout.request_timeout_s)
                opened.callback(self._conversations.close)
            self._pool: ServerPool | None = None
            if world.is_rank0:
                architecture = shape.architecture
                secret = self.secret
                self._pool = ServerPool(
                    config, self._http, architecture=architecture, secret=secret, log=log
                )
                opened.callback(self._pool.close)
            transport = open_transport(config, world, self._http, shape, run=run)
            opened.callback(transport.close)
            # A continued request would keep the adapter of its start.
            self._sync = Sync(
                world, self._http, transport, "abort" if sync.adapter else sync.in_flight
            )
            self._dispatcher = self._new_dispatcher(rollout.attempts, self._conversations)
            self._http.run_on_rank0(world, lambda: self._rank0_pool.open())
            self._set_servers(lambda pool: pool.servers)
            self._opened = opened.pop_all()

    @property
    def timings(self) -> Timings:
        """Timings of the last update."""
        return self._sync.timings

    @property
    def _rank0_pool(self) -> ServerPool:
        assert self._pool is not None, "only rank 0 has a pool"
        return self._pool

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> RequestBatch:
        return self._dispatcher.begin(prompts, sampling, self._version)

    def interrupt(self, pending: Sequence[RequestBatch]) -> list[list[PartialRollout]] | None:
        """Interrupt rollouts; None for conversations and trees, which must be finished."""
        # Partial rollouts cannot represent a conversation function's state, or the forks of a tree.
        if self._conversations is not None or any(batch.sampling.branches for batch in pending):
            return None
        self._dispatcher.stop_submitting(pending)
        # Barrier before the abort: no rank sends requests to the servers afterwards.
        self._world.gather(None)
        self._remove_servers(self._sync.abort(self.servers))
        progress = self._dispatcher.collect_partial(pending, ABORT_TIMEOUT_S)
        # Barrier before servers resume: no rank has a pending request.
        self._world.gather(None)
        self.resume()
        return progress

    def resume_partial(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        partial_rollouts: Sequence[PartialRollout],
    ) -> RequestBatch:
        known = () if self._conversations is not None or sampling.branches else partial_rollouts
        return self._dispatcher.begin(prompts, sampling, self._version, known)

    def finish(self, pending: RequestBatch, callback: GroupCallback | None = None) -> Completions:
        """Wait until the prompts of all ranks are answered.

        The ranks exchange their progress at least once a second.

        Raises:
            UserError: on every rank: no server can serve any longer, no prompt was answered for
                ``rollout.timeout_s``, or a prompt failed ``rollout.attempts`` times.
        """
        began = self._spoke = self._checked = time.monotonic()
        # Discard a health check from an earlier wait: a later sync may make the result obsolete.
        self._checking = None
        wait_s = 0.05
        while True:
            wait(pending, wait_s, callback)
            wait_s = min(2 * wait_s, EXCHANGE_S)
            reports = self._world.gather(self._make_report(pending, began))
            if error := next((report.error for report in reports if report.error), None):
                raise self._make_error(error)
            lost = {url: why for report in reports for url, why in report.lost.items()}
            if lost:
                self._remove_servers(lost)
            left = [report.unfinished for report in reports]
            if not any(left):
                return pending.build_groups()
            late = next((report.late for report in reports if report.late), "")
            self._log_heartbeat(left, began, late)
            # The timeout excludes the wait for a server.
            if not self.servers:
                self._restore_servers()
                began = time.monotonic()
            elif min(report.idle_s for report in reports) > self._config.rollout.timeout_s:
                in_flight = sum(self._world.gather(self._dispatcher.count_in_flight()), Counter())
                at = ", ".join(
                    f"{count} at server {url}" for url, count in sorted(in_flight.items())
                )
                problem = f"no prompt was answered for so long; unanswered: {_format_by_rank(left)}"
                details = (problem, at and f"requests under way: {at}", late)
                problem = "; ".join(filter(None, details))
                remedy = "Look for what it waits for" if late else "Read the servers' logs"
                timeout_s = f"{self._config.rollout.timeout_s:g}"
                raise UserError("rollout.timeout_s", timeout_s, problem, f"{remedy}, or raise it")

    def pause(self) -> None:
        """Make colocated servers release their GPU memory, until the next update."""
        failed: Mapping[str, str] | None = None
        while self._config.rollout.colocated and failed != {}:
            self._wait_for_restarts()
            failed = self._sync.release(self.servers)
            # Removal restarts the server, and the next iteration waits for the restart.
            self._remove_servers(failed)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Update every server to a version. Remove servers that fail; admit recovered servers.

        Raises:
            UserError: on every rank: no server is left, or servers fail repeatedly.
        """
        self._source = source
        self._version = version
        retries = self._config.rollout.sync.retries
        problems: Mapping[str, str] | None = None
        for _ in range(retries + 1):
            self._set_servers(ServerPool.admit_ready)
            if not self.servers:
                self._wait_for_servers()
            every = self._config.rollout.sync.check_every
            # Verify the first update, and later every sync.check_every versions.
            verify = not self._synced or (every > 0 and version % every == 0)
            problems = self._sync.update(
                self.servers, source, f"{self._run}-{version}", verify=verify
            )
            if problems is None:
                self._synced = True
                return
            self._retries += 1
            self._log_on_rank0(
                f"an update of the weights failed and is repeated: {_format_problems(problems)}"
            )
            self._remove_servers(problems)
        problem = (
            f"the servers could not be brought to version {version}: {_format_problems(problems)}"
        )
        remedy = "Read the servers' logs; raise it, or try rollout.sync.transport=disk"
        raise UserError("rollout.sync.retries", retries, problem, remedy)

    def resume(self) -> None:
        self._remove_servers(self._sync.resume(self.servers))
        self._dispatcher.set_servers(self.servers)

    def health(self) -> str | None:
        return None if self.servers else "no rollout server is left"

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        """Generate samples from every server. A server that fails here is removed.

        Raises:
            UserError: on every rank: no server is left, and no server recovers.
        """
        batches: dict[ServerClient, RequestBatch] = {}
        self._checking = None
        self._checked = time.monotonic()

        def find_problems() -> dict[str, str] | None:
            """Start missing batches, and wait for a moment. Return problems of servers by URL; None
            after all servers have answered."""
            for server in self.servers:
                if server not in batches:
                    alone = self._new_dispatcher(attempts=1)
                    alone.set_servers([server])
                    batches[server] = alone.begin(prompts, sampling, 0)
            checks = {server: batches[server] for server in self.servers}
            for batch in checks.values():
                batch.wait(EXCHANGE_S)
            if not any(batch.unfinished_count for batch in checks.values()):
                return None
            failed = {
                server.url: f"{batch.error}"
                for server, batch in checks.items()
                if batch.error is not None
            }
            return {**self._check_health(self._rank0_pool), **failed}

        # A recovered server has no batch yet: each pass starts the missing batches.
        while (lost := self._world.broadcast(find_problems)) is not None:
            self._remove_servers(lost)
            if not self.servers:
                self._restore_servers()
        return self._world.broadcast(
            lambda: {server.name: batches[server].build_groups() for server in self.servers}
        )

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return metrics since the last call, and no notes, because notes are logged at once."""
        counts = self._world.gather(self._dispatcher.resubmitted)
        timings = self._sync.timings
        metrics = {
            "rollout/servers": float(len(self.servers)),
            "rollout/resubmitted": float(sum(counts) - self._resubmitted),
            "rollout/sync_retries": float(self._retries),
            "perf/sync_pause_time": timings.pause,
            "perf/sync_transfer_time": timings.transfer,
            "perf/sync_end_time": timings.end,
            "perf/sync_resume_time": timings.resume,
            "perf/sync_bytes": float(timings.bytes),
        }
        self._resubmitted = sum(counts)
        self._retries = 0
        return self._world.broadcast(lambda: metrics), ()

    def close(self) -> None:
        self._opened.close()

    def _make_report(self, batch: RequestBatch, start_time: float) -> _Report:
        lost = self._dispatcher.take_unhealthy()
        if self._pool is not None:
            lost = {**self._check_health(self._pool), **lost}
        idle = time.monotonic() - max(start_time, batch.progressed)
        late = ""
        if self._conversations is not None:
            late = self._conversations.describe_stalled(self._config.run.stall_warning_s)
        return _Report(batch.unfinished_count, lost, batch.error, idle, late)

    def _check_health(self, pool: ServerPool) -> dict[str, str]:
        """Return new problems found by health checks, which run in the HTTP thread."""
        timeout_s = self._config.rollout.health_timeout_s
        if self._checking is not None and self._checking.done():
            checking = self._checking
            self._checking = None
            self._checked = time.monotonic()
            return checking.result()
        if self._checking is None and time.monotonic() - self._checked > timeout_s / 2:
            self._checking = self._http.start(pool.check(timeout_s))
        return {}

    def _remove_servers(self, problems: Mapping[str, str]) -> None:
        if not problems:
            return
        self._set_servers(lambda pool: pool.remove_unhealthy(problems))
        self._dispatcher.set_servers(self.servers)

    def _restore_servers(self) -> None:
        """Wait until a server recovers, update the weights, and resume generation.

        Called when no server is left.
        """
        self._wait_for_servers()
        assert self._source is not None, (
            "rollouts were requested before the first update of the weights"
        )
        self.update_weights(self._source, self._version)
        self.resume()

    def _wait_for_restarts(self) -> None:
        """Wait for restarting servers."""
        # A restart takes memory that a training step would need.

        def check_restarts(pool: ServerPool) -> tuple[ServerClient, ...] | None:
            servers = pool.admit_ready()
            if not pool.is_restarting:
                return servers
            time.sleep(EXCHANGE_S)
            return None

        self._set_servers(check_restarts)

    def _wait_for_servers(self) -> None:
        """Wait until a server recovers.

        Raises:
            UserError: on every rank: no server recovers within ``rollout.timeout_s``, or no server
                can recover.
        """
        began = time.monotonic()
        timeout_s = self._config.rollout.timeout_s
        self._log_on_rank0("no rollout server is left; waiting for a server to recover")

        def check_servers(pool: ServerPool) -> tuple[ServerClient, ...] | None:
            restarts = self._config.rollout.launch.restarts
            if servers := pool.admit_ready():
                return servers
            if pool.is_exhausted:
                problem = f"are used up, and no rollout server is left: {pool.failures}"
                remedy = (
                    "Read the servers' logs; raise it, and run the same command again: it resumes"
                )
                raise UserError("rollout.launch.restarts", restarts, problem, remedy)
            if time.monotonic() - began > timeout_s:
                problem = f"no rollout server is left, and none recovered in time: {pool.failures}"
                remedy = (
                    "Read the servers' logs, start them again, and run the same command "
                    "again: it resumes"
                )
                raise UserError("rollout.timeout_s", f"{timeout_s:g}", problem, remedy)
            time.sleep(EXCHANGE_S)
            return None

        self._set_servers(check_servers)

    def _set_servers(
        self, get_servers: Callable[[ServerPool], tuple[ServerClient, ...] | None]
    ) -> None:
        """Set the servers once ``get_servers``, called on rank 0, returns servers. Collective."""
        self.servers = self._world.poll(lambda: get_servers(self._rank0_pool))
        for server in self.servers:
            server.http = self._http

    def _new_dispatcher(
        self,
        attempts: int,
        conversations: Conversations | None = None,
    ) -> Dispatcher:
        rollout = self._config.rollout
        return Dispatcher(
            self._http,
            self._read_version,
            first=self._world.rank,
            max_in_flight=rollout.max_in_flight,
            request_timeout_s=rollout.request_timeout_s,
            attempts=attempts,
            conversations=conversations,
        )

    def _read_version(self, reported: str) -> int | None:
        run, _, number = reported.rpartition("-")
        return int(number) if run == self._run and number.isdigit() else None

    def _log_heartbeat(self, left: Sequence[int], start_time: float, stalled: str) -> None:
        now = time.monotonic()
        if stalled and not self._is_stalled:
            self._log_on_rank0(f"late: {stalled}")
        self._is_stalled = bool(stalled)
        if now - self._spoke > self._config.rollout.heartbeat_s:
            self._spoke = now
            self._log_on_rank0(
                f"waiting for rollouts for {now - start_time:.0f} s; {len(self.servers)} servers "
                f"serve; prompts not yet answered: {_format_by_rank(left)}"
            )

    def _log_on_rank0(self, text: str) -> None:
        if self._world.is_rank0:
            self._log(text)

    def _make_error(self, error: Exception) -> Exception:
        if isinstance(error, UserError):
            return error
        remedy = "Read the servers' logs; raise it if the servers failed for another reason"
        problem = f"a prompt could not be answered: {error}"
        return UserError("rollout.attempts", self._config.rollout.attempts, problem, remedy)


def _format_by_rank(left: Sequence[int]) -> str:
    return ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(left) if count)


def _format_problems(problems: Mapping[str, str] | None) -> str:
    text = "; ".join(f"{url} {problem}" for url, problem in (problems or {}).items())
    return text or "the failed server is unknown"

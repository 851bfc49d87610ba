"""Servers as one rollout engine: every rank asks them for its own share, the leader watches over them.

What all ranks must know alike (who serves, who is lost, whether to go on) travels in small messages over gloo at every
beat of the wait for rollouts; weights and completions never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Completions, Sampling, WeightSource
from megatron_dppo.rollout.servers.api import ServerApi
from megatron_dppo.rollout.servers.beats import BEAT_S, while_leader_waits
from megatron_dppo.rollout.servers.connect import api_for
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.dispatch import Batch, Dispatcher
from megatron_dppo.rollout.servers.fleet import Fleet, Member
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sync import Sync, Timings
from megatron_dppo.rollout.servers.transports import Transport


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank says at a beat."""

    unfinished: int
    lost: Mapping[str, str]
    error: Exception | None
    idle_s: float
    """Since a prompt of this rank was finished, or the wait began."""


class ServerEngine:
    """See :class:`RolloutEngine`. Made on every rank at once; ranks other than the leader have no ``fleet``.

    Args:
        config: of the run.
        world: the ranks.
        http: this rank's.
        fleet: the leader's.
        transport: moves the weights.
        conversations: generates, by means of the servers; None: they are asked for completions.
        run: a word of this run's own, by which its versions are told from those of others.
        secret: to be shown to the servers.
        say: takes words for the log.

    Raises:
        UserError: on every rank, if the servers cannot serve this run.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        http: Http,
        fleet: Fleet | None,
        transport: Transport,
        conversations: Conversations | None = None,
        *,
        run: str,
        secret: str | None,
        say: Callable[[str], None],
    ) -> None:
        rollout = config.rollout
        self._config, self._world, self._http, self._fleet = config, world, http, fleet
        self._run, self.secret, self._say = run, secret, say
        self._sync = Sync(world, http, transport, rollout.sync.in_flight)
        self._conversations = conversations
        self._dispatcher = self._new_dispatcher(attempts=rollout.attempts, conversations=conversations)
        self._source: WeightSource | None = None
        self._version = -1
        self._checking: Future[dict[str, str]] | None = None
        self._checked = self._spoke = 0.0
        self._resubmitted = self._retries = 0
        self._synced = False
        self._apis: dict[Member, ServerApi] = {}
        self.members = while_leader_waits(world, lambda: http.start(self._leaders_fleet.open()))
        """Who serves."""

    @property
    def timings(self) -> Timings:
        """Of the last update."""
        return self._sync.timings

    @property
    def _leaders_fleet(self) -> Fleet:
        assert self._fleet is not None, "only the leader has a fleet"
        return self._fleet

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Batch:
        return self._dispatcher.begin(prompts, sampling, self._version)

    def finish(self, pending: Batch) -> Completions:
        """Wait, beat by beat, until the last rank's last prompt is answered.

        Raises:
            UserError: on every rank, if no server can serve any more, nothing was answered for ``rollout.timeout_s``,
                or a prompt failed ``rollout.attempts`` times.
        """
        began = self._spoke = self._checked = time.monotonic()
        self._checking = None  # of an earlier wait; a sync may have come between
        beat_s = 0.05
        while True:
            pending.wait(beat_s)
            beat_s = min(2 * beat_s, BEAT_S)
            reports = self._world.gather(self._report(pending, began))
            if error := next((report.error for report in reports if report.error), None):
                raise self._failed(error)
            lost = {url: why for report in reports for url, why in report.lost.items()}
            if lost:
                self._lose(lost)
            left = [report.unfinished for report in reports]
            if not any(left):
                return pending.groups()
            self._heartbeat(left, began)
            if not self.members:
                self._recover()
                began = time.monotonic()
            elif min(report.idle_s for report in reports) > self._config.rollout.timeout_s:
                raise UserError(
                    "rollout.timeout_s",
                    f"{self._config.rollout.timeout_s:g}",
                    f"no prompt was answered for so long; unanswered: {_by_rank(left)}",
                    "Look into the servers' logs, or raise it",
                )

    def pause(self) -> None:
        """Where servers share the trainer's GPUs, have them give their memory back, until the next update."""
        failed: Mapping[str, str] | None = None
        while self._config.rollout.colocated and failed != {}:
            self._wait_for_starting()
            failed = self._sync.release(self._serving())
            self._lose(failed)  # and start it again, for which the step waits, too

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Bring every server to a version; those that fail are left behind, those that are back come along.

        Raises:
            UserError: on every rank, if none is left, or servers fail again and again.
        """
        self._source, self._version = source, version
        retries = self._config.rollout.sync.retries
        problems: Mapping[str, str] | None = None
        for _ in range(retries + 1):
            self.members = self._world.from_leader(lambda: self._leaders_fleet.welcome())
            if not self.members:
                self._wait_for_servers()
            every = self._config.rollout.sync.check_every
            verify = not self._synced or (every > 0 and version % every == 0)
            problems = self._sync.update(self._serving(), source, f"{self._run}-{version}", verify=verify)
            if problems is None:
                self._synced = True
                return
            self._retries += 1
            self._say_on_leader(f"an update of the weights failed and is tried again: {_list(problems)}")
            self._lose(problems)
        raise UserError(
            "rollout.sync.retries",
            retries,
            f"the servers could not be brought to version {version}: {_list(problems)}",
            "Look into the servers' logs; raise it, or try rollout.sync.transport=disk",
        )

    def resume(self) -> None:
        self._lose(self._sync.resume(self._serving()))
        self._serve()

    def health(self) -> str | None:
        return None if self.members else "no rollout server is left"

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        """A server that fails in it is lost.

        Raises:
            UserError: on every rank, if no server is left, and none comes back.
        """
        batches: dict[Member, Batch] = {}
        self._checking, self._checked = None, time.monotonic()

        def look() -> dict[str, str] | None:
            """What is wrong with servers; None once all have answered."""
            for member in self.members:
                if member not in batches:
                    alone = self._new_dispatcher(attempts=1)
                    alone.serve_from([self._api(member)])
                    batches[member] = alone.begin(prompts, sampling, 0)
            asked = {member: batches[member] for member in self.members}
            for batch in asked.values():
                batch.wait(BEAT_S)
            if not any(batch.unfinished for batch in asked.values()):
                return None
            failed = {member.url: f"{batch.error}" for member, batch in asked.items() if batch.error is not None}
            return {**self._unhealthy(self._leaders_fleet), **failed}

        while (lost := self._world.from_leader(look)) is not None:
            self._lose(lost)
            if not self.members:
                self._recover()
        return self._world.from_leader(
            lambda: {self._api(member).shown: batches[member].groups() for member in self.members}
        )

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Words were said when they were true."""
        counts = self._world.gather(self._dispatcher.resubmitted)
        timings = self._sync.timings
        metrics = {
            "rollout/servers": float(len(self.members)),
            "rollout/resubmitted": float(sum(counts) - self._resubmitted),
            "rollout/sync_retries": float(self._retries),
            "perf/sync_pause_time": timings.pause,
            "perf/sync_transfer_time": timings.transfer,
            "perf/sync_end_time": timings.end,
            "perf/sync_resume_time": timings.resume,
            "perf/sync_bytes": float(timings.bytes),
        }
        self._resubmitted, self._retries = sum(counts), 0
        return self._world.from_leader(lambda: metrics), ()

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._http.close)
            if self._conversations is not None:
                stack.callback(self._conversations.close)
            if self._fleet is not None:
                stack.callback(self._fleet.close)
            stack.callback(self._sync.transport.close)

    def _report(self, batch: Batch, began: float) -> _Report:
        lost = self._dispatcher.take_lost()
        if self._fleet is not None:
            lost = {**self._unhealthy(self._fleet), **lost}
        idle = time.monotonic() - max(began, batch.progressed)
        return _Report(batch.unfinished, lost, batch.error, idle)

    def _unhealthy(self, fleet: Fleet) -> dict[str, str]:
        """What the leader's checks have found since it was last asked. They run beside the wait."""
        timeout_s = self._config.rollout.health_timeout_s
        if self._checking is not None and self._checking.done():
            checking, self._checking, self._checked = self._checking, None, time.monotonic()
            return checking.result()
        if self._checking is None and time.monotonic() - self._checked > timeout_s / 2:
            self._checking = self._http.start(fleet.check(timeout_s))
        return {}

    def _lose(self, problems: Mapping[str, str]) -> None:
        """Take servers out on every rank alike."""
        if not problems:
            return
        self.members = self._world.from_leader(lambda: self._leaders_fleet.lose(problems))
        self._serve()

    def _serve(self) -> None:
        self._dispatcher.serve_from(self._serving())

    def _recover(self) -> None:
        """Nobody serves: wait for a server to come back, and bring it up to date."""
        self._wait_for_servers()
        assert self._source is not None, "rollouts were asked for before any weights were there"
        self.update_weights(self._source, self._version)
        self.resume()

    def _wait_for_starting(self) -> None:
        """Wait for servers that are being started again: they would take the memory that a step trains in."""

        def look() -> tuple[bool, tuple[Member, ...]]:
            members, starting = self._leaders_fleet.welcome(), self._leaders_fleet.starting
            if starting:
                time.sleep(BEAT_S)
            return starting, members

        starting = True
        while starting:
            starting, self.members = self._world.from_leader(look)

    def _wait_for_servers(self) -> None:
        """
        Raises:
            UserError: on every rank, if none comes back within ``rollout.timeout_s``, or none can.
        """
        began, timeout_s = time.monotonic(), self._config.rollout.timeout_s
        self._say_on_leader("no rollout server is left; waiting for one to come back")

        def look() -> tuple[Member, ...]:
            fleet, rollout = self._leaders_fleet, self._config.rollout
            members = fleet.welcome()
            if not members and fleet.hopeless:
                raise UserError(
                    "rollout.launch.restarts",
                    rollout.launch.restarts,
                    "are used up, and no rollout server is left",
                    "Look into the servers' logs; raise it, and run the same command again: it resumes",
                )
            if not members and time.monotonic() - began > timeout_s:
                raise UserError(
                    "rollout.timeout_s",
                    f"{timeout_s:g}",
                    "no rollout server is left, and none came back in time",
                    "Look into the servers' logs, start them again, and run the same command again: it resumes",
                )
            if not members:
                time.sleep(BEAT_S)
            return members

        while not (members := self._world.from_leader(look)):
            pass
        self.members = members

    def _serving(self) -> list[ServerApi]:
        return [self._api(member) for member in self.members]

    def _api(self, member: Member) -> ServerApi:
        """The same for as long as the server lives."""
        if member not in self._apis:
            rollout = self._config.rollout
            self._apis[member] = api_for(
                rollout.engine,
                member.url,
                self._http,
                secret=self.secret,
                timeout_s=rollout.sync.timeout_s,
                ranks=member.ranks,
                seeded=member.seeded,
                gpus=member.gpus,
            )
        return self._apis[member]

    def _new_dispatcher(self, *, attempts: int, conversations: Conversations | None = None) -> Dispatcher:
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

    def _read_version(self, told: str) -> int | None:
        run, _, number = told.rpartition("-")
        return int(number) if run == self._run and number.isdigit() else None

    def _heartbeat(self, left: Sequence[int], began: float) -> None:
        now = time.monotonic()
        if now - self._spoke > self._config.rollout.heartbeat_s:
            self._spoke = now
            self._say_on_leader(
                f"waiting for rollouts for {now - began:.0f} s; {len(self.members)} servers serve; "
                f"prompts not yet answered: {_by_rank(left)}"
            )

    def _say_on_leader(self, text: str) -> None:
        if self._world.leads:
            self._say(text)

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, UserError):
            return error
        return UserError(
            "rollout.attempts",
            self._config.rollout.attempts,
            f"a prompt could not be answered: {error}",
            "Look into the servers' logs; raise it if servers died of something else",
        )


def _by_rank(left: Sequence[int]) -> str:
    return ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(left) if count)


def _list(problems: Mapping[str, str] | None) -> str:
    return (
        "; ".join(f"{url} {problem}" for url, problem in (problems or {}).items()) or "nobody knows which server failed"
    )

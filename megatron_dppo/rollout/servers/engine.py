"""Servers as one rollout engine: every rank asks them for its own share, the leader watches over them.

What all ranks must know alike (who serves, who is lost, whether to go on) travels in small messages over gloo at every
beat of the wait for rollouts; weights and completions never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Groups, Sampling, WeightSource
from megatron_dppo.rollout.servers.api import ServerApi
from megatron_dppo.rollout.servers.connect import api_for
from megatron_dppo.rollout.servers.dispatch import Batch, Dispatcher
from megatron_dppo.rollout.servers.fleet import Fleet, Roster
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sync import Sync, Timings
from megatron_dppo.rollout.servers.transports import Transport

BEAT_S = 1.0
"""Longest time between two moments at which ranks that wait for rollouts compare notes."""


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
        *,
        run: str,
        secret: str | None,
        say: Callable[[str], None],
    ) -> None:
        rollout = config.rollout
        self._config, self._world, self._http, self._fleet = config, world, http, fleet
        self._run, self.secret, self._say = run, secret, say
        self._sync = Sync(world, http, transport, rollout.sync.in_flight, rollout.colocated)
        self._dispatcher = Dispatcher(
            http,
            self._read_version,
            first=world.rank,
            max_in_flight=rollout.max_in_flight,
            request_timeout_s=rollout.request_timeout_s,
            attempts=rollout.attempts,
        )
        self._source: WeightSource | None = None
        self._version = -1
        self._checking: Future[dict[str, str]] | None = None
        self._checked = self._spoke = 0.0
        self._resubmitted = self._retries = self._synced = 0
        self.roster = world.from_leader(lambda: self._leaders_fleet.open())
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

    def finish(self, pending: Batch) -> Groups:
        """Wait, beat by beat, until the last rank's last prompt is answered.

        Raises:
            UserError: on every rank, if no server can serve any more, nothing was answered for ``rollout.timeout_s``,
                or a prompt failed ``rollout.attempts`` times.
        """
        began = self._spoke = self._checked = time.monotonic()
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
            if not self.roster.members:
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
        if self._config.rollout.colocated:
            self._lose(self._sync.release(self._apis()))

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Bring every server to a version; those that fail are left behind, those that are back come along.

        Raises:
            UserError: on every rank, if none is left, or servers fail again and again.
        """
        self._source, self._version = source, version
        retries = self._config.rollout.sync.retries
        for _ in range(retries + 1):
            self.roster = self._world.from_leader(self._welcome)
            if not self.roster.members:
                self._wait_for_servers()
            every = self._config.rollout.sync.check_every
            verify = self._synced == 0 or (every > 0 and self._synced % every == 0)
            problems = self._sync.update(self._apis(), source, f"{self._run}-{version}", verify=verify)
            if problems is None:
                self._synced += 1
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
        self._lose(self._sync.resume(self._apis()))
        self._serve()

    def health(self) -> str | None:
        return None if self.roster.members else "no rollout server is left"

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Groups]:
        """Those of servers that fail in it are left out."""

        def sample() -> dict[str, Groups]:
            samples = {}
            for api in self._apis():
                alone = Dispatcher(
                    self._http,
                    self._read_version,
                    first=0,
                    max_in_flight=len(prompts),
                    request_timeout_s=self._config.rollout.request_timeout_s,
                    attempts=1,
                )
                alone.serve_from({api.url: api})
                batch = alone.begin(prompts, sampling, 0)
                batch.wait(self._config.rollout.request_timeout_s)
                if batch.error is None and not batch.unfinished:
                    samples[api.shown] = batch.groups()
            return samples

        return self._world.from_leader(sample)

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Words were said when they were true."""
        counts = self._world.gather(self._dispatcher.resubmitted)
        timings = self._sync.timings
        metrics = {
            "rollout/servers": float(len(self.roster.members)),
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
        self._sync.transport.close()
        self._http.close()
        if self._fleet is not None:
            self._fleet.close()

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

        def lose() -> Roster:
            self._leaders_fleet.lose(dict(problems))
            return self._leaders_fleet.roster()

        self.roster = self._world.from_leader(lose)
        self._serve()

    def _serve(self) -> None:
        apis = {api.url: api for api in self._apis()}
        self._dispatcher.serve_from({url: apis.get(url) or self._api(url, 1) for url in self.roster.doors})

    def _recover(self) -> None:
        """Nobody serves: wait for a server to come back, and bring it up to date."""
        self._wait_for_servers()
        assert self._source is not None, "rollouts were asked for before any weights were there"
        self.update_weights(self._source, self._version)
        self.resume()

    def _wait_for_servers(self) -> None:
        """
        Raises:
            UserError: on every rank, if none comes back within ``rollout.timeout_s``, or none can.
        """
        began, timeout_s = time.monotonic(), self._config.rollout.timeout_s
        self._say_on_leader("no rollout server is left; waiting for one to come back")

        def look() -> Roster:
            fleet = self._leaders_fleet
            if fleet.welcome():
                return fleet.roster()
            if fleet.hopeless or time.monotonic() - began > timeout_s:
                raise UserError(
                    "rollout.timeout_s",
                    f"{timeout_s:g}",
                    "no rollout server is left, and none came back",
                    "Look into the servers' logs, start them again, and run the same command again: it resumes",
                )
            time.sleep(BEAT_S)
            return Roster((), ())

        while not (roster := self._world.from_leader(look)).members:
            pass
        self.roster = roster

    def _welcome(self) -> Roster:
        self._leaders_fleet.welcome()
        return self._leaders_fleet.roster()

    def _apis(self) -> list[ServerApi]:
        return [self._api(member.url, member.ranks) for member in self.roster.members]

    def _api(self, url: str, ranks: int) -> ServerApi:
        rollout = self._config.rollout
        return api_for(
            rollout.engine, url, self._http, secret=self.secret, timeout_s=rollout.sync.timeout_s, ranks=ranks
        )

    def _read_version(self, told: str) -> int | None:
        run, _, number = told.rpartition("-")
        return int(number) if run == self._run and number.isdigit() else None

    def _heartbeat(self, left: Sequence[int], began: float) -> None:
        now = time.monotonic()
        if now - self._spoke > self._config.rollout.heartbeat_s:
            self._spoke = now
            self._say_on_leader(
                f"waiting for rollouts for {now - began:.0f} s; {len(self.roster.members)} servers serve; "
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


def _list(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{url} {problem}" for url, problem in problems.items()) or "nobody knows which server failed"

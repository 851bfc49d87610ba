"""Names the rank that others wait for, with the place in the code where it stands.

If one rank never enters a collective, the others wait until a timeout that names no rank. Here a thread of each rank
sends heartbeats, even while its main thread is blocked, and the leader compares them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.meeting import LOOPBACK, on_one_machine, open_store
from megatron_dppo.parallel.world import World

FRAMES = 8
"""Innermost frames of a stack that the log shows."""
UNLIMITED = ("", "rollout", "eval")
"""Phases that may take long on all ranks: rollouts and evaluations, which report their own progress, and the time
between phases, in which a run loads its weights and waits for servers."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank tells the leader."""

    number: int
    """How many heartbeats it has sent."""
    entered: int
    """Phases it has entered; the same number on all ranks that are equally far."""
    phase: str
    still_s: float
    """Seconds since it entered or left a phase."""
    host: str


class Watchdog:
    """Sends heartbeats until it is closed. Made by all ranks together; a run of one rank sends none.

    Args:
        world: the ranks.
        timers: of this rank's phases.
        late_s: seconds that ranks wait for another one before it is named, once for each phase.
        stuck_s: seconds after which all ranks are named, if they are equally far and none moves.
    """

    def __init__(self, world: World, timers: PhaseTimers, late_s: float, stuck_s: float) -> None:
        self._world, self._timers, self._late_s = world, timers, late_s
        self._stuck_s = max(late_s, stuck_s)
        self._interval_s = min(late_s / 4, 10.0)
        self._main = threading.main_thread().ident
        self._sent = self._answered = self._asked = 0
        self._heard: dict[int, tuple[int, float]] = {}
        """On the leader: the number of each rank's last heartbeat, and when it came."""
        self._named: set[tuple[int, int]] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._store = _shared_store(world)
            self._send()
            world.wait_for_all("first heartbeat")  # from here on every rank's heartbeat is there to be read
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(2.0)  # it may itself wait for a leader that is gone

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval_s):
                self._send()
                if self._world.leads:
                    self._compare()
        except RuntimeError:
            return  # the leader and its store are gone, which ends the run

    def _send(self) -> None:
        timers = self._timers
        self._sent += 1
        still = time.monotonic() - timers.moved
        heartbeat = Heartbeat(self._sent, timers.entered, timers.phase, still, socket.gethostname())
        self._store.set(f"heartbeat/{self._world.rank}", json.dumps(asdict(heartbeat)))
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"stack/{asked}/{self._world.rank}", self._stack())

    def _compare(self) -> None:
        texts = self._store.multi_get([f"heartbeat/{rank}" for rank in range(self._world.size)])
        heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
        now = time.monotonic()
        for rank, heartbeat in enumerate(heartbeats):
            if rank not in self._heard or self._heard[rank][0] != heartbeat.number:
                self._heard[rank] = heartbeat.number, now
        silent = [now - self._heard[rank][1] for rank in range(len(heartbeats))]
        late = late_ranks(heartbeats, silent, self._late_s, self._stuck_s)
        new = [rank for rank in late if (rank, heartbeats[rank].entered) not in self._named]
        if new:
            self._named |= {(rank, heartbeats[rank].entered) for rank in new}
            print(_describe(new, heartbeats, self._stacks(new)), file=sys.stderr, flush=True)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where those ranks stand, as far as they answer within two of their heartbeats."""
        self._asked = self._store.add("asked", 1)
        deadline = time.monotonic() + 2 * self._interval_s + 1.0
        self._send()
        found: dict[int, str] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline and not self._end.wait(0.05):
            for rank in ranks:
                if rank not in found and self._store.check([key := f"stack/{self._asked}/{rank}"]):
                    found[rank] = self._store.get(key).decode()
        return found

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""


def late_ranks(heartbeats: Sequence[Heartbeat], silent: Sequence[float], late_s: float, stuck_s: float) -> list[int]:
    """The ranks to name: those without a sign of life; else those that are behind, once others have waited for them;
    else all, once none of them has moved for long, unless their phase is one of ``UNLIMITED``.

    Args:
        heartbeats: the last heartbeat of each rank.
        silent: seconds since each came.
        late_s: seconds of waiting for another rank that are too long.
        stuck_s: seconds without a move that are too long for all of them.
    """
    if gone := [rank for rank, seconds in enumerate(silent) if seconds > late_s]:
        return gone
    front = max(heartbeat.entered for heartbeat in heartbeats)
    waited = max(heartbeat.still_s for heartbeat in heartbeats if heartbeat.entered == front)
    behind = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat.entered < front]
    if behind:
        return behind if waited > late_s else []
    still = min(heartbeat.still_s for heartbeat in heartbeats) > stuck_s
    return list(range(len(heartbeats))) if still and heartbeats[0].phase not in UNLIMITED else []


def _describe(late: Sequence[int], heartbeats: Sequence[Heartbeat], stacks: dict[int, str]) -> str:
    """One paragraph for each phase and stack in which late ranks are."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in late:
        alike.setdefault((heartbeats[rank].phase, stacks.get(rank, "")), []).append(rank)
    waiting = len(heartbeats) - len(late)
    lines = []
    for (phase, stack), ranks in alike.items():
        who = ", ".join(f"{rank} on {heartbeats[rank].host}" for rank in ranks)
        seconds = max(heartbeats[rank].still_s for rank in ranks)
        others = f"; {waiting} others wait" if waiting else ""
        lines.append(f"late: rank {who}, in {phase or 'no phase'} for {seconds:.0f} s{others}. It stands at:")
        lines.append(stack.rstrip() or "  (no answer: its process is stopped or gone, or holds the interpreter's lock)")
    return "\n".join(lines)


def _shared_store(world: World) -> dist.TCPStore:
    """A store for the heartbeats alone: a main thread that waits in the process group's store may lock that one."""
    limit = timedelta(seconds=world.timeout_s)
    mine: list[dist.TCPStore] = []

    def opened() -> tuple[str, int]:
        host = LOOPBACK if on_one_machine(os.environ) else os.environ.get("MASTER_ADDR", LOOPBACK)
        mine.append(open_store(host, limit))
        return host, mine[0].port

    host, port = world.from_leader(opened)
    return mine[0] if mine else dist.TCPStore(host, port, is_master=False, timeout=limit)

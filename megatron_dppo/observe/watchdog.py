"""Every rank says where it is; when others wait for one, the log names it, with the place in the code where it stands.

A collective that one rank never enters looks, from the others, like a dead network, and ends in a timeout that names no
one. Here a thread of each rank beats, beside whatever its main thread is held up in, and the leader's compares.
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
UNHURRIED = ("", "rollout", "eval")
"""Phases that take as long as they take, and say themselves how far they are; and what lies between phases, where a run
begins: loading weights, waiting for servers. All ranks may be there for long."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself."""

    number: int
    """Of its beats so far."""
    entered: int
    """Phases it has entered: the same on all ranks that are equally far."""
    phase: str
    still_s: float
    """Seconds since it entered or left one."""
    host: str


class Watchdog:
    """Beats until it is closed. Made by all ranks together; a run of one rank has nobody to wait for.

    Args:
        world: the ranks.
        timers: of this rank's phases.
        late_s: seconds that ranks wait for another before the log says so, once for each phase.
        stuck_s: seconds after which all of them are stuck, if they are equally far and none moves.
    """

    def __init__(self, world: World, timers: PhaseTimers, late_s: float, stuck_s: float) -> None:
        self._world, self._timers, self._late_s = world, timers, late_s
        self._stuck_s = max(late_s, stuck_s)
        self._beat_s = min(late_s / 4, 10.0)
        self._main = threading.main_thread().ident
        self._beats = self._answered = self._asked = 0
        self._heard: dict[int, tuple[int, float]] = {}
        """The leader's: the number of each rank's last beat, and when it came."""
        self._named: set[tuple[int, int]] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._store = _shared_store(world)
            self._say()
            world.wait_for_all("first heartbeat")  # from here on every rank's beat is there to be read
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(2.0)  # it may wait for a leader that is gone; nobody is to wait for it

    def _run(self) -> None:
        try:
            while not self._end.wait(self._beat_s):
                self._say()
                if self._world.leads:
                    self._look()
        except RuntimeError:
            return  # the leader is gone, and its store with it: that ends the run without our help

    def _say(self) -> None:
        timers = self._timers
        self._beats += 1
        still = time.monotonic() - timers.moved
        beat = Beat(self._beats, timers.entered, timers.phase, still, socket.gethostname())
        self._store.set(f"beat/{self._world.rank}", json.dumps(asdict(beat)))
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"stack/{asked}/{self._world.rank}", self._stack())

    def _look(self) -> None:
        texts = self._store.multi_get([f"beat/{rank}" for rank in range(self._world.size)])
        beats = [Beat(**json.loads(text)) for text in texts]
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank not in self._heard or self._heard[rank][0] != beat.number:
                self._heard[rank] = beat.number, now
        silent = [now - self._heard[rank][1] for rank in range(len(beats))]
        late = late_ranks(beats, silent, self._late_s, self._stuck_s)
        new = [rank for rank in late if (rank, beats[rank].entered) not in self._named]
        if new:
            self._named |= {(rank, beats[rank].entered) for rank in new}
            print(_describe(new, beats, self._stacks(new)), file=sys.stderr, flush=True)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where those ranks stand, as far as they answer within two of their beats."""
        self._asked = self._store.add("asked", 1)
        deadline = time.monotonic() + 2 * self._beat_s + 1.0
        self._say()
        found: dict[int, str] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline and not self._end.wait(0.05):
            for rank in ranks:
                if rank not in found and self._store.check([key := f"stack/{self._asked}/{rank}"]):
                    found[rank] = self._store.get(key).decode()
        return found

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""


def late_ranks(beats: Sequence[Beat], silent: Sequence[float], late_s: float, stuck_s: float) -> list[int]:
    """The ranks that others have waited for, for so long: those without a sign of life; else those that are behind; if
    none is, all that stand still.

    In a phase that takes as long as it takes, ranks that are equally far are not late.

    Args:
        beats: the last of each rank.
        silent: seconds since it came.
        late_s: what is long to wait for another.
        stuck_s: what is long to be in one phase, for all of them.
    """
    if gone := [rank for rank, seconds in enumerate(silent) if seconds > late_s]:
        return gone
    front = max(beat.entered for beat in beats)
    waited = max(beat.still_s for beat in beats if beat.entered == front)
    behind = [rank for rank, beat in enumerate(beats) if beat.entered < front]
    if behind:
        return behind if waited > late_s else []
    still = min(beat.still_s for beat in beats) > stuck_s
    return list(range(len(beats))) if still and beats[0].phase not in UNHURRIED else []


def _describe(late: Sequence[int], beats: Sequence[Beat], stacks: dict[int, str]) -> str:
    """One paragraph for each place where late ranks stand."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank in late:
        places.setdefault((beats[rank].phase, stacks.get(rank, "")), []).append(rank)
    waiting = len(beats) - len(late)
    lines = []
    for (phase, stack), ranks in places.items():
        who = ", ".join(f"{rank} on {beats[rank].host}" for rank in ranks)
        seconds = max(beats[rank].still_s for rank in ranks)
        others = f"; {waiting} others wait" if waiting else ""
        lines.append(f"late: rank {who}, in {phase or 'no phase'} for {seconds:.0f} s{others}. It stands at:")
        lines.append(stack.rstrip() or "  (no answer: its process is stopped or gone, or holds the interpreter's lock)")
    return "\n".join(lines)


def _shared_store(world: World) -> dist.TCPStore:
    """A store of our own: the process group's may be locked by what a main thread waits for in it."""
    limit = timedelta(seconds=world.timeout_s)
    mine: list[dist.TCPStore] = []

    def opened() -> tuple[str, int]:
        host = LOOPBACK if on_one_machine(os.environ) else os.environ.get("MASTER_ADDR", LOOPBACK)
        mine.append(open_store(host, limit))
        return host, mine[0].port

    host, port = world.from_leader(opened)
    return mine[0] if mine else dist.TCPStore(host, port, is_master=False, timeout=limit)

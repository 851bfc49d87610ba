"""Names the rank that others wait for, with the place in the code where it stands, and ends code
that hangs.

If one rank never enters a collective, the others wait until a timeout that names no rank. Here a
thread of each rank sends heartbeats, even while its main thread is blocked, and the leader compares
them.

Each rank also watches itself, also if it is the only one. Rollouts and evaluations run code of the
user's, which may never return. A main thread that stands still there, and waits for no other rank,
is named after ``run.late_s``. After ``rollout.timeout_s`` the thread sends it a signal, whose
handler raises ``StandstillError`` where the code stands. Code that catches even that, or hears no
signal, stands still for as long once more; then the thread ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron_dppo.config import Config
from megatron_dppo.errors import StandstillError, UserError, format_error
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.meeting import LOOPBACK, is_single_node, open_store
from megatron_dppo.parallel.world import TIMEOUT_FRACTION, World
from megatron_dppo.process import lifetime, streams
from megatron_dppo.process.streams import print_message

FRAMES = 8
"""Innermost frames of a stack that the log shows."""
UNLIMITED = ("", "rollout", "eval")
"""Phases that may take long on all ranks: rollouts and evaluations, which report their own
progress, and the time between phases, in which a run loads its weights and waits for servers."""
WAKE = signal.SIGUSR2
"""Interrupts a main thread that hangs, also within a call such as ``time.sleep``."""
OF_RANKS = "torch/distributed/"
"""In the path of the code in which a rank waits for others. Such a wait has a time limit of its
own."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's message to rank 0."""

    number: int
    """How many heartbeats it has sent."""
    entered: int
    """Phases it has entered; the same number on all ranks that are equally far."""
    phase: str
    still_s: float
    """Seconds since it entered or left a phase."""
    host: str


class Watchdog:
    """Watches until it is closed. Made by all ranks together, each on its main thread. A single
    rank sends no heartbeat.

    Args:
        world: the ranks, whose ``timeout_s`` limits how long one may stand still in rollouts and
            evaluations.
        timers: of this rank's phases.
        late_s: seconds that ranks wait for another one before it is named, once for each phase; and
            seconds without progress in rollouts and evaluations.
        stuck_s: seconds after which all ranks are named, if they are equally far and none moves.
    """

    def __init__(self, world: World, timers: PhaseTimers, late_s: float, stuck_s: float) -> None:
        self._world = world
        self._timers = timers
        self._late_s = late_s
        self._stuck_s = max(late_s, stuck_s)
        # Others that wait for this rank give up after the whole time, and know less.
        self._end_s = world.timeout_s * (TIMEOUT_FRACTION if world.size > 1 else 1.0)
        self._interval_s = min(late_s / 4, self._end_s / 4, 10.0)
        self._main = threading.main_thread().ident or 0
        self._hung: UserError | None = None
        self._interrupted_at = 0.0
        """Time of the last signal to the main thread. A main thread that has not moved since then
        caught the error."""
        self._reported_since = 0.0
        """The moment since which this rank had stood still when it last named itself."""
        self._sent = self._last_answer = self._last_request = 0
        self._last_beats: dict[int, tuple[int, float]] = {}
        """On the leader: the number of each rank's last heartbeat, and when it came."""
        self._named: set[tuple[int, int]] = set()
        self._end = threading.Event()
        if world.size > 1:
            self._store = _open_shared_store(world)
            self._send()
            world.barrier(
                "first heartbeat"
            )  # from here on every rank's heartbeat is there to be read
        streams.record_progress()
        self._before = signal.signal(WAKE, self._raise)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: Config, world: World, timers: PhaseTimers) -> Watchdog:
        # Half of what collectives wait: the names of those that hang are to come before the end.
        return cls(world, timers, config.run.late_s, stuck_s=config.layout.timeout_s / 2)

    def close(self) -> None:
        self._end.set()
        self._thread.join(2.0)  # it may itself wait for a leader that is gone
        signal.signal(WAKE, self._before)

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval_s):
                self._check_main_thread()
                if self._world.size > 1:
                    self._send()
                    if self._world.is_rank0:
                        self._check_heartbeats()
        except RuntimeError:
            return  # the leader and its store are gone, which ends the run

    def _check_main_thread(self) -> None:
        """Name this rank, or end what it does, if its main thread stands still and waits for no
        other rank."""
        phase = self._timers.phase
        since = max(self._timers.moved, streams.get_progress_time())
        if phase not in UNLIMITED and self._world.size > 1:
            return  # the leader compares all ranks there
        still = time.monotonic() - since
        limit_s = self._late_s if phase in UNLIMITED else self._stuck_s
        if phase in ("rollout", "eval"):
            limit_s = min(limit_s, self._end_s)
        if still < limit_s or self._is_waiting_for_ranks():
            return
        stack = self._format_stack()
        rank = self._world.rank
        if since > self._reported_since:
            self._reported_since = since
            name = f"{rank} on {socket.gethostname()}"
            print_message("\n".join(_format_paragraph(name, phase, still, "", stack)))
        if still >= self._end_s and phase in UNLIMITED:
            problem = (
                f"rank {rank} has made no progress for this time in {phase or 'no phase'}, "
                f"at:\n{stack.rstrip()}"
            )
            remedy = "Correct the cause in that stack, or raise rollout.timeout_s"
            hung = UserError("rollout.timeout_s", f"{self._world.timeout_s:g}", problem, remedy)
            if since == self._interrupted_at:
                lifetime.exit_now(2, format_error(hung))
            self._hung = hung
            streams.record_progress()  # what ends has time for it
            self._interrupted_at = streams.get_progress_time()
            signal.pthread_kill(self._main, WAKE)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._hung is not None:
            hung = self._hung
            self._hung = None
            raise StandstillError(hung)

    def _is_waiting_for_ranks(self) -> bool:
        frame = sys._current_frames().get(self._main)
        while frame is not None and OF_RANKS not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None

    def _send(self) -> None:
        timers = self._timers
        self._sent += 1
        still = time.monotonic() - timers.moved
        heartbeat = Heartbeat(self._sent, timers.entered, timers.phase, still, socket.gethostname())
        self._store.set(f"heartbeat/{self._world.rank}", json.dumps(asdict(heartbeat)))
        request = self._store.add("asked", 0)
        if request > self._last_answer:
            self._last_answer = request
            self._store.set(f"stack/{request}/{self._world.rank}", self._format_stack())

    def _check_heartbeats(self) -> None:
        texts = self._store.multi_get([f"heartbeat/{rank}" for rank in range(self._world.size)])
        heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
        now = time.monotonic()
        for rank, heartbeat in enumerate(heartbeats):
            if rank not in self._last_beats or self._last_beats[rank][0] != heartbeat.number:
                self._last_beats[rank] = heartbeat.number, now
        silent = [now - self._last_beats[rank][1] for rank in range(len(heartbeats))]
        late = find_late_ranks(heartbeats, silent, self._late_s, self._stuck_s)
        new = [rank for rank in late if (rank, heartbeats[rank].entered) not in self._named]
        if new:
            self._named |= {(rank, heartbeats[rank].entered) for rank in new}
            print_message(_describe(new, heartbeats, self._collect_stacks(new)))

    def _collect_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where those ranks stand, as far as they answer within two of their heartbeats."""
        self._last_request = self._store.add("asked", 1)
        deadline = time.monotonic() + 2 * self._interval_s + 1.0
        self._send()
        found: dict[int, str] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline and not self._end.wait(0.05):
            for rank in ranks:
                key = f"stack/{self._last_request}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
        return found

    def _format_stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""


def find_late_ranks(
    heartbeats: Sequence[Heartbeat], silence_s: Sequence[float], late_s: float, stuck_s: float
) -> list[int]:
    """The ranks to name: those without a sign of life; else those that are behind, once others have
    waited for them; else all, once none of them has moved for long, unless their phase is one of
    ``UNLIMITED``.

    Args:
        heartbeats: the last heartbeat of each rank.
        silence_s: seconds since each came.
        late_s: seconds of waiting for another rank that are too long.
        stuck_s: seconds without a move that are too long for all of them.
    """
    if gone := [rank for rank, seconds in enumerate(silence_s) if seconds > late_s]:
        return gone
    front = max(heartbeat.entered for heartbeat in heartbeats)
    waited = max(heartbeat.still_s for heartbeat in heartbeats if heartbeat.entered == front)
    behind = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat.entered < front]
    if behind:
        return behind if waited > late_s else []
    still = min(heartbeat.still_s for heartbeat in heartbeats) > stuck_s
    return list(range(len(heartbeats))) if still and heartbeats[0].phase not in UNLIMITED else []


def _describe(
    late_ranks: Sequence[int], heartbeats: Sequence[Heartbeat], stacks: dict[int, str]
) -> str:
    """One paragraph for each phase and stack in which late ranks are."""
    ranks_by_place: dict[tuple[str, str], list[int]] = {}
    for rank in late_ranks:
        ranks_by_place.setdefault((heartbeats[rank].phase, stacks.get(rank, "")), []).append(rank)
    waiting = len(heartbeats) - len(late_ranks)
    lines = []
    for (phase, stack), ranks in ranks_by_place.items():
        names = ", ".join(f"{rank} on {heartbeats[rank].host}" for rank in ranks)
        seconds = max(heartbeats[rank].still_s for rank in ranks)
        lines += _format_paragraph(
            names, phase, seconds, f"; {waiting} other ranks wait" if waiting else "", stack
        )
    return "\n".join(lines)


def _format_paragraph(
    source: str, phase: str, seconds: float, remark: str, stack: str
) -> list[str]:
    return [
        f"late: rank {source}, in {phase or 'no phase'} for {seconds:.0f} s{remark}. Stack:",
        stack.rstrip()
        or "  (no answer: its process is stopped or gone, or holds the interpreter's lock)",
    ]


def _open_shared_store(world: World) -> dist.TCPStore:
    """A store for the heartbeats alone: a main thread that waits in the process group's store may
    lock that one."""
    limit = timedelta(seconds=world.timeout_s)
    mine: list[dist.TCPStore] = []

    def open_for_leader() -> tuple[str, int]:
        host = LOOPBACK if is_single_node(os.environ) else os.environ.get("MASTER_ADDR", LOOPBACK)
        mine.append(open_store(host, limit))
        return host, mine[0].port

    host, port = world.broadcast(open_for_leader)
    return mine[0] if mine else dist.TCPStore(host, port, is_master=False, timeout=limit)

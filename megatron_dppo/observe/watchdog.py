"""Report ranks that keep other ranks waiting, with the stack, and end code that hangs.

A rank that never enters a collective keeps other ranks waiting until a timeout that names no rank.
Therefore a thread of each rank sends heartbeats, even while the main thread is blocked, and rank 0
compares the heartbeats.

Each rank, even a single rank, also watches the main thread, because rollouts and evaluations run a
user's code, which may never return:

1. After ``run.stall_warning_s`` without progress and without a wait for another rank, report the
   rank.
2. After ``rollout.timeout_s``, send the main thread a signal. The handler raises
   ``StandstillError`` at the current line.
3. After the same time again, because the code caught the error or never received the signal, end
   the process.
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
"""Innermost frames of a stack in the log."""
UNLIMITED = ("", "rollout", "eval")
"""Phases that may take long on all ranks: rollouts and evaluations report progress; between phases
(``""``), a run loads weights and waits for servers."""
WAKE = signal.SIGUSR2
"""Interrupts a hanging main thread, also in ``time.sleep``."""
OF_RANKS = "torch/distributed/"
"""Path of code that waits for other ranks, with a time limit."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message of a rank to rank 0."""

    number: int
    """Count of heartbeats."""
    entered: int
    """Phases entered; equal on ranks with equal progress."""
    phase: str
    still_s: float
    """Seconds since the last start or end of a phase."""
    host: str


class Watchdog:
    """Watchdog of a rank until :meth:`close`. A single rank sends no heartbeat.

    Collective; made on the main threads.

    Args:
        world: ranks; ``timeout_s`` limits seconds without progress in rollouts and evaluations.
        timers: phase timers of this rank.
        late_s: seconds without progress in rollouts and evaluations, or of waiting for a rank,
            before the rank is reported, once per phase.
        stuck_s: seconds without progress on all ranks, if equal, before all are reported.
    """

    def __init__(self, world: World, timers: PhaseTimers, late_s: float, stuck_s: float) -> None:
        self._world = world
        self._timers = timers
        self._late_s = late_s
        self._stuck_s = max(late_s, stuck_s)
        # End before other ranks time out, because the other ranks' errors name no cause.
        self._end_s = world.timeout_s * (TIMEOUT_FRACTION if world.size > 1 else 1.0)
        self._interval_s = min(late_s / 4, self._end_s / 4, 10.0)
        self._main = threading.main_thread().ident or 0
        self._hung: UserError | None = None
        # Time of the last signal. No progress since then: the main thread caught the error.
        self._interrupted_at = 0.0
        self._reported_since = 0.0
        """Start of the standstill reported last."""
        self._sent = self._last_answer = self._last_request = 0
        self._last_beats: dict[int, tuple[int, float]] = {}
        """On rank 0: number and arrival time of each rank's last heartbeat."""
        self._named: set[tuple[int, int]] = set()
        self._end = threading.Event()
        if world.size > 1:
            self._store = _open_shared_store(world)
            self._send()
            # Rank 0 reads all heartbeats, so every rank must have sent a heartbeat.
            world.barrier("first heartbeat")
        streams.record_progress()
        self._before = signal.signal(WAKE, self._raise)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: Config, world: World, timers: PhaseTimers) -> Watchdog:
        # Half of the collectives' timeout, so that the report precedes the end of the run.
        return cls(world, timers, config.run.stall_warning_s, stuck_s=config.layout.timeout_s / 2)

    def close(self) -> None:
        self._end.set()
        # Limit the wait, because the thread may wait for a rank 0 that has ended.
        self._thread.join(2.0)
        signal.signal(WAKE, self._before)

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval_s):
                self._check_main_thread()
                if self._world.size > 1:
                    self._send()
                    if self._world.is_rank0:
                        self._check_heartbeats()
        # The store ended with rank 0, and the run ends, too.
        except RuntimeError:
            return

    def _check_main_thread(self) -> None:
        phase = self._timers.phase
        since = max(self._timers.moved, streams.get_progress_time())
        # Rank 0 compares all ranks in other phases.
        if phase not in UNLIMITED and self._world.size > 1:
            return
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
            # Restart the clock, so that the interrupted code has time to end.
            streams.record_progress()
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
        """Return the stacks of ranks that answer within two heartbeats."""
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
    heartbeats: Sequence[Heartbeat],
    silence_s: Sequence[float],
    late_s: float,
    stuck_s: float,
) -> list[int]:
    """Return the ranks to report, by the first rule that applies.

    1. Ranks without a heartbeat for ``late_s``.
    2. Ranks with less progress than other ranks that have waited for ``late_s``.
    3. All ranks, if no rank made progress for ``stuck_s`` and the phase is not in ``UNLIMITED``.

    Args:
        heartbeats: last heartbeat of each rank.
        silence_s: seconds since each heartbeat.
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
    late_ranks: Sequence[int],
    heartbeats: Sequence[Heartbeat],
    stacks: dict[int, str],
) -> str:
    # Ranks at the same line share a paragraph, because a thousand equal stacks are unreadable.
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
    source: str,
    phase: str,
    seconds: float,
    remark: str,
    stack: str,
) -> list[str]:
    return [
        f"late: rank {source}, in {phase or 'no phase'} for {seconds:.0f} s{remark}. Stack:",
        stack.rstrip()
        or "  (no answer: its process is stopped or gone, or holds the interpreter's lock)",
    ]


def _open_shared_store(world: World) -> dist.TCPStore:
    # Use a separate store: a main thread that waits in the process group's store may lock it.
    limit = timedelta(seconds=world.timeout_s)
    mine: list[dist.TCPStore] = []

    def open_for_leader() -> tuple[str, int]:
        host = LOOPBACK if is_single_node(os.environ) else os.environ.get("MASTER_ADDR", LOOPBACK)
        mine.append(open_store(host, limit))
        return host, mine[0].port

    host, port = world.broadcast(open_for_leader)
    return mine[0] if mine else dist.TCPStore(host, port, is_master=False, timeout=limit)

"""Of ranks that wait for each other, the log names the one that they wait for, and where in the
code it stands."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.observe.watchdog import Heartbeat, Watchdog, find_late_ranks
from megatron_dppo.parallel.world import initialize
from megatron_dppo.process import lifetime
from megatron_dppo.process.streams import record_progress
from tests.ranks import RankPool

LATE_S = 0.4
AT = Heartbeat(number=9, entered=5, phase="actor_train", still_s=0.1, host="n1")


@contextlib.contextmanager
def watched(
    size: int, *, timeout_s: float = 30.0, still_s: float = LATE_S, late_s: float = LATE_S
) -> Iterator[tuple[Any, ...]]:
    """Return the world, its timers and the file of a watchdog's words."""
    world = initialize(LayoutConfig(dp=size), seed=1, timeout_s=timeout_s)
    timers, said = PhaseTimers(), io.StringIO()
    with contextlib.redirect_stderr(said), closing(Watchdog(world, timers, late_s, still_s)):
        yield world, timers, said


def sort_the_attic(rank: int) -> None:
    """What holds one rank up."""
    if rank == 1:
        time.sleep(4 * LATE_S)


def train(rank: int, size: int) -> str:
    with watched(size) as (_, timers, said), timers("step"):
        for _ in range(3):  # quick phases, of which nothing is to be said
            with timers("plan"):
                dist.all_reduce(torch.ones(1))
        with timers("deliver"):
            sort_the_attic(rank)
        with timers("actor_train"):
            dist.all_reduce(torch.ones(1))
        with timers("rollout"):
            for _ in range(8):  # time for a second word, which would be one too many
                time.sleep(LATE_S / 4)
                record_progress()
    return said.getvalue()


def test_late_rank_is_named_once_with_its_place_in_the_code(ranks: RankPool) -> None:
    said, *others = ranks.run(3, train)
    assert others == ["", ""]
    assert said.count("late: ") == 1, said
    assert said.startswith("late: rank 1 on ")
    assert "in deliver for" in said
    assert "2 other ranks wait" in said
    assert "sort_the_attic" in said


def stop(rank: int, size: int) -> str:
    """Rank 1 is stopped while all wait for rollouts, until the leader's log has named it."""
    with watched(size) as (world, timers, said), timers("rollout"):
        process = world.gather(os.getpid())[1]
        if rank == 1:
            os.kill(process, signal.SIGSTOP)
        elif rank == 0:
            deadline = time.monotonic() + 20.0
            while "late" not in said.getvalue() and time.monotonic() < deadline:
                time.sleep(0.05)
                record_progress()
            os.kill(process, signal.SIGCONT)
        world.barrier("rollouts")
    return said.getvalue()


def test_stopped_rank_is_named_in_every_phase(ranks: RankPool) -> None:
    said = ranks.run(3, stop)[0]
    assert said.startswith("late: rank 1 on ")
    assert "2 other ranks wait" in said
    assert "no answer: its process is stopped or gone" in said


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ([AT, AT, AT], []),
        ([replace(AT, still_s=9.0), AT], []),  # one has only just moved
        ([replace(AT, still_s=9.0)] * 2, [0, 1]),
        (
            [replace(AT, still_s=9.0, phase="rollout")] * 2,
            [],
        ),  # a slow generation is no dead network
        ([replace(AT, still_s=9.0), replace(AT, entered=4, phase="rollout", still_s=0.2)], [1]),
        (
            [replace(AT, still_s=0.3), replace(AT, entered=4, still_s=9.0)],
            [],
        ),  # nobody has waited for long
    ],
)
def test_late_ranks(beats: list[Heartbeat], late: list[int]) -> None:
    assert find_late_ranks(beats, [0.1] * len(beats), 1.0, 5.0) == late


def test_silent_rank_is_late() -> None:
    waiting = replace(AT, entered=6, still_s=9.0)
    assert find_late_ranks([waiting, AT, waiting], [0.1, 0.1, 3.0], 1.0, 5.0) == [2]


def stand_still(rank: int, size: int, phase: str, late_s: float) -> tuple[str, str]:
    """Rank 0 runs code that never returns, in a call that no exception interrupts; others wait for
    it."""
    raised = ""
    with watched(size, timeout_s=4 * LATE_S, still_s=60.0, late_s=late_s) as (world, timers, said):
        try:
            with timers(phase) if phase else contextlib.nullcontext():
                world.run_on_all_ranks(partial(never_return, rank), description="rollouts")
        except UserError as error:
            raised = str(error)
    return said.getvalue(), raised


def never_return(rank: int) -> None:
    if rank == 0:
        time.sleep(60.0)


@pytest.mark.parametrize(
    ("size", "phase", "late_s"), [(1, "", LATE_S), (2, "rollout", LATE_S), (1, "eval", 900.0)]
)
def test_code_without_a_return_is_named_and_ended(
    ranks: RankPool, size: int, phase: str, late_s: float
) -> None:
    outcomes = ranks.run(size, stand_still, phase, late_s)
    assert outcomes[0][0].count("late: rank 0 on ") == 1
    assert f"in {phase or 'no phase'} for" in outcomes[0][0] and "never_return" in outcomes[0][0]
    for said, raised in outcomes:  # the leader's error is everyone's
        assert raised.startswith("rollout.timeout_s = 1.6: rank 0 has made no progress"), raised
        assert "never_return" in raised and said in ("", outcomes[0][0])


def move_slowly(rank: int, size: int) -> str:
    with watched(size, timeout_s=2 * LATE_S, still_s=60.0) as (_, timers, said):
        with timers("rollout"):
            for _ in range(12):
                time.sleep(LATE_S / 4)
                record_progress()
        with timers("actor_train"):  # whose steps may be long
            time.sleep(4 * LATE_S)
    return said.getvalue()


def test_slow_work_is_not_a_hang(ranks: RankPool) -> None:
    assert ranks.run(1, move_slowly) == [""]


def try_again(rank: int, size: int, caught: type[BaseException], log: Path) -> None:
    """Call a tool that hangs again and again, whatever it raises."""

    def leave(code: int, text: str) -> None:
        log.write_text(f"{code} {text}")
        os._exit(code)

    lifetime.exit_now = leave
    with watched(size, timeout_s=4 * LATE_S, still_s=60.0) as (_, timers, _), timers("rollout"):
        while True:
            with contextlib.suppress(caught):
                time.sleep(600.0)


def test_code_that_catches_exceptions_is_interrupted(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 has made no progress"):
        ranks.run(1, try_again, Exception, tmp_path / "log")


def test_code_that_catches_everything_is_ended(ranks: RankPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(AssertionError):
        ranks.run(1, try_again, BaseException, log)
    assert log.read_text().startswith("2 ") and "try_again" in log.read_text()

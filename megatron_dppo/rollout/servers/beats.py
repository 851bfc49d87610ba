"""Waiting for what only the leader does, without waiting long inside a collective."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from megatron_dppo.parallel.world import World

T = TypeVar("T")

BEAT_S = 1.0
"""Longest time between two moments at which waiting ranks compare notes."""


def while_leader_waits(world: World, start: Callable[[], Future[T]]) -> T:
    """What the leader's work comes to, on every rank. Collective.

    However long it takes, no rank is in a collective for more than a beat: slow servers never look like a dead network.

    Args:
        world: the ranks.
        start: called on the leader, sets the work going beside the main thread. What it or the work raises is raised on
            every rank.
    """
    futures: list[Future[T]] = []

    def look() -> tuple[bool, T | None]:
        if not futures:
            futures.append(start())
        wait(futures, BEAT_S)
        return (True, futures[0].result()) if futures[0].done() else (False, None)

    while True:
        done, value = world.from_leader(look)
        if done:
            return value  # type: ignore[return-value]

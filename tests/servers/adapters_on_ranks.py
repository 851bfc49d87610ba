"""Runs on every rank: servers that hold the policy of the run's beginning, and are sent adapters."""

from __future__ import annotations

from collections.abc import Sequence

from tests.servers.on_ranks import Rig, Round, kill_main


def killed(rank: int, size: int, settings: Sequence[str]) -> list[Round]:
    """A server is killed while it generates, and comes back after an update.

    Returns:
        On the leader, the rounds before it is killed, as it is, and once it is back.
    """
    rig = Rig(settings)
    try:
        rig.sync(0)
        before = rig.roll_out()
        before.difference = rig.difference(0)
        killed = rig.roll_out(kill_main, [0])
        rig.change(1.5)
        rig.sync(1)
        rig.until(2, 1)
        after = rig.roll_out()
        after.difference = rig.difference(1)
        return [before, killed, after] if rig.world.leads else []
    finally:
        rig.engine.close()

"""Servers that share the trainer's GPUs; functions for the rank pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.servers.on_ranks import Rig, Round, kill_main


def colocated(rank: int, size: int, settings: Sequence[str]) -> tuple[list[Round], list[list[list[str]]]]:
    """Three steps of servers that give their memory back between them; in the second one is killed while it generates.

    Returns:
        On the leader: the rounds, and what each server was asked over its memory and weights before each.
    """
    rig, heard = Rig(settings), defaultdict[str, list[str]](list)
    rounds, asked = [], []

    def hearing(name: str) -> Any:
        method = getattr(SglangClient, name)

        async def call(api: SglangClient, *arguments: Any) -> Any:
            heard[api.url].append(name)
            return await method(api, *arguments)

        return mock.patch.object(SglangClient, name, call)

    try:
        with ExitStack() as stack:
            for name in ("release_memory", "regain_weights", "begin_update", "end_update", "regain_cache", "resume"):
                stack.enter_context(hearing(name))
            for version in range(3):
                rig.engine.pause()
                rig.change(1.01)  # a step trains
                rig.sync(version)
                asked.append(list(heard.values()))
                rounds.append(rig.roll_out(kill_main, [0] if version == 1 else []))
                rounds[-1].difference = rig.difference(version)
                heard.clear()
    finally:
        rig.engine.close()
    return (rounds, asked) if rig.world.leads else ([], [])

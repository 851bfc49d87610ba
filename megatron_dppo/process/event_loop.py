"""Event loop of conversations, with a user's code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from megatron_dppo.process.lifetime import end_fork

Ts = TypeVarTuple("Ts")


class EventLoop(asyncio.SelectorEventLoop):
    """Event loop of a single process: a process forked by a callback or a task's step ends after
    the callback or step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        return super().call_soon(self._call, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._call, callback, *args, context=context)

    def _call(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        try:
            callback(*args)
        finally:
            # A fork would continue the whole run, and its conversations might fork, too.
            end_fork(self._process)

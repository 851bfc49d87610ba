"""Conversations with the local engine: all of a rank's go on together, one turn after the other.

The engine generates for all of them at once, whenever each has asked for its next turn or has ended. So what is decoded
together depends on what was said, and not on how long a tool took: the same call gives the same bits.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.process.event_loop import EventLoop
from megatron_dppo.process.streams import moved, tell
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation import Client, ConversationFunction, TryAgainError
from megatron_dppo.rollout.engine import Completions, Sampling
from megatron_dppo.rollout.tree import Prefix, TreePath

Continue = Callable[[Sequence[Prefix], Sampling], list[list[TreePath]]]
"""The engine's: it continues each stem for each of its slots."""
Place = tuple[int, int]
"""Indices of a conversation: of its prompt among those requested together, and of the completion for the prompt."""
AGAIN_S = 0.3
"""Before a conversation that was given up, perhaps because a tool is down, is had again."""
TURN = 1 << 60
"""Ids of prompts are below it. Request n of a conversation is sampled as a prompt of the id + n · TURN: the first as a
completion without a conversation is, and each with luck of its own, also where it repeats another one."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A turn that is asked for."""

    stem: Prefix
    """Prefix of this conversation alone."""
    stops: tuple[int, ...]
    turn: asyncio.Future[Completion]


@dataclass(kw_only=True, eq=False, slots=True)
class LocalClient(Client):
    """See :class:`Client`."""

    ask: Callable[[_Request], None]
    asked: int = 0
    """Turns that were asked for."""

    async def turn(self, context: list[int], limit: int, stops: tuple[int, ...]) -> Completion:
        own = replace(self.prompt, id=self.prompt.id + self.asked * TURN, token_ids=np.array(context, np.int32))
        self.asked += 1
        stem = Prefix(own, (self.number,), limit=min(limit, self.max_tokens))
        request = _Request(stem, stops, asyncio.get_running_loop().create_future())
        self.ask(request)
        return await request.turn


class LocalConversations:
    """Completes prompts with an engine, through a user's function.

    Args:
        function: has one conversation.
        timeout_s: how long all of them may neither ask nor end.
        late_s: seconds in which none ends, after which those under way are named.
        end_s: seconds in which none ends, after which the run stops.
        attempts: how often each is had before the run stops.
    """

    def __init__(
        self,
        function: ConversationFunction,
        *,
        timeout_s: float,
        attempts: int,
        late_s: float = math.inf,
        end_s: float = math.inf,
    ) -> None:
        self.function, self.timeout_s, self.attempts = function, timeout_s, attempts
        self.late_s, self.end_s = late_s, end_s
        # One loop for all steps: what a function keeps may belong to it.
        self._runner = asyncio.Runner(loop_factory=EventLoop)

    def close(self) -> None:
        with suppress(SystemExit):  # of a user's callback
            self._runner.close()

    def complete(self, prompts: Sequence[Prompt], sampling: Sampling, go_on: Continue) -> Completions:
        """``sampling.samples`` completions of each prompt.

        Raises:
            UserError: the function raised, gave a conversation up too often, took too long, cancelled the run's tasks,
                or returned what cannot be trained on.
        """
        try:
            return self._runner.run(_Conversations(self, prompts, sampling, go_on).run())
        except asyncio.CancelledError:
            raise self.function.interference() from None
        except SystemExit as error:
            problem = f"raised in a callback or a task:\n{traceback.format_exc(limit=-4)}"
            raise UserError(self.function.setting, self.function.spec, problem, "Mend it") from error
        except RuntimeError as error:
            if not str(error).startswith("Event loop stopped"):
                raise
            raise self.function.interference() from None


class _Conversations:
    """Those of one call of the engine."""

    def __init__(self, of: LocalConversations, prompts: Sequence[Prompt], sampling: Sampling, go_on: Continue) -> None:
        self._of, self._prompts, self._sampling, self._continue = of, prompts, sampling, go_on
        self._asked: dict[Place, list[_Request]] = {}
        """By conversation, what it waits for."""
        self._moved = asyncio.Event()
        """A conversation has asked or ended."""
        self._silent_since = self._last_end = time.monotonic()
        """When a conversation last asked or ended; and when one last ended."""
        self._named = False

    async def run(self) -> Completions:
        prompts, samples = range(len(self._prompts)), range(self._sampling.samples)
        tasks = {(i, number): asyncio.create_task(self._have((i, number))) for i in prompts for number in samples}
        for task in tasks.values():
            task.add_done_callback(self._ended)
        try:
            while under_way := [place for place, task in tasks.items() if not _ended(task)]:
                self._look_at(under_way)
                if all(place in self._asked for place in under_way):
                    self._answer()
                else:
                    await self._wait(under_way)
        finally:
            for task in tasks.values():
                task.cancel()
        return [tuple(tasks[i, number].result() for number in samples) for i in prompts]

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        self._moved.set()
        self._last_end, self._named = time.monotonic(), False

    def _look_at(self, under_way: Sequence[Place]) -> None:
        """
        Raises:
            UserError: none of them has ended for too long: one asks again and again, or waits.
        """
        of, still = self._of, time.monotonic() - self._last_end
        if still < min(of.late_s, of.end_s):
            return
        late = [place for place in under_way if place not in self._asked] or under_way  # others may wait for these
        first = self._prompts[late[0][0]].id
        who = f"{len(late)} conversations of {of.function.spec}, the first of them about prompt {first}"
        if still > of.end_s:
            remedy = f"Look for why {of.function.spec} does not return, or raise it"
            raise UserError("rollout.timeout_s", f"{of.end_s:g}", f"passed in which none ended of {who}", remedy)
        if not self._named:
            self._named = True
            tell(f"late: none has ended for {still:.0f} s of {who}")

    async def _wait(self, under_way: Sequence[Place]) -> None:
        """Until one of them asks or ends, or it is time to look at them again."""
        of, silent_s = self._of, time.monotonic() - self._silent_since
        moved()  # the limits of conversations are looked at here
        try:
            await asyncio.wait_for(self._moved.wait(), min(max(of.timeout_s - silent_s, 0.0), of.late_s, of.end_s, 1.0))
        except TimeoutError:
            if time.monotonic() - self._silent_since < of.timeout_s:
                return
            silent = [place for place in under_way if place not in self._asked]
            problem = (
                f"passed in which {len(silent)} conversations of {of.function.spec} neither asked for a turn nor "
                f"ended, the first of them about prompt {self._prompts[silent[0][0]].id}"
            )
            remedy = (
                "Look for what it waits for (another conversation's turn comes only once it asks, too), or raise it"
            )
            raise UserError("rollout.request_timeout_s", f"{of.timeout_s:g}", problem, remedy) from None
        self._moved.clear()
        self._silent_since = time.monotonic()

    async def _have(self, place: Place) -> Completion:
        prompt, function = self._prompts[place[0]], self._of.function

        def ask(request: _Request) -> None:
            self._asked.setdefault(place, []).append(request)
            self._moved.set()

        for attempt in range(self._of.attempts):
            client = LocalClient(function=function, prompt=prompt, sampling=self._sampling, number=place[1], ask=ask)
            try:
                return await function.have(client)
            except TryAgainError as error:
                last = error
                self._asked.pop(place, None)
                if attempt + 1 < self._of.attempts:
                    await asyncio.sleep(AGAIN_S)
        problem = f"gave up prompt {prompt.id} {self._of.attempts} times (rollout.attempts), the last time: {last}"
        raise UserError(function.setting, function.spec, problem, "Look after its tools, or raise rollout.attempts")

    def _answer(self) -> None:
        """Generate all turns that are asked for. Those that end at the same tokens are decoded together, and what
        several samples of a prompt go on from is read once."""
        asked, self._asked = self._asked, {}
        by_stops: dict[tuple[int, ...], dict[Any, list[_Request]]] = {}
        for request in (request for place in sorted(asked) for request in asked[place]):
            stem = request.stem
            alike = stem.prompt.id, stem.prompt.token_ids.tobytes(), stem.limit
            by_stops.setdefault(request.stops, {}).setdefault(alike, []).append(request)
        for stops, every in by_stops.items():
            stems = [
                replace(requests[0].stem, slots=tuple(slot for each in requests for slot in each.stem.slots))
                for requests in every.values()
            ]
            turns = self._continue(stems, replace(self._sampling, stop_token_ids=stops))
            for requests, paths in zip(every.values(), turns, strict=True):
                for request, path in zip(requests, paths, strict=True):
                    if not request.turn.done():  # else whoever asked was cancelled
                        request.turn.set_result(path.completion)
        self._silent_since = time.monotonic()


def _ended(task: asyncio.Task[Completion]) -> bool:
    """Whether it has; what it raised is raised."""
    if task.done():
        task.result()
    return task.done()

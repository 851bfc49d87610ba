"""Conversations with the local engine: all conversations of a rank advance together, turn by turn.

The engine generates a batch once every conversation has requested its next turn or has ended. A
batch thus depends on the content of the conversations, not on the duration of tool calls, and the
same call gives the same bits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.process.event_loop import EventLoop
from megatron_dppo.process.streams import print_message, record_progress
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Completions, Sampling
from megatron_dppo.rollout.tree import TreePath
from megatron_dppo.rollout.turns import RETRY_DELAY_S, Client, RolloutFunction, TryAgainError

Continue = Callable[[Sequence[TreePath], Sampling], list[list[TreePath]]]
"""Engine's function that continues each prefix once per slot."""
Place = tuple[int, int]
"""Indices of a conversation: prompt in the call, then completion for the prompt."""
TURN = 1 << 60
"""Exclusive upper bound of prompt ids. Request n of a conversation is sampled as a prompt with the
id + n · TURN: request 0 like a completion without a conversation, and every request with a separate
seed, even with equal contexts."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A requested turn."""

    prefix: TreePath
    """Context of the turn, with the slot of the conversation."""
    stops: tuple[int, ...]
    turn: asyncio.Future[Completion]


class LocalConversations:
    """Completion of prompts with an engine, through a user's function.

    Args:
        timeout_s: seconds without a requested turn or an ended conversation until the run stops.
        late_s: seconds without an ended conversation until running conversations are reported.
        end_s: seconds without an ended conversation until the run stops.
        attempts: attempts at each conversation before the run stops.
    """

    def __init__(
        self,
        function: RolloutFunction,
        *,
        timeout_s: float,
        attempts: int,
        late_s: float = math.inf,
        end_s: float = math.inf,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.attempts = attempts
        self.late_s = late_s
        self.end_s = end_s
        # Keep one loop for all steps, because a function's objects may belong to the loop.
        self._runner = asyncio.Runner(loop_factory=EventLoop)

    def close(self) -> None:
        # A user's callback may raise SystemExit in both calls.
        with suppress(SystemExit):
            self._runner.run(self.function.close())
        with suppress(SystemExit):
            self._runner.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        extend: Continue,
    ) -> Completions:
        """Return ``sampling.samples`` completions of each prompt.

        Raises:
            UserError: the function raises, gives up a conversation too often, takes too long,
                cancels tasks of the run, or returns a completion unusable for training.
        """
        try:
            return self._runner.run(_Conversations(self, sampling, extend).run(prompts))
        except asyncio.CancelledError:
            raise self.function.make_interference_error() from None
        except SystemExit as error:
            problem = f"raised in a callback or a task:\n{traceback.format_exc(limit=-4)}"
            raise UserError(
                self.function.setting, self.function.spec, problem, "Mend it"
            ) from error
        except RuntimeError as error:
            if not str(error).startswith("Event loop stopped"):
                raise
            raise self.function.make_interference_error() from None


class _Conversations:
    """Conversations of one call: leftover tasks of a function cannot affect a later call."""

    def __init__(self, parent: LocalConversations, sampling: Sampling, extend: Continue) -> None:
        self._parent = parent
        self._sampling = sampling
        self._extend = extend
        self._requests: dict[Place, list[_Request]] = {}
        """Requests by waiting conversation."""
        self._moved = asyncio.Event()
        """Set when a conversation requests a turn or ends."""
        self._last_move = self._last_end = time.monotonic()
        self._is_reported = False

    async def run(self, prompts: Sequence[Prompt]) -> Completions:
        samples = range(self._sampling.samples)
        tasks = {
            (i, number): asyncio.create_task(self._run_conversation((i, number), prompt))
            for i, prompt in enumerate(prompts)
            for number in samples
        }
        for task in tasks.values():
            task.add_done_callback(self._handle_end)
        try:
            while under_way := [place for place, task in tasks.items() if not _is_over(task)]:
                busy = [place for place in under_way if place not in self._requests]
                # Report a busy conversation first, because the rest may wait for it.
                first = (busy or under_way)[0]
                self._check(len(busy), len(under_way), prompts[first[0]].id)
                if busy:
                    await self._wait()
                else:
                    self._generate_turns()
        finally:
            for task in tasks.values():
                task.cancel()
        completions: Completions = []
        for i in range(len(prompts)):
            completions.append(tuple(tasks[i, number].result() for number in samples))
        return completions

    def _handle_end(self, task: asyncio.Task[Completion]) -> None:
        self._moved.set()
        self._last_end = time.monotonic()
        self._is_reported = False

    def _check(self, busy: int, running: int, first: int) -> None:
        """Check the time since the last requested turn and the last ended conversation.

        Args:
            busy: number of conversations without a requested turn.
            running: number of unended conversations.
            first: prompt id of the first such conversation.

        Raises:
            UserError: a time exceeds ``timeout_s`` or ``end_s``.
        """
        parent = self._parent
        now = time.monotonic()
        conversations = f"{busy or running} conversations of {parent.function.spec}"
        where = f"the first of them about prompt {first}"
        if busy and now - self._last_move >= parent.timeout_s:
            problem = f"is over: {conversations} neither requested a turn nor ended, {where}"
            remedy = (
                "Find what the conversation waits for (turns are generated only when every "
                "conversation has requested one or ended), or raise it"
            )
            raise UserError("rollout.request_timeout_s", f"{parent.timeout_s:g}", problem, remedy)
        still = now - self._last_end
        if still > parent.end_s:
            problem = f"is over: none of {conversations} ended, {where}"
            remedy = f"Look for why {parent.function.spec} does not return, or raise it"
            raise UserError("rollout.timeout_s", f"{parent.end_s:g}", problem, remedy)
        if still >= parent.late_s and not self._is_reported:
            self._is_reported = True
            print_message(f"late: none of {conversations} has ended for {still:.0f} s, {where}")

    async def _wait(self) -> None:
        """Wait until a conversation requests a turn or ends, or the next check is due."""
        # Counts as progress, because ``_check`` limits the duration of conversations.
        record_progress()
        parent = self._parent
        left_s = max(self._last_move + parent.timeout_s - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            await asyncio.wait_for(
                self._moved.wait(), min(left_s, parent.late_s, parent.end_s, 1.0)
            )
            self._moved.clear()
            self._last_move = time.monotonic()

    async def _run_conversation(self, place: Place, prompt: Prompt) -> Completion:
        function = self._parent.function
        attempts = self._parent.attempts
        for attempt in range(attempts):
            turn = partial(self._request_turn, place, itertools.count())
            client = Client(
                function=function,
                prompt=prompt,
                sampling=self._sampling,
                number=place[1],
                turn=turn,
            )
            try:
                return await function.run(client)
            except TryAgainError as error:
                last = error
                self._requests.pop(place, None)
                if attempt + 1 < attempts:
                    await asyncio.sleep(RETRY_DELAY_S)
        problem = (
            f"gave up prompt {prompt.id} {attempts} times (rollout.attempts), the last time: {last}"
        )
        remedy = "Check its tools, or raise rollout.attempts"
        raise UserError(function.setting, function.spec, problem, remedy)

    async def _request_turn(
        self,
        place: Place,
        numbers: Iterator[int],
        client: Client,
        context: list[int],
        sampling: Sampling,
    ) -> Completion:
        prompt = client.prompt
        own = replace(
            prompt, id=prompt.id + next(numbers) * TURN, token_ids=np.array(context, np.int32)
        )
        prefix = TreePath(own, (client.number,), limit=min(sampling.max_tokens, client.max_tokens))
        request = _Request(
            prefix, sampling.stop_token_ids, asyncio.get_running_loop().create_future()
        )
        self._requests.setdefault(place, []).append(request)
        self._moved.set()
        return await request.turn

    def _generate_turns(self) -> None:
        """Generate all requested turns.

        Turns with the same stop tokens are decoded together, and a shared context is read once.
        """
        waiting = self._requests
        self._requests = {}
        by_stops: dict[tuple[int, ...], dict[Any, list[_Request]]] = {}
        for request in (request for place in sorted(waiting) for request in waiting[place]):
            if request.turn.done():  # cancelled
                continue
            prefix = request.prefix
            key = prefix.prompt.id, prefix.prompt.token_ids.tobytes(), prefix.limit
            by_stops.setdefault(request.stops, {}).setdefault(key, []).append(request)
        for stops, every in by_stops.items():
            prefixes = []
            for requests in every.values():
                slots = tuple(slot for each in requests for slot in each.prefix.slots)
                prefixes.append(replace(requests[0].prefix, slots=slots))
            turns = self._extend(prefixes, replace(self._sampling, stop_token_ids=stops))
            for requests, paths in zip(every.values(), turns, strict=True):
                for request, path in zip(requests, paths, strict=True):
                    request.turn.set_result(path.completion)
        self._last_move = time.monotonic()


def _is_over(task: asyncio.Task[Completion]) -> bool:
    """Return whether a task has ended; raise the error of a failed task."""
    if task.done():
        task.result()
    return task.done()

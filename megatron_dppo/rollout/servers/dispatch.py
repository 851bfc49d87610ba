"""One rank's prompts, spread over the servers that serve, until every sample of every prompt is there exactly once.

Everything here runs in the HTTP thread; the main thread waits for a :class:`RequestBatch`. A prompt is one request for
all its samples. A request that a server breaks off is sent again to another one, whole. A request that a server aborts
is continued from the tokens that it gave. No group is left out because it is slow: slow ones are the long ones, and
without them the gradient would be biased.

Where completions fork (``Sampling.branches``), a prompt is one request for all paths that begin there, and each of
their forks another one, as soon as they have ended: no prompt waits for another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import PartialRollout, Sampling
from megatron_dppo.rollout.servers.batch import PartialCompletion, RequestBatch, alike_so_far
from megatron_dppo.rollout.servers.client import GenerateResult, ServerClient
from megatron_dppo.rollout.servers.conversations import ConversationError, Conversations, completion_of
from megatron_dppo.rollout.servers.http import Http, ServerError, readable, run_all

PROBE_S = 5.0
"""How long a server, whose connection broke, may take to say that it lives."""
FAILURES = 8
"""Requests in a row that a server may fail."""
PAUSE_S = 0.3
"""Wait before a prompt is asked again of servers that have all just failed or aborted it."""

ReadVersion = Callable[[str], int | None]
"""The number in a version that a server tells; None if the version is not of this run."""


class PromptFailedError(Exception):
    """One prompt could not be answered by any server."""


class Dispatcher:
    """Which server is asked what, on this rank.

    Args:
        http: in whose thread all of this runs.
        read_version: see :data:`ReadVersion`.
        first: where to begin among equally busy servers, so that not all ranks begin with the same one.
        max_in_flight: prompts under way at one server.
        request_timeout_s: how long one of them may take there.
        attempts: how often a prompt is asked before the batch fails.
        conversations: has conversations in place of single requests.
    """

    def __init__(
        self,
        http: Http,
        read_version: ReadVersion,
        *,
        first: int,
        max_in_flight: int,
        request_timeout_s: float,
        attempts: int,
        conversations: Conversations | None = None,
    ) -> None:
        self._conversations = conversations
        self._http, self._read_version, self._first = http, read_version, first
        self._max_in_flight, self._timeout_s, self._attempts = max_in_flight, request_timeout_s, attempts
        self._asked: dict[ServerClient, set[asyncio.Task[Sequence[GenerateResult | Completion]]]] = {}
        """Who serves, and what this rank has under way there."""
        self._failures = Counter[ServerClient]()
        """In a row."""
        self._lost: dict[str, str] = {}
        self._running = weakref.WeakKeyDictionary[RequestBatch, Future[None]]()
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[None]]] = []
        """Those that wait for room or for a server, with their places."""
        self._numbers = itertools.count()
        self.resubmitted = 0
        """Requests that were asked again, since the beginning."""

    def take_lost(self) -> dict[str, str]:
        """Servers that this rank found unfit since the last call, by URL, and why."""
        return self._http.run(self._take_lost())

    def under_way(self) -> Counter[str]:
        """Requests of this rank that each server has not answered yet, by its URL."""
        return self._http.run(self._under_way())

    def serve_from(self, clients: Sequence[ServerClient]) -> None:
        """These servers are asked from now on, and no others; what is under way elsewhere is asked anew."""
        self._http.run(self._serve_from(clients))

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, oldest: int, so_far: Sequence[PartialRollout] = ()
    ) -> RequestBatch:
        """Ask for all of these prompts, and return at once.

        Args:
            prompts: in whose order they are asked, and the groups come back.
            sampling: the same for all.
            oldest: version before which no token may be made; a server that gives an older one is lost.
            so_far: what there is of them; what has ended is not asked for.
        """
        batch = RequestBatch(prompts, sampling, oldest, next(self._numbers), so_far)
        future = self._http.start(self._run(batch))
        future.add_done_callback(lambda future: batch.over(_outcome(future)))
        self._running[batch] = future
        return batch

    def ask_no_more(self, batches: Sequence[RequestBatch]) -> None:
        """Send no further requests. Those in flight still return."""
        for batch in batches:
            batch.broken_off = True
        self._http.run(self._let_go())

    def progress(self, batches: Sequence[RequestBatch], wait_s: float) -> list[list[PartialRollout]]:
        """How far batches are of which no more is asked, once servers have aborted them; what does not come back within
        so many seconds is given up."""
        until = time.monotonic() + wait_s
        for batch in batches:
            batch.wait(max(until - time.monotonic(), 0.0))
            self._running.pop(batch).cancel()
        return self._http.run(self._progress(batches))

    async def _let_go(self) -> None:
        self._wake()

    async def _progress(self, batches: Sequence[RequestBatch]) -> list[list[PartialRollout]]:
        return [batch.progress() for batch in batches]

    async def _take_lost(self) -> dict[str, str]:
        lost, self._lost = self._lost, {}
        return lost

    async def _under_way(self) -> Counter[str]:
        return Counter({client.url: len(tasks) for client, tasks in self._asked.items()})

    async def _serve_from(self, clients: Sequence[ServerClient]) -> None:
        for client in set(self._asked) - set(clients):
            self._drop(client)
        for client in clients:
            self._lost.pop(client.url, None)  # whatever was wrong with it was so before
            self._asked.setdefault(client, set())
        self._wake()

    async def _run(self, batch: RequestBatch) -> None:
        await run_all(self._prompt(batch, index) for index in range(len(batch.prompts)))

    async def _prompt(self, batch: RequestBatch, index: int) -> None:
        """See one prompt through."""
        samples = batch.samples[index]
        batch.some_ended(index, [sample for sample in samples if sample.ended])
        left = alike_so_far([sample for sample in samples if not sample.ended])
        await run_all(self._samples(batch, index, each) for each in left)
        if not batch.broken_off:
            batch.prompt_ended(index)

    async def _samples(
        self,
        batch: RequestBatch,
        index: int,
        samples: Sequence[PartialCompletion],
        attempt: int = 0,
        failed: frozenset[ServerClient] = frozenset(),
    ) -> None:
        """See samples through that have the same tokens so far, and what continues after their forks.

        Samples that were aborted at different tokens, and forks, go on each by itself: none waits for another.

        Args:
            attempt: how often a server has failed them.
            failed: those servers.
        """
        prompt, avoided, last = batch.prompts[index], set(failed), ""
        alike: list[Sequence[PartialCompletion]] = [samples]
        while alike == [samples]:
            if attempt >= self._attempts:
                raise PromptFailedError(f"prompt {prompt.id} was asked {attempt} times, the last time {last}")
            before = sum(sample.length for sample in samples)
            if failure := await self._part(batch, index, samples, attempt, avoided):
                attempt, last = attempt + 1, failure
                self.resubmitted += 1
            if batch.broken_off:
                return
            alike = alike_so_far([sample for sample in samples if not sample.ended])
            others = bool(failure) and not avoided >= set(self._asked)
            if alike and sum(sample.length for sample in samples) == before and not others:
                await asyncio.sleep(PAUSE_S)  # whoever could be asked has just failed, or is paused and aborts all
        forks = batch.some_ended(index, [sample for sample in samples if sample.ended])
        continued = [self._samples(batch, index, each, attempt, frozenset(avoided)) for each in alike]
        await run_all([*continued, *(self._samples(batch, index, each) for each in forks)])

    async def _part(
        self,
        batch: RequestBatch,
        index: int,
        samples: Sequence[PartialCompletion],
        attempt: int,
        failed: set[ServerClient],
    ) -> str | None:
        """Ask one server for a continuation of each of these samples, which have the same tokens so far.

        Args:
            failed: servers that failed this prompt, to be avoided while there are others; another may be added.

        Returns:
            None, or why it has to be asked again.
        """
        place = (batch.number, index)
        client = await self._server(place, failed, samples[0].server if samples[0].fresh else None)
        if batch.broken_off:
            self._wake()  # for the next one that waits
            return None
        read_versions = partial(self._versions, client, batch.oldest)
        answer: Coroutine[Any, Any, Sequence[GenerateResult | Completion]]
        if self._conversations is not None:
            sampling = replace(batch.sampling, samples=len(samples))
            answer = self._conversations(client, batch.prompts[index], sampling, read_versions)
        else:
            first, sampling = samples[0], batch.sampling
            sampling = replace(
                sampling,
                samples=len(samples),
                max_tokens=sampling.max_tokens - first.length,
                # Not the seed of the part before: a generator that begins anew would repeat the luck of its first
                # tokens.
                seed=sampling.seed_at(first.stem.prompt.id, first.slot, attempt, first.length),
            )
            answer = client.generate(first.token_ids, sampling, timeout_s=self._timeout_s)
        asked = self._asked[client]
        task: asyncio.Task[Sequence[GenerateResult | Completion]] = asyncio.create_task(readable(client.url, answer))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains
        asked.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return f"server {client.url} was taken out"
            results = task.result()
            if len(results) != len(samples):
                raise ServerError(client.url, f"gave {len(results)} samples, not {len(samples)}", alive=True)
            parts = [r if isinstance(r, Completion) else completion_of(r, read_versions(r.versions)) for r in results]
        except ServerError as error:
            failed.add(client)
            if not isinstance(error, ConversationError):
                await self._blame(client, error)
            return str(error)
        finally:
            task.cancel()
            asked.discard(task)
            self._wake()
        self._failures[client] = 0
        for sample, result, part in zip(samples, results, parts, strict=True):
            sample.parts.append(part)
            sample.server = client
            if isinstance(result, GenerateResult) and result.entropies is not None:
                sample.entropies.append(result.entropies)
            aborted = isinstance(result, GenerateResult) and result.reason == "abort"
            sample.ended = not aborted or sample.length == batch.sampling.max_tokens
        return None

    def _versions(self, client: ServerClient, oldest: int, versions: Sequence[tuple[str, int]]) -> NDArray[np.int32]:
        known = []
        for told, _ in versions:
            version = self._read_version(told)
            if version is None or version < oldest:
                problem = f"generates with weights of version {told!r}, which this step must not use"
                self._lose(client, problem)
                raise ServerError(client.url, problem, alive=True)
            known.append(version)
        return np.repeat(np.array(known, np.int32), [count for _, count in versions])

    async def _blame(self, client: ServerClient, error: ServerError) -> None:
        """Take a server out if it broke off and does not answer a question, or if it failed many requests in a row."""
        self._failures[client] += 1
        if self._failures[client] >= FAILURES:
            self._lose(client, f"failed {FAILURES} requests in a row, the last time it {error.problem}")
        elif not error.alive:
            try:
                await asyncio.wait_for(client.version(), PROBE_S)
            except (ServerError, TimeoutError):
                self._lose(client, error.problem)

    def _lose(self, client: ServerClient, problem: str) -> None:
        if client in self._asked:
            self._lost[client.url] = problem
            self._drop(client)

    def _drop(self, client: ServerClient) -> None:
        del self._failures[client]
        for task in self._asked.pop(client):
            task.cancel()

    async def _server(
        self, place: tuple[int, int], avoided: set[ServerClient], preferred: ServerClient | None
    ) -> ServerClient:
        """A server with room, as soon as there is one: the preferred one, or else the least busy one. An avoided one is
        returned only where there is no other. Who comes first by its place, of a batch and of a prompt in it, is served
        first: what is asked again, or continues, does not wait behind prompts that were not begun."""
        while True:
            clients = [client for client in self._asked if client not in avoided] or list(self._asked)
            first = self._first % max(len(clients), 1)
            order = clients[first:] + clients[:first]
            free = [client for client in order if len(self._asked[client]) < self._max_in_flight]
            if preferred in free:
                return preferred
            if free:
                return min(free, key=lambda client: len(self._asked[client]))
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((place, turn))
            await turn

    def _wake(self) -> None:
        """Let those look again that wait for room or for a server, once what has just ended could go on there."""
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda waits: waits[0]), []
        for _, turn in waiting:
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(None)


def _outcome(future: Future[None]) -> Exception | None:
    if future.cancelled():
        return PromptFailedError("generation was broken off")
    error = future.exception()
    return error if error is None or isinstance(error, Exception) else PromptFailedError(str(error))

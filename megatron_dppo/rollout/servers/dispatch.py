"""Dispatch of a rank's prompts to servers, until every sample of every prompt is complete exactly
once.

The code runs in the HTTP thread. The main thread waits for a :class:`RequestBatch`.

- A prompt is a single request for all samples.
- A failed request is sent again, whole, to another server.
- A request aborted by a server is continued after the received tokens.
- Slow groups are kept: they are the long groups, and the gradient would be biased without them.
- With ``Sampling.branches``, the first request of a prompt is for all paths from the prompt. Each
  fork of a path is a further request, sent when the path has ended.
- Prompts do not wait for each other.
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
from megatron_dppo.rollout.servers.batch import PartialCompletion, RequestBatch, group_by_prefix
from megatron_dppo.rollout.servers.client import GenerateResult, ServerClient
from megatron_dppo.rollout.servers.conversations import (
    ConversationError,
    Conversations,
    to_completion,
)
from megatron_dppo.rollout.servers.http import Http, ServerError, run_all, wrap_errors

PROBE_TIMEOUT_S = 5.0
"""Timeout in seconds of the health check after a broken connection."""
MAX_CONSECUTIVE_FAILURES = 8
"""Requests in a row that a server may fail."""
RETRY_DELAY_S = 0.3
"""Seconds before another request, if all servers have just failed or aborted the prompt."""

ReadVersion = Callable[[str], int | None]
"""Function from a server's version to the run's version number; None: version of another run."""


class PromptFailedError(Exception):
    """Failure of all attempts at a prompt."""


class Dispatcher:
    """Dispatcher of this rank's requests.

    Args:
        http: HTTP thread.
        read_version: see :data:`ReadVersion`.
        first: index of the preferred server among equally busy servers, different between ranks.
        max_in_flight: maximum number of pending prompts per server.
        request_timeout_s: timeout of a request, in seconds.
        attempts: maximum number of attempts per prompt, before the batch fails.
        conversations: replacement of single requests; None: single requests.
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
        self._http = http
        self._read_version = read_version
        self._first = first
        self._max_in_flight = max_in_flight
        self._timeout_s = request_timeout_s
        self._attempts = attempts
        self._in_flight: dict[
            ServerClient, set[asyncio.Task[Sequence[GenerateResult | Completion]]]
        ] = {}
        """Pending requests of this rank, by server."""
        self._failures = Counter[ServerClient]()
        """Consecutive failures."""
        self._lost: dict[str, str] = {}
        self._running = weakref.WeakKeyDictionary[RequestBatch, Future[None]]()
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[None]]] = []
        """Requests that wait for a free server, each with its priority."""
        self._numbers = itertools.count()
        self.resubmitted = 0
        """Number of repeated requests."""

    def take_unhealthy(self) -> dict[str, str]:
        """Return newly removed servers of this rank: reasons by URL."""
        return self._http.run(self._take_unhealthy())

    def count_in_flight(self) -> Counter[str]:
        """Return this rank's number of pending requests by URL."""
        return self._http.run(self._count_in_flight())

    def set_servers(self, clients: Sequence[ServerClient]) -> None:
        """Replace the servers. Requests pending on removed servers are sent again."""
        self._http.run(self._set_servers(clients))

    def begin(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        min_version: int,
        partial_rollouts: Sequence[PartialRollout] = (),
    ) -> RequestBatch:
        """Start requests for prompts, without waiting.

        Args:
            prompts: prompts, in the order of requests and groups.
            min_version: oldest version allowed. A server with an older version is removed.
            partial_rollouts: partial rollouts to resume; ended completions are not requested.
        """
        batch = RequestBatch(prompts, sampling, min_version, next(self._numbers), partial_rollouts)
        future = self._http.start(self._run(batch))
        future.add_done_callback(lambda future: batch.finish(_get_error(future)))
        self._running[batch] = future
        return batch

    def stop_submitting(self, batches: Sequence[RequestBatch]) -> None:
        """Submit no further requests; requests in flight still return."""
        for batch in batches:
            batch.broken_off = True
        self._http.run(self._wake_in_loop())

    def collect_partial(
        self,
        batches: Sequence[RequestBatch],
        wait_s: float,
    ) -> list[list[PartialRollout]]:
        """Return the partial rollouts of stopped batches, after servers have aborted the requests.

        Requests pending after ``wait_s`` seconds are cancelled.
        """
        until = time.monotonic() + wait_s
        for batch in batches:
            batch.wait(max(until - time.monotonic(), 0.0))
            self._running.pop(batch).cancel()
        return self._http.run(self._collect_partial(batches))

    async def _wake_in_loop(self) -> None:
        self._wake()

    async def _collect_partial(self, batches: Sequence[RequestBatch]) -> list[list[PartialRollout]]:
        return [batch.collect_partial() for batch in batches]

    async def _take_unhealthy(self) -> dict[str, str]:
        lost = self._lost
        self._lost = {}
        return lost

    async def _count_in_flight(self) -> Counter[str]:
        return Counter({client.url: len(tasks) for client, tasks in self._in_flight.items()})

    async def _set_servers(self, clients: Sequence[ServerClient]) -> None:
        for client in set(self._in_flight) - set(clients):
            self._remove_server(client)
        for client in clients:
            self._lost.pop(client.url, None)
            self._in_flight.setdefault(client, set())
        self._wake()

    async def _run(self, batch: RequestBatch) -> None:
        await run_all(self._run_prompt(batch, index) for index in range(len(batch.prompts)))

    async def _run_prompt(self, batch: RequestBatch, index: int) -> None:
        samples = batch.samples[index]
        batch.add_ended(index, [sample for sample in samples if sample.ended])
        left = group_by_prefix([sample for sample in samples if not sample.ended])
        await run_all(self._run_samples(batch, index, each) for each in left)
        if not batch.broken_off:
            batch.finish_prompt(index)

    async def _run_samples(
        self,
        batch: RequestBatch,
        index: int,
        samples: Sequence[PartialCompletion],
        attempt: int = 0,
        failed: frozenset[ServerClient] = frozenset(),
    ) -> None:
        """Complete samples with equal received tokens, and their forks.

        Samples aborted at different tokens continue independently, and so do forks.

        Args:
            attempt: number of earlier failures.
            failed: servers that failed earlier.
        """
        prompt = batch.prompts[index]
        avoided = set(failed)
        last = ""
        prefix_groups: list[Sequence[PartialCompletion]] = [samples]
        while prefix_groups == [samples]:
            if attempt >= self._attempts:
                raise PromptFailedError(
                    f"prompt {prompt.id} was requested {attempt} times, the last time {last}"
                )
            before = sum(sample.length for sample in samples)
            if failure := await self._send_request(batch, index, samples, attempt, avoided):
                attempt += 1
                last = failure
                self.resubmitted += 1
            if batch.broken_off:
                return
            prefix_groups = group_by_prefix([sample for sample in samples if not sample.ended])
            others = bool(failure) and not avoided >= set(self._in_flight)
            if prefix_groups and sum(sample.length for sample in samples) == before and not others:
                # All servers have just failed, or are paused and abort requests.
                await asyncio.sleep(RETRY_DELAY_S)
        forks = batch.add_ended(index, [sample for sample in samples if sample.ended])
        continued = [
            self._run_samples(batch, index, each, attempt, frozenset(avoided))
            for each in prefix_groups
        ]
        await run_all([*continued, *(self._run_samples(batch, index, each) for each in forks)])

    async def _send_request(
        self,
        batch: RequestBatch,
        index: int,
        samples: Sequence[PartialCompletion],
        attempt: int,
        failed: set[ServerClient],
    ) -> str | None:
        """Request a continuation of samples with equal tokens, from a single server.

        Args:
            failed: servers that failed the prompt, used only without alternatives; extended here.

        Returns:
            The reason for another attempt, or None.
        """
        place = (batch.number, index)
        client = await self._acquire_server(
            place, failed, samples[0].server if samples[0].is_unstarted else None
        )
        if batch.broken_off:
            # Pass the unused capacity to the next waiting request.
            self._wake()
            return None
        read_versions = partial(self._resolve_versions, client, batch.oldest)
        answer: Coroutine[Any, Any, Sequence[GenerateResult | Completion]]
        if self._conversations is not None:
            sampling = replace(batch.sampling, samples=len(samples))
            answer = self._conversations(client, batch.prompts[index], sampling, read_versions)
        else:
            first = samples[0]
            sampling = batch.sampling
            sampling = replace(
                sampling,
                samples=len(samples),
                max_tokens=sampling.max_tokens - first.length,
                # The old seed would repeat the random numbers of the first tokens.
                seed=sampling.derive_seed(
                    first.prefix.prompt.id, first.slot, attempt, first.length
                ),
            )
            answer = client.generate(first.token_ids, sampling, timeout_s=self._timeout_s)
        tasks = self._in_flight[client]
        task: asyncio.Task[Sequence[GenerateResult | Completion]] = asyncio.create_task(
            wrap_errors(client.url, answer)
        )
        # Retrieve an abandoned task's error, because asyncio would log a warning.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        tasks.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return f"server {client.url} was removed"
            results = task.result()
            if len(results) != len(samples):
                raise ServerError(
                    client.url, f"gave {len(results)} samples, not {len(samples)}", alive=True
                )
            parts: list[Completion] = []
            for result in results:
                if isinstance(result, Completion):
                    parts.append(result)
                else:
                    parts.append(to_completion(result, read_versions(result.versions)))
        except ServerError as error:
            failed.add(client)
            if not isinstance(error, ConversationError):
                await self._record_failure(client, error)
            return str(error)
        finally:
            task.cancel()
            tasks.discard(task)
            self._wake()
        # Any success ends a sequence of failures.
        self._failures[client] = 0
        for sample, result, part in zip(samples, results, parts, strict=True):
            sample.parts.append(part)
            sample.server = client
            if isinstance(result, GenerateResult) and result.entropies is not None:
                sample.entropies.append(result.entropies)
            aborted = isinstance(result, GenerateResult) and result.reason == "abort"
            sample.ended = not aborted or sample.length == batch.sampling.max_tokens
        return None

    def _resolve_versions(
        self,
        client: ServerClient,
        min_version: int,
        versions: Sequence[tuple[str, int]],
    ) -> NDArray[np.int32]:
        known = []
        for name, _ in versions:
            version = self._read_version(name)
            if version is None or version < min_version:
                problem = (
                    f"generates with weights of version {name!r}, which this step must not use"
                )
                self._mark_unhealthy(client, problem)
                raise ServerError(client.url, problem, alive=True)
            known.append(version)
        return np.repeat(np.array(known, np.int32), [count for _, count in versions])

    async def _record_failure(self, client: ServerClient, error: ServerError) -> None:
        """Count a failure; remove the server after too many in a row, or after a broken connection
        and a failed health check."""
        self._failures[client] += 1
        if self._failures[client] >= MAX_CONSECUTIVE_FAILURES:
            count = f"{MAX_CONSECUTIVE_FAILURES} requests in a row"
            self._mark_unhealthy(client, f"failed {count}, the last time it {error.problem}")
        elif not error.alive:
            try:
                await asyncio.wait_for(client.get_version(), PROBE_TIMEOUT_S)
            except (ServerError, TimeoutError):
                self._mark_unhealthy(client, error.problem)

    def _mark_unhealthy(self, client: ServerClient, problem: str) -> None:
        if client in self._in_flight:
            self._lost[client.url] = problem
            self._remove_server(client)

    def _remove_server(self, client: ServerClient) -> None:
        # Cancelled requests are sent again to other servers.
        del self._failures[client]
        for task in self._in_flight.pop(client):
            task.cancel()

    async def _acquire_server(
        self,
        priority: tuple[int, int],
        excluded: set[ServerClient],
        preferred: ServerClient | None,
    ) -> ServerClient:
        """Wait for a free server; return the preferred server if free, otherwise the least busy.

        Args:
            priority: batch number and prompt index. Requests wait in this order, so that repeated
                and continued requests come before new prompts.
            excluded: servers used only without alternatives.
        """
        while True:
            clients = [client for client in self._in_flight if client not in excluded]
            clients = clients or list(self._in_flight)
            # Rotate, because all ranks would otherwise prefer the same server.
            first = self._first % max(len(clients), 1)
            order = clients[first:] + clients[:first]
            free = [
                client for client in order if len(self._in_flight[client]) < self._max_in_flight
            ]
            if preferred in free:
                return preferred
            if free:
                return min(free, key=lambda client: len(self._in_flight[client]))
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((priority, turn))
            await turn

    def _wake(self) -> None:
        # After the current task, which may continue on the same server.
        asyncio.get_running_loop().call_soon(self._wake_waiters)

    def _wake_waiters(self) -> None:
        waiting = sorted(self._waiting, key=lambda waits: waits[0])
        self._waiting = []
        for _, turn in waiting:
            # Cancelled requests are done already.
            if not turn.done():
                turn.set_result(None)


def _get_error(future: Future[None]) -> Exception | None:
    if future.cancelled():
        return PromptFailedError("generation was broken off")
    error = future.exception()
    return error if error is None or isinstance(error, Exception) else PromptFailedError(str(error))

"""One rank's prompts, spread over the servers that serve, until every sample of every prompt is there exactly once.

Everything here runs in the HTTP thread but :class:`Batch`, which the main thread waits for. A prompt is one request for
all its samples. A request that a server breaks off is sent again to another one, whole. A request that a server aborts
is continued from the tokens that it gave. No group is left out because it is slow: slow ones are the long ones, and
without them the gradient would be biased.

Where completions fork (``Sampling.branches``), a prompt is one request for all paths that begin there, and each of
their forks another one, as soon as they have ended: no prompt waits for another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation import joined
from megatron_dppo.rollout.engine import Completions, Sampling
from megatron_dppo.rollout.servers.client import GenerateRequest, GenerateResult, ServerClient
from megatron_dppo.rollout.servers.conversations import ConversationError, Conversations, completion_of
from megatron_dppo.rollout.servers.http import Http, ServerError, readable
from megatron_dppo.rollout.tree import (
    Branches,
    Entropies,
    Stem,
    TreePath,
    forks_of,
    grown,
    leaves_of,
    root_of,
    wants_entropies,
)

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


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """A completion of which some tokens are there."""

    stem: Stem
    """What it began with."""
    slot: int
    """Of the stem's."""
    parts: list[Completion] = field(default_factory=list)
    """What servers gave after that, in order."""
    entropies: list[Entropies] = field(default_factory=list)
    """Of the parts, where they are asked for."""
    server: ServerClient | None = None
    """That gave the last part, or before there is one the stem, which is in its cache; None: no server has."""
    ended: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Of the prompt and of the response so far."""
        return [*self.stem.token_ids.tolist(), *(token for part in self.parts for token in part.token_ids.tolist())]

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return self.stem.length + sum(len(part.token_ids) for part in self.parts)

    @property
    def fresh(self) -> bool:
        """Whether it has no tokens but its stem's, which others begin with, too."""
        return self.length == self.stem.length

    def path(self, branches: Branches) -> TreePath:
        entropies = np.concatenate(self.entropies) if self.entropies else None
        return grown(self.stem, self.slot, joined(self.parts), entropies, branches)


class Batch:
    """Prompts under way. The main thread waits for it, and reads how far it is."""

    def __init__(self, prompts: Sequence[Prompt], sampling: Sampling, oldest: int) -> None:
        self.prompts, self.sampling = prompts, sampling
        self.oldest = oldest
        """Version before which no token may have been made."""
        self.paths: list[list[TreePath]] = [[] for _ in prompts]
        """Those of each prompt that have ended."""
        self.finished = 0
        self.progressed = time.monotonic()
        """When the last prompt was finished, or a path of it."""
        self.error: Exception | None = None
        """Why it will never be finished."""
        self._over = threading.Event()

    @property
    def unfinished(self) -> int:
        return len(self.prompts) - self.finished

    def wait(self, seconds: float) -> None:
        """Until it is finished or has failed, for so long at most."""
        self._over.wait(seconds)

    def groups(self) -> Completions:
        return [leaves_of(paths, self.sampling.branches) for paths in self.paths]

    def some_ended(self, index: int, samples: Sequence[PartialCompletion]) -> list[list[PartialCompletion]]:
        """Samples of a prompt have ended.

        Returns:
            what is to be continued after their forks: for each fork, samples that have the same tokens so far.
        """
        self.progressed = time.monotonic()
        continued = []
        for sample in samples:
            self.paths[index].append(path := sample.path(self.sampling.branches))
            for stem in forks_of(path, self.sampling.branches, self.sampling.seed):
                continued.append([PartialCompletion(stem, slot, server=sample.server) for slot in stem.slots])
        return continued

    def over(self, error: Exception | None) -> None:
        self.error = self.error or error
        self._over.set()


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
        self._changed = asyncio.Event()
        self.resubmitted = 0
        """Prompts that were asked again, since the beginning."""

    def take_lost(self) -> dict[str, str]:
        """Servers that this rank found unfit since the last call, by URL, and why."""
        return self._http.run(self._take_lost())

    def serve_from(self, clients: Sequence[ServerClient]) -> None:
        """These servers are asked from now on, and no others; what is under way elsewhere is asked anew."""
        self._http.run(self._serve_from(clients))

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, oldest: int) -> Batch:
        """Ask for all of these prompts, and return at once.

        Args:
            prompts: in whose order the groups come back.
            sampling: the same for all.
            oldest: version before which no token may have been made; a server that gives an older one is lost.
        """
        batch = Batch(prompts, sampling, oldest)
        self._http.start(self._run(batch)).add_done_callback(lambda future: batch.over(_outcome(future)))
        return batch

    async def _take_lost(self) -> dict[str, str]:
        lost, self._lost = self._lost, {}
        return lost

    async def _serve_from(self, clients: Sequence[ServerClient]) -> None:
        for client in set(self._asked) - set(clients):
            self._drop(client)
        for client in clients:
            self._lost.pop(client.url, None)  # whatever was wrong with it was so before
            self._asked.setdefault(client, set())
        self._wake()

    async def _run(self, batch: Batch) -> None:
        await _all(self._prompt(batch, index) for index in range(len(batch.prompts)))

    async def _prompt(self, batch: Batch, index: int) -> None:
        """See one prompt through."""
        stem = root_of(batch.prompts[index], batch.sampling.count(index), batch.sampling.branches)
        await self._samples(batch, index, [PartialCompletion(stem, slot) for slot in stem.slots])
        batch.finished += 1

    async def _samples(self, batch: Batch, index: int, samples: Sequence[PartialCompletion]) -> None:
        """See samples through that have one stem, and what continues after their forks."""
        prompt, attempt, last = batch.prompts[index], 0, ""
        failed: set[ServerClient] = set()
        while open_samples := [sample for sample in samples if not sample.ended]:
            if attempt >= self._attempts:
                raise PromptFailedError(f"prompt {prompt.id} was asked {attempt} times, the last time {last}")
            fresh = [sample for sample in open_samples if sample.fresh]
            parts = [[sample] for sample in open_samples if not sample.fresh] + ([fresh] if fresh else [])
            before = sum(sample.length for sample in open_samples)
            results = await asyncio.gather(*(self._part(batch, index, part, attempt, failed) for part in parts))
            if failures := [failure for failure in results if failure]:
                attempt, last = attempt + 1, failures[0]
                self.resubmitted += 1
            others = bool(failures) and not failed >= set(self._asked)
            if sum(sample.length for sample in open_samples) == before and not others:
                await asyncio.sleep(PAUSE_S)  # whoever could be asked has just failed, or is paused and aborts all
        await _all(self._samples(batch, index, each) for each in batch.some_ended(index, samples))

    async def _part(
        self, batch: Batch, index: int, samples: Sequence[PartialCompletion], attempt: int, failed: set[ServerClient]
    ) -> str | None:
        """Ask one server for a continuation of each of these samples, which have the same tokens so far.

        Args:
            failed: servers that failed this prompt, to be avoided while there are others; another may be added.

        Returns:
            None, or why it has to be asked again.
        """
        client = await self._server(failed, samples[0].server if samples[0].fresh else None)
        read_versions = partial(self._spans, client, batch.oldest)
        answer: Coroutine[Any, Any, Sequence[GenerateResult | Completion]]
        if self._conversations is not None:
            sampling = replace(batch.sampling, counts=(len(samples),))
            answer = self._conversations(client, batch.prompts[index], sampling, read_versions)
        else:
            answer = client.generate(self._request(batch, samples, attempt), timeout_s=self._timeout_s)
        asked = self._asked[client]
        task: asyncio.Task[Sequence[GenerateResult | Completion]] = asyncio.create_task(readable(client.url, answer))
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

    def _request(self, batch: Batch, samples: Sequence[PartialCompletion], attempt: int) -> GenerateRequest:
        sampling, first = batch.sampling, samples[0]
        return GenerateRequest(
            token_ids=first.token_ids,
            samples=len(samples),
            max_tokens=sampling.max_tokens - first.length,
            temperature=sampling.temperature,
            stop_token_ids=sampling.stop_token_ids,
            # Not the seed of the part before: a generator that begins anew would repeat the luck of its first tokens.
            seed=sampling.seed_at(first.stem.prompt.id, first.slot, attempt, first.length),
            routing=sampling.routing,
            entropies=wants_entropies(sampling.branches),
        )

    def _spans(self, client: ServerClient, oldest: int, versions: Sequence[tuple[str, int]]) -> list[VersionSpan]:
        spans = []
        for told, count in versions:
            version = self._read_version(told)
            if version is None or version < oldest:
                problem = f"generates with weights of version {told!r}, which this step must not use"
                self._lose(client, problem)
                raise ServerError(client.url, problem, alive=True)
            spans.append(VersionSpan(version, count))
        return spans

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

    async def _server(self, avoided: set[ServerClient], preferred: ServerClient | None) -> ServerClient:
        """A server with room, as soon as there is one: the preferred one, or else the least busy one. An avoided one is
        returned only where there is no other."""
        while True:
            clients = [client for client in self._asked if client not in avoided] or list(self._asked)
            first = self._first % max(len(clients), 1)
            order = clients[first:] + clients[:first]
            free = [client for client in order if len(self._asked[client]) < self._max_in_flight]
            if preferred in free:
                return preferred
            if free:
                return min(free, key=lambda client: len(self._asked[client]))
            await self._changed.wait()

    def _wake(self) -> None:
        """Let those look again that wait for room or for a server."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of it; where one fails, the rest is cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _outcome(future: Future[None]) -> Exception | None:
    if future.cancelled():
        return PromptFailedError("generation was broken off")
    error = future.exception()
    return error if error is None or isinstance(error, Exception) else PromptFailedError(str(error))

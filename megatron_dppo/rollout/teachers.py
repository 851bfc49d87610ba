"""Queries to teacher servers for log-probabilities, as soon as a group is complete.

A stock SGLang or vLLM server returns the id and the log-probability of each token of a prompt, at
temperature 1. Before the first step, both tokenizers must decode the whole vocabulary to the same
text.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.numbers import as_logprobs
from megatron_dppo.rl.sequences import split_prompt_and_response, split_sequences
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Completions
from megatron_dppo.rollout.servers.client import CONTROL_S
from megatron_dppo.rollout.servers.http import EXCHANGE_S, Http, ServerError, wrap_errors
from megatron_dppo.rollout.servers.launch import SECRET

T = TypeVar("T")

ASK_AGAIN_S = 3.0
"""Seconds until a query without a response is repeated."""
SHOWN = 20
"""Characters of a vocabulary shown in an error, from the first difference."""


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """Teacher server of known type and model."""

    url: str
    model: str
    """Name of the model in requests."""
    sglang: bool
    """Whether the server is SGLang; otherwise vLLM."""
    tokens: int
    """Size of the vocabulary shared with the policy."""

    def build_request(
        self,
        prompt: NDArray[np.int32],
        response: NDArray[np.int32],
    ) -> tuple[str, dict[str, Any]]:
        """Return path and body of a query for a response's tokens."""
        tokens = [*prompt.tolist(), *response.tolist()]
        if self.sglang:
            sampling = {"max_new_tokens": 0, "temperature": 1.0}
            options = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
            return "/generate", {"input_ids": tokens, "sampling_params": sampling, **options}
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        return "/v1/completions", body

    def parse_logprobs(
        self,
        answer: Mapping[str, Any],
        response: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of a response's tokens, [L], from the server's answer.

        Raises:
            ServerError: the answer is about different tokens.
            ValueError: the answer lacks valid log-probabilities.
        """
        expected_ids = response.tolist()
        if self.sglang:
            scored = [
                (token, logprob)
                for logprob, token, *_ in answer["meta_info"]["input_token_logprobs"][1:]
            ]
            # SGLang returns the id 0 for the vocabulary's last token.
            expected = []
            for (named, _), token in zip(scored, expected_ids, strict=False):
                expected.append(0 if named == 0 and token >= self.tokens - 1 else token)
            expected_ids = expected
        else:
            entries = answer["choices"][0]["prompt_logprobs"][-len(expected_ids) :]
            scored = [
                (t, entry[str(t)]["logprob"])
                for t, entry in zip(expected_ids, entries, strict=True)
                if str(t) in entry
            ]
        if len(scored) != len(response) or [token for token, _ in scored] != expected_ids:
            raise ServerError(
                self.url,
                f"returned log-probabilities of other tokens than the {len(response)} requested",
                alive=True,
            )
        return as_logprobs([logprob for _, logprob in scored])


class TeacherServers:
    """Servers named in ``loss.distillation``, on every rank that rolls out. Collective.

    Args:
        world: ranks that roll out.
        tokenizer: tokenizer of the policy.

    Raises:
        UserError: on every rank: a server does not respond, accepts too few tokens, or has a
            different vocabulary.
    """

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer) -> None:
        self.distillation = config.loss.distillation
        self._timeout_s = config.rollout.timeout_s
        self._secret = os.environ.get(SECRET) or None
        self._http = Http()
        self._room = asyncio.Semaphore(config.rollout.max_in_flight)
        longest = config.longest

        def connect_all() -> dict[str, TeacherServer]:
            urls = self.distillation.servers
            connecting = [
                self._http.start(wrap_errors(url, self._connect(url, tokenizer, longest)))
                for url in urls
            ]
            return {
                url: self.wait_response(url, future)
                for url, future in zip(urls, connecting, strict=True)
            }

        try:
            self._servers = world.broadcast(connect_all)
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: Prompt, completion: Completion) -> Future[NDArray[np.float32]]:
        """Start a query for a completion. The prompt's teacher must be a server."""
        server = self._servers[str(self.distillation.get_teacher(prompt.data_source))]
        return self._http.start(wrap_errors(server.url, self._read_all(server, prompt, completion)))

    def wait_response(self, url: str, future: Future[T]) -> T:
        """Wait for the answer of a server.

        Raises:
            UserError: the server failed.
        """
        try:
            return future.result()
        except ServerError as error:
            remedy = (
                "Start SGLang or vLLM there, with the policy's vocabulary and its tokenizer, "
                "and resume"
            )
            raise UserError(
                self.distillation.get_setting(url), url, f"the server {error.problem}", remedy
            ) from error

    def close(self) -> None:
        """Drop all connections. Not collective."""
        self._http.close()

    async def _connect(self, url: str, tokenizer: Tokenizer, longest: int) -> TeacherServer:
        url = url.rstrip("/")
        get = partial(self._http.call, "GET", url, secret=self._secret, timeout_s=CONTROL_S)
        routes = (await get("/openapi.json"))["paths"]
        models = (await get("/v1/models"))["data"]
        server = TeacherServer(
            url, models[0]["id"], sglang="/generate" in routes, tokens=len(tokenizer)
        )
        # vLLM always generates a token: require room for one more.
        if models[0]["max_model_len"] <= longest:
            problem = (
                f"takes {models[0]['max_model_len']} tokens, and the longest sequence has "
                f"{longest}, and one more"
            )
            raise ServerError(url, problem, alive=True)
        vocabulary = list(range(len(tokenizer)))
        body: dict[str, Any] = {"model": server.model, "tokens": vocabulary}
        if server.sglang:
            body["skip_special_tokens"] = False
        answer = await self._http.call(
            "POST", url, "/detokenize", body=body, secret=self._secret, timeout_s=CONTROL_S
        )
        expected = tokenizer.decode(vocabulary)
        found = answer["text" if server.sglang else "prompt"]
        if expected != found:
            at = next(
                (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                len(expected),
            )
            theirs = found[at : at + SHOWN]
            ours = expected[at : at + SHOWN]
            problem = (
                f"has another vocabulary: its text has {theirs!r}, where the policy's text has "
                f"{ours!r}"
            )
            raise ServerError(url, problem, alive=True)
        return server

    async def _read_all(
        self,
        server: TeacherServer,
        prompt: Prompt,
        completion: Completion,
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of all sequences of a completion, [L]."""
        # A further sequence's first token was not sampled: its log-probability is unused, and 0.
        result = np.zeros(len(completion.token_ids), np.float32)
        splits = [
            split_prompt_and_response(prompt.token_ids, completion, k)
            for k, span in enumerate(split_sequences(completion))
            if span.stop
        ]
        reading = (
            self._read(server, before, completion.token_ids[positions])
            for before, positions in splits
        )
        for (_, positions), logprobs in zip(splits, await asyncio.gather(*reading), strict=True):
            result[positions] = logprobs
        return result

    async def _read(
        self,
        server: TeacherServer,
        prompt: NDArray[np.int32],
        response: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of one response, [L].

        A query to a dead server is repeated within ``rollout.timeout_s``. A refusal is final.
        """
        path, body = server.build_request(prompt, response)
        async with self._room:
            until = time.monotonic() + self._timeout_s
            while True:
                left = max(until - time.monotonic(), 1.0)
                answer = self._http.call_with_retries(
                    "POST", server.url, path, body=body, secret=self._secret, timeout_s=left
                )
                try:
                    return server.parse_logprobs(await answer, response)
                except ServerError as error:
                    # A dead server may restart.
                    if error.alive or time.monotonic() + ASK_AGAIN_S > until:
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)


class TeacherQuery:
    """Queries for the completions of one rank's prompts, in order of completion.

    Args:
        servers: None if no teacher is a server.
        prompts: [P], prompts of this rank.
    """

    def __init__(self, servers: TeacherServers | None, prompts: Sequence[Prompt]) -> None:
        self._servers = servers
        self._prompts = prompts
        self._queries: dict[int, list[Future[NDArray[np.float32]]]] = {}
        """Started queries by index of the prompt, if its teacher is a server."""

    def submit_groups(self, groups: Iterable[tuple[int, tuple[Completion, ...]]]) -> None:
        """Start the queries for complete groups, without waiting for answers."""
        if self._servers is None:
            return
        for place, group in groups:
            prompt = self._prompts[place]
            if self._servers.distillation.has_server(prompt.data_source):
                self._queries[place] = [self._servers.submit(prompt, each) for each in group]

    def wait(self, completions: Completions, world: World) -> None:
        """Wait until the queries of all ranks have ended. Collective, with a short exchange every
        ``EXCHANGE_S``."""
        if self._servers is None:
            return
        self.submit_groups(
            (place, group) for place, group in enumerate(completions) if place not in self._queries
        )
        futures = [future for each in self._queries.values() for future in each]
        while any(world.gather(bool(wait(futures, EXCHANGE_S).not_done))):
            pass

    def add_logprobs(self, completions: Completions) -> Completions:
        """Return the completions with the teachers' log-probabilities. Not collective.

        Raises:
            UserError: a server failed to return log-probabilities.
        """
        return [self._add_group_logprobs(place, group) for place, group in enumerate(completions)]

    def cancel(self) -> None:
        """Cancel all queries after a failed rollout."""
        for futures in self._queries.values():
            for future in futures:
                future.cancel()

    def _add_group_logprobs(
        self,
        place: int,
        group: tuple[Completion, ...],
    ) -> tuple[Completion, ...]:
        if self._servers is None or place not in self._queries:
            return group
        url = str(self._servers.distillation.get_teacher(self._prompts[place].data_source))
        responses = (self._servers.wait_response(url, query) for query in self._queries[place])
        return tuple(
            replace(c, teacher_logprobs=logprobs)
            for c, logprobs in zip(group, responses, strict=True)
        )

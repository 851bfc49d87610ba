"""Servers that teach: how likely the tokens of completions are to them, asked as soon as a group is complete.

A stock SGLang or vLLM server tells the log-probabilities of a text that it is given, token by token, at temperature 1.
It gets token ids and no text, and every log-probability comes back with the id that it is of. The meaning of the
ids is compared once, before the first step: both tokenizers have to read the whole vocabulary alike.
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
from megatron_dppo.rl.sequences import prompt_and_response, sequences
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Completions
from megatron_dppo.rollout.servers.client import CONTROL_S
from megatron_dppo.rollout.servers.http import EXCHANGE_S, Http, ServerError, readable
from megatron_dppo.rollout.servers.launch import SECRET

T = TypeVar("T")

ASK_AGAIN_S = 3.0
"""Seconds until a server that did not answer is asked again."""
SHOWN = 20
"""Characters of two vocabularies that are shown from where they part."""


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """A server that has been asked what it is."""

    url: str
    model: str
    """The name by which it is asked for its model."""
    sglang: bool
    """Whether it is SGLang; else it is vLLM."""
    tokens: int
    """Size of the vocabulary shared with the policy."""

    def question(self, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> tuple[str, dict[str, Any]]:
        """Path and body of a question about a response's tokens."""
        tokens = [*prompt.tolist(), *response.tolist()]
        if self.sglang:
            sampling = {"max_new_tokens": 0, "temperature": 1.0}
            asked = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
            return "/generate", {"input_ids": tokens, "sampling_params": sampling, **asked}
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return "/v1/completions", body

    def logprobs(self, answer: Mapping[str, Any], response: NDArray[np.int32]) -> NDArray[np.float32]:
        """[L], what the answer says of the response's tokens.

        Raises:
            ServerError: it speaks of other tokens.
            ValueError: it gives no log-probabilities.
        """
        asked = response.tolist()
        if self.sglang:
            told = [(token, logprob) for logprob, token, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
            # It gives the last token of a vocabulary the id 0, with the log-probability that is that token's.
            asked = [
                0 if named == 0 and t >= self.tokens - 1 else t for (named, _), t in zip(told, asked, strict=False)
            ]
        else:
            entries = answer["choices"][0]["prompt_logprobs"][-len(asked) :]
            told = [(t, entry[str(t)]["logprob"]) for t, entry in zip(asked, entries, strict=True) if str(t) in entry]
        if len(told) != len(response) or [token for token, _ in told] != asked:
            raise ServerError(self.url, f"spoke of other tokens than the {len(response)} that it was asked", alive=True)
        return as_logprobs([logprob for _, logprob in told])


class TeacherServers:
    """The servers that ``loss.distillation`` names, on every rank that rolls out. Collective.

    Args:
        config: of the run.
        world: the ranks.
        tokenizer: the policy's.

    Raises:
        UserError: on every rank; a server does not answer, takes too few tokens, or has another vocabulary.
    """

    def __init__(self, config: Config, world: World, tokenizer: Tokenizer) -> None:
        self.distillation, self._timeout_s = config.loss.distillation, config.rollout.timeout_s
        self._secret = os.environ.get(SECRET) or None
        self._http, self._room = Http(), asyncio.Semaphore(config.rollout.max_in_flight)
        longest = config.longest

        def contact() -> dict[str, TeacherServer]:
            urls = self.distillation.servers
            asked = [self._http.start(readable(url, self._contact(url, tokenizer, longest))) for url in urls]
            return {url: self.answer(url, future) for url, future in zip(urls, asked, strict=True)}

        try:
            self._servers = world.from_leader(contact)
        except BaseException:
            self.close()
            raise

    def ask(self, prompt: Prompt, completion: Completion) -> Future[NDArray[np.float32]]:
        """Have a completion to a prompt that a server teaches read, while something else is done."""
        server = self._servers[str(self.distillation.teacher_of(prompt.data_source))]
        return self._http.start(readable(server.url, self._read_all(server, prompt, completion)))

    def answer(self, url: str, asked: Future[T]) -> T:
        """Await a server's answer.

        Raises:
            UserError: the server failed.
        """
        try:
            return asked.result()
        except ServerError as error:
            remedy = "Start SGLang or vLLM there, with the policy's vocabulary and its tokenizer, and resume"
            raise UserError(self.distillation.setting_of(url), url, f"the server {error.problem}", remedy) from error

    def close(self) -> None:
        """Drop all connections. Not collective."""
        self._http.close()

    async def _contact(self, url: str, tokenizer: Tokenizer, longest: int) -> TeacherServer:
        url = url.rstrip("/")
        get = partial(self._http.call, "GET", url, secret=self._secret, timeout_s=CONTROL_S)
        routes, models = (await get("/openapi.json"))["paths"], (await get("/v1/models"))["data"]
        server = TeacherServer(url, models[0]["id"], sglang="/generate" in routes, tokens=len(tokenizer))
        if models[0]["max_model_len"] <= longest:  # vLLM generates a token, too
            problem = f"takes {models[0]['max_model_len']} tokens, and the longest sequence has {longest}, and one more"
            raise ServerError(url, problem, alive=True)
        vocabulary = list(range(len(tokenizer)))
        body = {"model": server.model, "tokens": vocabulary} | ({"skip_special_tokens": False} if server.sglang else {})
        answer = await self._http.call("POST", url, "/detokenize", body=body, secret=self._secret, timeout_s=CONTROL_S)
        ours, theirs = tokenizer.decode(vocabulary), answer["text" if server.sglang else "prompt"]
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            parts = f"{theirs[at : at + SHOWN]!r}, where the policy's goes on with {ours[at : at + SHOWN]!r}"
            raise ServerError(url, f"has another vocabulary: it goes on with {parts}", alive=True)
        return server

    async def _read_all(self, server: TeacherServer, prompt: Prompt, completion: Completion) -> NDArray[np.float32]:
        """A further sequence's first token was not sampled: its log-probability is unknown and unused."""
        said = np.zeros(len(completion.token_ids), np.float32)
        asked = [prompt_and_response(prompt.token_ids, completion, k) for k in range(len(sequences(completion)))]
        reading = (self._read(server, before, completion.token_ids[of]) for before, of in asked)
        for (_, of), logprobs in zip(asked, await asyncio.gather(*reading), strict=True):
            said[of] = logprobs
        return said

    async def _read(
        self, server: TeacherServer, prompt: NDArray[np.int32], response: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """A server that has died may come back, and is asked again. A refusal is final."""
        path, body = server.question(prompt, response)
        async with self._room:
            until = time.monotonic() + self._timeout_s
            while True:
                left = max(until - time.monotonic(), 1.0)
                answer = self._http.call_patiently(
                    "POST", server.url, path, body=body, secret=self._secret, timeout_s=left
                )
                try:
                    return server.logprobs(await answer, response)
                except ServerError as error:
                    if error.alive or time.monotonic() + ASK_AGAIN_S > until:
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)


class TeacherQuery:
    """Completions of one rank's prompts, read in the order in which they come.

    Args:
        servers: that read them; None: nobody does.
        prompts: P.
    """

    def __init__(self, servers: TeacherServers | None, prompts: Sequence[Prompt]) -> None:
        self._servers, self._prompts = servers, prompts
        self._asked: dict[int, list[Future[NDArray[np.float32]]]] = {}
        """By the place of the prompt; those that no server teaches have none."""

    def look(self, groups: Iterable[tuple[int, tuple[Completion, ...]]]) -> None:
        """Ask for groups that are complete, and wait for nothing."""
        if self._servers is None:
            return
        for place, group in groups:
            if self._servers.distillation.served((prompt := self._prompts[place]).data_source):
                self._asked[place] = [self._servers.ask(prompt, completion) for completion in group]

    def finish(self, completions: Completions, world: World) -> Completions:
        """The same completions, with what the servers say of those that they teach. Collective.

        Ranks wait in a short collective every ``EXCHANGE_S``, as they do for rollouts.

        Raises:
            UserError: on every rank; a server has not said it.
        """
        if self._servers is None:
            return completions
        self.look((place, group) for place, group in enumerate(completions) if place not in self._asked)
        asked = [future for each in self._asked.values() for future in each]
        while any(world.gather(bool(wait(asked, EXCHANGE_S).not_done))):
            pass
        return world.together(lambda: list(map(self._read, range(len(completions)), completions)), what="teachers")

    def abandon(self) -> None:
        """The groups will not be complete: nobody needs what is said of them."""
        for asked in self._asked.values():
            for future in asked:
                future.cancel()

    def _read(self, place: int, group: tuple[Completion, ...]) -> tuple[Completion, ...]:
        if self._servers is None or place not in self._asked:
            return group
        url = str(self._servers.distillation.teacher_of(self._prompts[place].data_source))
        said = (self._servers.answer(url, asked) for asked in self._asked[place])
        return tuple(replace(c, teacher_logprobs=logprobs) for c, logprobs in zip(group, said, strict=True))

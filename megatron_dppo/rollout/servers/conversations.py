"""Conversations with servers; a conversation uses the same server for all turns.

- The user's functions run in a separate thread, because slow code must not delay heartbeats.
- Requests are sent in the HTTP thread.
- If a server fails, another server receives the whole prompt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.client import GenerateResult, ServerClient
from megatron_dppo.rollout.servers.http import CLOSE_S, Http, ServerError, run_all, wrap_errors
from megatron_dppo.rollout.turns import (
    RETRY_DELAY_S,
    Client,
    RolloutFunction,
    TryAgainError,
    merge_parts,
)

ReadVersions = Callable[[Sequence[tuple[str, int]]], NDArray[np.int32]]
"""Function from a server's versions to the run's version of each token, called in the HTTP thread.
Raises :class:`ServerError` for versions not allowed in the step."""


class ConversationError(ServerError):
    """Failure of a conversation without a fault of the server, to be repeated."""


def to_completion(result: GenerateResult, versions: NDArray[np.int32]) -> Completion:
    """Convert a server's continuation into a completion; the policy sampled every token."""
    sampled = np.ones(len(result.token_ids), bool)
    reason: Literal["stop", "length"] = "stop" if result.reason == "stop" else "length"
    return Completion(
        result.token_ids,
        result.logprobs,
        sampled,
        versions,
        reason,
        result.routing,
        sampling_mask=result.sampling_mask,
    )


class Conversations:
    """Completions of prompts from a server, through a user's function.

    Args:
        timeout_s: timeout in seconds for all conversations of a prompt.
    """

    def __init__(self, function: RolloutFunction, *, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._thread = Http()
        self._begun: dict[int, float] = {}
        """Start time of pending conversations by prompt id."""

    def describe_stalled(self, seconds: float) -> str:
        """Describe the longest pending prompt, if pending for ``seconds``; otherwise return "".
        Callable from any thread."""
        # Copy the items, because the HTTP thread changes the dictionary.
        prompt, began = min(
            list(self._begun.items()), key=lambda each: each[1], default=(-1, math.inf)
        )
        if (under_way := time.monotonic() - began) < seconds:
            return ""
        return f"{self._function.spec} has not returned for prompt {prompt} after {under_way:.0f} s"

    def close(self) -> None:
        # A user's function may block the loop.
        with suppress(TimeoutError):
            self._thread.run(self._function.close(), CLOSE_S)
        self._thread.close()

    async def __call__(
        self,
        server: ServerClient,
        prompt: Prompt,
        sampling: Sampling,
        read_versions: ReadVersions,
    ) -> list[Completion]:
        """Return ``sampling.samples`` completions from a server. Runs in the HTTP thread.

        Raises:
            ServerError: the server failed.
            ConversationError: the function gave up a conversation, or exceeded the timeout.
            UserError: the function raised, cancelled the run's tasks, or returned an unusable
                result.
        """
        problem = f"served {self._function.spec} for {self._timeout_s:g} s without a completion"

        def request_turn(*request: Any) -> Awaitable[Completion]:
            return asyncio.wrap_future(
                server.http.start(self._request_turn(server, read_versions, *request))
            )

        client = partial(
            Client, function=self._function, prompt=prompt, sampling=sampling, turn=request_turn
        )
        clients = [client(number=number, failure=ServerError) for number in range(sampling.samples)]
        future = self._thread.start(run_all(map(self._function.run, clients)))
        self._begun[prompt.id] = time.monotonic()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TryAgainError as error:
            problem = f"was given up by {self._function.spec}: {error}"
        except TimeoutError:
            pass
        # Either the run or the user's function has cancelled the conversations.
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # The run.
                raise
            raise self._function.make_interference_error() from None
        finally:
            self._begun.pop(prompt.id, None)
        raise ConversationError(server.url, problem, alive=True)

    async def _request_turn(
        self,
        server: ServerClient,
        read_versions: ReadVersions,
        client: Client,
        context: list[int],
        sampling: Sampling,
    ) -> Completion:
        """Request a turn; an aborted turn is resumed on the same server."""
        parts: list[Completion] = []
        made: list[int] = []
        while len(made) < sampling.max_tokens:
            seed = sampling.derive_seed(
                client.prompt.id, client.number, len(client.generated), len(made)
            )
            rest = replace(sampling, max_tokens=sampling.max_tokens - len(made), seed=seed)
            answer = server.generate([*context, *made], rest, timeout_s=self._timeout_s)
            (result,) = await wrap_errors(server.url, answer)
            parts.append(to_completion(result, read_versions(result.versions)))
            made += result.token_ids.tolist()
            if result.reason != "abort":
                break
            await asyncio.sleep(RETRY_DELAY_S)
        return merge_parts(parts)

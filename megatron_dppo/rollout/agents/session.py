"""Rollout of an agent at the endpoint: requests become contexts, and sampled turns become answers.

A request of chat messages continues the recorded turn whose messages the request repeats: the
sampled token ids replace the turn's text, even if a chat template omits thoughts of earlier turns,
or a tokenizer would merge the text in another way. All other requests are rendered from scratch,
and begin a further sequence: a sub-agent, an edited history, a compacted context.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from megatron_dppo.data.examples import Tools
from megatron_dppo.data.turns import (
    ChatRenderer,
    Message,
    normalize_message,
    parse_tool_calls,
)
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Completion
from megatron_dppo.rollout.agents.requests import (
    MODEL,
    RefusedError,
    TurnRequest,
    read_messages,
    read_request,
)
from megatron_dppo.rollout.conversation_checks import check_ids
from megatron_dppo.rollout.turns import Client, merge_parts, merge_sequences

Body: TypeAlias = Mapping[str, Any]
"""JSON object of a request or an answer."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of one rollout."""

    turns: int
    tokens: int
    """Tokens of all sequences together."""
    idle_s: float
    """Seconds without a pending request."""


@dataclass(frozen=True, slots=True)
class _ChatTurn:
    """Recorded turn of a chat."""

    before: Sequence[Message]
    """Messages before the turn."""
    messages: Sequence[object]
    """Messages up to the turn, the turn included, in the form for comparisons."""
    tools: Tools
    token_ids: list[int]
    """Context and turn."""


class Session:
    """Requests of one rollout.

    Args:
        client: record of the rollout.
        sampling: values of sampling parameters that equal the run's, by name.
        find_stop_token: returns the token of a stop text, or None.
    """

    def __init__(
        self,
        client: Client,
        renderer: ChatRenderer,
        limits: AgentLimits,
        sampling: Mapping[str, Sequence[object]],
        find_stop_token: Callable[[str], int | None],
    ) -> None:
        self._client = client
        self._tokenizer = client.tokenizer
        self._renderer = renderer
        self._limits = limits
        self._sampling = sampling
        self._find_stop_token = find_stop_token
        self._chat: list[_ChatTurn] = []
        self._texts: list[tuple[str, list[int]]] = []
        """Text and token ids after each turn of a text completion."""
        self._requests = 0
        self._is_truncated = False
        self._refusal = ""
        """First request that is not served."""
        self._pending: set[asyncio.Task[Any]] = set()
        self._idle_since = time.monotonic()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the engine's error after a failed turn."""

    @property
    def idle_left_s(self) -> float:
        """Seconds until the limit of a rollout without a pending request."""
        idle_s = 0.0 if self._pending else time.monotonic() - self._idle_since
        return self._limits.idle_s - idle_s

    async def answer(self, route: Callable[[Session, Any], Awaitable[Body]], body: Any) -> Body:
        """Answer a request.

        Raises:
            RefusedError: the request is not served, or a limit of the rollout is reached.
        """
        task = asyncio.current_task()
        assert task is not None
        self._pending.add(task)
        try:
            return await route(self, body)
        except RefusedError as error:
            self.refuse(error)
            raise
        except Exception as error:
            if self.failed.done():
                raise
            # The values of a request are the agent's. A tokenizer, for example, raises TypeError
            # for half of a surrogate pair.
            refused = RefusedError(f"The request cannot be read: {error}", "messages")
            self.refuse(refused)
            raise refused from error
        finally:
            self._pending.discard(task)
            self._idle_since = time.monotonic()

    def refuse(self, error: RefusedError) -> None:
        """Record a refusal."""
        self._is_truncated |= error.is_limit
        if not error.is_limit:
            self._refusal = self._refusal or str(error)

    def close(self) -> None:
        """Cancel pending requests."""
        for task in self._pending:
            task.cancel()
        self.failed.cancel()

    def build_completion(self, score: Score | None) -> Completion:
        """Return the completion of an ended rollout; without a token if the rollout failed.

        Args:
            score: score by the agent; None: the reward function scores the completion.
        """
        sequences = [merge_parts(each.parts) for each in self._client.sequences]
        if self._refusal:
            score = Score.from_failure("error", f"requested what is not served: {self._refusal}")
        elif len(sequences) == 1 and not len(sequences[0].token_ids) and not is_failed(score):
            score = Score.from_failure("error", "ended without a turn of the policy")
        if is_failed(score):
            return replace(merge_parts([]), score=score)
        whole = replace(merge_sequences(sequences), score=score)
        return replace(whole, finish_reason="length") if self._is_truncated else whole

    async def complete_chat(self, body: Any) -> Body:
        """Answer a request of ``/v1/chat/completions``."""
        request = read_request(body, self._sampling)
        messages, tools = read_messages(body)
        known = [normalize_message(message) for message in messages]
        context = self._find_context(messages, known, tools)
        turn, text, stop = await self._generate(context, request)
        content, calls = parse_tool_calls(text) if tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self._requests}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
        whole = [*context, *turn.token_ids.tolist()]
        self._chat.append(_ChatTurn(messages, [*known, normalize_message(message)], tools, whole))
        reason = "tool_calls" if calls else turn.finish_reason
        choice = {"index": 0, "message": message, "logprobs": None}
        choice |= {"finish_reason": reason, "stop_reason": stop}
        return self._build_answer("chat.completion", choice, context, turn)

    async def complete_text(self, body: Any) -> Body:
        """Answer a request of ``/v1/completions``: a text or a list of token ids."""
        request = read_request(body, self._sampling)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            # The longest text of a recorded turn keeps the sampled token ids.
            texts = [each for each in self._texts if prompt.startswith(each[0])]
            text, before = max(texts, key=lambda each: len(each[0]), default=("", []))
            new = self._tokenizer([prompt[len(text) :]], add_special_tokens=False)["input_ids"][0]
            context = [*before, *new]
        else:
            action = "requested a completion of a prompt"
            context = check_ids(prompt, self._client.function.vocabulary, action).tolist()
        turn, text, stop = await self._generate(context, request)
        token_ids = turn.token_ids.tolist()
        if isinstance(prompt, str):
            whole = [*context, *token_ids]
            self._texts.append((prompt + text + (stop or ""), whole))
            if stop is not None:
                self._texts.append((prompt + text, whole[:-1]))
        choice = {"index": 0, "text": text, "token_ids": token_ids, "logprobs": None}
        choice |= {"finish_reason": turn.finish_reason, "stop_reason": stop}
        return self._build_answer("text_completion", choice, context, turn)

    def _find_context(
        self,
        messages: Sequence[Message],
        known: Sequence[object],
        tools: Tools,
    ) -> list[int]:
        before = [
            turn
            for turn in self._chat
            if turn.tools == tools and list(known[: len(turn.messages)]) == turn.messages
        ]
        # Several turns may have equal messages: continue the last.
        turn = max(reversed(before), key=lambda turn: len(turn.messages), default=None)
        if turn is None:
            return self._renderer.render(messages, tools)
        last = turn.token_ids[-1]
        new = messages[len(turn.messages) :]
        return [
            *turn.token_ids,
            *self._renderer.render_after_turn(turn.before, last, new, tools),
        ]

    async def _generate(
        self, context: list[int], request: TurnRequest
    ) -> tuple[Completion, str, str | None]:
        """Generate a turn; return the turn, the text without stop tokens, and the stop text."""
        client = self._client
        stops = self._read_stops(request.stops)
        self._requests += 1
        if self._requests > self._limits.turns:
            raise RefusedError(
                f"The rollout has used its rollout.agent_turns = {self._limits.turns}.",
                code="rollout_limit",
                is_limit=True,
            )
        if client.count_left(context) <= 0:
            most = len(context) + client.count_left(context)
            raise RefusedError(
                # Clients recognise a full context by these words.
                f"This model's maximum context length is {most} tokens. However, you requested "
                f"{len(context)} tokens in the messages.",
                "messages",
                "context_length_exceeded",
                is_limit=True,
            )
        left = self._limits.tokens - self._count_other_tokens(context) - len(context)
        if left <= 0:
            raise RefusedError(
                f"The rollout has used its rollout.agent_tokens = {self._limits.tokens}.",
                code="rollout_limit",
                is_limit=True,
            )
        most = left if request.max_tokens is None else min(left, request.max_tokens)
        try:
            turn = await client.generate(context, max_tokens=most, stop_token_ids=[*stops])
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        token_ids = turn.token_ids.tolist()
        stop = stops.get(token_ids[-1]) if token_ids else None
        shown = token_ids if stop is None else token_ids[:-1]
        return turn, self._tokenizer.decode(shown, skip_special_tokens=True), stop

    def _count_other_tokens(self, context: Sequence[int]) -> int:
        """Return the tokens of all sequences that a context does not continue."""
        continued = self._client.find_sequence(context)
        return sum(
            len(each.token_ids)
            for each in self._client.sequences
            if each.parts and each is not continued
        )

    def _read_stops(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the stop texts by token."""
        found = {}
        for text in texts:
            if (token := self._find_stop_token(text)) is None:
                raise RefusedError(
                    f"The stop text {text!r:.80} is not always a single token of its own, and a "
                    "turn ends with a whole token.",
                    "stop",
                )
            found[token] = text
        return found

    def _build_answer(
        self,
        kind: Literal["chat.completion", "text_completion"],
        choice: Body,
        context: Sequence[int],
        turn: Completion,
    ) -> Body:
        read, made = len(context), len(turn.token_ids)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return {
            "id": f"turn-{self._requests}",
            "object": kind,
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }


def is_failed(score: Score | None) -> bool:
    return score is not None and score.failure is not None

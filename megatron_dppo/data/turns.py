"""Conversations between the policy and an environment that sends chat messages, as token ids.

The policy's turns stay the sampled token ids. The chat template renders the environment's new
messages, which the policy reads after its own turn:

    <|im_start|>user guess<|im_end|><|im_start|>assistant    prompt
    4<|im_end|>                                              sampled by the policy
    <|im_start|>user more<|im_end|><|im_start|>assistant     read by the policy

Scoring replays the conversation with the sampled turns.

Tools have the form of Qwen3 and Qwen2.5, with calls in blocks of a turn:

    Let me add.
    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

Generate = Callable[[list[int]], Awaitable[list[int]]]
"""Function from new token ids to the policy's next turn, the final token included. Raises
:class:`ResponseFullError`."""
Message = Mapping[str, Any]
"""``content`` of a policy's message is the whole turn."""
# Replaces a policy's turn in the template, and must not occur in a conversation. Without quotation
# marks, because a template may escape these.
MARK = "(turn of the policy: 5b1f2c9e)"


class ResponseFullError(Exception):
    """No token of the response is left."""


class ConversationFormatError(ValueError):
    """Messages that cannot become token ids. The text is a predicate, to follow "it"."""


class ReplayMismatchError(RuntimeError):
    """An environment answers differently in a replay."""

    def __init__(self, action: str) -> None:
        law = "Its messages may depend on the problem and on the policy's messages only"
        super().__init__(f"The environment {action} in the replay of this conversation. {law}.")


class ChatSession:
    """Conversation. A call takes all messages and returns the policy's next turn.

    Args:
        tokenizer: the policy's.
        prompt_messages: messages of the prompt.
        generate: generator of the policy's turns.
        tools: tools of the prompt. transformers chooses among several chat templates by tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_messages: object,
        generate: Generate,
        tools: Tools = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_messages = prompt_messages
        self._generate = generate
        self._render = partial(tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
        self._messages: list[Message] = []
        self._last = -1

    async def __call__(self, messages: Sequence[Message]) -> str:
        """
        Raises:
            ConversationFormatError: the messages do not continue the earlier ones, or fail to
                render.
            ResponseFullError: no token is left.
        """
        token_ids = await self._generate(self._encode_new_messages(messages))
        # The environment reads text without end-of-turn marks.
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._last = token_ids[-1]
        return text

    def _encode_new_messages(self, messages: Sequence[Message]) -> list[int]:
        # The first call must repeat the prompt, because the policy has read the prompt already.
        if not self._messages:
            prompt = self._prompt_messages
            if not isinstance(prompt, Sequence) or _get_contents(messages) != _get_contents(prompt):
                raise ConversationFormatError("begins with other messages than its problem")
            return []
        known = len(self._messages)
        if _get_contents(messages[:known]) != _get_contents(self._messages):
            raise ConversationFormatError("changes earlier messages of the conversation")
        text = self._render_new_messages(self._messages[:-1], messages[known:])
        token_ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        # A turn that the policy closed with the end-of-turn token already has this token.
        tokens = token_ids[1:] if token_ids[:1] == [self._last] else token_ids
        if not tokens:
            raise ConversationFormatError(
                "requests two turns of the policy without a message between them"
            )
        return tokens

    def _render_new_messages(self, before: Sequence[Message], new: Sequence[Message]) -> str:
        """Return the template's text after a policy's turn that follows ``before``."""
        if not all(isinstance(message.get("content"), str) for message in new):
            raise ConversationFormatError("answers with more than text")
        chat = [*before, {"role": "assistant", "content": MARK}, *new]
        try:
            until = self._render(before, add_generation_prompt=False)
            whole = self._render(chat, add_generation_prompt=True)
        # A template is a program and may raise any exception.
        except Exception as error:
            raise ConversationFormatError(
                f"answers with messages that fail in the chat template ({error})"
            ) from error
        # Refuse a template that changes earlier text, because sampled tokens must stay as sampled.
        if whole.count(MARK) != 1 or not whole.startswith(until):
            roles = ", ".join(str(message["role"]) for message in new) or "nothing"
            problem = (
                f"answers with messages ({roles}) for which the chat template changes earlier "
                "messages"
            )
            raise ConversationFormatError(problem)
        return str(whole.partition(MARK)[2])


class TurnReplay:
    """Replay of the policy's turns in a completion: a :data:`Generate`.

    Args:
        token_ids: [L], response.
        loss_mask: [L], True for sampled tokens; empty: all.
        cut_off: True if no token was left.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        loss_mask: Sequence[bool],
        *,
        cut_off: bool,
    ) -> None:
        marked = zip(loss_mask or [True] * len(token_ids), token_ids, strict=True)
        self._left: list[tuple[bool, list[int]]] = []
        """Remaining runs of tokens, True if sampled."""
        for sampled, run in groupby(marked, lambda each: bool(each[0])):
            self._left.append((sampled, [token for _, token in run]))
        self._cut_off = cut_off

    async def __call__(self, token_ids: list[int]) -> list[int]:
        """
        Raises:
            ReplayMismatchError: ``token_ids`` differ from the completion's tokens.
            ResponseFullError: the completion was cut off at this turn.
        """
        given = self._take(from_policy=False)
        # A response that was cut off may hold only the first of the environment's tokens.
        ends_here = self._cut_off and not self._left
        if (token_ids[: len(given)] if ends_here else token_ids) != given:
            raise ReplayMismatchError("answered differently")
        if ends_here:
            raise ResponseFullError
        if not self._left:
            raise ReplayMismatchError("requested another turn")
        return self._take(from_policy=True)

    def check_end(self) -> None:
        """
        Raises:
            ReplayMismatchError: tokens of the completion remain.
        """
        if self._left:
            raise ReplayMismatchError("ended early")

    def _take(self, *, from_policy: bool) -> list[int]:
        if self._left and self._left[0][0] == from_policy:
            return self._left.pop(0)[1]
        return []


def _get_contents(messages: Sequence[Any]) -> list[tuple[object, object]]:
    return [(message["role"], message.get("content")) for message in messages]


Tools = Sequence[Mapping[str, Any]]
"""Tools in the form of chat templates: ``{"type": "function", "function": {"name": ...,
"description": ..., "parameters": ...}}``; ``parameters`` is a JSON schema."""
CALL = "<tool_call>"
# Qwen3-Coder's form of calls, not parsed here.
OTHER_CALL = "<function="
_BLOCK = re.compile(rf"{CALL}(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINKS = "<think>"
_HAS_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return a turn's text before the first call, thoughts included, and the calls.

    As in vLLM's parser:

    - Blocks within thoughts are not calls.
    - The last block may be unclosed.
    - If a block lacks a name or an object of arguments, the whole turn is text, without calls.
    """
    thoughts, end, words = text.rpartition(_HAS_THOUGHT)
    calls = [_parse_call(block) for block in _BLOCK.findall(words)]
    if not calls or None in calls or _THINKS in words:
        return text, []
    content = thoughts + end + words.partition(CALL)[0]
    return content.strip(), [call for call in calls if call is not None]


def _parse_call(block: str) -> ToolCall | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

"""Conversations of the policy with an environment that speaks in messages, as token ids.

What the policy said is kept as the token ids that it sampled. The environment's new messages are
rendered by the chat template, and of the rendered text the policy reads what stands after its own
turn, up to where it speaks again:

    <|im_start|>user guess<|im_end|><|im_start|>assistant    the prompt
    4<|im_end|>                                              said by the policy
    <|im_start|>user more<|im_end|><|im_start|>assistant     told

The same code has the conversation and has it once more when it is scored, with what the policy said
then: an environment that now answers otherwise is found out.

An environment may have tools, in the form of Qwen3 and Qwen2.5. The chat template says what tools
there are, and the policy calls one in a block of its answer:

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
"""The policy's answer to these further token ids, with the token that ended it; raises
:class:`ResponseFullError` if no token is left."""
Message = Mapping[str, Any]
"""A dict; of the policy's, all that it said is ``content``."""
MARK = "(the policy's turn: 5b1f2c9e)"
"""Stands for a turn of the policy where a template renders what comes after it."""


class ResponseFullError(Exception):
    """No token is left of the response: the conversation is cut off here."""


class ConversationFormatError(ValueError):
    """An environment or a template whose messages cannot become token ids so. The text is to stand
    after "it"."""


class ReplayMismatchError(RuntimeError):
    """An environment went on otherwise than it did when the policy spoke to it, though the policy
    said the same."""

    def __init__(self, action: str) -> None:
        law = "Its messages may depend on the problem and on the policy's messages only"
        super().__init__(
            f"The environment {action}, unlike in the rollout of this conversation. {law}."
        )


class ChatSession:
    """One conversation. Called with all messages so far, it returns what the policy says to them.

    Args:
        tokenizer: Hugging Face's, of the policy.
        prompt_messages: messages of the prompt.
        generate: has the policy go on.
        tools: tools of the prompt, by which transformers chooses among several chat templates.
    """

    def __init__(
        self, tokenizer: Any, prompt_messages: object, generate: Generate, tools: Tools = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_messages = prompt_messages
        self._generate = generate
        self._render = partial(tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
        self._messages: list[Message] = []
        """All that were said so far, the last one by the policy."""
        self._last = -1
        """The policy's last token."""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """
        Raises:
            TurnsError: the messages are not those so far and further ones, or cannot be rendered.
            NothingLeftError: no token is left.
        """
        token_ids = await self._generate(self._encode_new_messages(messages))
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._last = token_ids[-1]
        return text

    def _encode_new_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids between the policy's last turn and its next one."""
        if not self._messages:
            if not isinstance(self._prompt_messages, Sequence) or _get_contents(
                messages
            ) != _get_contents(self._prompt_messages):
                raise ConversationFormatError("begins with other messages than its problem")
            return []
        known = len(self._messages)
        if _get_contents(messages[:known]) != _get_contents(self._messages):
            raise ConversationFormatError("changes earlier messages of the conversation")
        text = self._render_new_messages(self._messages[:-1], messages[known:])
        token_ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        tokens = (
            token_ids[1:] if token_ids[:1] == [self._last] else token_ids
        )  # the policy has ended its turn itself
        if not tokens:
            raise ConversationFormatError(
                "requests two turns of the policy without a message between them"
            )
        return tokens

    def _render_new_messages(self, before: Sequence[Message], new: Sequence[Message]) -> str:
        """A template's text after the policy's turn, which has come after the messages
        ``before``."""
        if not all(isinstance(message.get("content"), str) for message in new):
            raise ConversationFormatError("answers with more than text")
        chat = [*before, {"role": "assistant", "content": MARK}, *new]
        try:
            until = self._render(before, add_generation_prompt=False)
            whole = self._render(chat, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            raise ConversationFormatError(
                f"answers with messages that fail in the chat template ({error})"
            ) from error
        if whole.count(MARK) != 1 or not whole.startswith(until):
            roles = ", ".join(str(message["role"]) for message in new) or "nothing"
            problem = (
                f"answers with messages ({roles}) for which the chat template changes earlier "
                "messages"
            )
            raise ConversationFormatError(problem)
        return str(whole.partition(MARK)[2])


class TurnReplay:
    """Replay of a completion's turns of the policy: a :data:`Generate`.

    Args:
        token_ids: [L], of the response.
        loss_mask: [L], which of them the policy said; empty: all.
        cut_off: whether the response ended since no token was left.
    """

    def __init__(
        self, token_ids: Sequence[int], loss_mask: Sequence[bool], *, cut_off: bool
    ) -> None:
        marked = zip(loss_mask or [True] * len(token_ids), token_ids, strict=True)
        self._left = [
            (sampled, [token for _, token in run])
            for sampled, run in groupby(marked, lambda each: bool(each[0]))
        ]
        """Runs of tokens, and which of them the policy said."""
        self._cut_off = cut_off

    async def __call__(self, token_ids: list[int]) -> list[int]:
        """
        Raises:
            OtherAnswerError: the policy was told something else.
            NothingLeftError: as when the completion was made.
        """
        given = self._take(from_policy=False)
        ends_here = self._cut_off and not self._left
        if (token_ids[: len(given)] if ends_here else token_ids) != given:
            raise ReplayMismatchError("answered")
        if ends_here:
            raise ResponseFullError
        if not self._left:
            raise ReplayMismatchError("continued")
        return self._take(from_policy=True)

    def check_end(self) -> None:
        """
        Raises:
            OtherAnswerError: something is left of the completion.
        """
        if self._left:
            raise ReplayMismatchError("ended")

    def _take(self, *, from_policy: bool) -> list[int]:
        if self._left and self._left[0][0] == from_policy:
            return self._left.pop(0)[1]
        return []


def _get_contents(messages: Sequence[Any]) -> list[tuple[object, object]]:
    return [(message["role"], message.get("content")) for message in messages]


Tools = Sequence[Mapping[str, Any]]
"""As a chat template takes them: ``{"type": "function", "function": {"name": ..., "description":
..., "parameters": ...}}``, ``parameters`` a JSON schema."""
CALL = "<tool_call>"
OTHER_CALL = "<function="
"""In templates of another form of calls, that of Qwen3-Coder."""
_BLOCK = re.compile(rf"{CALL}(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINKS = "<think>"
_HAS_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The calls of a turn of the policy, and what it said before the first of them, its thoughts
    among that.

    Thoughts call nothing. As in vLLM's parser of this form, the last block need not be closed, and
    one that holds no object with a name and an object of arguments makes all of the turn words: an
    environment then learns that no tool was called.
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

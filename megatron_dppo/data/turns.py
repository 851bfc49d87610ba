"""Chat messages of a conversation as token ids, around turns that stay as sampled.

The chat template renders the messages that the policy reads after its own turn:

    <|im_start|>user guess<|im_end|><|im_start|>assistant    prompt
    4<|im_end|>                                              sampled by the policy
    <|im_start|>user more<|im_end|><|im_start|>assistant     read by the policy

Tools have the form of Qwen3 and Qwen2.5, with calls in blocks of a turn:

    Let me add.
    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config import DataConfig
from megatron_dppo.data.date import freeze_date
from megatron_dppo.data.examples import Tools, select_chat_template
from megatron_dppo.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""Message in OpenAI's form."""
# Replaces a policy's turn in the template, and must not occur in a conversation. Without quotation
# marks, because a template may escape these.
MARK = "(turn of the policy: 5b1f2c9e)"


class ConversationFormatError(ValueError):
    """Messages that cannot become token ids. The text is a sentence."""


class ChatRenderer:
    """Chat template of the policy, with the settings of the run's prompts.

    Methods raise ConversationFormatError if the template fails.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._data = data

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return a chat up to the policy's next turn."""
        return self._tokenize(self._render(messages, tools))

    def render_after_turn(
        self,
        before: Sequence[Message],
        last: int,
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int]:
        """Return the tokens between a policy's turn and the next turn.

        Args:
            before: messages before the turn.
            last: last token of the turn.
            new: messages after the turn.
        """
        text = self._render([*before, {"role": "assistant", "content": MARK}, *new], tools)
        # The text before the mark is not used: a template may change earlier turns, as Qwen3's
        # does with thoughts, and the policy reads the turns as sampled.
        if text.count(MARK) != 1:
            raise ConversationFormatError("The chat template repeats or omits a turn.")
        token_ids = self._tokenize(text.partition(MARK)[2])
        # A turn that the policy closed with the end-of-turn token already has this token.
        return token_ids[1:] if token_ids[:1] == [last] else token_ids

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        return token_ids

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        chat = [_to_template(message) for message in messages]
        options: dict[str, Any] = dict(self._data.chat_template_kwargs)
        template = select_chat_template(self._tokenizer, tools)
        if tools and (CALL not in template or OTHER_CALL in template):
            raise ConversationFormatError(
                f"The chat template of the policy has no tools that are called by JSON in {CALL}."
            )
        if self._data.date:
            options["chat_template"] = freeze_date(template, self._data.date)
        options |= {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
        try:
            (text,) = self._tokenizer.apply_chat_template([chat], **options)
        # A template is a program and may raise any exception.
        except Exception as error:
            raise ConversationFormatError(
                f"The messages fail in the chat template ({error})."
            ) from error
        return text


def read_text(content: object) -> str:
    """Return the content of a message as text.

    Raises:
        ConversationFormatError: the content has other parts than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ConversationFormatError("A message has other content than text.")
        parts.append(part["text"])
    return "".join(parts)


def normalize_message(message: Message) -> tuple[object, ...]:
    """Return the parts of a message that the policy reads or has sampled, to compare messages.

    Clients return a message with other empty fields, or with the content as a list of parts.

    Raises:
        ConversationFormatError: the content is no text, or a tool call lacks a part.
    """
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in _calls(message)]
    return message["role"], read_text(message.get("content")), message.get("tool_call_id"), *calls


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            calls.append({"function": {"name": function["name"], "arguments": arguments}})
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConversationFormatError(f"A tool call cannot be read ({error!r}).") from error
    return calls


def _to_template(message: Message) -> Message:
    """Return a message as templates read it: text, and arguments of tools as objects."""
    # Clients send empty fields as null, and templates ask whether a field is defined.
    fields = {name: value for name, value in message.items() if value is not None}
    fields["content"] = read_text(message.get("content"))
    if calls := _calls(message):
        fields["tool_calls"] = calls
    return fields


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

"""From a problem to the text that the policy reads: the chat template, or the problem as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_dppo.config import DataConfig
from megatron_dppo.data.rows import Row, is_blank, is_too_deep
from megatron_dppo.errors import UserError

if TYPE_CHECKING:
    from megatron_dppo.data.tokenizer import Tokenizer  # imports transformers

Messages = list[Mapping[str, Any]]
ROLES = ("system", "user", "assistant", "tool")
"""What Qwen's chat templates render. They leave out messages of another role, without a word."""
PLAIN = "Give a string, or set data.chat_template=true"
OF_A_CHAT = re.compile(r"\s*\[?\s*\{\s*[\"'](?:role|content)[\"']\s*:")


def read_prompt(row: Row, data: DataConfig) -> str | Messages:
    """The prompt of a row: text, or chat messages, also where a column holds them as JSON text. Needs no tokenizer.

    Raises:
        UserError: if it is neither, blank, or a chat that the template would not render whole or that answers itself;
            for messages under ``data.chat_template = false``, and a ``data.system`` there.
    """
    if data.system is not None and not data.chat_template:
        raise UserError(
            "data.system",
            data.system,
            "has no place without a chat template",
            "Remove it, or set data.chat_template=true",
        )
    prompt = row.require_text(data.prompt_key, "data.prompt_key")
    if isinstance(prompt, str):
        prompt = _read_text(row, prompt, data.prompt_key)
    if isinstance(prompt, str):
        if is_blank(prompt):
            raise row.complaint("has an empty prompt", "Remove the row")
        return prompt
    if not data.chat_template:
        raise row.complaint(f"has a {type(prompt).__name__} as prompt, while data.chat_template is false", PLAIN)
    if not _is_chat(prompt):
        raise row.complaint(
            "has a prompt that is neither a string nor a list of messages",
            'Give text, or a list like [{"role": "user", "content": "..."}]',
        )
    for message in prompt:
        _check_message(row, message)
    if prompt[-1]["role"] == "assistant":
        raise row.complaint(
            "has a prompt that ends with an answer, a message of the assistant: the policy would be shown it",
            "Take that message out of the prompt; data.response_key names a column of answers for sft",
        )
    if not any(message["role"] == "user" for message in prompt):
        raise row.complaint("has a prompt without a message of the user", "Add one, or remove the row")
    return prompt


def render(prompts: Sequence[tuple[Row, str | Messages]], data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The text of every prompt that ``read_prompt`` returned, each with the row it comes from.

    The template's own switches (``enable_thinking``) are left at their defaults.

    Raises:
        UserError: if there is no template, or it fails.
    """
    if not data.chat_template:
        return [str(prompt) for _, prompt in prompts]
    if not tokenizer.chat_template:
        raise UserError(
            "data.chat_template", True, "the tokenizer has no chat template", "Set data.chat_template=false, or add one"
        )
    chats = [_chat(prompt, data.system) for _, prompt in prompts]
    try:
        return _apply(tokenizer, chats)
    except Exception:  # a template may raise anything; it is found again below, with its row
        return [_apply_to_one(tokenizer, row, chat) for (row, _), chat in zip(prompts, chats, strict=True)]


def _apply(tokenizer: Tokenizer, chats: Sequence[Messages]) -> list[str]:
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False) if chats else []


def _apply_to_one(tokenizer: Tokenizer, row: Row, chat: Messages) -> str:
    try:
        return _apply(tokenizer, [chat])[0]
    except Exception as error:
        raise row.complaint(f"fails in the chat template ({error})", "Mend the row's messages") from error


def _chat(prompt: str | Messages, system: str | None) -> Messages:
    chat: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system}, *chat]


def _read_text(row: Row, text: str, key: str) -> str | Messages:
    """The messages that a text writes down, or the text where it is none of those."""
    if text.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if _is_chat(value) and not is_too_deep(value):
            row.check_strings(value, key)
            return value
        if _is_chat(value) or OF_A_CHAT.match(text):
            raise row.complaint(
                f"holds chat messages in column {key!r} as text that is no plain JSON list of them",
                'Give a list like [{"role": "user", "content": "..."}], or JSON text of one',
            )
    return text


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _check_message(row: Row, message: Mapping[str, Any]) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        remedy = f"Call it one of {', '.join(ROLES)}: chat templates leave out any other"
        raise row.complaint(f"has a prompt with a message of the role {role!r:.60}", remedy)
    if role == "assistant" and message.get("tool_calls") and not content:
        return
    if not isinstance(content, str):
        kind = "no content" if content is None else f"a {type(content).__name__} for its content"
        raise row.complaint(f"has a prompt with a message of the {role} that has {kind}", "Give its text as a string")
    if is_blank(content):
        raise row.complaint(f"has a prompt with an empty message of the {role}", "Fill it in, or remove it")

"""From a problem to the text that the policy reads: the chat template, or the problem as it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.config import DataConfig
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError

PLAIN = "Give a string, or set data.chat_template=true"


def render(prompts: Sequence[tuple[Row, Any]], data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The text of every prompt: a string or chat messages, each with the row it comes from.

    The template's own switches (``enable_thinking``) are left at their defaults.

    Raises:
        UserError: if a prompt is neither, messages meet ``data.chat_template = false``, or the template fails.
    """
    if not data.chat_template:
        return [_plain(row, prompt, data) for row, prompt in prompts]
    if not tokenizer.chat_template:
        raise UserError(
            "data.chat_template", True, "the tokenizer has no chat template", "Set data.chat_template=false, or add one"
        )
    chats = [_messages(row, prompt, data) for row, prompt in prompts]
    try:
        return _apply(tokenizer, chats)
    except Exception:  # a template may raise anything; it is found again below, with its row
        for (row, _), chat in zip(prompts, chats, strict=True):
            try:
                _apply(tokenizer, [chat])
            except Exception as error:
                raise row.complaint(f"fails in the chat template ({error})", "Mend the row's messages") from error
        raise


def _apply(tokenizer: Tokenizer, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False) if chats else []


def _plain(row: Row, prompt: Any, data: DataConfig) -> str:
    if data.system is not None:
        raise UserError(
            "data.system",
            data.system,
            "has no place without a chat template",
            "Remove it, or set data.chat_template=true",
        )
    if not isinstance(prompt, str):
        raise row.complaint(f"has a {type(prompt).__name__} as prompt, while data.chat_template is false", PLAIN)
    return prompt


def _messages(row: Row, prompt: Any, data: DataConfig) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        if not prompt:
            raise row.complaint("has an empty prompt", "Remove the row")
        system = [] if data.system is None else [{"role": "system", "content": data.system}]
        return [*system, {"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return prompt
    raise row.complaint(
        "has a prompt that is neither a string nor a list of messages",
        'Give text, or a list like [{"role": "user", "content": "..."}]',
    )

"""Prompts and worked answers as a run reads them: from a file or a generator, checked, rendered and tokenised once.

All that can be seen without a tokenizer is checked first. Importing this file imports neither torch nor transformers,
so that a bad row is known before a rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.generators import GENERATORS, Split
from megatron_dppo.data.rows import Row, as_text, is_blank, is_too_deep, read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Label, Prompt

Messages = list[Mapping[str, Any]]
ROLES = ("system", "user", "assistant", "tool")
"""What Qwen's chat templates render. They leave out messages of another role, without a word."""
A_LIST = 'a list like [{"role": "user", "content": "..."}]'
OF_A_CHAT = re.compile(r"\s*\[?\s*\{\s*[\"'](?:role|content)[\"']\s*:")


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of a source."""

    row: Row
    prompt: str | Messages
    label: Label
    """Or the worked answer, a text, where that is asked for."""
    data_source: str
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A file or generator, and the setting that names it."""

    name: str
    setting: str


def source_of(data: DataConfig, split: Split) -> Source | None:
    """Where a split comes from; None: nowhere."""
    if split == "train" and data.rollouts is not None:
        return Source(data.rollouts, "data.rollouts")
    name = (
        data.train
        if split == "train" or (data.eval is None and data.train in GENERATORS and data.rollouts is None)
        else data.eval
    )
    assert not isinstance(name, dict), "of several files the caller asks for one"
    return None if name is None else Source(name, "data.train" if name is data.train else "data.eval")


def read_examples(source: Source, data: DataConfig, split: Split, *, responses: bool = False) -> list[Example]:
    """All problems of a source; with ``responses`` their worked answers in the place of labels.

    Raises:
        UserError: for a file that is absent, empty or malformed, and whatever ``example_of`` refuses.
    """
    if source.name in GENERATORS:
        rows = GENERATORS[source.name].rows(data, split)
        data = replace(data, prompt_key="prompt", label_key="label", response_key="response")
    else:
        rows = read_rows(source.name, source.setting)
    return [example_of(row, data, responses=responses) for row in rows]


def example_of(row: Row, data: DataConfig, *, responses: bool = False) -> Example:
    """What a row says under the columns that ``data`` names.

    Raises:
        UserError: naming the row: for a prompt that ``read_prompt`` refuses, and a label or worked answer that is
            absent, no number (NaN), of a type that can be written in several ways (a date, bytes), or half a character.
    """
    extra = row.values.get("extra_info", row.values.get("metadata"))  # as verl has it, and slime
    data_source = str(row.values.get("data_source") or "")
    row.check_strings(data_source, "data_source")
    prompt = read_prompt(row, data)
    setting = "data.response_key" if responses and data.response_key else "data.label_key"
    key = (responses and data.response_key) or data.label_key
    unlabelled = row.setting == "data.rollouts" and not responses  # their rewards are there already
    answer = row.values.get(key, "") if unlabelled else row.require(key, setting)
    if responses or not isinstance(answer, dict | list):
        answer = _as_text(row, key, answer)
    if responses and is_blank(answer):
        raise row.error(f"has an empty answer in column {key!r}", "Remove the row")
    if not isinstance(extra, Mapping):
        extra = {name: value for name, value in row.values.items() if name != "completions" or not unlabelled}
    return Example(row, prompt, answer, data_source, extra)


def _as_text(row: Row, key: str, value: Any) -> str:
    try:
        return as_text(value)
    except ValueError as error:
        raise row.error(f"holds {error} in column {key!r}", "Write it as text, or remove the row") from error


def read_prompt(row: Row, data: DataConfig) -> str | Messages:
    """The prompt of a row: text, or chat messages, also where a column holds them as JSON text. Needs no tokenizer.

    Raises:
        UserError: if it is neither, blank, or a chat that the template would not render whole or that answers itself;
            for messages under ``data.chat_template = false``, and a ``data.system`` there.
    """
    if data.system is not None and not data.chat_template:
        remedy = "Remove it, or set data.chat_template=true"
        raise UserError("data.system", data.system, "has no place without a chat template", remedy)
    prompt = row.require(data.prompt_key, "data.prompt_key")
    if isinstance(prompt, str):
        prompt = _read_text(row, prompt, data.prompt_key)
    if isinstance(prompt, str):
        if is_blank(prompt):
            raise row.error("has an empty prompt", "Remove the row")
        return prompt
    if not data.chat_template:
        problem = f"has a {type(prompt).__name__} as prompt, while data.chat_template is false"
        raise row.error(problem, "Give a string, or set data.chat_template=true")
    if not _is_chat(prompt):
        raise row.error("has a prompt that is neither a string nor a list of messages", f"Give text, or {A_LIST}")
    for message in prompt:
        _check_message(row, message)
    if prompt[-1]["role"] == "assistant":
        problem = "has a prompt that ends with an answer, a message of the assistant: the policy would be shown it"
        remedy = "Take that message out of the prompt; data.response_key names a column of answers for sft"
        raise row.error(problem, remedy)
    if not any(message["role"] == "user" for message in prompt):
        raise row.error("has a prompt without a message of the user", "Add one, or remove the row")
    return prompt


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
            problem = f"holds chat messages in column {key!r} as text that is no plain JSON list of them"
            raise row.error(problem, f"Give {A_LIST}, or JSON text of one")
    return text


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _check_message(row: Row, message: Mapping[str, Any]) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        remedy = f"Call it one of {', '.join(ROLES)}: chat templates leave out any other"
        raise row.error(f"has a prompt with a message of the role {role!r:.60}", remedy)
    if role == "assistant" and message.get("tool_calls") and not content:
        return
    if not isinstance(content, str):
        kind = "no content" if content is None else f"a {type(content).__name__} for its content"
        raise row.error(f"has a prompt with a message of the {role} that has {kind}", "Give its text as a string")
    if is_blank(content):
        raise row.error(f"has a prompt with an empty message of the {role}", "Fill it in, or remove it")


class PromptPool(list[Prompt]):
    """The prompts of a run, in the order of the file. ``pool[i].id == i``."""

    def __init__(self, prompts: Iterable[Prompt], dropped: int = 0) -> None:
        super().__init__(prompts)
        self.dropped = dropped
        """How many more there were, longer than ``data.max_prompt_tokens``."""


@dataclass(frozen=True, slots=True)
class WorkedAnswer:
    """A prompt with the answer that supervised training imitates."""

    prompt_ids: NDArray[np.int32]
    """[P]"""
    response_ids: NDArray[np.int32]
    """[L], the end-of-turn token included."""


class _Rendered(NamedTuple):
    example: Example
    text: str
    token_ids: NDArray[np.int32]


def load_prompts(data: DataConfig, tokenizer: Tokenizer, *, split: Split) -> PromptPool:
    """The pool of a split. Held-out prompts of a file are those of ``data.eval``; without it their pool is empty. Where
    ``data.eval`` names several files, the caller asks for one after the other.

    Raises:
        UserError: for a file that is absent, empty or malformed, a row without its prompt or label, a chat template
            that fails, a prompt over ``data.max_prompt_tokens``, or a pool that loses all its prompts to that limit.
    """
    return prompts_and_rows(data, tokenizer, split=split)[0]


def prompts_and_rows(data: DataConfig, tokenizer: Tokenizer, *, split: Split) -> tuple[PromptPool, list[Row]]:
    """The pool of a split, and the row of each of its prompts. See ``load_prompts``."""
    rendered, dropped = _load(data, tokenizer, split, responses=False)
    return PromptPool(_prompts(rendered), dropped), [r.example.row for r in rendered]


def prompts_of(rows: Sequence[Row], data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of rows that were read elsewhere, whatever their length.

    Raises:
        UserError: for a row without its prompt or label, and a chat template that fails.
    """
    return _prompts(_rendered([example_of(row, data) for row in rows], data, tokenizer))


def load_worked_answers(data: DataConfig, tokenizer: Tokenizer, *, split: Split = "train") -> list[WorkedAnswer]:
    """Prompts with the answers of ``data.response_key`` (or the label's column), closed by the end-of-turn token.

    Raises:
        UserError: as ``load_prompts``; and for a row without that column, or a tokenizer without an end token.
    """
    end = end_token_id(tokenizer)
    rendered, _ = _load(data, tokenizer, split, responses=True)
    responses = _tokenise(tokenizer, [str(r.example.label) for r in rendered])
    return [
        WorkedAnswer(r.token_ids, np.array([*response, end], np.int32))
        for r, response in zip(rendered, responses, strict=True)
    ]


def _load(data: DataConfig, tokenizer: Tokenizer, split: Split, *, responses: bool) -> tuple[list[_Rendered], int]:
    source = source_of(data, split)
    if source is None:
        return [], 0
    examples = read_examples(source, data, split, responses=responses)
    return _within_limit(_rendered(examples, data, tokenizer), data, source)


def _rendered(examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer) -> list[_Rendered]:
    texts = _texts(examples, data, tokenizer)
    token_ids = _tokenise(tokenizer, texts)
    return [
        _Rendered(example, text, np.array(tokens, np.int32))
        for example, text, tokens in zip(examples, texts, token_ids, strict=True)
    ]


def _texts(examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """What the policy reads: the prompts in the chat template, whose own switches (``enable_thinking``) are left at
    their defaults, or the prompts as they stand."""
    if not data.chat_template:
        return [str(example.prompt) for example in examples]
    if not tokenizer.chat_template:
        raise UserError(
            "data.chat_template", True, "the tokenizer has no chat template", "Set data.chat_template=false, or add one"
        )
    chats = [_chat(example.prompt, data.system) for example in examples]
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    try:
        return render(chats) if chats else []
    except Exception:  # a template may raise anything; one by one tells which row it was
        return [_of_one(example.row, render, chat) for example, chat in zip(examples, chats, strict=True)]


def _of_one(row: Row, render: Callable[[Sequence[Messages]], list[str]], chat: Messages) -> str:
    try:
        return render([chat])[0]
    except Exception as error:
        raise row.error(f"fails in the chat template ({error})", "Mend the row's messages") from error


def _chat(prompt: str | Messages, system: str | None) -> Messages:
    chat: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system}, *chat]


def _prompts(rendered: Sequence[_Rendered]) -> list[Prompt]:
    return [
        Prompt(
            id=number,
            token_ids=r.token_ids,
            text=r.text,
            label=r.example.label,
            data_source=r.example.data_source,
            extra=r.example.extra,
            asked=r.example.prompt,
            place=r.example.row.place,
        )
        for number, r in enumerate(rendered)
    ]


def _tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # One call, so that the tokenizers library spreads it over its threads: 17,000 prompts in a second or two.
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def _within_limit(rendered: list[_Rendered], data: DataConfig, source: Source) -> tuple[list[_Rendered], int]:
    limit = data.max_prompt_tokens
    for r in rendered:
        if not len(r.token_ids):
            raise r.example.row.error("has an empty prompt", "Remove the row")
        if len(r.token_ids) > limit and data.overlong_prompts == "error":
            raise r.example.row.error(
                f"has a prompt of {len(r.token_ids)} tokens, over data.max_prompt_tokens = {limit}",
                "Raise the limit, or set data.overlong_prompts=drop to leave such prompts out",
            )
    kept = [r for r in rendered if len(r.token_ids) <= limit]
    if rendered and not kept:
        raise UserError(
            source.setting,
            source.name,
            f"all {len(rendered)} prompts are longer than data.max_prompt_tokens = {limit}",
            f"Raise the limit: the shortest has {min(len(r.token_ids) for r in rendered)} tokens",
        )
    return kept, len(rendered) - len(kept)

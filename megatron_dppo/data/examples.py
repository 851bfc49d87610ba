"""Problems as a source gives them, and as the policy reads them: rendered in its chat template, and
tokenised.

Importing this file imports neither torch nor transformers. A row is looked at as far as one can
without a tokenizer, so that a bad one is known before a rank starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.date import freeze_date
from megatron_dppo.data.generators import GENERATORS, TOOLS, Split
from megatron_dppo.data.rows import Row, as_text, drop_nulls, is_blank, is_too_deep, read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, get_leading_tokens
from megatron_dppo.data.turns import Tools
from megatron_dppo.errors import UserError
from megatron_dppo.hub import DATA_SUFFIXES, data_files, is_id
from megatron_dppo.rl.types import Label

Messages = list[Mapping[str, Any]]
ROLES = ("system", "user", "assistant", "tool")
"""Roles that Qwen's chat templates render. They leave out messages of another role, silently."""
A_LIST = 'a list like [{"role": "user", "content": "..."}]'
CHAT_PREFIX = re.compile(r"\s*\[?\s*\{\s*[\"'](?:role|content)[\"']\s*:")


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of a source."""

    row: Row
    prompt: str | Messages
    label: Label
    """Or the worked answer, a text, where that is asked for."""
    data_source: str
    extra: Mapping[str, Any]
    tools: Tools = ()
    """That the chat template tells the policy of."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a folder of files, a data set of the hub or a generator, and the setting that names
    it."""

    name: str
    setting: str
    weight: float = 1.0
    """Its share of every step, relative to the other sources'."""
    prompt_key: str | None = None
    """None: that of the settings, as for ``label_key``."""
    label_key: str | None = None

    def apply_columns(self, data: DataConfig) -> DataConfig:
        """The settings, with the source's own columns."""
        if self.name in GENERATORS:
            return replace(data, prompt_key="prompt", label_key="label", response_key="response")
        own = {"prompt_key": self.prompt_key, "label_key": self.label_key}
        return replace(data, **{name: key for name, key in own.items() if key is not None})

    def list_files(self) -> list[Path]:
        """Its files, in their order, in a folder that of their names; of a data set of the hub
        after they were fetched.

        Raises:
            UserError: as ``hub.data_files``; and for a folder without files of data.
        """
        if is_id(self.name) and not self.name.endswith(DATA_SUFFIXES):
            return data_files(
                self.name, self.setting, split="test" if self.setting == "data.eval" else "train"
            )
        if not (folder := Path(self.name)).is_dir():
            return [folder]
        files = [
            file
            for file in sorted(folder.iterdir())
            if file.name.endswith(DATA_SUFFIXES) and file.is_file()
        ]
        if not files:
            problem = "is a folder without files of data"
            suffixes = ", ".join(DATA_SUFFIXES)
            raise UserError(
                self.setting,
                self.name,
                problem,
                f"Name a folder that holds files ending in {suffixes}",
            )
        return files


def resolve_sources(data: DataConfig, split: Split) -> list[Source]:
    """Where a split comes from; empty: from nowhere."""
    if split == "train" and data.rollouts is not None:
        return [Source(data.rollouts, "data.rollouts")]
    if split == "train" and not isinstance(data.train, str):
        return [
            Source(s.path, "data.train", s.weight, s.prompt_key, s.label_key) for s in data.train
        ]
    of_train = split == "train" or (
        data.eval is None and data.train in GENERATORS and data.rollouts is None
    )
    name, setting = (data.train, "data.train") if of_train else (data.eval, "data.eval")
    assert name is None or isinstance(name, str), "of several files the caller asks for one"
    return [] if name is None else [Source(name, setting)]


def read_examples(
    source: Source, data: DataConfig, split: Split, *, responses: bool = False
) -> list[Example]:
    """All problems of a source; with ``responses`` their worked answers in the place of labels.

    Raises:
        UserError: for a file that is absent, empty or malformed, and whatever ``parse_example``
            refuses.
    """
    if source.name in GENERATORS:
        rows = GENERATORS[source.name].rows(data, split)
    else:
        rows = [row for file in source.list_files() for row in read_rows(str(file), source.setting)]
    columns = source.apply_columns(data)
    return [parse_example(row, columns, responses=responses) for row in rows]


def parse_example(row: Row, data: DataConfig, *, responses: bool = False) -> Example:
    """A row's example, by the columns that ``data`` names.

    Raises:
        UserError: naming the row: for a prompt that ``read_prompt`` refuses, and a label or worked
            answer that is absent, no number (NaN), of a type that can be written in several ways (a
            date, bytes), or half a character.
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
        raise row.make_error(f"has an empty answer in column {key!r}", "Remove the row")
    if not isinstance(extra, Mapping):
        left_out = {"completions"} if unlabelled else set()
        extra = {
            name: value
            for name, value in row.values.items()
            if value is not None and name not in left_out
        }
    tools = _read_tools(row) if data.chat_template else ()
    return Example(row, prompt, answer, data_source, extra, tools)


def _as_text(row: Row, key: str, value: Any) -> str:
    try:
        return as_text(value)
    except ValueError as error:
        raise row.make_error(
            f"holds {error} in column {key!r}", "Write it as text, or remove the row"
        ) from error


def read_prompt(row: Row, data: DataConfig) -> str | Messages:
    """The prompt of a row: text, or chat messages, also where a column holds them as JSON text.
    Needs no tokenizer.

    Raises:
        UserError: if it is neither, blank, or a chat that the template would not render whole or
            that answers itself; for messages under ``data.chat_template = false``, and a
            ``data.system`` there.
    """
    if data.system is not None and not data.chat_template:
        remedy = "Remove it, or set data.chat_template=true"
        raise UserError("data.system", data.system, "has no place without a chat template", remedy)
    prompt = row.require(data.prompt_key, "data.prompt_key")
    if isinstance(prompt, str):
        prompt = _read_text(row, prompt, data.prompt_key)
    if isinstance(prompt, str):
        if is_blank(prompt):
            raise row.make_error("has an empty prompt", "Remove the row")
        return prompt
    if not data.chat_template:
        problem = f"has a {type(prompt).__name__} as prompt, while data.chat_template is false"
        raise row.make_error(problem, "Give a string, or set data.chat_template=true")
    if not _is_chat(prompt):
        raise row.make_error(
            "has a prompt that is neither a string nor a list of messages",
            f"Give text, or {A_LIST}",
        )
    for message in prompt:
        _check_message(row, message)
    if prompt[-1]["role"] == "assistant":
        problem = (
            "has a prompt that ends with an answer, a message of the assistant: the policy "
            "would be shown it"
        )
        remedy = (
            "Remove that message from the prompt; data.response_key names a column of "
            "answers "
            "for sft"
        )
        raise row.make_error(problem, remedy)
    if not any(message["role"] == "user" for message in prompt):
        raise row.make_error(
            "has a prompt without a message of the user", "Add one, or remove the row"
        )
    return prompt


def hash_prompt(prompt: str | Messages) -> int:
    """A 64-bit hash of what a prompt asks: of its text, or of its user's messages, whatever the
    white space."""
    texts = (
        [prompt]
        if isinstance(prompt, str)
        else [str(m["content"]) for m in prompt if m["role"] == "user"]
    )
    words = " ".join(" ".join(texts).split())
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), signed=True)


def _read_tools(row: Row) -> Tools:
    """The column ``tools``, as TRL has it: a list of functions by their JSON schemas, or JSON text
    of one."""
    given = row.values.get(TOOLS)
    if given is None:
        return ()
    row.check_strings(given, TOOLS)
    try:
        tools = drop_nulls(json.loads(given)) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and ("function" in t or "name" in t) for t in tools
    ):
        form = (
            '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": '
            "...}}]"
        )
        remedy = f"Give a list like {form}, or rename the column"
        raise row.make_error(
            f"holds no list of functions in column {TOOLS!r}, the column of the policy's tools",
            remedy,
        )
    return tools


def _read_text(row: Row, text: str, key: str) -> str | Messages:
    """The messages that a text writes down, or the text where it is none of those."""
    if text.lstrip().startswith(("[", "{")):
        try:
            value = drop_nulls(json.loads(text))
        except (ValueError, RecursionError):
            value = None
        if _is_chat(value) and not is_too_deep(value):
            row.check_strings(value, key)
            return value
        if _is_chat(value) or CHAT_PREFIX.match(text):
            problem = (
                f"holds chat messages in column {key!r} as text that is no plain JSON list of them"
            )
            raise row.make_error(problem, f"Give {A_LIST}, or JSON text of one")
    return text


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _check_message(row: Row, message: Mapping[str, Any]) -> None:
    role = message["role"]
    content = message.get("content")
    if role not in ROLES:
        remedy = f"Call it one of {', '.join(ROLES)}: chat templates leave out any other"
        raise row.make_error(f"has a prompt with a message of the role {role!r:.60}", remedy)
    if role == "assistant" and message.get("tool_calls") and not content:
        return
    if isinstance(content, list) and {"image", "image_url", "video"} & set(
        chain.from_iterable(content)
    ):
        raise row.make_error(
            "has a prompt with an image or a video",
            "Give text alone: vision towers are not trained here",
        )
    if not isinstance(content, str):
        kind = "no content" if content is None else f"a {type(content).__name__} for its content"
        raise row.make_error(
            f"has a prompt with a message of the {role} that has {kind}",
            "Give its text as a string",
        )
    if (
        is_blank(content) and role != "system"
    ):  # an empty one leaves out the default of Qwen2.5's template
        raise row.make_error(
            f"has a prompt with an empty message of the {role}", "Fill it in, or remove it"
        )


AT_ONCE = 256
"""Texts in a call of the tokenizer."""


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """An example, and what the policy reads of it."""

    example: Example
    text: str
    token_ids: list[int]
    response_ids: list[int]
    """Its worked answer, closed by the end-of-turn token; empty if that was not asked for."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the worked answer."""
        return len(self.token_ids) + len(self.response_ids)


def render_examples(
    examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer, *, responses: bool = False
) -> list[RenderedExample]:
    """Render and tokenise examples, whatever their length; with ``responses`` their worked answers,
    too.

    Raises:
        UserError: for a chat template that is absent or fails; with ``responses`` for a tokenizer
            without an end token.
    """
    texts = render_prompts(examples, data, tokenizer)
    start = [] if data.chat_template else get_leading_tokens(tokenizer)
    mark = tokenizer.decode(start)
    token_ids = [
        start + ids
        for ids in _tokenize_texts(tokenizer, [text.removeprefix(mark) for text in texts])
    ]
    response_ids: list[list[int]] = [[] for _ in examples]
    if responses:
        end = end_token_id(tokenizer)
        response_ids = [
            [*ids, end]
            for ids in _tokenize_texts(tokenizer, [str(example.label) for example in examples])
        ]
    return [
        RenderedExample(*each)
        for each in zip(examples, texts, token_ids, response_ids, strict=True)
    ]


def is_within_limit(rendered: RenderedExample, data: DataConfig) -> bool:
    """Whether a prompt is short enough.

    Raises:
        UserError: if it is not, and ``data.overlong_prompts`` does not leave such prompts out; or
            if it is empty.
    """
    limit = data.max_prompt_tokens
    if not rendered.token_ids:
        raise rendered.example.row.make_error("has an empty prompt", "Remove the row")
    if len(rendered.token_ids) > limit and data.overlong_prompts == "error":
        problem = (
            f"has a prompt of {len(rendered.token_ids)} tokens, over data.max_prompt_tokens "
            f"= {limit}"
        )
        remedy = "Raise the limit, or set data.overlong_prompts=drop to leave such prompts out"
        raise rendered.example.row.make_error(problem, remedy)
    return len(rendered.token_ids) <= limit


def render_prompts(
    examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer
) -> list[str]:
    """Return the policy's input: prompts in the chat template, or prompts behind the tokens that
    begin a text.

    Raises:
        UserError: there is no template, it fails for a row, or it has no such switch as
            ``data.chat_template_kwargs``.
    """
    if not data.chat_template:
        mark = tokenizer.decode(get_leading_tokens(tokenizer))
        return [mark + str(example.prompt).removeprefix(mark) for example in examples]
    if not tokenizer.chat_template:
        remedy = "Set data.chat_template=false, or add one"
        raise UserError("data.chat_template", True, "the tokenizer has no chat template", remedy)
    texts: list[str] = []
    for tools, run in groupby(examples, lambda example: example.tools):
        same_tools = list(run)
        template = select_chat_template(tokenizer, tools)
        for switch in data.chat_template_kwargs:
            if (
                switch in ("messages", "tools", "add_generation_prompt", "tokenize")
                or switch not in template
            ):
                problem = "is no switch of the policy's chat template"
                remedy = "Remove it, or write it as the template does"
                raise UserError("data.chat_template_kwargs", switch, problem, remedy)
        if tools and "tools" not in template:
            remedy = "Use a policy whose chat template has tools, or remove the column"
            raise same_tools[0].row.make_error(
                "has tools, and the chat template has no place for tools", remedy
            )
        chats = [_build_chat(example.prompt, data.system) for example in same_tools]
        fixed = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
        options: dict[str, Any] = {**data.chat_template_kwargs, **fixed}
        if data.date:
            options["chat_template"] = freeze_date(template, data.date)
        try:
            texts += tokenizer.apply_chat_template(chats, **options)
        except Exception:  # a template may raise anything; one by one tells which row it was
            for example, chat in zip(same_tools, chats, strict=True):
                try:
                    texts += tokenizer.apply_chat_template([chat], **options)
                except Exception as error:
                    problem = f"fails in the chat template ({error})"
                    raise example.row.make_error(problem, "Correct the row's messages") from error
    return texts


def select_chat_template(tokenizer: Tokenizer, tools: Tools) -> str:
    """Return the chat template that transformers takes for prompts with these tools: of several,
    one by its name.

    Raises:
        UserError: none of several templates is the default.
    """
    try:
        return tokenizer.get_chat_template(tools=tools or None)
    except ValueError as error:
        problem = (
            "the tokenizer has the chat templates "
            f"{', '.join(tokenizer.chat_template or ())}, and no default"
        )
        remedy = "Call one of them default, or set data.chat_template=false"
        raise UserError("data.chat_template", True, problem, remedy) from error


def _build_chat(prompt: str | Messages, system: str | None) -> Messages:
    chat: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system}, *chat]


def _tokenize_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # Many in a call, so that the tokenizers library spreads them over its threads; but what it
    # makes of a text, besides its ids, takes far more memory than these.
    token_ids: list[list[int]] = []
    for first in range(0, len(texts), AT_ONCE):
        token_ids += tokenizer(list(texts[first : first + AT_ONCE]), add_special_tokens=False)[
            "input_ids"
        ]
    return token_ids

"""Parse problems of a source, and render and tokenise problems for the policy.

Does not import torch or transformers: the parser reports a bad row before a rank starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeGuard

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.date import freeze_date
from megatron_dppo.data.generators import GENERATORS, TOOLS, Split
from megatron_dppo.data.rows import Row, as_text, drop_nulls, is_blank, is_too_deep, read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, get_leading_tokens
from megatron_dppo.errors import UserError
from megatron_dppo.hub import DATA_SUFFIXES, data_files, is_id
from megatron_dppo.rl.types import Label

Messages = list[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Tools in the form of chat templates: ``{"type": "function", "function": {"name": ...,
"description": ..., "parameters": ...}}``; ``parameters`` is a JSON schema."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of Qwen's chat templates, which silently omit any other."""
A_LIST = 'a list like [{"role": "user", "content": "..."}]'
CHAT_PREFIX = re.compile(r"\s*\[?\s*\{\s*[\"'](?:role|content)[\"']\s*:")


@dataclass(frozen=True, slots=True)
class Example:
    """Checked row."""

    row: Row
    prompt: str | Messages
    label: Label
    """Label, or text of the worked answer on request."""
    data_source: str
    extra: Mapping[str, Any]
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class Source:
    """File, folder of files, data set of the hub or generator."""

    name: str
    setting: str
    weight: float = 1.0
    """Fraction of every step, relative to other sources."""
    prompt_key: str | None = None
    """None: ``data.prompt_key``."""
    label_key: str | None = None
    """None: ``data.label_key``."""

    def apply_columns(self, data: DataConfig) -> DataConfig:
        """Return the settings with the source's columns."""
        if self.name in GENERATORS:
            return replace(data, prompt_key="prompt", label_key="label", response_key="response")
        own = {"prompt_key": self.prompt_key, "label_key": self.label_key}
        return replace(data, **{name: key for name, key in own.items() if key is not None})

    def list_files(self) -> list[Path]:
        """Return the files in order; files of a hub's data set are downloaded first.

        Raises:
            UserError: an error of ``hub.data_files``, or a folder without data files.
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
    """Return the sources of a split, if any."""
    if split == "train" and data.rollouts is not None:
        return [Source(data.rollouts, "data.rollouts")]
    if split == "train" and not isinstance(data.train, str):
        return [
            Source(s.path, "data.train", s.weight, s.prompt_key, s.label_key) for s in data.train
        ]
    # A generator holds out its own problems.
    holds_out = data.eval is None and data.train in GENERATORS and data.rollouts is None
    from_train = split == "train" or holds_out
    name, setting = (data.train, "data.train") if from_train else (data.eval, "data.eval")
    assert name is None or isinstance(name, str), "of several files the caller asks for one"
    return [] if name is None else [Source(name, setting)]


def read_examples(
    source: Source,
    data: DataConfig,
    split: Split,
    *,
    responses: bool = False,
) -> list[Example]:
    """Read all problems; with ``responses``, worked answers instead of labels.

    Raises:
        UserError: a file is absent, empty or malformed, or ``parse_example`` refuses a row.
    """
    if source.name in GENERATORS:
        rows = GENERATORS[source.name].rows(data, split)
    else:
        rows = [row for file in source.list_files() for row in read_rows(str(file), source.setting)]
    columns = source.apply_columns(data)
    return [parse_example(row, columns, responses=responses) for row in rows]


def parse_example(row: Row, data: DataConfig, *, responses: bool = False) -> Example:
    """Return a row's example, from the columns named by ``data``.

    Raises:
        UserError: ``read_prompt`` refuses the prompt; or the label or worked answer is absent, is
            NaN, has a type with several spellings (a date, bytes), or contains half a character.
    """
    # Column names of verl and slime.
    extra = row.values.get("extra_info", row.values.get("metadata"))
    data_source = str(row.values.get("data_source") or "")
    row.check_strings(data_source, "data_source")
    prompt = read_prompt(row, data)
    setting = "data.response_key" if responses and data.response_key else "data.label_key"
    key = (responses and data.response_key) or data.label_key
    # Offline rollouts need no label, because the file holds the rewards.
    unlabelled = row.setting == "data.rollouts" and not responses
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
    """Return the prompt of a row: text or chat messages, possibly as JSON text.

    Raises:
        UserError: The prompt

            - has another type, or is blank;
            - is a chat that the template would not render whole, or that ends with an answer;
            - is a chat while ``data.chat_template`` is false.

            Or ``data.system`` is set while ``data.chat_template`` is false.
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
            "Remove that message from the prompt; data.response_key names a column of answers for "
            "sft"
        )
        raise row.make_error(problem, remedy)
    if not any(message["role"] == "user" for message in prompt):
        raise row.make_error(
            "has a prompt without a message of the user", "Add one, or remove the row"
        )
    return prompt


def hash_prompt(prompt: str | Messages) -> int:
    """Return a 64-bit hash of a prompt's text or user messages, up to white space."""
    texts = (
        [prompt]
        if isinstance(prompt, str)
        else [str(m["content"]) for m in prompt if m["role"] == "user"]
    )
    words = " ".join(" ".join(texts).split())
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), signed=True)


def _read_tools(row: Row) -> Tools:
    """Return the column ``tools``: JSON schemas of functions, or JSON text, as in TRL."""
    given = row.values.get(TOOLS)
    if given is None:
        return ()
    row.check_strings(given, TOOLS)
    try:
        tools = drop_nulls(json.loads(given)) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        tools = None
    if not _is_tool_list(tools):
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


def _is_tool_list(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(tool, dict) and ("function" in tool or "name" in tool) for tool in value
    )


def _read_text(row: Row, text: str, key: str) -> str | Messages:
    """Return the chat messages in a JSON text, else the text."""
    if text.lstrip().startswith(("[", "{")):
        try:
            value = drop_nulls(json.loads(text))
        except (ValueError, RecursionError):
            value = None
        if _is_chat(value) and not is_too_deep(value):
            row.check_strings(value, key)
            return value
        # Text that looks like a chat, such as Python's form, would be trained on as text.
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
    # A turn of the assistant may consist of calls alone.
    if role == "assistant" and message.get("tool_calls") and not content:
        return
    vision = {"image", "image_url", "video"}
    if isinstance(content, list) and vision & set(chain.from_iterable(content)):
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
    # An empty system message is valid: Qwen2.5's template then omits the default system message.
    if is_blank(content) and role != "system":
        raise row.make_error(
            f"has a prompt with an empty message of the {role}", "Fill it in, or remove it"
        )


AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RenderedExample:
    example: Example
    text: str
    token_ids: list[int]
    response_ids: list[int]
    """Worked answer with the end-of-turn token, on request."""

    @property
    def length(self) -> int:
        """Tokens of prompt and worked answer."""
        return len(self.token_ids) + len(self.response_ids)


def render_examples(
    examples: Sequence[Example],
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    responses: bool = False,
) -> list[RenderedExample]:
    """Render and tokenise examples of any length; with ``responses``, worked answers, too.

    Raises:
        UserError: the chat template is absent or fails, or an end token is needed and absent.
    """
    texts = render_prompts(examples, data, tokenizer)
    start = [] if data.chat_template else get_leading_tokens(tokenizer)
    mark = tokenizer.decode(start)
    bare_texts = [text.removeprefix(mark) for text in texts]
    token_ids = [start + ids for ids in _tokenize_texts(tokenizer, bare_texts)]
    response_ids: list[list[int]] = [[] for _ in examples]
    if responses:
        end = end_token_id(tokenizer)
        answers = [str(example.label) for example in examples]
        response_ids = [[*ids, end] for ids in _tokenize_texts(tokenizer, answers)]
    rendered = zip(examples, texts, token_ids, response_ids, strict=True)
    return [RenderedExample(*each) for each in rendered]


def is_within_limit(rendered: RenderedExample, data: DataConfig) -> bool:
    """Return whether a prompt has at most ``data.max_prompt_tokens`` tokens.

    Raises:
        UserError: the prompt is empty; or is too long while ``data.overlong_prompts`` is ``error``.
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
    examples: Sequence[Example],
    data: DataConfig,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return the policy's input: chats, or prompts behind the tokens that begin a text.

    Raises:
        UserError: the chat template is absent, fails for a row, or lacks a switch of
            ``data.chat_template_kwargs``.
    """
    if not data.chat_template:
        mark = tokenizer.decode(get_leading_tokens(tokenizer))
        # A prompt may already begin with the text's first tokens.
        return [mark + str(example.prompt).removeprefix(mark) for example in examples]
    if not tokenizer.chat_template:
        remedy = "Set data.chat_template=false, or add one"
        raise UserError("data.chat_template", True, "the tokenizer has no chat template", remedy)
    reserved = ("messages", "tools", "add_generation_prompt", "tokenize")
    texts: list[str] = []
    for tools, run in groupby(examples, lambda example: example.tools):
        same_tools = list(run)
        template = select_chat_template(tokenizer, tools)
        for switch in data.chat_template_kwargs:
            if switch in reserved or switch not in template:
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
        # A template may raise any exception. Render row by row to find the row that fails.
        except Exception:
            for example, chat in zip(same_tools, chats, strict=True):
                try:
                    texts += tokenizer.apply_chat_template([chat], **options)
                except Exception as error:
                    problem = f"fails in the chat template ({error})"
                    raise example.row.make_error(problem, "Correct the row's messages") from error
    return texts


def select_chat_template(tokenizer: Tokenizer, tools: Tools) -> str:
    """Return the chat template that transformers selects, by name, for these tools.

    Raises:
        UserError: the tokenizer has several templates, without a default.
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
    # Tokenise many texts per call, so that the tokenizers library uses all threads; but not all
    # texts at once, because the library's other results take far more memory than token ids.
    token_ids: list[list[int]] = []
    for first in range(0, len(texts), AT_ONCE):
        batch = list(texts[first : first + AT_ONCE])
        token_ids += tokenizer(batch, add_special_tokens=False)["input_ids"]
    return token_ids

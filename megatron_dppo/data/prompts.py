"""Prompts and worked answers as a run reads them: from a file or the generator, rendered and tokenised once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import DataConfig
from megatron_dppo.data.examples import Example, Messages, Source, example_of, read_examples, source_of
from megatron_dppo.data.generators import Split
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Prompt


class PromptPool(Sequence[Prompt]):
    """The prompts of a run. ``pool[i].id == i``."""

    def __init__(self, prompts: Sequence[Prompt], dropped: int = 0) -> None:
        """
        Args:
            prompts: in the order of the file.
            dropped: how many more there were, longer than ``data.max_prompt_tokens``.
        """
        self._prompts, self.dropped = tuple(prompts), dropped

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self._prompts[index]


@dataclass(frozen=True, slots=True)
class WorkedAnswer:
    """A prompt with the answer that supervised training imitates."""

    prompt_ids: NDArray[np.int32]
    """[P]"""
    response_ids: NDArray[np.int32]
    """[L], the end-of-turn token included."""


@dataclass(frozen=True, slots=True)
class _Rendered:
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
    rendered, dropped = _load(data, tokenizer, split, responses=False)
    return PromptPool(_prompts(rendered), dropped)


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
    responses = _tokenise(tokenizer, [r.example.response for r in rendered])
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
    try:
        return _apply(tokenizer, chats)
    except Exception:  # a template may raise anything; one by one tells which row it was
        return [_apply_to_one(tokenizer, example.row, chat) for example, chat in zip(examples, chats, strict=True)]


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
            raise r.example.row.complaint("has an empty prompt", "Remove the row")
        if len(r.token_ids) > limit and data.overlong_prompts == "error":
            raise r.example.row.complaint(
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

"""Examples as the policy reads them: rendered in its chat template, and tokenised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from megatron_dppo.config import DataConfig
from megatron_dppo.data.examples import Example, Messages
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError

AT_ONCE = 256
"""Texts in a call of the tokenizer."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example, and what the policy reads of it."""

    example: Example
    text: str
    token_ids: list[int]
    response_ids: list[int]
    """Of its worked answer, closed by the end-of-turn token; empty where that was not asked for."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the worked answer."""
        return len(self.token_ids) + len(self.response_ids)


def rendered(
    examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer, *, responses: bool = False
) -> list[Rendered]:
    """Render and tokenise examples, whatever their length; with ``responses`` their worked answers, too.

    Raises:
        UserError: for a chat template that is absent or fails; with ``responses`` for a tokenizer without an end token.
    """
    texts = texts_of(examples, data, tokenizer)
    token_ids = _tokenise(tokenizer, texts)
    response_ids: list[list[int]] = [[] for _ in examples]
    if responses:
        end = end_token_id(tokenizer)
        response_ids = [[*ids, end] for ids in _tokenise(tokenizer, [str(example.label) for example in examples])]
    return [Rendered(*each) for each in zip(examples, texts, token_ids, response_ids, strict=True)]


def is_within_limit(each: Rendered, data: DataConfig) -> bool:
    """Whether a prompt is short enough.

    Raises:
        UserError: if it is not, and ``data.overlong_prompts`` does not leave such prompts out; or if it is empty.
    """
    limit = data.max_prompt_tokens
    if not each.token_ids:
        raise each.example.row.error("has an empty prompt", "Remove the row")
    if len(each.token_ids) > limit and data.overlong_prompts == "error":
        problem = f"has a prompt of {len(each.token_ids)} tokens, over data.max_prompt_tokens = {limit}"
        remedy = "Raise the limit, or set data.overlong_prompts=drop to leave such prompts out"
        raise each.example.row.error(problem, remedy)
    return len(each.token_ids) <= limit


def texts_of(examples: Sequence[Example], data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """What the policy reads: the prompts in the chat template, whose own switches (``enable_thinking``) are left at
    their defaults, or the prompts as they stand."""
    if not data.chat_template:
        return [str(example.prompt) for example in examples]
    if not tokenizer.chat_template:
        remedy = "Set data.chat_template=false, or add one"
        raise UserError("data.chat_template", True, "the tokenizer has no chat template", remedy)
    texts: list[str] = []
    for tools, run in groupby(examples, lambda example: example.tools):
        alike = list(run)
        if tools and "tools" not in tokenizer.chat_template:
            remedy = "Take a policy whose template tells it of tools, or remove the column"
            raise alike[0].row.error("has tools, of which the chat template says nothing", remedy)
        chats = [_chat(example.prompt, data.system) for example in alike]
        render = partial(tokenizer.apply_chat_template, tools=tools or None, add_generation_prompt=True, tokenize=False)
        try:
            texts += render(chats)
        except Exception:  # a template may raise anything; one by one tells which row it was
            texts += [_of_one(example.row, render, chat) for example, chat in zip(alike, chats, strict=True)]
    return texts


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


def _tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # Many in a call, so that the tokenizers library spreads them over its threads; but what it makes of a text, besides
    # its ids, takes far more memory than these.
    token_ids: list[list[int]] = []
    for first in range(0, len(texts), AT_ONCE):
        token_ids += tokenizer(list(texts[first : first + AT_ONCE]), add_special_tokens=False)["input_ids"]
    return token_ids

"""Prompts and worked answers as a run draws them: from files or a generator, checked, rendered and
tokenised once.

Those of small files are in memory. Those of large ones lie on the disk, and are made of it when
they are asked for.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import DataConfig
from megatron_dppo.data.examples import (
    RenderedExample,
    Source,
    hash_prompt,
    is_within_limit,
    parse_example,
    read_examples,
    render_examples,
    render_prompts,
    resolve_sources,
)
from megatron_dppo.data.generators import Split
from megatron_dppo.data.rows import Row
from megatron_dppo.data.stored import Columns, StoredRows, are_large, store
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Label, Prompt

T = TypeVar("T")
NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class SourcePool(Generic[T]):
    """Items of one source, in the order of its files."""

    items: Sequence[T]
    weight: float = 1.0
    """Its share of every step, relative to the other sources'."""
    dropped: int = 0
    """How many more there were, longer than ``data.max_prompt_tokens``."""
    longest: int = 0
    """The most tokens of an item."""
    data_sources: frozenset[str] = frozenset()
    """``data_source`` of its prompts."""
    keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    """[N], of prompts: ``hash_prompt``."""


class Pool(Sequence[T]):
    """Items that a run draws from: source after source."""

    def __init__(self, sources: Sequence[SourcePool[T]]) -> None:
        self.sources = tuple(sources)
        self._ends = list(accumulate(len(source.items) for source in sources))

    @property
    def dropped(self) -> int:
        """As of a source."""
        return sum(source.dropped for source in self.sources)

    @property
    def longest(self) -> int:
        """As of a source."""
        return max(source.longest for source in self.sources)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._get_item(i) for i in range(len(self))[index]]
        return self._get_item(range(len(self))[index])

    def _get_item(self, index: int) -> T:
        source = bisect_right(self._ends, index)
        return self.sources[source].items[index - (self._ends[source - 1] if source else 0)]


class PromptPool(Pool[Prompt]):
    """The prompts of a run. ``pool[i].id == i``."""

    @property
    def data_sources(self) -> frozenset[str]:
        """As of a source."""
        return frozenset[str]().union(*(source.data_sources for source in self.sources))

    def find_overlap(self, held_out: Sequence[Prompt]) -> tuple[int, str]:
        """How many held-out prompts are among these, but for white space; and the first, with its
        place in both."""
        keys = np.concatenate([NO_KEYS, *(source.keys for source in self.sources)])
        found = np.flatnonzero(
            np.isin(
                known := np.array([hash_prompt(p.raw_prompt) for p in held_out], np.int64), keys
            )
        )
        if not len(found):
            return 0, ""
        first = held_out[found[0]]
        return len(
            found
        ), f"{first.place} is {self[int(np.flatnonzero(keys == known[found[0]])[0])].place}"

    def _get_item(self, index: int) -> Prompt:
        prompt = super()._get_item(index)
        return prompt if prompt.id == index else dataclasses.replace(prompt, id=index)


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A prompt with the answer that supervised training imitates."""

    prompt_ids: NDArray[np.int32]
    """[P]"""
    response_ids: NDArray[np.int32]
    """[L], the end-of-turn token included."""


class LabelCheck(NamedTuple):
    """Check of prompts' labels before anything is generated."""

    name: str
    """Name of the check: prompts that were stored under another name are checked again."""
    look: Callable[[Iterable[tuple[str, Label]]], None]
    """Raises UserError for the first label, each with its place, that cannot be compared with
    answers."""


NO_CHECK = LabelCheck("", lambda labels: None)


def load_prompts(
    data: DataConfig, tokenizer: Tokenizer, *, split: Split, check: LabelCheck = NO_CHECK
) -> PromptPool:
    """The pool of a split. Held-out prompts of a file are those of ``data.eval``; without it their
    pool is empty. Where ``data.eval`` names several files, the caller asks for one after the other.

    Raises:
        UserError: for a file that is absent, empty or malformed, a row without its prompt or label
            or with one that ``check`` refuses, a chat template that fails, a prompt over
            ``data.max_prompt_tokens``, or a source that loses all its prompts to that limit.
    """
    sources = resolve_sources(data, split)
    return PromptPool(
        [_load_source_pool(source, data, tokenizer, split, check=check) for source in sources]
    )


def load_offline_prompts(data: DataConfig, tokenizer: Tokenizer) -> tuple[PromptPool, list[Row]]:
    """The prompts of ``data.rollouts``, and the row of each, for what else it holds. Raises as
    ``load_prompts``."""
    [source] = resolve_sources(data, "train")
    kept, dropped = _read(source, data, tokenizer, "train")
    return PromptPool([_make_prompt_pool(source, kept, dropped)]), [
        each.example.row for each in kept
    ]


def make_prompts(rows: Sequence[Row], data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of rows that were read elsewhere, whatever their length.

    Raises:
        UserError: for a row without its prompt or label, and a chat template that fails.
    """
    examples = [parse_example(row, data) for row in rows]
    return [
        _make_prompt(number, each)
        for number, each in enumerate(render_examples(examples, data, tokenizer))
    ]


def load_supervised_examples(data: DataConfig, tokenizer: Tokenizer) -> Pool[SupervisedExample]:
    """Prompts with the answers of ``data.response_key`` (or the label's column), closed by the
    end-of-turn token.

    Raises:
        UserError: as ``load_prompts``; and for a row without that column, or a tokenizer without an
            end token.
    """
    sources = resolve_sources(data, "train")
    return Pool(
        [_load_source_pool(source, data, tokenizer, "train", responses=True) for source in sources]
    )


def _load_source_pool(
    source: Source,
    data: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    responses: bool = False,
    check: LabelCheck = NO_CHECK,
) -> SourcePool[Any]:
    """Prompts of a source, or with ``responses`` its worked answers."""
    if not are_stored(source):
        kept, dropped = _read(source, data, tokenizer, split, responses=responses, check=check)
        if not responses:
            return _make_prompt_pool(source, kept, dropped)
        answers = [_make_supervised_example(each.token_ids, each.response_ids) for each in kept]
        return SourcePool(answers, source.weight, dropped, max(each.length for each in kept))
    rows = _open_stored(
        source, data, Path(tokenizer.name_or_path), responses=responses, check=check
    )
    columns = source.apply_columns(data)

    def get_prompt(index: int) -> Prompt:
        example = parse_example(rows.get_row(index), columns)
        return _make_prompt(
            index,
            RenderedExample(
                example,
                render_prompts([example], columns, tokenizer)[0],
                rows.get_tokens(index),
                [],
            ),
        )

    def get_answer(index: int) -> SupervisedExample:
        return _make_supervised_example(rows.get_tokens(index, 0), rows.get_tokens(index, 1))

    items = _LazySequence(len(rows), get_answer if responses else get_prompt)
    return SourcePool(
        items, source.weight, rows.dropped, rows.longest, rows.data_sources, rows.keys
    )


def are_stored(source: Source) -> bool:
    """Whether a source's rows are on the disk with their tokens. Offline rollouts are in memory,
    all of them."""
    return source.setting != "data.rollouts" and are_large(source.list_files())


def prepare(
    source: Source, data: DataConfig, policy: Path, *, responses: bool, check: LabelCheck = NO_CHECK
) -> None:
    """Store the rows of a source that are to be stored, for ranks to read.

    Args:
        source: for which ``are_stored``.
        data: of the run.
        policy: the folder of the tokenizer, which is loaded if they are not stored yet.
        responses: whether worked answers are wanted.
        check: as for ``load_prompts``.

    Raises:
        UserError: as ``load_prompts`` and ``load_supervised_examples``.
    """
    _open_stored(source, data, policy, responses=responses, check=check)


def _open_stored(
    source: Source, data: DataConfig, policy: Path, *, responses: bool, check: LabelCheck
) -> StoredRows:
    data = source.apply_columns(data)
    load = cache(load_tokenizer)
    names = (
        "prompt_key",
        "label_key",
        "system",
        "chat_template",
        "chat_template_kwargs",
        "date",
        "max_prompt_tokens",
        "overlong_prompts",
    )
    depends_on = {name: getattr(data, name) for name in names} | {"check": check.name}
    if responses:
        depends_on["response_key"] = data.response_key

    def encode(rows: list[Row]) -> list[tuple[int, Columns] | None]:
        examples = [parse_example(row, data, responses=responses) for row in rows]
        check.look((example.row.place, example.label) for example in examples)
        return [
            (
                hash_prompt(r.example.prompt),
                (r.token_ids, r.response_ids) if responses else (r.token_ids,),
            )
            if is_within_limit(r, data)
            else None
            for r in render_examples(examples, data, load(policy), responses=responses)
        ]

    return store(source.list_files(), source.setting, depends_on, policy, encode)


def _read(
    source: Source,
    data: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    responses: bool = False,
    check: LabelCheck = NO_CHECK,
) -> tuple[list[RenderedExample], int]:
    """The examples of a small source that are within the limit, and how many are not."""
    examples = read_examples(source, data, split, responses=responses)
    data = source.apply_columns(data)
    check.look((example.row.place, example.label) for example in examples)
    all_of_it = render_examples(examples, data, tokenizer, responses=responses)
    kept = [each for each in all_of_it if is_within_limit(each, data)]
    if all_of_it and not kept:
        problem = (
            f"all {len(all_of_it)} prompts are longer than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}"
        )
        remedy = (
            "Raise the limit: the shortest has "
            f"{min(len(each.token_ids) for each in all_of_it)} tokens"
        )
        raise UserError(source.setting, source.name, problem, remedy)
    return kept, len(all_of_it) - len(kept)


def _make_prompt_pool(
    source: Source, kept: Sequence[RenderedExample], dropped: int
) -> SourcePool[Prompt]:
    prompts = [_make_prompt(number, each) for number, each in enumerate(kept)]
    data_sources = frozenset(prompt.data_source for prompt in prompts)
    keys = np.array([hash_prompt(each.example.prompt) for each in kept], np.int64)
    return SourcePool(prompts, source.weight, dropped, data_sources=data_sources, keys=keys)


def _make_prompt(number: int, rendered: RenderedExample) -> Prompt:
    return Prompt(
        id=number,
        token_ids=np.array(rendered.token_ids, np.int32),
        text=rendered.text,
        label=rendered.example.label,
        data_source=rendered.example.data_source,
        extra=rendered.example.extra,
        raw_prompt=rendered.example.prompt,
        place=rendered.example.row.place,
    )


def _make_supervised_example(prompt: list[int], response: list[int]) -> SupervisedExample:
    return SupervisedExample(np.array(prompt, np.int32), np.array(response, np.int32))


class _LazySequence(Sequence[T]):
    """Items that are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)

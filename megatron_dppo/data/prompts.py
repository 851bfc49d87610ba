"""Load prompts and worked answers from files or a generator: check, render and tokenise once.

Items of large files are on the disk, and built on access.
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
    """Fraction of every step, relative to other sources."""
    dropped: int = 0
    """Items dropped because of ``data.max_prompt_tokens``."""
    longest: int = 0
    """Tokens of the longest item."""
    data_sources: frozenset[str] = frozenset()
    keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    """[N], ``hash_prompt`` of the prompts."""


class Pool(Sequence[T]):
    """Items of a run's sources, source after source."""

    def __init__(self, sources: Sequence[SourcePool[T]]) -> None:
        self.sources = tuple(sources)
        self._ends = list(accumulate(len(source.items) for source in sources))

    @property
    def dropped(self) -> int:
        return sum(source.dropped for source in self.sources)

    @property
    def longest(self) -> int:
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
        start = self._ends[source - 1] if source else 0
        return self.sources[source].items[index - start]


class PromptPool(Pool[Prompt]):
    """Prompts of a run. ``pool[i].id == i``."""

    @property
    def data_sources(self) -> frozenset[str]:
        return frozenset[str]().union(*(source.data_sources for source in self.sources))

    def find_overlap(self, held_out: Sequence[Prompt]) -> tuple[int, str]:
        """Count the held-out prompts in this pool, up to white space, and describe the first."""
        keys = np.concatenate([NO_KEYS, *(source.keys for source in self.sources)])
        known = np.array([hash_prompt(p.raw_prompt) for p in held_out], np.int64)
        found = np.flatnonzero(np.isin(known, keys))
        if not len(found):
            return 0, ""
        first = held_out[found[0]]
        same = self[int(np.flatnonzero(keys == known[found[0]])[0])]
        return len(found), f"{first.place} is {same.place}"

    def _get_item(self, index: int) -> Prompt:
        # A source numbers prompts from 0, a pool over all sources.
        prompt = super()._get_item(index)
        return prompt if prompt.id == index else dataclasses.replace(prompt, id=index)


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """Prompt with the target answer of supervised training."""

    prompt_ids: NDArray[np.int32]
    """[P]"""
    response_ids: NDArray[np.int32]
    """[L], the end-of-turn token included."""


class LabelCheck(NamedTuple):
    name: str
    """Stored prompts are checked again under another name."""
    look: Callable[[Iterable[tuple[str, Label]]], None]
    """Takes pairs of place and label; raises UserError for a label without comparison."""


NO_CHECK = LabelCheck("", lambda labels: None)


def load_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    split: Split,
    check: LabelCheck = NO_CHECK,
) -> PromptPool:
    """Load the prompts of a split.

    Held-out prompts come from ``data.eval``; call once per file. Without ``data.eval``, the pool
    is empty.

    Raises:
        UserError: a file is absent, empty or malformed; a row lacks a prompt or label; ``check``
            refuses a label; a chat template fails; or a prompt, or every prompt of a source,
            exceeds ``data.max_prompt_tokens``.
    """
    sources = resolve_sources(data, split)
    return PromptPool(
        [_load_source_pool(source, data, tokenizer, split, check=check) for source in sources]
    )


def load_offline_prompts(data: DataConfig, tokenizer: Tokenizer) -> tuple[PromptPool, list[Row]]:
    """Load the prompts of ``data.rollouts``, with their rows. Errors as ``load_prompts``."""
    [source] = resolve_sources(data, "train")
    kept, dropped = _read(source, data, tokenizer, "train")
    pool = PromptPool([_make_prompt_pool(source, kept, dropped)])
    return pool, [each.example.row for each in kept]


def make_prompts(rows: Sequence[Row], data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Make prompts of any length from rows.

    Raises:
        UserError: a row lacks a prompt or label, or a chat template fails.
    """
    examples = [parse_example(row, data) for row in rows]
    rendered = render_examples(examples, data, tokenizer)
    return [_make_prompt(number, each) for number, each in enumerate(rendered)]


def load_supervised_examples(data: DataConfig, tokenizer: Tokenizer) -> Pool[SupervisedExample]:
    """Load prompts with answers of the column ``data.response_key``, else of the label's column.

    Raises:
        UserError: an error of ``load_prompts``, or the tokenizer has no end token.
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
    if not are_stored(source):
        kept, dropped = _read(source, data, tokenizer, split, responses=responses, check=check)
        if not responses:
            return _make_prompt_pool(source, kept, dropped)
        answers = [_make_supervised_example(each.token_ids, each.response_ids) for each in kept]
        return SourcePool(answers, source.weight, dropped, max(each.length for each in kept))
    policy = Path(tokenizer.name_or_path)
    rows = _open_stored(source, data, policy, responses=responses, check=check)
    columns = source.apply_columns(data)

    # Only token ids are stored: parse the row and render the text on access.
    def get_prompt(index: int) -> Prompt:
        example = parse_example(rows.get_row(index), columns)
        text = render_prompts([example], columns, tokenizer)[0]
        return _make_prompt(index, RenderedExample(example, text, rows.get_tokens(index), []))

    def get_answer(index: int) -> SupervisedExample:
        return _make_supervised_example(rows.get_tokens(index, 0), rows.get_tokens(index, 1))

    items = _LazySequence(len(rows), get_answer if responses else get_prompt)
    return SourcePool(
        items, source.weight, rows.dropped, rows.longest, rows.data_sources, rows.keys
    )


def are_stored(source: Source) -> bool:
    """Return whether rows and tokens are on the disk; offline rollouts never are."""
    return source.setting != "data.rollouts" and are_large(source.list_files())


def prepare(
    source: Source,
    data: DataConfig,
    policy: Path,
    *,
    responses: bool,
    check: LabelCheck = NO_CHECK,
) -> None:
    """Store the rows of a large source on the disk, for ranks to read.

    Args:
        policy: folder of the tokenizer, loaded only if the rows are not stored.
        responses: True to store worked answers, too.

    Raises:
        UserError: an error of ``load_prompts`` or ``load_supervised_examples``.
    """
    _open_stored(source, data, policy, responses=responses, check=check)


def _open_stored(
    source: Source,
    data: DataConfig,
    policy: Path,
    *,
    responses: bool,
    check: LabelCheck,
) -> StoredRows:
    data = source.apply_columns(data)
    # Load late and once: stored rows need no tokenizer.
    load = cache(load_tokenizer)
    # Settings that the stored rows depend on.
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
        encoded: list[tuple[int, Columns] | None] = []
        for each in render_examples(examples, data, load(policy), responses=responses):
            if not is_within_limit(each, data):
                encoded.append(None)
                continue
            answer = (each.response_ids,) if responses else ()
            encoded.append((hash_prompt(each.example.prompt), (each.token_ids, *answer)))
        return encoded

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
        shortest = min(len(each.token_ids) for each in all_of_it)
        remedy = f"Raise the limit: the shortest has {shortest} tokens"
        raise UserError(source.setting, source.name, problem, remedy)
    return kept, len(all_of_it) - len(kept)


def _make_prompt_pool(
    source: Source,
    kept: Sequence[RenderedExample],
    dropped: int,
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
    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)

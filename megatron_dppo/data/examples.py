"""What a data set says of each problem, checked before anything is rendered: as far as one can see without a tokenizer.

Imports neither torch nor transformers, so that a bad row is known before a rank starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config import DataConfig
from megatron_dppo.data.generators import GENERATORS, Split, columns_of_generators
from megatron_dppo.data.render import Messages, read_prompt
from megatron_dppo.data.rows import Row, as_text, is_blank, read_rows
from megatron_dppo.rl.types import Label


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of a source."""

    row: Row
    prompt: str | Messages
    label: Label
    """"" where the worked answers are asked for, which need none."""
    response: str
    """The worked answer; "" where none is asked for."""
    data_source: str
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A file or generator, and the setting that names it."""

    name: str
    setting: str


def source_of(data: DataConfig, split: Split) -> Source | None:
    """Where a split comes from; None: nowhere."""
    name = data.train if split == "train" or (data.eval is None and data.train in GENERATORS) else data.eval
    assert not isinstance(name, dict), "of several files the caller asks for one"
    return None if name is None else Source(name, "data.train" if name is data.train else "data.eval")


def read_examples(source: Source, data: DataConfig, split: Split, *, responses: bool = False) -> list[Example]:
    """All problems of a source; with ``responses`` their worked answers in the place of labels.

    Raises:
        UserError: for a file that is absent, empty or malformed, and whatever ``example_of`` refuses.
    """
    if source.name in GENERATORS:
        rows, columns = GENERATORS[source.name].rows(data, split), columns_of_generators(data)
    else:
        rows, columns = read_rows(source.name, source.setting), data
    return [example_of(row, columns, responses=responses) for row in rows]


def example_of(row: Row, data: DataConfig, *, responses: bool = False) -> Example:
    """What a row says under the columns that ``data`` names.

    Raises:
        UserError: naming the row: for a prompt that ``read_prompt`` refuses, and a label or worked answer that is
            absent, no number (NaN), of a type that can be written in several ways (a date, bytes), or half a character.
    """
    extra = row.values.get("extra_info", row.values.get("metadata"))  # as verl has it, and slime
    data_source = str(row.values.get("data_source") or "")
    row.check_strings(data_source, "data_source")
    return Example(
        row=row,
        prompt=read_prompt(row, data),
        label="" if responses else _label(row, data.label_key),
        response=_response(row, data) if responses else "",
        data_source=data_source,
        extra=extra if isinstance(extra, Mapping) else row.values,
    )


def _label(row: Row, key: str) -> Label:
    value = row.require_text(key, "data.label_key")
    return value if isinstance(value, dict | list) else _as_text(row, key, value)


def _response(row: Row, data: DataConfig) -> str:
    key, setting = data.response_key or data.label_key, "data.response_key" if data.response_key else "data.label_key"
    text = _as_text(row, key, row.require_text(key, setting))
    if is_blank(text):
        raise row.complaint(f"has an empty answer in column {key!r}", "Remove the row")
    return text


def _as_text(row: Row, key: str, value: Any) -> str:
    try:
        return as_text(value)
    except ValueError as error:
        raise row.complaint(f"holds {error} in column {key!r}", "Write it as text, or remove the row") from error

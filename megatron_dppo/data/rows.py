"""Read rows of data files, each with a place for error messages."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError

COLUMNS_IN_USE = {
    "data.prompt_key": ("prompt", "question", "problem", "messages"),
    "data.label_key": ("label", "answer", "reward_model.ground_truth", "ground_truth", "solution"),
    "data.response_key": ("response", "answer", "solution"),
}
"""Usual columns of published data sets, likeliest first, to suggest for a missing column."""
# Above the nesting of data sets, and below Python's recursion limit, because rows are sent to
# other processes and walked through by templates.
DEEPEST = 64
"""Maximum nesting of a row's values."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
BATCH = 1024
INVISIBLE = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Unicode categories."""


@dataclass(frozen=True, slots=True)
class Row:
    """Record of a file, without null fields of nested objects."""

    values: Mapping[str, Any]
    setting: str
    """Setting of the file (``data.train``)."""
    place: str
    """File and line, or file and row."""

    def make_error(self, problem: str, remedy: str) -> UserError:
        return UserError(self.setting, self.place, problem, remedy)

    def __getitem__(self, key: str) -> Any:
        """Return a column. A key with dots is a column's name, else a path of objects."""
        return self.values[key] if key in self.values else _get_nested(self.values, key.split("."))

    def require(self, key: str, setting: str) -> Any:
        """Return the value of a required column, readable by a tokenizer or a log.

        Raises:
            UserError: the column is missing (the error suggests another), or the value is null or
                contains a lone surrogate.
        """
        try:
            value = self[key]
        except KeyError:
            columns = list(_iter_paths(self.values))
            likely = next((c for c in COLUMNS_IN_USE[setting] if c in columns), None)
            # A label column must not be suggested from the usual columns of prompts.
            others = [
                c
                for c in columns
                if c not in COLUMNS_IN_USE["data.prompt_key"] or setting == "data.prompt_key"
            ]
            likely = likely or next(iter(get_close_matches(key, others, 1)), None)
            remedy = f"Set {setting} to the right column" if columns else "Remove the row"
            if likely:
                remedy += f", perhaps {likely!r}"
            raise self.make_error(
                f"has no column {key!r} (it has {', '.join(columns) or 'none'})", remedy
            ) from None
        if value is None:
            raise self.make_error(
                f"holds null in column {key!r}",
                f"Remove the row, or set {setting} to another column",
            )
        self.check_strings(value, key)
        return value

    def check_strings(self, value: Any, key: str) -> None:
        """Raise UserError at the first lone surrogate in a value of column ``key``."""
        # JSON can hold a lone surrogate, half of a character. No tokenizer or log can.
        for text in iter_strings(value, names=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(text[error.start]):04x}"
                problem = f"holds half a character ({half}, a lone surrogate) in column {key!r}"
                raise self.make_error(problem, "Correct the text, or remove the row") from error


def iter_strings(value: Any, *, names: bool = False) -> Iterator[str]:
    """Yield every string in a JSON value, optionally with the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if names:
            yield from value
        for part in value.values():
            yield from iter_strings(part, names=names)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from iter_strings(part, names=names)


def is_too_deep(value: dict[str, Any] | list[Any]) -> bool:
    level: list[Any] = [value]
    # Walk level by level, because a recursion would fail on the value that this check must refuse.
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            parts = each.values() if isinstance(each, dict) else each
            inner += [part for part in parts if isinstance(part, dict | list | tuple)]
        if not inner:
            return False
        level = inner
    return True


def is_blank(text: str) -> bool:
    """Return whether all characters are white space, control characters or zero-width marks."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)


def as_text(value: Any) -> str:
    """Return a string, a number or a truth value in the author's spelling.

    Raises:
        ValueError: the value is NaN or infinite, or a type with several spellings.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise ValueError(f"{value} (no number)")
        # Parquet may store integers as floats or decimals.
        if value == int(value):
            return str(int(value))
    if isinstance(value, Decimal):
        return f"{value:f}".rstrip("0")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"a {type(value).__name__}, which may be written in several ways")


def read_rows(file: str, setting: str) -> list[Row]:
    """Read all rows of a JSONL, JSON (a list) or parquet file.

    Raises:
        UserError: the file is absent, malformed, of another kind, or without rows.
    """
    path = Path(file)
    if not path.is_file():
        remedy = (
            "Give the path of a JSONL or parquet file, or a generator: arithmetic, "
            "reasoning_gym, verifiers"
        )
        raise UserError(setting, file, "is no file", remedy)
    if path.suffix not in SUFFIXES:
        raise UserError(
            setting, file, "is of no known kind", f"Give a file ending in {', '.join(SUFFIXES)}"
        )
    try:
        if path.suffix == ".json":
            rows = list(_read_json(path, setting))
        else:
            rows = [row for batch in read_batches(path, setting, BATCH) for row in batch.rows]
    except OSError as error:
        raise UserError(setting, file, f"cannot be read ({error})", "Make it readable") from error
    if not rows:
        raise UserError(setting, file, "holds no rows", "Give a file with at least one prompt")
    return rows


def _iter_lines(path: Path, setting: str) -> Iterator[tuple[int, str]]:
    # Split on newlines only: str.splitlines would also break lines at U+2028, which JSON strings
    # may hold.
    with path.open(encoding="utf-8", newline="\n") as lines:
        try:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise UserError(
                setting, path, f"is not UTF-8 text ({error})", "Convert the file to UTF-8"
            ) from error


def parse_line(line: str | bytes, number: int, path: Path, setting: str) -> Row:
    """Parse a JSONL line; raise UserError for no JSON object, or too deep nesting."""
    place = f"{path}, line {number}"
    return _as_row(_parse(line, place, setting, "Correct or remove the line"), place, setting)


def parse_record(values: Any, number: int, path: Path, setting: str) -> Row:
    """Parse a record of parquet or a JSON list; raise UserError as ``parse_line``."""
    return _as_row(values, f"{path}, row {number}", setting)


def _read_json(path: Path, setting: str) -> Iterator[Row]:
    remedy = "Correct it, or name it .jsonl if it holds one object per line"
    try:
        values = _parse(path.read_text(encoding="utf-8"), str(path), setting, remedy)
    except UnicodeDecodeError as error:
        raise UserError(setting, path, f"is not JSON ({error})", remedy) from error
    if not isinstance(values, list):
        raise UserError(setting, path, "is not a list of objects", "Give a JSON list, or JSONL")
    for number, value in enumerate(values, 1):
        yield parse_record(value, number, path, setting)


def _parse(text: str | bytes, place: str, setting: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(setting, place, f"is not JSON ({error})", remedy) from error
    except RecursionError as error:
        raise _make_depth_error(setting, place) from error


def _as_row(values: Any, place: str, setting: str) -> Row:
    if not isinstance(values, dict):
        raise UserError(
            setting,
            place,
            f"is a {type(values).__name__}, no object",
            "Give one JSON object for each row",
        )
    if is_too_deep(values):
        raise _make_depth_error(setting, place)
    # Drop nulls, because parquet gives every object of a column the fields of all objects.
    return Row({name: drop_nulls(value) for name, value in values.items()}, setting, place)


def drop_nulls(value: Any) -> Any:
    """Drop null fields of objects at any depth."""
    if isinstance(value, dict):
        return {name: drop_nulls(part) for name, part in value.items() if part is not None}
    return [drop_nulls(part) for part in value] if isinstance(value, list) else value


def _make_depth_error(setting: str, place: str) -> UserError:
    return UserError(
        setting,
        place,
        f"nests deeper than {DEEPEST} values",
        "Flatten or remove it",
    )


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a large file."""

    rows: list[Row]
    numbers: list[int]
    """In the file, from 1."""
    values: Any
    """Lines of JSON, or an Arrow array of records, unchanged."""
    done: float
    """Fraction of the file read."""


def read_batches(file: Path, setting: str, size: int) -> Iterator[RowBatch]:
    """Yield batches of ``size`` rows; only one batch is in memory.

    Raises:
        UserError: an error of ``read_rows``.
    """
    read = _read_parquet_batches if file.suffix == ".parquet" else _read_line_batches
    return read(file, setting, size)


def _read_line_batches(path: Path, setting: str, size: int) -> Iterator[RowBatch]:
    lines = _iter_lines(path, setting)
    read = 0
    total = path.stat().st_size
    while batch := list(islice(lines, size)):
        values = [line.encode() for _, line in batch]
        read += sum(map(len, values))
        rows = [parse_line(line, number, path, setting) for number, line in batch]
        yield RowBatch(rows, [number for number, _ in batch], values, min(read / total, 1.0))


def _read_parquet_batches(path: Path, setting: str, size: int) -> Iterator[RowBatch]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without the last two arguments, a whole row group would be in memory.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            first = 1
            total = file.metadata.num_rows
            for batch in file.iter_batches(size):
                try:
                    records = batch.to_pylist()
                # Texts that are not UTF-8, dates beyond Python's range, columns with equal names.
                except Exception as error:
                    raise _make_read_error(batch, path, setting, first) from error
                numbers = list(range(first, first + len(records)))
                rows = [
                    parse_record(values, number, path, setting)
                    for number, values in enumerate(records, first)
                ]
                values = pyarrow.StructArray.from_arrays(
                    map(_decode_dictionary, batch.columns), names=batch.schema.names
                )
                first += len(records)
                yield RowBatch(rows, numbers, values, (first - 1) / total)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            setting, path, f"is no readable parquet file ({error})", "Copy or write it again"
        ) from error


def _decode_dictionary(column: Any) -> Any:
    import pyarrow

    # An Arrow file with several batches has room for a single dictionary only.
    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _make_read_error(table: Any, path: Path, setting: str, first: int) -> UserError:
    """Return the error for the first unreadable value of a table."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if table.column_names.count(name) > 1:
            return UserError(
                setting, path, f"has several columns {name!r}", "Give each column a different name"
            )
        for number, value in enumerate(column, first):
            try:
                value.as_py()
            except Exception as error:
                problem = f"holds an unreadable value in column {name!r} ({error})"
                return UserError(
                    setting,
                    f"{path}, row {number}",
                    problem,
                    "Correct the value, or remove the column",
                )
    return UserError(setting, path, "holds an unreadable value", "Write it again")


def _get_nested(value: Any, keys: list[str]) -> Any:
    for key in keys:
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[key]
    return value


def _iter_paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _iter_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"

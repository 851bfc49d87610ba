"""Rows of a data file, each with the place it stands at, so that a complaint can name it."""

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
"""These columns' usual names in published data sets, likeliest first: proposed if a row lacks the
one asked for."""
DEEPEST = 64
"""Values within values of a row. Far above what data sets have, and far below what Python's own
recursion bears: rows travel to other processes, and templates walk through them."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
BATCH = 1024
"""Rows that are read at a time."""
INVISIBLE = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Unicode's categories of characters that nobody sees."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a file. Fields of null within its values are left out, as of objects that never
    had them: parquet gives every object of a column the fields of all others."""

    values: Mapping[str, Any]
    setting: str
    """The setting that named the file (``data.train``)."""
    place: str
    """File and line, or file and row."""

    def make_error(self, problem: str, remedy: str) -> UserError:
        """An error that names this row."""
        return UserError(self.setting, self.place, problem, remedy)

    def __getitem__(self, key: str) -> Any:
        """The value of a column; dots in ``key`` reach into nested objects, unless a column is
        called just so."""
        return self.values[key] if key in self.values else _get_nested(self.values, key.split("."))

    def require(self, key: str, setting: str) -> Any:
        """The value of a column that the row must have, and that a tokenizer or a log can read.

        Raises:
            UserError: if the row lacks the column (names the likeliest of those it has), holds null
                there, or a lone surrogate, half of a character, which JSON can write and no
                tokenizer or log can.
        """
        try:
            value = self[key]
        except KeyError:
            columns = list(_iter_paths(self.values))
            likely = next((c for c in COLUMNS_IN_USE[setting] if c in columns), None)
            others = [
                c
                for c in columns
                if c not in COLUMNS_IN_USE["data.prompt_key"] or setting == "data.prompt_key"
            ]
            likely = likely or next(iter(get_close_matches(key, others, 1, 0.0)), None)
            remedy = f"Set {setting} to the right column" + (
                f", perhaps {likely!r}" if likely else ""
            )
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
        """Refuse lone surrogates anywhere in a value of column ``key``.

        Raises:
            UserError: naming the first.
        """
        for text in iter_strings(value, names=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(text[error.start]):04x}"
                problem = f"holds half a character ({half}, a lone surrogate) in column {key!r}"
                raise self.make_error(problem, "Correct the text, or remove the row") from error


def iter_strings(value: Any, *, names: bool = False) -> Iterator[str]:
    """Every string in a value of JSON; with ``names`` those of columns, too."""
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
    """Whether more than :data:`DEEPEST` values lie within each other. Does not itself recurse."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list | tuple)
        ]
        if not level:
            return False
    return True


def is_blank(text: str) -> bool:
    """Whether a text has nothing to be seen in it: white space, control characters, marks of no
    width."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)


def as_text(value: Any) -> str:
    """A string, a number or a truth value as its author wrote it.

    Whole numbers that parquet stores as floats or decimals are the integers that they were.

    Raises:
        ValueError: for numbers that are none, and for all that has no one spelling.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise ValueError(f"{value} (no number)")
        if value == int(value):
            return str(int(value))
    if isinstance(value, Decimal):
        return f"{value:f}".rstrip("0")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"a {type(value).__name__}, which may be written in several ways")


def read_rows(file: str, setting: str) -> list[Row]:
    """All rows of a JSONL file (.jsonl), a JSON list (.json) or a parquet file (.parquet).

    Raises:
        UserError: if the file is absent, malformed, of another kind, or without rows.
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
    """The lines that are not blank, each with its number."""
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
    """Row of a line of JSONL.

    Raises:
        UserError: if it is no JSON object, or one too deep.
    """
    place = f"{path}, line {number}"
    return _as_row(_parse(line, place, setting, "Correct or remove the line"), place, setting)


def parse_record(values: Any, number: int, path: Path, setting: str) -> Row:
    """Row of a parquet file or of a JSON list; raises as ``parse_line``."""
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
    return Row({name: drop_nulls(value) for name, value in values.items()}, setting, place)


def drop_nulls(value: Any) -> Any:
    """A value without the fields of its objects, at any depth, that hold null."""
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
    """Lines or rows of the file, from 1."""
    values: Any
    """Lines of JSON as they stand in the file, or an Arrow array of a parquet file's records."""
    done: float
    """Share of the file that has been read."""


def read_batches(file: Path, setting: str, size: int) -> Iterator[RowBatch]:
    """The rows of a JSONL or parquet file, ``size`` at a time, without the others in memory.

    Raises:
        UserError: as ``read_rows``.
    """
    return (_read_parquet_batches if file.suffix == ".parquet" else _read_line_batches)(
        file, setting, size
    )


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
        # Without the last two, all of a row group would be in memory.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            first = 1
            total = file.metadata.num_rows
            for batch in file.iter_batches(size):
                try:
                    records = batch.to_pylist()
                # Text that is not UTF-8, dates without room in Python, columns of one name.
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
    """Without a dictionary, of which a file of several batches has room for one alone."""
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _make_read_error(table: Any, path: Path, setting: str, first: int) -> UserError:
    """Error for a table with unreadable values, at the first place that has the problem."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if table.column_names.count(name) > 1:
            return UserError(
                setting, path, f"has several columns {name!r}", "Give each column a different name"
            )
        for number, value in enumerate(column, first):
            try:
                value.as_py()
            except Exception as error:
                problem = f"holds in column {name!r} what cannot be read ({error})"
                return UserError(
                    setting,
                    f"{path}, row {number}",
                    problem,
                    "Correct the value, or remove the column",
                )
    return UserError(setting, path, "holds what cannot be read", "Write it again")


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

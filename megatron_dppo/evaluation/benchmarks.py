"""Sources of held-out problems: named benchmarks, user files, generators.

Imports no torch, so that a missing file is reported before a rank starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from megatron_dppo.config import Config, DataConfig, replace
from megatron_dppo.data.generators import GENERATORS
from megatron_dppo.data.rows import COLUMNS_IN_USE, Row, as_text, is_blank, read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.rewards.math.completion import extract_marked_answer

SETTING = "eval.benchmarks"
PROBLEM = "problem"
ANSWER = "answer"
FOLDER = "MEGATRON_DPPO_BENCHMARKS"
"""Environment variable for an unset ``eval.folder``."""
DEFAULT_FOLDER = "data/eval"
SUFFIXES = (".jsonl", ".json", ".parquet")
STEP_BY_STEP = (
    "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
)
TAKEN = frozenset({"accuracy", "reward", "unscored", ""})
"""Names of other metrics (``eval/accuracy``)."""
BY_SOURCE = "source/"
"""Prefix of a data source's metrics (``eval/source/gsm8k``)."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Published set of problems."""

    description: str
    problems: int
    """A file with another number of problems is refused."""
    files: tuple[str, ...]
    """Names of published copies, without suffix; the first existing one is read."""
    source: str
    label: str = "answer"
    """Column of the reference answer. A list has several parts."""
    worked: bool = False
    """Whether the column holds a solution with a marked answer (a box, number signs)."""
    prompt: tuple[str, ...] = ("problem", "question")
    """Candidate columns of the problem, likeliest first."""
    template: str = STEP_BY_STEP
    """With ``{problem}``."""
    verifier: str = "math"
    """Judges the answers, whatever the training reward."""


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
BENCHMARKS = TypeAdapter(dict[str, Benchmark]).validate_python(_TABLE)
KNOWN = (*BENCHMARKS, *GENERATORS)
"""Names that ``eval.benchmarks`` accepts without a file."""


@dataclass(frozen=True, slots=True)
class EvalSource:
    """Unread held-out problems of a run."""

    name: str
    """In reports; "" for a single unnamed file."""
    file: str
    """File or generator."""
    setting: str
    """``data.eval`` or ``eval.benchmarks``."""
    benchmark: Benchmark | None = None
    """None for a user's file: unchanged prompts, judged by ``reward.function``."""

    @property
    def display_name(self) -> str:
        """Name, else the file's stem."""
        return self.name or Path(self.file).stem


def list_sources(config: Config) -> list[EvalSource]:
    """List a run's held-out sources: ``data.eval`` (by default the training generator's problems),
    then ``eval.benchmarks``.

    Raises:
        UserError: if a name is unknown, another metric's or repeated, or benchmarks have no file.
    """
    folder = resolve_folder(config)
    # Report all missing files at once.
    absent = [
        name
        for name in config.eval.benchmarks
        if name in BENCHMARKS and find_file(name, folder) is None
    ]
    if absent:
        raise _make_missing_files_error(absent, folder)
    named = [_parse_entry(entry, config) for entry in config.eval.benchmarks]
    held_out = config.data.eval
    train = config.data.train
    has_source = held_out is not None or bool(named) or config.data.rollouts is not None
    if not has_source and isinstance(train, str) and train in GENERATORS:
        held_out = train
    files = held_out if isinstance(held_out, dict) else {} if held_out is None else {"": held_out}
    found = [*(EvalSource(name, file, "data.eval") for name, file in files.items()), *named]
    for number, source in enumerate(found):
        # Only the single file of ``data.eval`` may lack a name.
        needs_name = isinstance(held_out, dict) or source.setting == SETTING
        if source.name in TAKEN and (source.name or needs_name):
            problem = "is the name of another metric"
            remedy = "Give that file another name"
            raise UserError(source.setting, source.name, problem, remedy)
        if source.display_name in [other.display_name for other in found[:number]]:
            raise UserError(
                source.setting,
                source.display_name,
                "appears twice",
                "Give one of the two another name",
            )
    return found


def _parse_entry(entry: str, config: Config) -> EvalSource:
    name, equals, file = entry.partition("=")
    if equals:
        return EvalSource(name.strip(), file.strip(), SETTING)
    if name in GENERATORS:
        return EvalSource(name, name, SETTING)
    if name not in BENCHMARKS:
        near = get_close_matches(name, KNOWN, 1)
        remedy = f"Write {near[0]}, if that was meant" if near else f"Known are {', '.join(KNOWN)}"
        raise UserError(
            SETTING, name, "is no benchmark", f"{remedy}; a file of your own is NAME=FILE"
        )
    return EvalSource(name, str(find_file(name, resolve_folder(config))), SETTING, BENCHMARKS[name])


def _make_missing_files_error(names: Sequence[str], folder: Path) -> UserError:
    known = {name: BENCHMARKS[name] for name in names}
    looked = "; ".join(f"{name}: {', '.join(each.files)}" for name, each in known.items())
    have = "has" if len(known) == 1 else "have"
    problem = f"{have} no file in {folder} (looked for {looked}, as {', '.join(SUFFIXES)})"
    published = "; ".join(
        f"{name}: {each.problems} problems, {each.source}" for name, each in known.items()
    )
    ways = f"point eval.folder or ${FOLDER} at the folder that has them, or leave them out"
    remedy = f"Put the files there as they are published ({published}), {ways}"
    return UserError(SETTING, ", ".join(names), problem, remedy)


def resolve_folder(config: Config) -> Path:
    return Path(config.eval.folder or os.environ.get(FOLDER) or DEFAULT_FOLDER)


def find_file(name: str, folder: Path) -> Path | None:
    """Return a benchmark's file; None if missing."""
    files = (folder / (stem + suffix) for stem in BENCHMARKS[name].files for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class Question:
    """Problem before any chat template."""

    row: Row
    prompt: str
    label: str


def read_benchmark(name: str, file: str, benchmark: Benchmark) -> list[Question]:
    """Return a benchmark's problems in its template.

    Raises:
        UserError: if the file is malformed or has another number of problems, or a row has no
            problem or answer.
    """
    rows = read_rows(file, SETTING)
    # Scores on another number of problems would not be comparable.
    if len(rows) != benchmark.problems:
        problem = f"holds {len(rows)} problems, and {name} has {benchmark.problems}"
        remedy = (
            f"Fetch it again ({benchmark.source}), or evaluate on it under another name: "
            f"NAME={file}"
        )
        raise UserError(SETTING, file, problem, remedy)
    return [
        Question(row, _build_prompt(row, benchmark), _read_label(row, benchmark)) for row in rows
    ]


def _find_column(row: Row, preferred: str, setting: str) -> str:
    """Return ``preferred`` if the row has this column, else the first usual column."""
    for column in (preferred, *COLUMNS_IN_USE[setting]):
        with suppress(KeyError):
            row[column]
            return column
    return preferred


def read_source_rows(source: EvalSource, data: DataConfig) -> tuple[list[Row], DataConfig]:
    """Return the rows of an ``eval.benchmarks`` source, and settings to read them.

    Raises:
        UserError: see ``read_benchmark`` and ``read_rows``.
    """
    if source.benchmark is not None:
        questions = read_benchmark(source.name, source.file, source.benchmark)
        rows = [
            dataclasses.replace(
                q.row, values={"data_source": source.name, PROBLEM: q.prompt, ANSWER: q.label}
            )
            for q in questions
        ]
        return rows, replace(data, prompt_key=PROBLEM, label_key=ANSWER)
    rows = read_rows(source.file, SETTING)
    question = _find_column(rows[0], data.prompt_key, "data.prompt_key")
    return rows, replace(
        data,
        prompt_key=question,
        label_key=_find_column(rows[0], data.label_key, "data.label_key"),
    )


def _build_prompt(row: Row, benchmark: Benchmark) -> str:
    problem = _get_value(row, benchmark.prompt)
    if not isinstance(problem, str) or is_blank(problem):
        raise row.make_error("has no problem that is a text", "Fetch the file again")
    # Use replace, because format would fail on the braces of LaTeX.
    return benchmark.template.replace("{problem}", problem)


def _read_label(row: Row, benchmark: Benchmark) -> str:
    value = _get_value(row, (benchmark.label,))
    try:
        text = ", ".join(map(as_text, value)) if isinstance(value, list) else as_text(value)
    except ValueError as error:
        raise row.make_error(
            f"holds {error} in column {benchmark.label!r}", "Fetch the file again"
        ) from error
    label = extract_marked_answer(text) if benchmark.worked else text
    if not label:
        raise row.make_error(
            f"states no answer in column {benchmark.label!r}", "Fetch the file again"
        )
    return label


def _get_value(row: Row, columns: tuple[str, ...]) -> Any:
    # Parquet gives every row all columns, so null means absent.
    column = next((name for name in columns if row.values.get(name) is not None), None)
    if column is None:
        problem = (
            f"has nothing in a column {' or '.join(columns)} (it has "
            f"{', '.join(row.values) or 'none'})"
        )
        raise row.make_error(
            problem,
            "Put the file there as it is published, or name it as your own: NAME=FILE",
        )
    return row.values[column]

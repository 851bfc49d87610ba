"""Sources of held-out problems: named benchmarks, files of the user, generators. Each has its
problems' place and columns, the form in which they are asked, and their verifier.

Imports no torch, so that an absent file is known before a rank starts.
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
"""Environment variable with the folder of the benchmarks' files, where ``eval.folder`` names
none."""
DEFAULT_FOLDER = "data/eval"
SUFFIXES = (".jsonl", ".json", ".parquet")
STEP_BY_STEP = (
    "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
)
TAKEN = frozenset({"accuracy", "reward", "unscored", ""})
"""Names of other metrics, as in ``eval/accuracy``."""
BY_SOURCE = "source/"
"""Beginning of the names of a data source's metrics, as in ``eval/source/gsm8k``."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A published set of problems."""

    description: str
    problems: int
    """How many it has. A file with another number of problems is refused: its scores are not
    comparable."""
    files: tuple[str, ...]
    """Names, without suffix, of published copies. The first one that is there is read."""
    source: str
    """Who publishes it."""
    label: str = "answer"
    """Column of the reference answer. A list there is one answer of several parts."""
    worked: bool = False
    """Whether that column holds a worked solution, which marks the answer (a box, number signs)."""
    prompt: tuple[str, ...] = ("problem", "question")
    """Columns that may hold the problem: the first one that a row has."""
    template: str = STEP_BY_STEP
    """Prompt of the policy, around ``{problem}``."""
    verifier: str = "math"
    """The reward function that judges its answers, whichever one trains the policy."""


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
BENCHMARKS = TypeAdapter(dict[str, Benchmark]).validate_python(_TABLE)
KNOWN = (*BENCHMARKS, *GENERATORS)
"""Names that ``eval.benchmarks`` accepts without a file."""


@dataclass(frozen=True, slots=True)
class EvalSource:
    """Held-out problems of a run, before they are read."""

    name: str
    """The name in reports; "" where a run has one file without a name."""
    file: str
    """A file, or the name of a generator."""
    setting: str
    """The setting that names it, ``data.eval`` or ``eval.benchmarks``."""
    benchmark: Benchmark | None = None
    """None for a file of the user: its prompts are asked as they stand, and ``reward.function``
    judges the answers."""

    @property
    def display_name(self) -> str:
        """The name, or the file's where there is none."""
        return self.name or Path(self.file).stem


def list_sources(config: Config) -> list[EvalSource]:
    """Held-out sources of a run: ``data.eval``, or by default the generator's problems; then
    ``eval.benchmarks``.

    Raises:
        UserError: for a name that is none, is another metric's or stands twice, and for all
            benchmarks without a file.
    """
    folder = resolve_folder(config)
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
    if (
        held_out is None
        and isinstance(train, str)
        and train in GENERATORS
        and not named
        and config.data.rollouts is None
    ):
        held_out = train
    files = held_out if isinstance(held_out, dict) else {} if held_out is None else {"": held_out}
    found = [*(EvalSource(name, file, "data.eval") for name, file in files.items()), *named]
    for number, source in enumerate(found):
        if source.name in TAKEN and (
            source.name or isinstance(held_out, dict) or source.setting == SETTING
        ):
            problem = "is what another metric is called"
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
    """Where the files of benchmarks lie."""
    return Path(config.eval.folder or os.environ.get(FOLDER) or DEFAULT_FOLDER)


def find_file(name: str, folder: Path) -> Path | None:
    """Return the file of a benchmark; None: there is none."""
    files = (folder / (stem + suffix) for stem in BENCHMARKS[name].files for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class Question:
    """A problem as the policy shall be asked it, before any chat template."""

    row: Row
    prompt: str
    label: str


def read_benchmark(name: str, file: str, benchmark: Benchmark) -> list[Question]:
    """The problems of a benchmark's file, each put as the declaration says.

    Raises:
        UserError: for a file that is malformed or has another number of problems, and a row without
            a problem or an answer.
    """
    rows = read_rows(file, SETTING)
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
    """The column of a user's own file: the one that the run's data have, else the first with a
    usual name."""
    for column in (preferred, *COLUMNS_IN_USE[setting]):
        with suppress(KeyError):
            row[column]
            return column
    return preferred


def read_source_rows(source: EvalSource, data: DataConfig) -> tuple[list[Row], DataConfig]:
    """Rows that ``eval.benchmarks`` names, and the settings to read them with.

    Args:
        source: whose setting is ``eval.benchmarks``.
        data: of the run.

    Raises:
        UserError: as ``read_benchmark`` and ``read_rows``.
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
    """The value of the first of these columns that the row has."""
    column = next((name for name in columns if row.values.get(name) is not None), None)
    if column is None:
        problem = (
            f"has nothing in a column {' or '.join(columns)} (it has "
            f"{', '.join(row.values) or 'none'})"
        )
        raise row.make_error(
            problem, "Put the file there as it is published, or name it as your own: NAME=FILE"
        )
    return row.values[column]

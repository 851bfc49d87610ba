"""Reads the folder of a run that goes on, has ended or was killed.

Lines that cannot be read are left out and counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeGuard, TypeVar

import numpy as np
from annotated_types import Gt
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron_dppo.errors import UserError
from megatron_dppo.observe.metrics import FILE
from megatron_dppo.observe.private import format_masked
from megatron_dppo.process.streams import print_message
from megatron_dppo.rl.types import Floats
from megatron_dppo.settings import IN_FORCE, describe_renamed, get_settings
from megatron_dppo.trainer.resume import SettingChange, find_changes, list_renamed, read_history

Record = Mapping[str, Any]
"""A line of JSON."""
CENSUS = "pruning.jsonl"
ANSWERS = "answers.jsonl"

T = TypeVar("T")
Count = Annotated[FiniteFloat, Gt(0)]
Cell = tuple[FiniteFloat, FiniteFloat, Count, FiniteFloat, FiniteFloat]


class CensusRow(TypedDict):
    """A row of ``pruning.jsonl``, as :meth:`PruningStats.to_dict` writes it."""

    step: FiniteFloat
    binary: bool
    kept: tuple[FiniteFloat, FiniteFloat]
    pruned: tuple[FiniteFloat, FiniteFloat]
    idle: tuple[FiniteFloat, FiniteFloat]
    by_group: list[Cell]
    by_reward: list[Cell]
    by_cause: list[Cell]


class SampleAnswer(TypedDict):
    """An answer in a row of ``answers.jsonl``."""

    prompt: str
    label: str
    answer: str
    correct: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of one folder. A field is empty where its file is absent."""

    name: str
    """A short name that no other run of the page has."""
    folder: Path
    number: int
    """Its place on the page, from 0. It decides the colour."""
    config: Mapping[str, Any]
    """Values of ``config.yaml`` by dotted key."""
    changes: Sequence[tuple[int, Sequence[SettingChange]]]
    """After how many steps settings changed, and which."""
    rows: Sequence[Record]
    """Rows of ``metrics.jsonl``: finite numbers only."""
    census: Sequence[CensusRow]
    """Rows of ``pruning.jsonl``."""
    answers: Sequence[Record]
    """Rows of ``answers.jsonl``."""
    scores: Sequence[tuple[str, Record]]
    """Every ``scores.json`` under the folder, with the folder that it is in."""
    written: datetime | None
    """When its last row of metrics was."""
    left_out: Sequence[str]
    """Files with lines that cannot be read, and how many; the last line of a killed run is not
    one."""
    group: str = ""
    """Name that the user gave it, alone or with other runs; empty: none."""

    @property
    def colour(self) -> str:
        """Its colour on the page, and from the seventh run on that its lines are broken."""
        return f"run{self.number % 6}" + " again" * (self.number >= 6)

    @property
    def steps(self) -> list[Record]:
        """The rows of steps. Row 0, of the evaluation before the first step, is not among them."""
        return [row for row in self.rows if "perf/step_time" in row]

    def get_setting(self, key: str) -> Any:
        """Its value in this run, or the default where the run says nothing of it."""
        return self.config[key] if key in self.config else get_default(key)

    def get_series(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values of the rows that have ``key``."""
        found = [(row["step"], row[key]) for row in self.rows if key in row]
        steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
        return steps, values

    def compute_mean(self, key: str) -> float | None:
        values = self.get_series(key)[1]
        return float(values.mean()) if len(values) else None

    @property
    def changed_settings(self) -> Sequence[str]:
        """Settings of results (``history.RESULTS``) that were changed on the way, and when."""
        return [
            f"{change.key} {format_masked(change.key, change.before)} until step {step:,}, "
            f"then {format_masked(change.key, change.now)}"
            for step, found in self.changes
            for change in found
            if change.affects_results
        ]

    @property
    def held_out(self) -> int | None:
        """The number of problems behind ``eval/accuracy``; None where it is a mean over several
        files or not known."""
        return next(iter(self.problems.values())) if len(self.problems) == 1 else None

    @property
    def problems(self) -> Mapping[str, int]:
        """How many are held out, by the name of their file; "" for the only one."""
        found = self.answers[-1].get("problems") if self.answers else None
        counts = found if isinstance(found, dict) else {}
        return {
            name: count for name, count in counts.items() if isinstance(count, int) and count > 0
        }


def get_default(key: str) -> Any:
    """As YAML has it: a list where ``config/`` has a tuple; None for what is no setting of this
    version."""
    default = get_settings()[key].default if key in get_settings() else None
    return list(default) if isinstance(default, tuple) else default


def get_data_names(run: RunRecord) -> str:
    """The names of the files, or of the generators, that a run was trained on."""
    given = run.get_setting("data.rollouts") or run.get_setting("data.train")
    places = [each["path"] for each in given] if isinstance(given, list) else [given]
    return ", ".join(PurePath(str(place or "")).name for place in places) or "(not recorded)"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, in this order.

    Args:
        folders: each with ``NAME=`` before it, or without. Runs of one name are a group.

    Raises:
        UserError: naming the first folder that holds neither a run nor results of an evaluation.
    """
    groups, places = zip(*map(_split_group, folders), strict=True) if folders else ((), ())
    found = []
    for number, (group, place, name) in enumerate(zip(groups, places, _names(places), strict=True)):
        if group:
            name = group if groups.count(group) == 1 else f"{group}: {name}"
        found.append(replace(read_run(place, name, number), group=group))
    return found


def _split_group(folder: Path) -> tuple[str, Path]:
    name, given, place = str(folder).partition("=")
    return (name, Path(place)) if given and not folder.exists() else ("", folder)


def read_run(folder: Path, name: str, number: int = 0) -> RunRecord:
    """One of them; the arguments are the fields of ``RunRecord``."""
    metrics = folder / FILE
    scores = list(_read_scores(folder))
    if not metrics.is_file() and not scores:
        remedy = f"Give folders that hold a {FILE} (run.dir of a training) or a scores.json"
        raise UserError(
            "RUN", folder, "is no folder of a run" if folder.is_dir() else "is no folder", remedy
        )
    history = read_history(folder)
    if renamed := list_renamed(history):
        print_message(f"note  {describe_renamed(folder / IN_FORCE, renamed)}")
    rows, census, answers = (_read_rows(folder / file) for file in (FILE, CENSUS, ANSWERS))
    counted = _validate_rows(CensusRow, census)
    read: Mapping[str, Sequence[object]] = {FILE: rows, CENSUS: counted, ANSWERS: answers}
    return RunRecord(
        name=name,
        folder=folder,
        number=number,
        config={key: value for key, value in history[-1].settings.items() if _is_given(key, value)}
        if history
        else {},
        changes=[
            (entry.step, found)
            for before, entry in pairwise(history)
            if (found := find_changes(before.settings, entry.settings))
        ],
        rows=[{key: value for key, value in row.items() if is_number(value)} for row in rows],
        census=counted,
        answers=[
            {**row, "answers": _validate_rows(SampleAnswer, row.get("answers"))} for row in answers
        ],
        scores=scores,
        written=datetime.fromtimestamp(metrics.stat().st_mtime) if metrics.is_file() else None,
        left_out=[
            f"{lines} of the lines of {file} cannot be read, and {'is' if lines == 1 else 'are'} "
            "left out"
            for file, kept in read.items()
            if (lines := _read_text(folder / file).count("\n") - len(kept)) > 0
        ],
    )


def _is_given(key: str, value: Any) -> bool:
    """Whether it is no null that stands for the rest of a line that was not written yet."""
    return value is not None or key not in get_settings() or get_settings()[key].takes_none


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths: as many as tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({i})" for i, folder in enumerate(folders, 1)]


def _read_rows(file: Path) -> list[Record]:
    """Lines of JSON that name their step."""
    return [
        row for line in _read_text(file).split("\n") if is_number((row := _parse(line)).get("step"))
    ]


def _read_text(file: Path) -> str:
    """Bytes that are no UTF-8 are replaced one by one."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _parse(text: str) -> Record:
    """A JSON object; empty for anything else, as for a line that a kill cut short."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _validate_rows(row_type: type[T], rows: Any) -> list[T]:
    """Return the rows of a list that have a form."""
    adapter = TypeAdapter(row_type)
    found = []
    for row in rows if isinstance(rows, list) else ():
        with suppress(ValidationError):
            found.append(adapter.validate_python(row))
    return found


def _read_scores(folder: Path) -> Iterator[tuple[str, Record]]:
    for file in sorted(folder.glob("**/scores.json")):
        found = _parse(_read_text(file))
        if isinstance(found.get("benchmarks"), dict):
            yield str(file.parent.relative_to(folder)), found

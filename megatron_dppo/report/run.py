"""Read the folder of a running, finished or killed run; count unreadable lines."""

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
CENSUS = "pruning.jsonl"
ANSWERS = "answers.jsonl"

T = TypeVar("T")
Count = Annotated[FiniteFloat, Gt(0)]
Cell = tuple[FiniteFloat, FiniteFloat, Count, FiniteFloat, FiniteFloat]


class CensusRow(TypedDict):
    """Row of ``pruning.jsonl``, written by :meth:`PruningStats.to_dict`."""

    step: FiniteFloat
    binary: bool
    kept: tuple[FiniteFloat, FiniteFloat]
    pruned: tuple[FiniteFloat, FiniteFloat]
    idle: tuple[FiniteFloat, FiniteFloat]
    by_group: list[Cell]
    by_reward: list[Cell]
    by_cause: list[Cell]


class SampleAnswer(TypedDict):
    prompt: str
    label: str
    answer: str
    correct: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Contents of a run's folder; empty fields for missing files."""

    name: str
    """Short and unique on the page."""
    folder: Path
    number: int
    """Index on the page; selects the colour."""
    config: Mapping[str, Any]
    """``config.yaml`` by dotted key."""
    changes: Sequence[tuple[int, Sequence[SettingChange]]]
    """Changed settings, with the steps before each change."""
    rows: Sequence[Record]
    """``metrics.jsonl``, finite numbers only."""
    census: Sequence[CensusRow]
    """``pruning.jsonl``."""
    answers: Sequence[Record]
    """``answers.jsonl``."""
    scores: Sequence[tuple[str, Record]]
    """Every ``scores.json`` below the folder, with its relative folder."""
    written: datetime | None
    """Time of the last row of metrics."""
    left_out: Sequence[str]
    """Files with numbers of unreadable lines."""
    group: str = ""
    """Name given by the user; runs of a name form a group."""

    @property
    def colour(self) -> str:
        """Colour on the page."""
        # The palette has six colours. Further runs repeat them with broken lines.
        return f"run{self.number % 6}" + " again" * (self.number >= 6)

    @property
    def steps(self) -> list[Record]:
        """Rows of steps."""
        # Row 0 is the evaluation before the first step, and has no time.
        return [row for row in self.rows if "perf/step_time" in row]

    def get_setting(self, key: str) -> Any:
        return self.config[key] if key in self.config else get_default(key)

    def get_series(self, key: str) -> tuple[Floats, Floats]:
        """Return steps and values of a metric."""
        found = [(row["step"], row[key]) for row in self.rows if key in row]
        steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
        return steps, values

    def compute_mean(self, key: str) -> float | None:
        values = self.get_series(key)[1]
        return float(values.mean()) if len(values) else None

    @property
    def changed_settings(self) -> Sequence[str]:
        """Changed settings that affect results, with steps."""
        return [
            f"{change.key} {format_masked(change.key, change.before)} until step {step:,}, "
            f"then {format_masked(change.key, change.now)}"
            for step, found in self.changes
            for change in found
            if change.affects_results
        ]

    @property
    def held_out(self) -> int | None:
        """Problems of ``eval/accuracy``; None if unknown."""
        # With several files the accuracy is a mean over files, which is no fraction of all
        # problems.
        return next(iter(self.problems.values())) if len(self.problems) == 1 else None

    @property
    def problems(self) -> Mapping[str, int]:
        """Held-out problems by file; "" for a single file."""
        found = self.answers[-1].get("problems") if self.answers else None
        counts = found if isinstance(found, dict) else {}
        return {
            name: count for name, count in counts.items() if isinstance(count, int) and count > 0
        }


def get_default(key: str) -> Any:
    """Return the default as in YAML (a list for a tuple); None for an unknown setting."""
    default = get_settings()[key].default if key in get_settings() else None
    return list(default) if isinstance(default, tuple) else default


def get_data_names(run: RunRecord) -> str:
    given = run.get_setting("data.rollouts") or run.get_setting("data.train")
    places = [each["path"] for each in given] if isinstance(given, list) else [given]
    return ", ".join(PurePath(str(place or "")).name for place in places) or "(not recorded)"


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Return the runs in these folders, in order.

    Args:
        folders: paths, or ``NAME=PATH``. Runs of the same name form a group.

    Raises:
        UserError: naming the first folder without a run or evaluation results.
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
    # An existing folder may have an equals sign in the name.
    return (name, Path(place)) if given and not folder.exists() else ("", folder)


def read_run(folder: Path, name: str, number: int = 0) -> RunRecord:
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
    finite = []
    for row in rows:
        finite.append({key: value for key, value in row.items() if is_number(value)})
    samples = []
    for row in answers:
        samples.append({**row, "answers": _validate_rows(SampleAnswer, row.get("answers"))})
    left_out = []
    for file, kept in read.items():
        # Count only lines with an end, because a killed run leaves half a line.
        lines = _read_text(folder / file).count("\n") - len(kept)
        if lines > 0:
            verb = "is" if lines == 1 else "are"
            left_out.append(f"{lines} of the lines of {file} cannot be read, and {verb} left out")
    settings = history[-1].settings if history else {}
    return RunRecord(
        name=name,
        folder=folder,
        number=number,
        config={key: value for key, value in settings.items() if _is_given(key, value)},
        changes=[
            (entry.step, found)
            for before, entry in pairwise(history)
            if (found := find_changes(before.settings, entry.settings))
        ],
        rows=finite,
        census=counted,
        answers=samples,
        scores=scores,
        written=datetime.fromtimestamp(metrics.stat().st_mtime) if metrics.is_file() else None,
        left_out=left_out,
    )


def _is_given(key: str, value: Any) -> bool:
    # A null in a half-written line is no value, if the setting does not take null.
    return value is not None or key not in get_settings() or get_settings()[key].takes_none


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct ends of paths."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({i})" for i, folder in enumerate(folders, 1)]


def _read_rows(file: Path) -> list[Record]:
    return [
        row for line in _read_text(file).split("\n") if is_number((row := _parse(line)).get("step"))
    ]


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _parse(text: str) -> Record:
    """Return a JSON object; empty for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _validate_rows(row_type: type[T], rows: Any) -> list[T]:
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

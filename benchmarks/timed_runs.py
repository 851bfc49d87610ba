"""Training runs on disk: held-out accuracy over steps and tokens, and fitted costs in seconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True, slots=True)
class Point:
    """State of a run at an evaluation: held-out accuracy, and sums over the steps until then."""

    step: int
    accuracy: float
    generated: float = 0.0
    """Tokens generated."""
    trained: float = 0.0
    """Tokens trained on."""
    measured: float = 0.0
    """Wall-clock seconds; processor seconds in TRL's runs."""


@dataclass(frozen=True, slots=True)
class Run:
    arm: str
    lr: float
    seed: int
    points: list[Point]

    @classmethod
    def read(cls, line: str) -> Run:
        fields = json.loads(line)
        return cls(**fields | {"points": [Point(*point) for point in fields["points"]]})

    def line(self) -> str:
        points = []
        for p in self.points:
            points.append([p.step, p.accuracy, p.generated, p.trained, round(p.measured, 3)])
        return json.dumps(asdict(self) | {"points": points})


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per step, per token generated and per token trained on."""

    step: float
    generated: float
    trained: float
    error: float
    """Mean relative error of the fit between two evaluations."""

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Costs:
        """Fit non-negative costs to the measured seconds between evaluations (least squares)."""
        spans = []
        for run in runs:
            for a, b in pairwise(run.points):
                tokens = (b.generated - a.generated, b.trained - a.trained)
                spans.append((b.step - a.step, *tokens, b.measured - a.measured))
        table = np.array(spans, np.float64)
        # Division by the seconds weights relative errors equally.
        relative = table[:, :3] / table[:, 3:]
        found, _ = nnls(relative, np.ones(len(table)))
        return cls(*map(float, found), error=float(np.abs(relative @ found - 1.0).mean()))

    def seconds(self, point: Point) -> float:
        steps = self.step * point.step
        generated = self.generated * point.generated
        trained = self.trained * point.trained
        return steps + generated + trained

    def to(self, run: Run, accuracy: float) -> float:
        """Return the seconds until ``accuracy``; of the whole run if never reached."""
        return seconds_to(run, accuracy, self.seconds)


def seconds_to(
    run: Run, accuracy: float, clock: Callable[[Point], float] = attrgetter("measured")
) -> float:
    """Return the seconds on ``clock`` until ``accuracy``, interpolated between evaluations; of the
    whole run if never reached."""
    for before, after in pairwise(run.points):
        if after.accuracy >= accuracy:
            share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
            return clock(before) + share * (clock(after) - clock(before))
    return clock(run.points[-1])


class Store:
    """Finished runs, as lines of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.runs = {(run.arm, run.lr, run.seed): run for run in map(Run.read, lines)}

    def add(self, run: Run) -> None:
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            file.write(run.line() + "\n")
            self.runs[run.arm, run.lr, run.seed] = run


def points(rows: Sequence[dict[str, float]]) -> Iterable[Point]:
    generated = trained = seconds = 0.0
    for row in rows:
        generated += row.get("rollout/generated_tokens", 0.0)
        trained += row.get("train/tokens", 0.0)
        seconds += row.get("perf/step_time", 0.0)
        if "eval/accuracy" in row:
            yield Point(int(row["step"]), row["eval/accuracy"], generated, trained, seconds)

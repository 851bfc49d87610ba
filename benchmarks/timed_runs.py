"""Training runs on disk: held-out accuracy over steps and tokens, and the seconds that these
cost."""

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
    """A run at one evaluation: sums over all steps so far."""

    step: int
    accuracy: float
    generated: float = 0.0
    trained: float = 0.0
    measured: float = 0.0
    """Wall-clock seconds; TRL's processor's seconds."""


@dataclass(frozen=True, slots=True)
class Run:
    arm: str
    lr: float
    seed: int
    points: list[Point]

    @classmethod
    def read(cls, line: str) -> Run:
        given = json.loads(line)
        return cls(**given | {"points": [Point(*point) for point in given["points"]]})

    def line(self) -> str:
        points = [
            [p.step, p.accuracy, p.generated, p.trained, round(p.measured, 3)] for p in self.points
        ]
        return json.dumps(asdict(self) | {"points": points})


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, of a token generated and of a token trained on."""

    step: float
    generated: float
    trained: float
    error: float

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Costs:
        spans = [(b.step - a.step, b.generated - a.generated, b.trained - a.trained,
        b.measured - a.measured)
                 for run in runs for a, b in pairwise(run.points)]  # fmt: skip
        table = np.array(spans, np.float64)
        relative = table[:, :3] / table[:, 3:]
        found, _ = nnls(relative, np.ones(len(table)))
        return cls(*map(float, found), error=float(np.abs(relative @ found - 1.0).mean()))

    def seconds(self, point: Point) -> float:
        return (
            self.step * point.step + self.generated * point.generated + self.trained * point.trained
        )

    def to(self, run: Run, accuracy: float) -> float:
        """Seconds to the accuracy; of the whole run where it was not reached."""
        return seconds_to(run, accuracy, self.seconds)


def seconds_to(
    run: Run, accuracy: float, clock: Callable[[Point], float] = attrgetter("measured")
) -> float:
    """As ``Costs.to``, by another clock."""
    for before, after in pairwise(run.points):
        if after.accuracy >= accuracy:
            share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
            return clock(before) + share * (clock(after) - clock(before))
    return clock(run.points[-1])


class Store:
    """All runs so far, on disk."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
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

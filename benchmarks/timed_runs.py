"""Training runs on disk: held-out accuracy over steps and tokens, and fitted costs in seconds."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from megatron_dppo.config import Config
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.resume import flatten_config


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
    """Wall-clock seconds."""
    considered: float = 0.0
    """Prompts of the windows, pruned or not; 0 in runs stored before this was counted."""


Settings = dict[str, Any]
"""Values by dotted key."""
NOT_COMPARED = ("run.dir", "run.seed", "model.path")
"""Settings that differ between equal trainings. The name of the task identifies the policy."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training."""

    task: str
    """See :func:`name_task`."""
    arm: str
    seed: int
    settings: Settings
    """All settings that are not the package's default."""
    points: list[Point]
    figures: dict[str, float] = field(default_factory=dict)
    """Further results, by name."""

    @property
    def lr(self) -> float:
        return float(self.settings.get("optimizer.lr", math.nan))

    @classmethod
    def read(cls, line: str) -> Run:
        fields = json.loads(line)
        return cls(**fields | {"points": [Point(*point) for point in fields["points"]]})

    def line(self) -> str:
        points = []
        for p in self.points:
            values = [p.step, p.accuracy, p.generated, p.trained, round(p.measured, 3)]
            if p.considered:
                values.append(round(p.considered))
            points.append(values)
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


@cache
def read_settings(config: str, words: tuple[str, ...]) -> Settings:
    """Return the compared settings of a configuration with overrides that are not the package's
    default."""
    defaults = read_defaults()
    given = flatten_config(load_config(config, words)).items()
    return {k: v for k, v in given if k not in NOT_COMPARED and v != defaults[k]}


@cache
def read_defaults() -> Settings:
    """Return the package's default of every setting."""
    return flatten_config(Config())


def digest(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def name_task(name: str, folder: Path) -> str:
    """Return a task's name with a digest of its problems, all ``*.jsonl`` of a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.jsonl")):
        found.update(file.name.encode() + file.read_bytes())
    return f"{name} {found.hexdigest()[:8]}"


class Store:
    """Finished runs, as lines of a file. A run is found by task, seed and all settings.

    A line ``{"defaults": …}`` holds the package's defaults at the time of the following runs. Hence
    a run is not found if a default has changed, but still found if a setting was added, or was
    removed while it had its default.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._defaults: Settings = {}
        self._runs: dict[tuple[str, int, str], Run] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            if line.startswith('{"defaults"'):
                self._defaults = json.loads(line)["defaults"]
            else:
                run = Run.read(line)
                self._runs[self._key(run.task, run.seed, run.settings)] = run

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def _key(self, task: str, seed: int, settings: Settings) -> tuple[str, int, str]:
        """Return task, seed, and a digest of all settings that are not today's default."""
        then = self._defaults
        now = read_defaults()
        own = {k: v for k, v in (then | settings).items() if v != now.get(k, then.get(k))}
        return task, seed, digest(own)

    def find(self, task: str, seed: int, settings: Settings) -> Run | None:
        """Return the run with these settings, see :func:`read_settings`; None without one."""
        return self._runs.get((task, seed, digest(settings)))

    def add(self, run: Run) -> None:
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            if self._defaults != read_defaults():
                self._defaults = read_defaults()
                file.write(json.dumps({"defaults": self._defaults}) + "\n")
            file.write(run.line() + "\n")
            self._runs[self._key(run.task, run.seed, run.settings)] = run


def train(
    config: Path | str,
    words: Sequence[str],
    folder: Path,
    stop: Callable[[Sequence[dict[str, float]]], bool] | None = None,
) -> list[dict[str, float]]:
    """Train in a process, and return the rows of metrics. The log is ``folder`` with ``.log``.

    Args:
        config: the configuration.
        words: overrides.
        folder: folder of the run.
        stop: function of the present rows; True ends the training.

    Raises:
        SystemExit: the training failed; has the log.
    """
    own = [f"run.dir={folder}", "run.export=false", "run.checkpoint_every=0"]
    command = [sys.executable, "-m", "megatron_dppo", "train", str(config), *words, *own]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.5)
            if stop and folder.exists() and stop(read_metrics(folder)):
                process.terminate()
                process.wait()
                return read_metrics(folder)
    if process.returncode:
        raise SystemExit(folder.with_suffix(".log").read_text(encoding="utf-8"))
    return read_metrics(folder)


def points(rows: Sequence[dict[str, float]], samples: int = 8) -> Iterator[Point]:
    """Yield a point per evaluation of a run with ``samples`` completions per prompt."""
    generated = trained = seconds = considered = 0.0
    for row in rows:
        if kept := row.get("prune/kept_prompt_fraction"):
            completions = row["rollout/generated_tokens"] / row["rollout/response_len/mean"]
            considered += completions / samples / kept
        generated += row.get("rollout/generated_tokens", 0.0)
        trained += row.get("train/tokens", 0.0)
        seconds += row.get("perf/step_time", 0.0)
        if "eval/accuracy" in row:
            sums = (generated, trained, seconds, considered)
            yield Point(int(row["step"]), row["eval/accuracy"], *sums)

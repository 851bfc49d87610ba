"""Runs against each other, by the clock: seconds of a step, and seconds until they were equally accurate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.report.axes import duration, say
from megatron_dppo.report.reading import Run
from megatron_dppo.settings import settings

TEST = ("data.eval", "data.prompt_key", "data.label_key", "eval.benchmarks", "eval.folder", "eval.samples",
        "eval.temperature", "reward.function")  # fmt: skip
"""What an accuracy is of."""
GENERATED = ("data.arithmetic.", "data.reasoning_gym.")
"""Settings of generators, which belong to the test too, but for:"""
TRAINING_ONLY = ("problems", "forgotten_carries", "short_answers", "eval_problems")
"""The last says how many are held out and not which: the first ones are asked, and runs tell how many."""
COUNTS = ("eval.problems", "data.arithmetic.eval_problems", "data.reasoning_gym.eval_problems")


@dataclass(frozen=True, slots=True)
class Race:
    """What was measured of several runs; by name, the first one first."""

    pace: Mapping[str, float]
    """Mean seconds of a step."""
    target: float | None
    """The best accuracy that all of them had at some evaluation; None where there is none to race for."""
    reached: Mapping[str, float]
    """Seconds of training steps until the first evaluation at the target or above."""
    differs: Sequence[str] = ()
    """Why there is none: what the runs' tests do not have in common."""
    changed: Sequence[str] = ()
    """Of runs that are not of one kind of training each: what was changed on the way."""

    def cells(self, seconds: Mapping[str, float], name: str) -> str:
        """A run's seconds, and how they compare with the first run's."""
        if name not in seconds:
            return "–"
        first = next(iter(seconds))
        ratio = "" if name == first or not seconds[first] else f" · {seconds[name] / seconds[first]:.2f}×"
        return duration(seconds[name]) + ratio

    def said(self) -> str:
        """The outcome in words, with what it is worth."""
        words = f"Measured, a step: {self._against_first(self.pace)}."
        if self.changed:
            words = f"{words} What a run's results are of was changed on its way: {'; '.join(self.changed)}."
        if self.target is None:
            return f"{words} {self.unlike}".rstrip()
        return (
            f"{words} Training steps until the first evaluation at {say(self.target, 'share')} or more, which every "
            f"run reached: {self._against_first(self.reached)}. That is one run of each; evaluations lie some steps "
            "apart, and another seed would give another ratio."
        )

    @property
    def unlike(self) -> str:
        """What is said where accuracies are not comparable, else empty."""
        if not self.differs:
            return ""
        tested = f"The runs were tested on different problems, or in different ways ({', '.join(self.differs)})"
        return f"{tested}: how long each took to an accuracy is not compared."

    def _against_first(self, seconds: Mapping[str, float]) -> str:
        first, *others = seconds
        ratios = [
            f"{name} {duration(seconds[name])}"
            + (f", {seconds[name] / seconds[first]:.2f} times as long" if seconds[first] else "")
            for name in others
        ]
        return "; ".join([f"{first} {duration(seconds[first])}", *ratios])


def race(runs: Sequence[Run]) -> Race | None:
    """None where fewer than two runs have taken a step."""
    timed = [run for run in runs if run.steps]
    if len(timed) < 2:
        return None
    pace = {run.name: sum(row["perf/step_time"] for row in run.steps) / len(run.steps) for run in timed}
    changed = [f"{run.name}, {words}" for run in timed for words in run.of_several_settings]
    target = min(max(run.series("eval/accuracy")[1], default=0.0) for run in timed)
    if target and (differs := _different_tests(timed)):
        return Race(pace, None, {}, differs, changed)
    reached = {run.name: _seconds_until(run, target) for run in timed}
    # A target that a run had met before its first step is no race.
    raced = bool(target) and min(reached.values()) > 0.0
    return Race(pace, target, reached, (), changed) if raced else Race(pace, None, {}, (), changed)


def _different_tests(runs: Sequence[Run]) -> list[str]:
    """The settings that make accuracies those of different tests, and whether their problems are as many."""
    if not all(run.config for run in runs):
        return ["not every run's settings are recorded"]
    own = [key for key in settings() if key.startswith(GENERATED) and key.rpartition(".")[2] not in TRAINING_ONLY]
    keys = [*TEST, *own]
    if not any(run.setting("data.eval") or run.setting("eval.benchmarks") for run in runs):
        keys.append("data.train")  # a generator's own
    differs = [
        change.key
        for run in runs
        for _, changes in run.changes
        for change in changes
        if change.key in keys and change.key != "data.train"
    ]
    if not all(run.problems for run in runs):
        keys += COUNTS
    elif any(run.problems != runs[0].problems for run in runs):
        differs.append("how many they are")
    return differs + [key for key in keys if any(run.setting(key) != runs[0].setting(key) for run in runs)]


def _seconds_until(run: Run, accuracy: float) -> float:
    seconds = 0.0
    for row in run.rows:
        seconds += row.get("perf/step_time", 0.0)
        if row.get("eval/accuracy", -1.0) >= accuracy:
            break
    return seconds

"""Runs that differ by their seed alone are one arm: how many times as long as another arm it takes, and how sure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

from megatron_dppo.report.run import Run
from megatron_dppo.trainer.resume import changes

SEED = "run.seed"
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5%, by degrees of freedom from 1 on; of more than ten the last one, which is a little too wide."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``Arm("pruned-1", {1: "pruned-1", 2: "pruned-2"})`` has two seeds."""

    first: str
    """Name of its first run."""
    runs: Mapping[int, str]
    """Names by seed."""

    @property
    def name(self) -> str:
        return self.first if len(self.runs) == 1 else f"{self.first} ({len(self.runs)} seeds)"


@dataclass(frozen=True, slots=True)
class Ratio:
    """An arm's seconds over the first arm's: the geometric mean over the seeds that both have.

    Where these are fewer than two, it is the mean of the one over the mean of the other.
    """

    value: float
    interval: tuple[float, float] | None
    """95%, by Student's t over the logarithms of the ratios seed by seed; None of fewer than two seeds."""
    seeds: int
    """That both have."""


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """The runs by arm, in their order. Two runs of the same seed are never in one arm. If all runs would make one arm,
    each is an arm of its own, so that there is something to compare."""
    found: list[tuple[Run, dict[int, str]]] = []
    for run in runs:
        seed = int(run.setting(SEED))
        same = (of for other, of in found if run.config and seed not in of and _alike(run, other))
        if (of_arm := next(same, None)) is not None:
            of_arm[seed] = run.name
        else:
            found.append((run, {seed: run.name}))
    if len(found) == 1:
        return [Arm(run.name, {int(run.setting(SEED)): run.name}) for run in runs]
    return [Arm(run.name, of) for run, of in found]


def ratios(arms: Sequence[Arm], seconds: Mapping[str, float]) -> Iterator[tuple[Arm, float, Ratio | None]]:
    """Each arm, the mean of its runs' seconds, and how they compare with the first arm's; None of that one itself."""
    for arm in arms:
        yield arm, fmean(seconds[name] for name in arm.runs.values()), _ratio(arms[0], arm, seconds)


def _ratio(first: Arm, arm: Arm, seconds: Mapping[str, float]) -> Ratio | None:
    if arm is first or not all(seconds[name] for of in (first, arm) for name in of.runs.values()):
        return None
    pairs = [(first.runs[seed], name) for seed, name in arm.runs.items() if seed in first.runs]
    if len(pairs) < 2:
        own, others = (fmean(seconds[name] for name in of.runs.values()) for of in (arm, first))
        return Ratio(own / others, None, len(pairs))
    logs = [log(seconds[other] / seconds[one]) for one, other in pairs]
    mean = fmean(logs)
    reach = T_975[min(len(logs) - 1, len(T_975)) - 1] * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(mean), (exp(mean - reach), exp(mean + reach)), len(logs))


def why_no_interval(arms: Sequence[Arm]) -> str:
    """Of a ratio."""
    return "one run each" if all(len(arm.runs) == 1 for arm in arms) else "fewer than two seeds in common"


def _alike(one: Run, other: Run) -> bool:
    return {change.key for change in changes(one.config, other.config)} <= {SEED}

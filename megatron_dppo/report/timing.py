"""Seconds of a step by phase, the fastest of several runs, and costs.

Runs that differ only by seed form an arm. Arms are compared by time ratios.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod, sqrt
from statistics import fmean, stdev
from typing import get_args

import numpy as np

from megatron_dppo.config.rollout import ServerKind
from megatron_dppo.observe.timers import (
    PHASES,
    compute_breakdown,
    estimate_savings,
    format_duration,
)
from megatron_dppo.report.charts import (
    Chart,
    Layer,
    compute_stack_top,
    format_number,
    make_stack_chart,
    with_title,
)
from megatron_dppo.report.learning import compute_wilson_interval, get_step_numbers
from megatron_dppo.report.parts import Bars, Charts, Note, Part, Section, Segment, Table
from megatron_dppo.report.pruning import has_pruning
from megatron_dppo.report.run import Record, RunRecord
from megatron_dppo.rl.intervals import compute_student_t
from megatron_dppo.rl.types import Floats
from megatron_dppo.settings import get_settings
from megatron_dppo.trainer.resume import find_changes

NAMES = (*PHASES.values(), "other")
NARROWEST = 0.07
"""Fraction of the scale. Narrower segments have no label."""
TEST = (
    "data.eval",
    "data.prompt_key",
    "data.label_key",
    "eval.benchmarks",
    "eval.folder",
    "eval.samples",
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "eval.max_response_tokens",
    "reward.function",
)
"""Settings that define the task of an accuracy."""
GENERATED = ("data.arithmetic.", "data.reasoning_gym.", "data.verifiers.")
"""Generators' settings that define the task, except ``TRAINING_ONLY``."""
# eval_problems is the number of held-out problems; each run records its actual number.
TRAINING_ONLY = ("problems", "forgotten_carries", "short_answers", "eval_problems")
CERTAINTY = (
    "In brackets 95% intervals: geometric means, seed by seed (Student's t). Ratios without "
    "brackets have no interval (fewer than two seeds in common), and another seed would give "
    "others."
)
COUNTS = ("eval.problems", *(f"{generator}eval_problems" for generator in GENERATED))


def make_timing_section(runs: Sequence[RunRecord]) -> Section:
    """Show mean seconds by phase on a common scale; then step by step."""
    layers = {run.name: _make_layers(run) for run in runs if run.steps}
    lead = (
        "Wall-clock seconds of a step, by phase, on the leading rank. Evaluations and "
        "checkpoints are not in them."
    )
    if not layers:
        return Section(lead, [], "No step has been timed yet.")
    means: dict[str, dict[str, float]] = {}
    for name, run_layers in layers.items():
        means[name] = {layer.name: float(layer.values.mean()) for layer in run_layers}
    present = {phase for mean in means.values() for phase, value in mean.items() if value > 0.0}
    phases = [phase for phase in NAMES if phase in present]
    longest = max(sum(mean.values()) for mean in means.values()) or 1.0
    bars = [
        (name, format_duration(sum(mean.values())), _make_segments(mean, phases, longest))
        for name, mean in means.items()
    ]
    key = [(f"phase-{phase}", phase) for phase in phases]
    top = max(compute_stack_top(run_layers) for run_layers in layers.values())
    charts = [
        make_phase_chart(run, f"{run.name}, by phase", top) for run in runs if run.name in layers
    ]
    return Section(lead, [Bars(bars, key), _make_table(means, phases), Charts(charts)])


@with_title("Seconds per step")
def make_phase_chart(run: RunRecord, about: str, top: float | None = None) -> Chart:
    """Chart each step's seconds by phase."""
    # Charts of several runs share ``top``, so that heights are comparable.
    return make_stack_chart(
        about, get_step_numbers(run), _make_layers(run), form="number", top=top, empty="no timings"
    )


def _make_layers(run: RunRecord) -> list[Layer]:
    """Return the seconds of each phase, with its fraction of the mean step."""
    found = [compute_breakdown(row) for row in run.steps]
    present = {name for row in found for name in row}
    seconds: dict[str, Floats] = {}
    for name in NAMES:
        if name in present:
            seconds[name] = np.array([row.get(name, 0.0) for row in found])
    total = sum(float(values.mean()) for values in seconds.values()) or 1.0
    return [
        Layer(name, f"phase-{name}", values, _format_percent(float(values.mean()) / total))
        for name, values in seconds.items()
    ]


def _make_segments(
    mean: Mapping[str, float],
    phases: Sequence[str],
    longest: float,
) -> list[Segment]:
    segments = []
    for phase in phases:
        share = mean.get(phase, 0.0) / longest
        if share > 0.0:
            label = format_duration(mean[phase]) if share > NARROWEST else ""
            segments.append(Segment(f"phase-{phase}", phase, 100 * share, label))
    return segments


def _make_table(means: Mapping[str, Mapping[str, float]], phases: Sequence[str]) -> Table:
    totals = {name: sum(mean.values()) or 1.0 for name, mean in means.items()}

    def cell(name: str, seconds: float) -> str:
        return f"{format_duration(seconds)} · {_format_percent(seconds / totals[name])}"

    rows = []
    for phase in phases:
        cells = [cell(name, mean.get(phase, 0.0)) for name, mean in means.items()]
        rows.append([phase, *cells])
    rows.append(["a step", *map(format_duration, totals.values())])
    return Table(["phase", *means], rows, "Mean seconds of a step, and their share of it")


def _format_percent(share: float) -> str:
    return "<1%" if 0.0 < share < 0.005 else f"{100 * share:.0f}%"


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """Times of several runs. Mappings are by run, the first run first."""

    pace: Mapping[str, float]
    """Mean seconds of a step."""
    target: float | None
    """Best accuracy reached by every run; None if not compared, or explained by chance."""
    reached: Mapping[str, float]
    """Training seconds until the first evaluation at the target."""
    arms: Sequence[Arm]
    """The runs, grouped if only the seed differs."""
    differs: Sequence[str] = ()
    """Settings tested differently; then no target."""
    changed: Sequence[str] = ()
    """Changes of settings during a run, in words."""
    unpruned: Sequence[str] = ()
    """Runs without pruning."""
    by_chance: float | None = None
    """Best accuracy reached by every run, if a run may have had it before training."""

    def describe(self) -> str:
        words = [f"Measured, a step: {self._format_ratios(self.pace)}."]
        if self.target is not None:
            until = (
                "Training steps until the first evaluation at "
                f"{format_number(self.target, 'share')} or more"
            )
            words += [f"{until}, which every run reached: {self._format_ratios(self.reached)}."]
            words += ["Evaluations lie some steps apart."]
        if self.by_chance is not None:
            best = format_number(self.by_chance, "share")
            words += [
                f"Every run reached {best}, which is within the 95% interval of an accuracy before "
                "training: no time to an accuracy is given."
            ]
        words += [CERTAINTY]
        if self.changed:
            changed = "; ".join(self.changed)
            words += [f"A setting that affects results changed during a run: {changed}."]
        if self.differs:
            tested = f"on different problems, or in different ways ({', '.join(self.differs)})"
            words += [
                f"The runs were tested {tested}: the times that they took to an accuracy are not "
                "compared."
            ]
        return " ".join(words)

    def _format_ratios(self, seconds: Mapping[str, float]) -> str:
        words = []
        for arm, mean, ratio in compute_ratios(self.arms, seconds):
            times = f", {ratio.value:.2f} times as long{ratio.brackets}" if ratio else ""
            words.append(f"{arm.name} {format_duration(mean)}{times}")
        return "; ".join(words)


def make_comparison(runs: Sequence[RunRecord]) -> SpeedComparison | None:
    """Compare the runs with steps; None for fewer than two."""
    timed = [run for run in runs if run.steps]
    if len(timed) < 2:
        return None
    pace = {}
    for run in timed:
        pace[run.name] = sum(row["perf/step_time"] for row in run.steps) / len(run.steps)
    changed = [f"{run.name}, {words}" for run in timed for words in run.changed_settings]
    target = min(max(run.get_series("eval/accuracy")[1], default=0.0) for run in timed)
    differs = _find_test_differences(timed) if target else []
    arms = group_by_arm(timed)
    unpruned = [run.name for run in timed if not has_pruning(run)]
    # A time of 0, of a run that began at the target, has no ratio.
    by_chance = not differs and any(target <= _bound_initial_accuracy(run) for run in timed)
    if not target or differs or by_chance:
        best = target if target and by_chance else None
        return SpeedComparison(pace, None, {}, arms, differs, changed, unpruned, best)
    reached = {run.name: _sum_seconds_until(run, target) for run in timed}
    return SpeedComparison(pace, target, reached, arms, (), changed, unpruned)


def _bound_initial_accuracy(run: RunRecord) -> float:
    """Return the upper end of the 95% interval of the accuracy before training; −1 if unknown."""
    steps, accuracy = run.get_series("eval/accuracy")
    if not len(steps) or steps[0] > 0.0:
        return -1.0
    before = float(accuracy[0])
    return compute_wilson_interval(before, run.held_out)[1] if run.held_out else before


def _find_test_differences(runs: Sequence[RunRecord]) -> list[str]:
    """List settings that make the runs' accuracies incomparable."""
    if not all(run.config for run in runs):
        return ["not every run's settings are recorded"]
    own = [
        key
        for key in get_settings()
        if key.startswith(GENERATED) and key.rpartition(".")[2] not in TRAINING_ONLY
    ]
    keys = [*TEST, *own]
    if not any(run.get_setting("data.eval") or run.get_setting("eval.benchmarks") for run in runs):
        keys.append("data.train")  # a generator's own problems
    changed = [change.key for run in runs for _, changes in run.changes for change in changes]
    differs = [key for key in changed if key in keys and key != "data.train"]
    # Without recorded problems, compare the settings with their numbers.
    if not all(run.problems for run in runs):
        keys += COUNTS
    elif any(run.problems != runs[0].problems for run in runs):
        differs.append("how many they are")
    for key in keys:
        if any(run.get_setting(key) != runs[0].get_setting(key) for run in runs):
            differs.append(key)
    return differs


def _sum_seconds_until(run: RunRecord, accuracy: float) -> float:
    seconds = 0.0
    for row in run.rows:
        seconds += row.get("perf/step_time", 0.0)
        if row.get("eval/accuracy", -1.0) >= accuracy:
            break
    return seconds


SEED = "run.seed"


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs that differ by seed: ``Arm("pruned-1", {1: "pruned-1", 2: "pruned-2"})``."""

    first: str
    """Name of the group, else of the first run."""
    runs: Mapping[int, str]
    """By seed."""

    @property
    def name(self) -> str:
        return self.first if len(self.runs) == 1 else f"{self.first} ({len(self.runs)} seeds)"


@dataclass(frozen=True, slots=True)
class Ratio:
    """An arm's seconds relative to the first arm: geometric mean over shared seeds."""

    value: float
    interval: tuple[float, float] | None
    """95%, Student's t over logarithms of ratios; None for fewer than two seeds."""
    seeds: int
    """Shared seeds."""

    @property
    def brackets(self) -> str:
        """Interval in brackets, or empty."""
        return "" if self.interval is None else " [{:.2f}, {:.2f}]".format(*self.interval)


def group_by_arm(runs: Sequence[RunRecord]) -> list[Arm]:
    """Group runs of the same group, else runs that differ only by seed."""
    found: list[tuple[RunRecord, dict[int, str]]] = []
    # An arm never has two runs of a seed, because pairs are by seed.
    for run in runs:
        seed = int(run.get_setting(SEED))
        for other, seeds in found:
            is_same_arm = run.group == other.group
            if not run.group and not other.group:
                is_same_arm = _differs_by_seed_only(run, other)
            if seed not in seeds and is_same_arm:
                seeds[seed] = run.name
                break
        else:
            found.append((run, {seed: run.name}))
    # With a single arm, compare its runs.
    if len(found) == 1:
        return [Arm(run.name, {int(run.get_setting(SEED)): run.name}) for run in runs]
    return [Arm(run.group or run.name, seeds) for run, seeds in found]


def _differs_by_seed_only(run: RunRecord, other: RunRecord) -> bool:
    if not run.config:
        return False
    return {change.key for change in find_changes(run.config, other.config)} <= {SEED}


def compute_ratios(
    arms: Sequence[Arm], seconds: Mapping[str, float]
) -> Iterator[tuple[Arm, float, Ratio | None]]:
    """Yield each arm, mean seconds, and ratio to the first arm."""
    for arm in arms:
        mean = fmean(seconds[name] for name in arm.runs.values())
        yield arm, mean, _compute_ratio(arms[0], arm, seconds)


def _compute_ratio(first: Arm, arm: Arm, seconds: Mapping[str, float]) -> Ratio | None:
    names = (*first.runs.values(), *arm.runs.values())
    if arm is first or not all(seconds[name] for name in names):
        return None
    pairs = [(first.runs[seed], name) for seed, name in arm.runs.items() if seed in first.runs]
    # Without two pairs, compare the means of the arms.
    if len(pairs) < 2:
        own = fmean(seconds[name] for name in arm.runs.values())
        baseline = fmean(seconds[name] for name in first.runs.values())
        return Ratio(own / baseline, None, len(pairs))
    # Logarithms, because a ratio and its inverse must be equally far from 1.
    logs = [log(seconds[other] / seconds[one]) for one, other in pairs]
    mean = fmean(logs)
    reach = compute_student_t(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(mean), (exp(mean - reach), exp(mean + reach)), len(logs))


@dataclass(frozen=True, slots=True)
class DeviceHours:
    """GPU-hours, or hours of processes without GPUs."""

    hours: float
    """Steps and evaluations, without startup and checkpoints."""
    by_prompts: float
    """Estimated hours saved, with completion pruning unchanged."""
    by_completions: float
    both: float
    """More than the sum, because pruned rollouts also skip training."""
    at_equal_noise: float | None
    """Estimated hours saved, relative to unpruned steps of fewer prompts with the same variance;
    None if a rule is biased, and the variance therefore unknown."""
    devices: str
    """``8 GPUs``, ``2 processes``; with the number of servers."""

    @property
    def unit(self) -> str:
        return "GPU-h" if "GPU" in self.devices else "process-h"

    @property
    def share(self) -> float:
        """Fraction saved, of the hours of the same steps without pruning."""
        return self.both / (self.hours + self.both) if self.hours else 0.0

    @property
    def share_at_equal_noise(self) -> float | None:
        """Fraction saved, of the hours of unpruned steps of fewer prompts."""
        saved = self.at_equal_noise
        return saved if not saved else saved / (self.hours + saved)


def count_device_hours(run: RunRecord) -> DeviceHours:
    """Multiply each row's seconds by the devices held at the time."""
    servers = _count_server_gpus(run)
    hours = 0.0
    saved = np.zeros(3)
    at_equal_noise: float | None = 0.0
    for row in run.rows:
        held = (_count_ranks(run, row) + (servers or 0)) / 3600.0
        hours += held * (row.get("perf/step_time", 0.0) + row.get("perf/eval_time", 0.0))
        seconds = row.get("perf/step_time", 0.0)
        own = np.array(estimate_savings(row))
        saved += held * own
        inflation = row.get("prune/variance_inflation")
        if inflation and at_equal_noise is not None:
            at_equal_noise += held * ((seconds + own[2]) / inflation - seconds)
        elif own.any():
            at_equal_noise = None
    devices = _describe_devices(run, servers)
    by_prompts, by_completions, both = saved.tolist()
    return DeviceHours(hours, by_prompts, by_completions, both, at_equal_noise, devices)


def _count_ranks(run: RunRecord, row: Record) -> int:
    """Return the row's trainer ranks, else the layout's."""
    sizes = (int(run.get_setting(f"layout.{size}") or 1) for size in ("tp", "pp", "cp", "dp"))
    return int(row.get("perf/ranks", 0)) or prod(sizes)


def _count_server_gpus(run: RunRecord) -> int | None:
    """Return the servers' GPUs beside the trainer's; None if unknown (externally managed)."""
    has_servers = run.get_setting("rollout.engine") in get_args(ServerKind)
    if not has_servers or run.get_setting("rollout.colocated"):
        return 0
    tp = run.get_setting("rollout.launch.tp")
    count = int(run.get_setting("rollout.launch.count"))
    if not count:
        return None
    return sum(tp[:count]) if isinstance(tp, list) else count * int(tp)


def _describe_devices(run: RunRecord, servers: int | None) -> str:
    held = max((_count_ranks(run, row) for row in run.rows), default=0) + (servers or 0)
    # If the record does not mention GPUs, assume GPUs.
    on_gpus = any(row.get("perf/gpus", 1) for row in run.rows)
    word = ("GPU" if on_gpus else "process") + ("" if held == 1 else "s" if on_gpus else "es")
    of_servers = "servers not counted" if servers is None else f"{servers} of them for servers"
    return f"{held} {word}" + (f", {of_servers}" if servers != 0 else "")


def make_cost_section(runs: Sequence[RunRecord], price: float | None) -> Section:
    """Show hours and money, spent and saved by pruning.

    Args:
        price: cost of a GPU-hour; None: from each run's settings.
    """
    prices = [price] * len(runs)
    if price is None:
        prices = [run.get_setting("cluster.price_per_gpu_hour") for run in runs]
    priced = any(rate is not None for rate in prices)
    found = [(count_device_hours(run), rate) for run, rate in zip(runs, prices, strict=True)]

    def hours(label: str, field: str) -> list[str]:
        cells = []
        for costs, _ in found:
            value = getattr(costs, field)
            text = "–" if value is None else f"{format_number(value, 'number')} {costs.unit}"
            cells.append(text)
        return [label, *cells]

    def share(label: str, field: str) -> list[str]:
        cells = []
        for costs, _ in found:
            value = getattr(costs, field)
            cells.append("–" if value is None else format_number(value, "share"))
        return [label, *cells]

    def money(label: str, field: str) -> list[str]:
        cells = []
        for costs, rate in found:
            value = getattr(costs, field)
            known = value is not None and rate is not None
            cells.append(_format_money(value * rate) if known else "–")
        return [label, *cells]

    def format_rate(rate: float | None) -> str:
        return "–" if rate is None else f"{rate:g}"

    rows = [
        ["held", *(costs.devices for costs, _ in found)],
        hours("spent", "hours"),
        hours("saved by pruning at equal noise, estimated", "at_equal_noise"),
        share("… of unpruned steps of fewer prompts, as noisy", "share_at_equal_noise"),
        hours("saved by pruning prompts at equal steps, estimated", "by_prompts"),
        hours("saved by pruning completions at equal steps, estimated", "by_completions"),
        hours("saved by both at equal steps, estimated", "both"),
        share("… of as many unpruned steps of all prompts", "share"),
    ]
    if priced:
        rows.append(["price of an hour", *map(format_rate, prices)])
        rows.append(money("money spent", "hours"))
        rows.append(money("money saved at equal noise, estimated", "at_equal_noise"))
        rows.append(money("money saved at equal steps, estimated", "both"))
    lead = (
        "Spent: seconds of all steps and evaluations, times the GPUs or processes held; not starts "
        "and checkpoints. Saved: estimated from each run's own timers, as if every token of a step "
        "cost the same; either level with the pruning of the other as it is, so that both together "
        "save more than their sum. A smaller unpruned batch saves time, too: what pruning saves "
        "beyond that is the row at equal noise. Costs that do not depend on the tokens are not "
        "saved: where a run without pruning is on this page, trust the times measured above."
    )
    if any(_count_server_gpus(run) is None for run in runs):
        lead += (
            " Externally managed servers are not counted, because the number of their GPUs is "
            "unknown: hours and money are the trainer's alone."
        )
    parts: list[Part] = [Table(["", *(run.name for run in runs)], rows)]
    if not priced:
        parts.append(Note("--price, or cluster.price_per_gpu_hour, turns hours into money."))
    return Section(lead, parts)


def _format_money(amount: float) -> str:
    if amount >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.2f}" if amount >= 0.1 or not amount else f"{amount:.1g}"

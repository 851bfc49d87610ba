"""Held-out accuracy over seconds: unpruned GRPO, smaller unpruned batches, and two strengths of pruning.

A pruned step is cheaper and noisier. So is a step of fewer prompts, without any pruning: that is the control. All arms
train the quickstart's policy, which ``scripts/quickstart.sh`` warms up, on one rank with one thread, two runs at a
time. Seconds are those of the steps, without start-up and evaluations.

``--tune`` finds each arm's learning rate: every rate of ``RATES``, and further ones as long as the best is at the edge,
on one seed, then the two best on another. Finished runs are stored one by one, and are not trained again. Without
``--tune``, the script trains every arm at its rate on five other seeds, and stores every run's evaluations. ``--draw``
makes the picture from the stored file, and trains nothing.

    python benchmarks/speed_curve.py [--tune] [--json]
    python benchmarks/speed_curve.py --draw docs/speed.png
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pruning_speedup import crossing, ratio, trained

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CURVE, TUNING = RESULTS / "speed_curve.json", RESULTS / "speed_curve_tuning.json"
ACCURACY = 0.6
RATES = (1e-4, 1.5e-4, 2.25e-4, 3.4e-4)
"""Learning rates in steps of 1.5."""
TUNING_SEEDS, SEEDS = (11, 12), (1, 2, 3, 4, 5)
COMMON = ("configs/quickstart.yaml", "model.path=runs/quickstart/warm", "layout.tp=1")
UNPRUNED = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
STRONG = (
    "pruning.prompts.keep=0.3",
    "pruning.prompts.floor=0.15",
    "pruning.completions.keep=0.3",
    "pruning.max_weight=10",
)


LOOKS = (("#555555", "-"), ("#0072B2", "--"), ("#E69F00", "-."), ("#D55E00", "-"))
"""Colour and line of each arm, told apart by the colour-blind and in grey."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training. All arms have 8 completions a prompt."""

    settings: tuple[str, ...]
    prompts: int
    """Prompts a step, before pruning."""
    steps: int
    """So many that all arms train for about as long."""
    evaluate: int
    """Steps between evaluations."""


def smaller(prompts: int, *, steps: int, evaluate: int) -> Arm:
    return Arm((*UNPRUNED, f"rollout.prompts_per_step={prompts}"), prompts, steps, evaluate)


FULL = "unpruned, 64 prompts"
ARMS = {
    FULL: smaller(64, steps=40, evaluate=2),
    "unpruned, 32 prompts": smaller(32, steps=80, evaluate=3),
    "unpruned, 20 prompts": smaller(20, steps=125, evaluate=5),
    "pruned, default": Arm((), 64, steps=60, evaluate=2),
    "pruned, strong": Arm(STRONG, 64, steps=140, evaluate=5),
}
SMALLER = [name for name, arm in ARMS.items() if arm.prompts < ARMS[FULL].prompts]


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's evaluations."""

    arm: str
    rate: float
    seed: int
    steps: list[int]
    seconds: list[float]
    """Seconds of all steps before each evaluation."""
    accuracy: list[float]
    seconds_to_accuracy: float | None
    """None if the run did not reach it."""
    steps_to_accuracy: float | None
    seconds_per_step: float
    """The median."""

    @classmethod
    def of(cls, arm: str, rate: float, seed: int, rows: Sequence[dict[str, float]]) -> Curve:
        spent = [0.0]
        for row in rows:
            if row["step"] > 0:
                spent.append(spent[-1] + row["perf/step_time"])
        evaluated = [row for row in rows if "eval/accuracy" in row]
        reached = crossing(rows, ACCURACY)
        return cls(
            arm=arm,
            rate=rate,
            seed=seed,
            steps=[int(row["step"]) for row in evaluated],
            seconds=[round(spent[int(row["step"])], 3) for row in evaluated],
            accuracy=[row["eval/accuracy"] for row in evaluated],
            seconds_to_accuracy=None if reached is None else float(np.interp(reached, range(len(spent)), spent)),
            steps_to_accuracy=reached,
            seconds_per_step=statistics.median(np.diff(spent)),
        )

    def at(self, seconds: np.ndarray) -> np.ndarray:
        """Accuracy at these times, on the lines between evaluations: [times] float."""
        return np.interp(seconds, self.seconds, self.accuracy)


Wanted = tuple[str, float, int]
"""An arm, a learning rate and a seed."""


def train_all(wanted: Sequence[Wanted], *, jobs: int) -> list[Curve]:
    """One run for each, in this order, ``jobs`` at a time."""
    folder = Path(tempfile.mkdtemp(prefix="speed-curve-"))

    def curve(place: int) -> Curve:
        name, rate, seed = wanted[place]
        arm = ARMS[name]
        own = (f"optimizer.lr={rate}", f"run.steps={arm.steps}", f"eval.every={arm.evaluate}", *arm.settings)
        return Curve.of(name, rate, seed, trained([*COMMON, *own], folder / str(place), seed=seed))

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(curve, range(len(wanted))))
    finally:
        shutil.rmtree(folder)


def origin(option: str) -> dict[str, str]:
    """The command, commit, processor and date of a stored measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = f"{len(models)} cores, {models[0].partition(':')[2].strip()}"
    date = datetime.now(UTC).date().isoformat()
    command = f"python benchmarks/speed_curve.py {option}"
    return {"command": command, "commit": commit.stdout.strip(), "processor": processor, "date": date}


def steps_by_rate(rows: Sequence[dict[str, Any]], name: str) -> dict[float, float]:
    """An arm's steps to the accuracy by rate: geometric mean over seeds, infinite if one did not reach it."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["arm"] == name:
            found.setdefault(row["rate"], []).append(row["steps_to_accuracy"] or math.inf)
    return {rate: math.exp(statistics.fmean(map(math.log, steps))) for rate, steps in found.items()}


def tune(*, jobs: int) -> dict[str, Any]:
    """Each arm's best rate, stored with the runs that found it."""
    report = json.loads(TUNING.read_text()) if TUNING.exists() else {**origin("--tune"), "rates": {}, "runs": []}
    rows = report["runs"]
    first, second = TUNING_SEEDS

    def run(wanted: Sequence[Wanted]) -> None:
        have = {(row["arm"], row["rate"], row["seed"]) for row in rows}
        missing = [each for each in wanted if each not in have]
        for start in range(0, len(missing), jobs):
            for curve in train_all(missing[start : start + jobs], jobs=jobs):
                kept = ("arm", "rate", "seed", "seconds_to_accuracy", "steps_to_accuracy")
                rows.append({key: getattr(curve, key) for key in kept} | {"final_accuracy": curve.accuracy[-1]})
            store(TUNING, report)

    run([(name, rate, first) for rate in RATES for name in ARMS])
    for name in ARMS:
        while True:
            steps = steps_by_rate([row for row in rows if row["seed"] == first], name)
            best = min(steps, key=steps.__getitem__)
            further = best * 1.5 if best == max(steps) else best / 1.5 if best == min(steps) else None
            if further is None:
                break
            run([(name, float(f"{further:.2g}"), first)])
        run([(name, rate, second) for rate in sorted(steps, key=steps.__getitem__)[:2]])
    for name in ARMS:
        twice = {row["rate"] for row in rows if row["arm"] == name and row["seed"] == second}
        steps = {rate: mean for rate, mean in steps_by_rate(rows, name).items() if rate in twice}
        report["rates"][name] = min(steps, key=steps.__getitem__)
    store(TUNING, report)
    return report


def summary(runs: Sequence[Curve]) -> dict[str, Any]:
    """By arm: settings, seconds to the accuracy, and its ratios to the full batch and to the best smaller batch."""
    table: dict[str, dict[str, Any]] = {}
    for name in ARMS:
        own = [run for run in runs if run.arm == name]
        reached = [run.seconds_to_accuracy for run in own if run.seconds_to_accuracy is not None]
        table[name] = {
            "settings": [f"optimizer.lr={own[0].rate}", *ARMS[name].settings],
            "seconds_per_step": statistics.median(run.seconds_per_step for run in own),
            "seconds_to_accuracy": statistics.geometric_mean(reached) if reached else None,
            "reached": len(reached),
            "step_time_ratio": ratio(runs, name, "seconds_per_step", baseline=FULL),
            "time_ratio": ratio(runs, name, "seconds_to_accuracy", baseline=FULL),
        }
    best = min(SMALLER, key=lambda name: (-table[name]["reached"], table[name]["seconds_to_accuracy"] or math.inf))
    for name, row in table.items():
        row["time_ratio_to_smaller"] = ratio(runs, name, "seconds_to_accuracy", baseline=best)
    return {"accuracy": ACCURACY, "seeds": len(SEEDS), "smaller": best, "arms": table}


def draw(report: dict[str, Any], file: Path) -> None:
    """The picture: each arm's mean over seeds as a line, the range of its seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [Curve(**run) for run in report["runs"]]
    end = min(run.seconds[-1] for run in runs)
    times = np.linspace(0, end, 200)
    with pyplot.rc_context({"font.size": 13, "font.family": "DejaVu Sans"}):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        drawn = [name for name in report["arms"] if name not in SMALLER or name == report["smaller"]]
        for name, (colour, line) in zip(drawn, LOOKS, strict=True):
            accuracy = 100 * np.array([run.at(times) for run in runs if run.arm == name])
            (rate,) = {run.rate for run in runs if run.arm == name}
            label = f"{name} (learning rate {1e4 * rate:.3g}e-4)"
            axes.plot(times, accuracy.mean(axis=0), line, color=colour, linewidth=2.5, label=label)
            axes.fill_between(times, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.13, linewidth=0)
        axes.axhline(100 * report["accuracy"], color="black", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, end), xlabel="seconds of training, one core a run (line: mean, band: range of five seeds)")
        axes.set(ylim=(0, 100), ylabel="held-out accuracy [%]")
        axes.legend(loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=110, facecolor="white")


def store(file: Path, report: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="find each arm's learning rate")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the stored curve, and train nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--json", action="store_true", help="print the JSON object alone, as always")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(CURVE.read_text()), options.draw)
        return
    if options.tune:
        report = tune(jobs=options.jobs)
    else:
        rates = json.loads(TUNING.read_text())["rates"]
        runs = train_all([(name, rates[name], seed) for seed in SEEDS for name in ARMS], jobs=options.jobs)
        report = {**origin("--json"), **summary(runs)}
        store(CURVE, {**report, "runs": [asdict(run) for run in runs]})
    print(json.dumps(report))


if __name__ == "__main__":
    main()

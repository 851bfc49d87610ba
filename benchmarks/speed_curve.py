"""Held-out accuracy over seconds: unpruned GRPO, the best smaller unpruned batch, and two strengths of pruning.

A pruned step is cheaper and noisier. So is a step of fewer prompts, without any pruning: that is the control. All arms
train the quickstart's policy, which ``scripts/quickstart.sh`` warms up, on one rank with one thread, two runs at a
time. Seconds are those of the steps, without start-up and evaluations.

``--tune`` trains every arm at every rate of ``RATES`` on two seeds, and stores each run's steps and seconds to 60%.
Without it, the script takes each arm's best rate and the best smaller batch from there, trains the four arms on five
other seeds, and stores every run's evaluations. ``--draw`` makes the picture from the stored file, and trains nothing.

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
"""Learning rates in steps of 1.5. An arm whose best is the first or the last has not been tuned."""
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


FULL, DEFAULT, STRONGLY = "unpruned, 64 prompts", "pruned, default", "pruned, strong"
SMALLER = {f"unpruned, {arm.prompts} prompts": arm for arm in (
    smaller(32, steps=80, evaluate=3), smaller(20, steps=125, evaluate=5), smaller(13, steps=180, evaluate=7)
)}  # fmt: skip
ARMS = {
    FULL: smaller(64, steps=40, evaluate=2),
    **SMALLER,
    DEFAULT: Arm((), 64, steps=60, evaluate=2),
    STRONGLY: Arm(STRONG, 64, steps=140, evaluate=5),
}


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


def train_all(wanted: Sequence[tuple[str, float, int]], *, jobs: int, quiet: bool) -> list[Curve]:
    """One run for each (arm, rate, seed), in this order, ``jobs`` at a time."""
    folder = Path(tempfile.mkdtemp(prefix="speed-curve-"))

    def curve(place: int) -> Curve:
        name, rate, seed = wanted[place]
        arm = ARMS[name]
        own = (f"optimizer.lr={rate}", f"run.steps={arm.steps}", f"eval.every={arm.evaluate}", *arm.settings)
        found = Curve.of(name, rate, seed, trained([*COMMON, *own], folder / str(place), seed=seed))
        if not quiet:
            print(f"{name:<22} rate {rate:.3g} seed {seed}: {found.seconds_to_accuracy} s to {ACCURACY:.0%}, "
                  f"{found.steps_to_accuracy} steps, {found.accuracy[-1]:.3f} at the end", flush=True)  # fmt: skip
        return found

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(curve, range(len(wanted))))
    finally:
        shutil.rmtree(folder)


def origin(command: str) -> dict[str, str]:
    """Where a stored measurement comes from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = f"{len(models)} cores, {models[0].partition(':')[2].strip()}"
    date = datetime.now(UTC).date().isoformat()
    return {"command": command, "commit": commit.stdout.strip(), "processor": processor, "date": date}


def best_rates(runs: Sequence[Curve]) -> dict[str, float]:
    """Each arm's rate with the fewest steps to the accuracy, among those at which every seed reached it."""
    best: dict[str, tuple[float, float]] = {}
    for name, rate in dict.fromkeys((run.arm, run.rate) for run in runs):
        steps = [run.steps_to_accuracy for run in runs if (run.arm, run.rate) == (name, rate)]
        if None not in steps:
            mean = statistics.geometric_mean(steps)
            best[name] = min(best.get(name, (math.inf, rate)), (mean, rate))
    return {name: rate for name, (_, rate) in best.items()}


def best_smaller(runs: Sequence[Curve], rates: dict[str, float]) -> str:
    """The smaller batch that reaches the accuracy in the fewest seconds, at its best rate."""

    def seconds(name: str) -> float:
        own = [run for run in runs if run.arm == name]
        step = statistics.median(run.seconds_per_step for run in own)
        return step * statistics.geometric_mean(run.steps_to_accuracy for run in own if run.rate == rates[name])

    return min((name for name in SMALLER if name in rates), key=seconds)


def summary(runs: Sequence[Curve], arms: Sequence[str]) -> dict[str, Any]:
    """By arm: settings, seconds to the accuracy, and both ratios to both unpruned arms."""
    few = next(name for name in arms if name in SMALLER)
    table: dict[str, Any] = {}
    for name in arms:
        own = [run for run in runs if run.arm == name]
        reached = [run.seconds_to_accuracy for run in own if run.seconds_to_accuracy is not None]
        table[name] = {
            "settings": [f"optimizer.lr={own[0].rate}", *ARMS[name].settings],
            "seconds_per_step": round(statistics.median(run.seconds_per_step for run in own), 4),
            "seconds_to_accuracy": round(statistics.geometric_mean(reached), 2) if reached else None,
            "reached": len(reached),
            "step_time_ratio": ratio(runs, name, "seconds_per_step", baseline=FULL),
            "time_ratio": ratio(runs, name, "seconds_to_accuracy", baseline=FULL),
            "time_ratio_to_smaller": ratio(runs, name, "seconds_to_accuracy", baseline=few),
        }
    return {"accuracy": ACCURACY, "seeds": len({run.seed for run in runs}), "smaller": few, "arms": table}


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
        for (name, arm), (colour, line) in zip(report["arms"].items(), LOOKS, strict=True):
            accuracy = 100 * np.array([run.at(times) for run in runs if run.arm == name])
            label = f"{name} (rate {float(arm['settings'][0].removeprefix('optimizer.lr=')):.3g})"
            axes.plot(times, accuracy.mean(axis=0), line, color=colour, linewidth=2.5, label=label)
            axes.fill_between(times, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.13, linewidth=0)
        axes.axhline(100 * report["accuracy"], color="black", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, end), xlabel="seconds of training, one core a run")
        axes.set(ylim=(0, 100), ylabel="held-out accuracy [%]")
        axes.legend(loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=110, facecolor="white")


def stored(file: Path, report: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def tuned(path: Path = TUNING) -> tuple[dict[str, float], str]:
    """Each arm's best rate, and the best smaller batch, from the stored tuning runs."""
    runs = [Curve(**run) for run in json.loads(path.read_text())["runs"]]
    rates = best_rates(runs)
    return rates, best_smaller(runs, rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="train every arm at every rate, and store that")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the stored curve, and train nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(CURVE.read_text()), options.draw)
        return
    if options.tune:
        wanted = [(name, rate, seed) for seed in TUNING_SEEDS for rate in RATES for name in ARMS]
        runs = train_all(wanted, jobs=options.jobs, quiet=options.json)
        report = {**origin("python benchmarks/speed_curve.py --tune"), "rates": best_rates(runs)}
        stored(TUNING, {**report, "runs": [asdict(run) for run in runs]})
    else:
        rates, few = tuned()
        names = [FULL, few, DEFAULT, STRONGLY]
        wanted = [(name, rates[name], seed) for seed in SEEDS for name in names]
        runs = train_all(wanted, jobs=options.jobs, quiet=options.json)
        report = {**origin("python benchmarks/speed_curve.py --json"), **summary(runs, names)}
        stored(CURVE, {**report, "runs": [asdict(run) for run in runs]})
    print(json.dumps(report))


if __name__ == "__main__":
    main()

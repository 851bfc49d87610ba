"""Seconds to a held-out accuracy at the best learning rate of each arm: pruned, with smaller
batches, and with smaller groups.

    python benchmarks/time_to_accuracy.py [--task word_problems] [--seeds 5] [--jobs 2] [--json]
    python benchmarks/time_to_accuracy.py --group-sizes --seeds 10 [--jobs 2] [--json]

The design was fixed before the first run. Later changes: the default pruning changed twice, and
``default`` was tuned again each time; the accuracy for word problems changed once, after 21 tuning
runs.

- All arms start from the task's warmed-up policy, and differ in ``pruning.*``, in prompts per step
  and in the constant learning rate. The result is the time until held-out accuracy reaches
  ``Task.accuracy``: 90% of the gain of 36 steps of the largest unpruned batch in a first run (on
  word problems, in two). A run that misses ``Task.accuracy`` within the work of ``--steps`` steps
  of the largest unpruned batch counts with all seconds of the run.
- **Tuning**: each arm at three learning rates on one seed. While the fastest rate is the lowest or
  the highest, a further rate beyond is tried. The two fastest rates then have a second seed. The
  least geometric mean over both seeds wins.
- **Measuring**: ``--seeds`` further seeds, unused in any choice. Ratios are paired by seed; an
  interval is of the geometric mean of ratios (Student's t). All arms are compared with the unpruned
  batch that was fastest in tuning. ``best_time_ratio`` is of the pruned arm that was fastest in
  tuning.
- ``EQUAL_NOISE`` is not tuned: learning rate, prompts and number of steps of the best unpruned
  batch, with ``pruning.target_noise=1``. Both arms train to the end, on ``--equal-noise-seeds``, to
  compare seconds of whole runs and final accuracies. (On sums, 10 and then 5 seeds were added after
  the first 5, whose interval was ±0.086.)
- ``--group-sizes`` compares groups of 4 and of 8, each unpruned at three batches and under the
  default pruning. Ten seeds, fixed after ``group_size.py`` and before the first of these runs.
- Seconds are s₀·steps + s₁·(tokens generated) + s₂·(tokens trained on), fitted to the wall-clock
  seconds of all runs in the store, so that other work on the machine affects no single arm.
  ``costs.error`` is the mean relative error between two evaluations. Evaluations, checkpoints and
  start-up do not count.
- Each arm is evaluated after every twentieth of the arm's work, on 400 word
  problems or 200 sums; accuracy is interpolated between evaluations.

Every run is appended to ``--store``. A repeated call skips stored runs.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from arms import UNPRUNED, neyman, pruning
from harness import arguments, finish, mean_and_reach, paired_ratio
from timed_runs import (
    Costs,
    Point,
    Run,
    Store,
    name_task,
    points,
    read_settings,
    train,
)
from word_problems import prepared

from megatron_dppo.data.generators import make_sums
from megatron_dppo.settings import load_config

FACTOR = 1.5
"""Ratio of neighbouring learning rates."""
TUNING_SEEDS = 101, 102
EVALUATIONS = 20
DEFAULT = "prompts 0.85, tokens auto, weights to 10"
EQUAL_NOISE = f"{DEFAULT}, noise 1"
"""Not tuned; has the prompts and the group size of the best unpruned batch."""
QUICKSTART = Path("configs/quickstart.yaml")
PROBLEMS = 400
"""Most held-out problems per evaluation; the quickstart holds out 200 sums."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings of a training."""

    prompts: int
    """Prompts per step, before pruning."""
    cost: float
    """Approximate seconds of a step, relative to the largest unpruned batch: sets the number of
    steps of equal work."""
    lr: float
    """Middle of the first three learning rates."""
    settings: tuple[str, ...]
    """``pruning.*``"""
    samples: int = 8
    """Completions per prompt."""


ALL_PROMPTS = {
    f"unpruned, {n} prompts": Arm(n, n / 64, lr, UNPRUNED)
    for n, lr in ((64, 3.4e-4), (32, 2.3e-4), (16, 1.5e-4), (8, 1e-4))
}
GROUPS_OF_4 = {
    f"unpruned, {n} prompts × 4": Arm(n, n / 128, lr, UNPRUNED, samples=4)
    for n, lr in ((64, 2.3e-4), (32, 1.5e-4), (16, 1e-4))
} | {f"{DEFAULT}, 64 prompts × 4": Arm(64, 0.32, 1.5e-4, neyman(0.85, "auto"), samples=4)}
ARMS: dict[str, Arm] = ALL_PROMPTS | {
    f"{DEFAULT}, 32 prompts": Arm(32, 0.32, 1.5e-4, neyman(0.85, "auto")),
    "prompts 0.7, tokens auto, weights to 10, 32 prompts": Arm(
        32, 0.28, 1.5e-4, neyman(0.7, "auto")
    ),
    "prompts 0.7, tokens 0.5, weights to 5, 32 prompts": Arm(
        32, 0.32, 1.5e-4, neyman(0.7, 0.5, max_weight=5.0)
    ),
    "prompts 0.7, tokens 0.3, weights to 10, 32 prompts": Arm(32, 0.27, 1.5e-4, neyman(0.7, 0.3)),
    "prompts 0.4, tokens 0.3, weights to 10, 64 prompts": Arm(64, 0.32, 1.5e-4, neyman(0.4, 0.3)),
    "DPPO: threshold, r 0.3 / 0.5, weights to 10, 32 prompts": Arm(
        32, 0.33, 1.5e-4, pruning("threshold", "threshold", keep=(0.7, 0.5))
    ),
    "DPPO: threshold, r 0.15 / 0.5, weights to 10, 32 prompts": Arm(
        32, 0.33, 1.5e-4, pruning("threshold", "threshold", keep=(0.85, 0.5))
    ),
    "CPPO: top_k 0.5, divided by all, 32 prompts": Arm(
        32, 0.4, 1.5e-4, pruning(completions="top_k", keep=(1.0, 0.5))
    ),
    "GRESO: greso, not refilled, 32 prompts": Arm(
        32, 0.47, 1.5e-4, pruning("greso", keep=(0.5, 1.0))
    ),
    "DAPO: dynamic_sampling, 32 prompts": Arm(32, 0.8, 1.5e-4, pruning("dynamic_sampling")),
    **GROUPS_OF_4,
}
GROUP_SIZES = {
    *GROUPS_OF_4,
    *(f"unpruned, {n} prompts" for n in (32, 16, 8)),
    f"{DEFAULT}, 32 prompts",
}
ON_SUMS_ALONE = {
    name for name in ARMS if name.startswith(("prompts 0.7", "DPPO: threshold, r 0.3"))
}
ON_WORD_PROBLEMS_ALONE = {name for name in ARMS if name.startswith("DPPO: threshold, r 0.15")}


@dataclass(frozen=True, slots=True)
class Task:
    """Common properties of all arms."""

    policy: Path
    settings: Sequence[str]
    accuracy: float
    """Target accuracy."""
    version: str
    """Name of problems and policy in the store."""

    @classmethod
    def named(cls, name: str) -> Task:
        """Return the task of this name; create missing files."""
        folder = Path("runs") / name
        if name == "word_problems":
            made = prepared(folder)
            # Two first runs went from 24.5% to 74.5%.
            version = name_task("word problems", folder)
            return cls(made.policy, made.settings, 0.695, version)
        folder.mkdir(parents=True, exist_ok=True)
        train, held_out = make_sums(load_config(str(QUICKSTART), ()).data.arithmetic)
        for file, sums in (("train", train), ("held_out", held_out[:PROBLEMS])):
            rows = [json.dumps({"prompt": each.question, "label": each.label}) for each in sums]
            (folder / f"{file}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        # scripts/quickstart.sh makes the policy. The first run went from 10.5% to 86%.
        policy = Path("runs/quickstart/warm")
        return cls(policy, ("layout.tp=1",), 0.78, name_task("sums", folder))


class Measurement:
    """Runs of a call, in the order of the design."""

    def __init__(self, task: Task, options: Any) -> None:
        self.task = task
        self.options = options
        default = Path(f"benchmarks/results/time_to_accuracy_{options.task}.jsonl")
        self.store = Store(options.store or default)
        left_out = ON_WORD_PROBLEMS_ALONE if options.task == "sums" else ON_SUMS_ALONE
        wanted = options.arms or ARMS.keys() - left_out - GROUPS_OF_4.keys()
        if options.group_sizes:
            wanted = GROUP_SIZES
        self.arms = {name: arm for name, arm in ARMS.items() if name in wanted}
        self.folder = Path(tempfile.mkdtemp(prefix="time-to-accuracy-"))
        self.pool = ThreadPoolExecutor(options.jobs)

    def steps(self, own: Arm) -> int:
        return math.ceil(self.options.steps / own.cost)

    def words(self, own: Arm, lr: float) -> list[str]:
        """Return the overrides of a training."""
        steps = self.steps(own)
        return [
            *self.task.settings,
            f"model.path={self.task.policy}",
            f"run.steps={steps}",
            f"optimizer.lr={lr:g}",
            f"rollout.prompts_per_step={own.prompts}",
            f"rollout.samples_per_prompt={own.samples}",
            f"eval.every={max(steps // EVALUATIONS, 1)}",
            f"eval.problems={PROBLEMS}",
            *own.settings,
        ]

    def run(self, name: str, own: Arm, lr: float, seed: int, *, whole: bool = False) -> Run:
        """Return the stored run, or train. Unless ``whole``, a training ends once the accuracy is
        reached."""
        words = self.words(own, lr)
        settings = read_settings(str(self.options.config), tuple(words))
        found = self.store.find(self.task.version, seed, settings)
        if found and (not whole or found.points[-1].step == self.steps(own)):
            return found

        def has_reached(rows: Sequence[dict[str, float]]) -> bool:
            accuracies = (row.get("eval/accuracy", 0.0) for row in rows)
            return any(accuracy >= self.task.accuracy for accuracy in accuracies)

        folder = self.folder / f"{len(name)}-{own.prompts}-{lr}-{seed}-{threading.get_ident()}"
        stop = None if whole else has_reached
        rows = train(self.options.config, [*words, f"run.seed={seed}"], folder, stop)
        run = Run(self.task.version, name, seed, settings, list(points(rows)))
        self.store.add(run)
        shutil.rmtree(folder, ignore_errors=True)
        accuracies = [f"{point.accuracy:.2f}" for point in run.points]
        print(name, f"{lr:g}", seed, *accuracies, file=sys.stderr, flush=True)
        return run

    def run_all(self, wanted: Iterable[tuple[str, Arm, float, int]]) -> list[Run]:
        return list(self.pool.map(lambda each: self.run(*each), wanted))

    def costs(self) -> Costs:
        """Fit costs to the stored runs of ``ARMS`` and ``EQUAL_NOISE``."""
        fitted = ARMS.keys() | {EQUAL_NOISE}
        own = (run for run in self.store if run.task == self.task.version)
        return Costs.of(run for run in own if run.arm in fitted)

    def mean_seconds(self, name: str, lr: float, seeds: Sequence[int]) -> float:
        to = self.costs().to
        return statistics.geometric_mean(
            to(self.run(name, ARMS[name], lr, seed), self.task.accuracy) for seed in seeds
        )

    def sort_rates(self, name: str, rates: Iterable[float], seeds: Sequence[int]) -> list[float]:
        """Sort learning rates of an arm, the fastest first."""
        return sorted(rates, key=lambda lr: self.mean_seconds(name, lr, seeds))

    def tune(self) -> dict[str, float]:
        """Return the best learning rate of each arm."""
        first, second = TUNING_SEEDS
        rates: dict[str, list[float]] = {}
        for name, own in self.arms.items():
            rates[name] = [rate(own.lr, by) for by in (-1, 0, 1)]
        further = [(name, lr) for name, tried in rates.items() for lr in tried]
        while True:
            self.run_all((name, self.arms[name], lr, first) for name, lr in further)
            order = {name: self.sort_rates(name, rates[name], [first]) for name in rates}
            further = []
            for name, tried in rates.items():
                fastest = order[name][0]
                if fastest == max(tried):
                    further.append((name, rate(fastest, 1)))
                elif fastest == min(tried):
                    further.append((name, rate(fastest, -1)))
            if not further:
                break
            for name, lr in further:
                rates[name].append(lr)
        candidates = {name: order[name][:2] for name in rates}
        self.run_all(
            (name, self.arms[name], lr, second) for name, both in candidates.items() for lr in both
        )
        best = {}
        for name, both in candidates.items():
            best[name] = self.sort_rates(name, both, TUNING_SEEDS)[0]
        return best

    def tuning(self, name: str) -> dict[str, list[float]]:
        """Return seconds to the accuracy on each tuning seed, by learning rate."""
        to = self.costs().to
        tried: dict[str, list[float]] = {}
        for run in sorted(self.store, key=lambda run: (run.lr, run.seed)):
            if run.arm == name and run.seed in TUNING_SEEDS:
                seconds = to(run, self.task.accuracy)
                tried.setdefault(f"{run.lr:g}", []).append(seconds)
        return tried

    def best(self, rates: dict[str, float], names: Iterable[str]) -> str:
        return min(names, key=lambda name: self.mean_seconds(name, rates[name], TUNING_SEEDS))

    def result(self) -> dict[str, Any]:
        rates = self.tune()
        unpruned = [name for name in self.arms if name.startswith("unpruned")]
        control = self.best(rates, unpruned)
        like = self.arms[control]
        settings = neyman(0.85, "auto", target_noise=1.0)
        equal_noise = replace(like, lr=rates[control], settings=settings)
        arms = self.arms | {EQUAL_NOISE: equal_noise}
        rates[EQUAL_NOISE] = rates[control]
        seeds = range(1, 1 + self.options.seeds)
        for seed in seeds:
            jobs = []
            for name, arm in arms.items():
                whole = name in (control, EQUAL_NOISE)
                jobs.append(partial(self.run, name, arm, rates[name], seed, whole=whole))
            list(self.pool.map(lambda job: job(), jobs))
        further = range(1, 1 + max(self.options.equal_noise_seeds, self.options.seeds))
        ends: dict[str, list[Point]] = {}
        for name in (EQUAL_NOISE, control):
            run_whole = partial(self.run, name, arms[name], rates[name], whole=True)
            ends[name] = [run.points[-1] for run in self.pool.map(run_whole, further)]
        costs = self.costs()
        runs: dict[str, list[Run]] = {}
        taken: dict[str, list[float]] = {}
        for name in arms:
            runs[name] = [self.run(name, arms[name], rates[name], seed) for seed in seeds]
            taken[name] = [costs.to(run, self.task.accuracy) for run in runs[name]]
        fastest = self.best(rates, self.arms.keys() - set(unpruned))
        pairs = zip(ends[EQUAL_NOISE], ends[control], strict=True)
        mean, reach = mean_and_reach([noisy.accuracy - end.accuracy for noisy, end in pairs])
        control_seconds = [costs.seconds(end) for end in ends[control]]
        equal_noise_seconds = [costs.seconds(end) for end in ends[EQUAL_NOISE]]
        table = {}
        for name, own in runs.items():
            last = [run.points[-1] for run in own]
            table[name] = {
                "lr": rates[name],
                "seconds": statistics.geometric_mean(taken[name]),
                "seconds_by_seed": taken[name],
                "reached": sum(map(self.reached, own)),
                "time_ratio": paired_ratio(taken[control], taken[name]),
                "step_s": statistics.fmean(costs.seconds(end) / end.step for end in last),
                "tuning": self.tuning(name),
            }
        return {
            "task": self.options.task,
            "accuracy": self.task.accuracy,
            "costs": asdict(costs),
            "control": control,
            "best_pruned": fastest,
            "best_time_ratio": table[fastest]["time_ratio"],
            "equal_noise_time_ratio": table[EQUAL_NOISE]["time_ratio"],
            "equal_noise_run_ratio": paired_ratio(control_seconds, equal_noise_seconds),
            "final_accuracy_difference": {
                "difference": mean,
                "interval": [mean - reach, mean + reach],
                "seeds": len(further),
            },
            "arms": table,
        }

    def reached(self, run: Run) -> bool:
        return any(point.accuracy >= self.task.accuracy for point in run.points)


def rate(lr: float, by: int) -> float:
    """Return the learning rate ``by`` steps away, to two digits."""
    return float(f"{lr * FACTOR**by:.2g}")


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw seconds to the accuracy: a dot per seed, a bar for an arm's geometric mean, the fastest
    arm on top."""
    from matplotlib.figure import Figure

    taken = {name: arm["seconds_by_seed"] for name, arm in found["arms"].items()}
    order = sorted(taken, key=lambda name: -statistics.geometric_mean(taken[name]))
    size = 9, 0.36 * len(order) + 1.1
    figure = Figure(figsize=size, dpi=160, facecolor="white", layout="constrained")
    panel = figure.subplots()
    for row, name in enumerate(order):
        colour = "#64748b" if name.startswith("unpruned") else "#2563eb"
        mean = statistics.geometric_mean(taken[name])
        panel.barh(row, mean, color=colour, alpha=0.35, height=0.7)
        panel.plot(taken[name], [row] * len(taken[name]), "o", color=colour, ms=4)
    panel.set_yticks(range(len(order)), order)
    panel.set_xlim(left=0)
    panel.set_xlabel("seconds", loc="right")
    title = (
        f"Seconds to {found['accuracy']:.0%} held-out accuracy, each arm at its own best "
        "learning rate"
    )
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out)


def main() -> None:
    parser = arguments(
        __doc__,
        config=QUICKSTART,
        seeds=5,
        equal_noise_seeds=15,
        steps=(48, "of the largest unpruned batch, as much work as which a run may take"),
        store=(Path, "all runs; by default a file of the task in benchmarks/results"),
        jobs=(1, "runs at a time"),
        picture=(Path, "where to draw the seconds of all arms"),
    )
    parser.add_argument("--task", choices=("sums", "word_problems"), default="sums")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), metavar="ARM")
    parser.add_argument("--group-sizes", action="store_true", help="compare groups of 4 and 8")
    options = parser.parse_args()
    measurement = Measurement(Task.named(options.task), options)
    try:
        found = measurement.result()
    finally:
        measurement.pool.shutdown(cancel_futures=True)
        shutil.rmtree(measurement.folder)
    if options.picture:
        draw(found, options.picture)
    finish(found, options)


if __name__ == "__main__":
    main()

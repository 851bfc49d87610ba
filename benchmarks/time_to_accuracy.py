"""Seconds to a held-out accuracy, each way to train at its own best learning rate: pruned, and with
smaller batches.

    python benchmarks/time_to_accuracy.py [--task word_problems] [--seeds 5] [--jobs 2] [--json]

The design was fixed before the first run. Since then the default pruning has changed twice;
``default`` was tuned again each time. TRL's arms came later. The accuracy for word problems was
changed once, after 21 tuning runs.

- All arms start from the task's warmed-up policy. They differ in ``pruning.*``, in prompts per step
  and in the learning rate, which is constant. What is compared is the time until held-out accuracy
  reaches ``Task.accuracy``: 90% of what 36 steps of the largest unpruned batch had gained in a
  first run (on word problems, in two). A run that does not reach it within as much work as
  ``--steps`` steps of that batch counts with all its seconds.
- **Tuning**: each arm at three learning rates on one seed. While the fastest is the lowest or the
  highest of them, one more is tried beyond it. The two fastest then have a second seed. The least
  geometric mean over both seeds wins.
- **Measuring**: ``--seeds`` further seeds, on which nothing was chosen. Ratios are paired by seed;
  an interval is that of their geometric mean (Student's t). The unpruned batch that all are
  compared with is the fastest one in tuning, and so is the pruned arm of ``best_time_ratio``.
- ``equal noise`` is not tuned. It has the learning rate, the prompts and the number of steps of the
  best unpruned batch, with ``pruning.target_noise=1``. Both train to the end, on
  ``--equal-noise-seeds``, to compare seconds of whole runs and final accuracies. (On sums, 10 and
  then 5 seeds were added after the first 5, whose interval was ±0.086.)
- Seconds are s₀·steps + s₁·(tokens generated) + s₂·(tokens trained on), fitted to the wall-clock
  seconds of all runs in the store, so that other work on the machine strikes no arm alone.
  ``costs.error`` is the mean relative error between two evaluations. Evaluations, checkpoints and
  start-up do not count.
- **TRL's** GRPOTrainer has arms of its own, tuned in the same way. It has one thread, and counts by
  its processor's seconds. ``over_trl`` compares its best arm with our best pruned arm, seed by
  seed, in runs at the same time (``--jobs 2``), unless one is in the store already. Ours counts by
  the wall clock, which is never less.
- An arm is evaluated after every twentieth of its work, on 400 problems; between evaluations
  accuracy is interpolated.

Every run is appended to ``--store``. Called again, the script goes on where it was.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from against_trl import SAMPLES, trl_python
from against_trl import Arm as Process
from harness import arguments, finish, mean_and_reach, paired_ratio
from timed_runs import Costs, Run, Store, points, seconds_to
from word_problems import prepared

from megatron_dppo.data.generators import make_sums
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.settings import load_config

HERE = Path(__file__).parent
FACTOR = 1.5
"""Between neighbouring learning rates."""
TUNING_SEEDS = 101, 102
EVALUATIONS = 20
EQUAL_NOISE = "equal noise, default"
BESIDE_TRL = "beside TRL: "
QUICKSTART = Path("configs/quickstart.yaml")
WARM_UP = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
"""The quickstart's."""
PROBLEMS = 400
"""Held-out ones of an evaluation."""
TRL_BATCH = 32
"""Sequences of a forward and backward pass of TRL's: 16, 64 and 128 took the same time within
5%."""


def pruned(prompts: str, completions: str, *more: str) -> tuple[str, ...]:
    """The settings of two rules."""
    return (f"pruning.prompts.rule={prompts}", f"pruning.completions.rule={completions}", *more)


SEVEN_TENTHS = ("pruning.prompts.keep=0.7",)
MILD = (*SEVEN_TENTHS, "pruning.completions.keep=0.5", "pruning.max_weight=5")
LESS = ("pruning.completions.keep=0.3",)
FEW = ("pruning.prompts.keep=0.4", *LESS)
FEWER = ("pruning.prompts.keep=0.3", "pruning.prompts.floor=0.15", *LESS)
OFF = pruned("none", "none")


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to train."""

    prompts: int
    """Per step, before pruning."""
    cost: float
    """A step's seconds over those of the largest unpruned batch, roughly: sets how many steps are
    as much work."""
    lr: float
    """The middle one of the first three."""
    settings: tuple[str, ...]
    """``pruning.*``"""
    by_trl: bool = False


UNPRUNED = {
    f"unpruned, {n} prompts": Arm(n, n / 64, lr, OFF)
    for n, lr in ((64, 3.4e-4), (32, 2.3e-4), (16, 1.5e-4), (8, 1e-4))
}
ARMS: dict[str, Arm] = UNPRUNED | {
    "default, 32 prompts": Arm(32, 0.32, 1.5e-4, ()),
    "prompts 0.7, tokens auto, 32 prompts": Arm(32, 0.28, 1.5e-4, SEVEN_TENTHS),
    "prompts 0.7, tokens 0.5, weights to 5, 32 prompts": Arm(32, 0.32, 1.5e-4, MILD),
    "prompts 0.7, tokens 0.3, 32 prompts": Arm(32, 0.27, 1.5e-4, (*SEVEN_TENTHS, *LESS)),
    "prompts 0.4, tokens 0.3, 64 prompts": Arm(64, 0.32, 1.5e-4, FEW),
    "threshold (DPPO's paper), 32 prompts": Arm(32, 0.33, 1.5e-4, pruned("threshold", "threshold")),
    "top_k (CPPO), 32 prompts": Arm(32, 0.4, 1.5e-4, pruned("none", "top_k")),
    "greso, 32 prompts": Arm(32, 0.47, 1.5e-4, pruned("greso", "none")),
    "dynamic sampling (DAPO), 32 prompts": Arm(32, 0.8, 1.5e-4, pruned("dynamic_sampling", "none")),
}
TRL = {
    f"TRL, {n} prompts": Arm(n, n / 32, lr, (), by_trl=True)
    for n, lr in ((32, 1.5e-4), (16, 1e-4), (8, 6.7e-5))
}
ALL = ARMS | TRL
ON_SUMS_ALONE = {*TRL, *(name for name in ARMS if name.startswith("prompts 0.7"))}


@dataclass(frozen=True, slots=True)
class Task:
    """What all arms have in common."""

    policy: Path
    settings: Sequence[str]
    accuracy: float
    """To be reached."""
    max_response_tokens: int
    folder: Path
    """With ``train.jsonl`` and ``load_problems.jsonl``, TRL's problems."""

    @classmethod
    def named(cls, name: str) -> Task:
        """The task by its name, with what it needs made where it is not there yet."""
        folder = Path("runs") / name
        if name == "word_problems":
            made = prepared(folder)
            return cls(
                made.policy, made.settings, 0.695, 96, folder
            )  # two first runs: from 24.5% to 74.5%
        folder.mkdir(parents=True, exist_ok=True)
        for file, sums in zip(
            ("train", "held_out"),
            make_sums(load_config(str(QUICKSTART), ()).data.arithmetic),
            strict=True,
        ):
            rows = [json.dumps({"prompt": each.question, "label": each.label}) for each in sums]
            del rows[PROBLEMS if file == "held_out" else len(rows) :]
            (folder / f"{file}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        # the policy is scripts/quickstart.sh's; from 10.5% to 86%
        return cls(Path("runs/quickstart/warm"), ("layout.tp=1",), 0.78, 64, folder)


class Measurement:
    """The runs of a call, in the order of the design."""

    def __init__(self, task: Task, options: Any) -> None:
        self.task, self.options = task, options
        self.store = Store(
            options.store or Path(f"benchmarks/results/time_to_accuracy_{options.task}.jsonl")
        )
        wanted = options.arms or (ALL if options.task == "sums" else ALL.keys() - ON_SUMS_ALONE)
        self.arms = {name: arm for name, arm in ALL.items() if name in wanted}
        self.folder = Path(tempfile.mkdtemp(prefix="time-to-accuracy-"))
        self.pool = ThreadPoolExecutor(options.jobs)

    def run(self, name: str, own: Arm, lr: float, seed: int, *, whole: bool = False) -> Run:
        """One training, unless the store has it; it ends when it has reached the accuracy, if not
        wanted whole."""
        if found := self.store.runs.get((name, lr, seed)):
            return found
        folder = self.folder / f"{len(name)}-{own.prompts}-{lr}-{seed}-{threading.get_ident()}"
        steps = math.ceil(self.options.steps / own.cost)
        found = self.by_trl if own.by_trl else partial(self.by_us, whole=whole)
        run = Run(name, lr, seed, list(points(found(own, lr, seed, steps, folder))))
        if len(run.points) < 2:
            raise SystemExit(f"{name}: {folder.with_suffix('.log').read_text(encoding='utf-8')}")
        self.store.add(run)
        shutil.rmtree(folder, ignore_errors=True)
        print(
            name,
            f"{lr:g}",
            seed,
            *(f"{p.accuracy:.2f}" for p in run.points),
            file=sys.stderr,
            flush=True,
        )
        return run

    def by_us(
        self, own: Arm, lr: float, seed: int, steps: int, folder: Path, *, whole: bool
    ) -> list[dict[str, float]]:
        words = [
            *self.task.settings,
            f"model.path={self.task.policy}",
            f"run.dir={folder}",
            f"run.seed={seed}",
        ]
        words += [
            f"run.steps={steps}",
            f"optimizer.lr={lr:g}",
            f"rollout.prompts_per_step={own.prompts}",
        ]
        words += [f"eval.every={max(steps // EVALUATIONS, 1)}", f"eval.problems={PROBLEMS}"]
        words += ["run.export=false", "run.checkpoint_every=0", *own.settings]
        command = [sys.executable, "-m", "megatron_dppo", "train", str(self.options.config), *words]
        with folder.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            while process.poll() is None:
                time.sleep(0.5)
                if (
                    not whole
                    and folder.exists()
                    and any(
                        row.get("eval/accuracy", 0.0) >= self.task.accuracy
                        for row in read_metrics(folder)
                    )
                ):
                    process.terminate()
                    process.wait()
                    break
        return read_metrics(folder)

    def by_trl(
        self, own: Arm, lr: float, seed: int, steps: int, folder: Path
    ) -> list[dict[str, float]]:
        """The rows of a training by TRL's GRPOTrainer: each step's seconds, and the accuracy where
        it was evaluated."""
        asked = {
            "policy": str(self.task.policy), "pool": str(self.task.folder / "train.jsonl"),
            "prompts": own.prompts,
            "samples": SAMPLES, "max_response_tokens": self.task.max_response_tokens,
            "steps": steps, "lr": lr,
            "batch": TRL_BATCH, "threads": 1, "reward": "exact",
            "settings": WARM_UP | {"seed": seed},
            "held_out": str(self.task.folder / "held_out.jsonl"),
            "evaluate_every": max(steps // EVALUATIONS, 1),
        }  # fmt: skip
        trained = Process(
            "TRL",
            [trl_python(), str(HERE / "trl_run.py"), json.dumps(asked)],
            folder.with_suffix(".log"),
        )
        try:
            rows = [{"step": 0, "eval/accuracy": trained.heard()["accuracy"]}]
            for step in range(1, steps + 1):
                trained.take_step()
                told = trained.steps[-1]
                rows.append({"step": step, "perf/step_time": told["cpu_seconds"]})
                if "accuracy" in told:
                    rows[-1]["eval/accuracy"] = told["accuracy"]
                    if told["accuracy"] >= self.task.accuracy:
                        break
        finally:
            trained.process.kill()
        return rows

    def every(self, wanted: Iterable[tuple[str, Arm, float, int]]) -> list[Run]:
        return list(self.pool.map(lambda each: self.run(*each), wanted))

    def costs(self) -> Costs:
        """Of the runs that count by them."""
        return Costs.of(
            run for run in self.store.runs.values() if run.arm in ARMS or run.arm == EQUAL_NOISE
        )

    def mean_seconds(self, name: str, lr: float, seeds: Sequence[int]) -> float:
        to = seconds_to if ALL[name].by_trl else self.costs().to
        return statistics.geometric_mean(
            to(self.store.runs[name, lr, seed], self.task.accuracy) for seed in seeds
        )

    def tune(self) -> dict[str, float]:
        """The best learning rate of each arm."""
        first, second = TUNING_SEEDS
        rates = {name: [rate(own.lr, by) for by in (-1, 0, 1)] for name, own in self.arms.items()}
        self.every(
            (name, self.arms[name], lr, first) for name, all_of in rates.items() for lr in all_of
        )
        while True:
            order = {
                n: sorted(all_of, key=lambda lr, n=n: self.mean_seconds(n, lr, [first]))
                for n, all_of in rates.items()
            }
            further = [
                (name, rate(order[name][0], 1 if order[name][0] == max(all_of) else -1))
                for name, all_of in rates.items()
                if order[name][0] in (min(all_of), max(all_of))
            ]
            if not further:
                break
            self.every((name, self.arms[name], lr, first) for name, lr in further)
            for name, lr in further:
                rates[name].append(lr)
        self.every((name, self.arms[name], lr, second) for name in rates for lr in order[name][:2])
        return {
            name: min(
                order[name][:2], key=lambda lr, n=name: self.mean_seconds(n, lr, TUNING_SEEDS)
            )
            for name in rates
        }

    def tuning(self, name: str) -> dict[str, list[float]]:
        """Seconds to the accuracy on each tuning seed, by learning rate."""
        to, runs = seconds_to if name in TRL else self.costs().to, self.store.runs
        tried: dict[str, list[float]] = {}
        for arm, lr, seed in sorted(runs):
            if arm == name and seed in TUNING_SEEDS:
                tried.setdefault(f"{lr:g}", []).append(to(runs[arm, lr, seed], self.task.accuracy))
        return tried

    def best(self, rates: dict[str, float], names: Iterable[str]) -> str:
        return min(names, key=lambda name: self.mean_seconds(name, rates[name], TUNING_SEEDS))

    def result(self) -> dict[str, Any]:
        rates = self.tune()
        control = self.best(rates, [name for name in self.arms if name in UNPRUNED])
        like, own_arms = (
            self.arms[control],
            {name: arm for name, arm in self.arms.items() if not arm.by_trl},
        )
        arms = own_arms | {
            EQUAL_NOISE: Arm(like.prompts, like.cost, rates[control], ("pruning.target_noise=1",))
        }
        rates[EQUAL_NOISE] = rates[control]
        seeds = range(1, 1 + self.options.seeds)
        for seed in seeds:
            whole = {name: name in (control, EQUAL_NOISE) for name in arms}
            jobs = [
                partial(self.run, name, arms[name], rates[name], seed, whole=whole[name])
                for name in arms
            ]
            list(self.pool.map(lambda job: job(), jobs))
        further = range(1, 1 + max(self.options.equal_noise_seeds, self.options.seeds))
        both = {
            name: list(
                self.pool.map(partial(self.run, name, arms[name], rates[name], whole=True), further)
            )
            for name in (EQUAL_NOISE, control)
        }
        costs = self.costs()
        runs = {name: [self.store.runs[name, rates[name], seed] for seed in seeds] for name in arms}
        taken = {
            name: [costs.to(run, self.task.accuracy) for run in own] for name, own in runs.items()
        }
        fastest = self.best(rates, [name for name in own_arms if name not in UNPRUNED])
        ends = [[run.points[-1] for run in own] for own in both.values()]
        mean, reach = mean_and_reach([a.accuracy - b.accuracy for a, b in zip(*ends, strict=True)])
        table = {
            name: {
                "lr": rates[name],
                "seconds": statistics.geometric_mean(taken[name]),
                "seconds_by_seed": taken[name],
                "reached": sum(map(self.reached, own)),
                "time_ratio": paired_ratio(taken[control], taken[name]),
                "step_s": statistics.fmean(
                    costs.seconds(run.points[-1]) / run.points[-1].step for run in own
                ),
                "tuning": self.tuning(name),
            }
            for name, own in runs.items()
        }
        return {
            "task": self.options.task,
            "accuracy": self.task.accuracy,
            "costs": asdict(costs),
            "control": control,
            "best_pruned": fastest,
            "best_time_ratio": table[fastest]["time_ratio"],
            "equal_noise_time_ratio": table[EQUAL_NOISE]["time_ratio"],
            "equal_noise_run_ratio": paired_ratio(
                *([costs.seconds(p) for p in end] for end in reversed(ends))
            ),
            "final_accuracy_difference": {
                "difference": mean,
                "interval": [mean - reach, mean + reach],
                "seeds": len(further),
            },
            "arms": table,
            **(self.over_trl(rates, fastest, seeds) if len(own_arms) < len(self.arms) else {}),
        }

    def over_trl(self, rates: dict[str, float], ours: str, seeds: Iterable[int]) -> dict[str, Any]:
        """TRL's best arm beside an arm of ours."""
        trl = self.best(rates, [name for name in self.arms if name in TRL])
        beside = BESIDE_TRL + ours
        pairs = [
            self.every([(trl, ALL[trl], rates[trl], seed), (beside, ALL[ours], rates[ours], seed)])
            for seed in seeds
        ]
        taken = [
            [seconds_to(run, self.task.accuracy) for run in own] for own in zip(*pairs, strict=True)
        ]
        return {
            "over_trl": paired_ratio(*taken),
            "trl": {
                "arm": trl,
                "lr": rates[trl],
                "seconds": dict(
                    zip((trl, ours), map(statistics.geometric_mean, taken), strict=True)
                ),
                "seconds_by_seed": taken[0],
                "reached": sum(self.reached(run) for run, _ in pairs),
                "tuning": {name: self.tuning(name) for name in self.arms if name in TRL},
            },
        }

    def reached(self, run: Run) -> bool:
        return any(point.accuracy >= self.task.accuracy for point in run.points)


def rate(lr: float, by: int) -> float:
    """A neighbouring learning rate, to two digits."""
    return float(f"{lr * FACTOR**by:.2g}")


def draw(found: dict[str, Any], out: Path) -> None:
    """Seconds to the accuracy: a dot for each seed, a bar for the geometric mean of an arm; the
    fastest arm on top."""
    from matplotlib.figure import Figure

    taken = {name: arm["seconds_by_seed"] for name, arm in found["arms"].items()}
    if "trl" in found:
        taken[found["trl"]["arm"]] = found["trl"]["seconds_by_seed"]
    order = sorted(taken, key=lambda name: -statistics.geometric_mean(taken[name]))
    figure = Figure(
        figsize=(9, 0.36 * len(order) + 1.1), dpi=160, facecolor="white", layout="constrained"
    )
    panel = figure.subplots()
    for row, name in enumerate(order):
        colour = "#16a34a" if name in TRL else "#64748b" if name in UNPRUNED else "#2563eb"
        panel.barh(
            row, statistics.geometric_mean(taken[name]), color=colour, alpha=0.35, height=0.7
        )
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
    parser.add_argument("--arms", nargs="+", choices=list(ALL), metavar="ARM")
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

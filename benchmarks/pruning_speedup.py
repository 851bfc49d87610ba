"""What each pruning rule buys on a task: seconds and tokens to a held-out accuracy, unpruned over it.

The task is the quickstart's ``sums``, whose policy ``scripts/quickstart.sh`` warms up, or ``word_problems``, which
``word_problems.py`` makes in ``runs/word_problems`` at the first call. All arms start from one warmed-up policy and
differ in ``pruning.*``, some also in prompts per step or, as their names say, in the learning rate. Seed by seed they
run in turn, so that a noisy machine treats them alike. Seconds are those of the steps: evaluations, checkpoints,
start-up are left out. Where an accuracy lies between two evaluations, the time to it is interpolated. Final accuracies
are compared after as many steps, or, with ``--pruned-steps``, after as many as pruning makes affordable:
``run_time_ratio`` is that of the whole runs, unpruned over pruned. Intervals are of the geometric mean of the paired
ratios over seeds (Student's t).

    python benchmarks/pruning_speedup.py [--task word_problems] [--seeds 3] [--arms neyman top_k] [--json]
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import arguments, finish, mean_and_reach, package_command, paired_ratio
from word_problems import prepared

from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.observe.timers import breakdown


def arm(prompts: str, completions: str, *more: str) -> tuple[str, ...]:
    return (f"pruning.prompts.rule={prompts}", f"pruning.completions.rule={completions}", *more)


BASELINE = "unpruned"
TOKENS = "pruning.completions.keep=0.3"
HALF = ("pruning.prompts.keep=0.5", TOKENS)
FEW = ("pruning.prompts.keep=0.4", TOKENS, "pruning.max_weight=10")
FEWER = ("pruning.prompts.keep=0.3", "pruning.prompts.floor=0.15", TOKENS, "pruning.max_weight=10")
RECORDS = ("pruning.prompts.predictor=record",)
"""Prompts are predicted by their own visits, and not by their text."""
ARMS: dict[str, tuple[str, ...]] = {
    BASELINE: arm("none", "none"),
    "neyman": (),
    "neyman, 0.3 of the tokens": (TOKENS,),
    "neyman, completions alone, 0.3": arm("none", "neyman", TOKENS),
    "neyman, half the prompts, 0.3": HALF,
    "neyman, half the prompts, 0.3, weights to 10": (*HALF, "pruning.max_weight=10"),
    "neyman, 0.4 of the prompts, 0.3, weights to 10": FEW,
    "neyman, 0.3 of the prompts, 0.3, weights to 10": FEWER,
    "neyman, records alone": RECORDS,
    "neyman, 0.4 of the prompts, 0.3, weights to 10, records alone": (*FEW, *RECORDS),
    "threshold (the paper)": arm("threshold", "threshold"),
    "threshold_deterministic": arm("none", "threshold_deterministic"),
    "top_k": arm("none", "top_k"),
    "top_k, kept normaliser (CPPO)": arm("none", "top_k", "pruning.completions.normaliser=kept"),
    "greso": arm("greso", "none"),
    "dynamic_sampling": arm("dynamic_sampling", "none"),
    "unpruned, 32 prompts, 1.5e-4": arm("none", "none", "rollout.prompts_per_step=32", "optimizer.lr=1.5e-4"),
    "unpruned, 20 prompts, 1.5e-4": arm("none", "none", "rollout.prompts_per_step=20", "optimizer.lr=1.5e-4"),
    "neyman, 2.25e-4": ("optimizer.lr=2.25e-4",),
    "neyman, 0.3 of the prompts, 0.3, weights to 10, 1.5e-4": (*FEWER, "optimizer.lr=1.5e-4"),
}
BY_DEFAULT = [name for name in ARMS if "e-4" not in name]
RATIOS = {
    "run_time_ratio": "seconds",
    "step_time_ratio": "seconds_per_step",
    "time_to_accuracy_ratio": "seconds_to_accuracy",
    "steps_to_accuracy_ratio": "steps_to_accuracy",
    "generated_tokens_ratio": "generated_tokens_to_accuracy",
    "backward_tokens_ratio": "backward_tokens_to_accuracy",
}
"""Fields of a run by the names of their ratios, unpruned over the arm."""
SUMS, WORD_PROBLEMS = "sums", "word_problems"


@dataclass(frozen=True, slots=True)
class Task:
    """What all arms have in common."""

    policy: Path
    settings: Sequence[str]
    """What is set over the configuration."""
    accuracy: float
    """The held-out accuracy to be reached."""

    @classmethod
    def named(cls, name: str) -> Task:
        """The task by its name, with what it needs made where it is not there yet."""
        if name == SUMS:
            return cls(Path("runs/quickstart/warm"), settings=(), accuracy=0.6)
        made = prepared(Path("runs/word_problems"))
        return cls(made.policy, made.settings, accuracy=0.65)


@dataclass(frozen=True, slots=True)
class Run:
    """What one training cost and reached."""

    arm: str
    seed: int
    seconds: float
    """Of all its steps."""
    seconds_per_step: float
    phases: dict[str, float]
    """Seconds of a step by phase, means."""
    seconds_to_accuracy: float | None
    """None where the accuracy was not reached."""
    steps_to_accuracy: float | None
    generated_tokens_to_accuracy: float | None
    backward_tokens_to_accuracy: float | None
    final_accuracy: float

    @property
    def rollout_share(self) -> float:
        return self.phases["rollout"] / sum(self.phases.values())


def trained(words: Sequence[str], folder: Path, *, seed: int) -> list[dict[str, float]]:
    """The rows of metrics of one run of ``words``, a configuration and its overrides; its folder is gone afterwards."""
    own = (f"run.dir={folder}", f"run.seed={seed}", "run.export=false", "run.checkpoint_every=0")
    package_command("train", *words, *own)
    rows = read_metrics(folder)
    shutil.rmtree(folder)
    return rows


def measure(name: str, seed: int, rows: Sequence[dict[str, float]], accuracy: float) -> Run:
    steps = [row for row in rows if row["step"] > 0]
    share = crossing(rows, accuracy)

    def to_accuracy(key: str | None) -> float | None:
        """What was spent, of a metric or in steps (None), until the accuracy was reached."""
        if share is None:
            return None
        spent = [row.get(key, 0.0) if key else 1.0 for row in steps]
        whole = math.floor(share)
        return sum(spent[:whole]) + (share - whole) * (spent[whole] if whole < len(spent) else 0.0)

    parts = [breakdown(row) for row in steps]
    return Run(
        arm=name,
        seed=seed,
        seconds=sum(row["perf/step_time"] for row in steps),
        seconds_per_step=statistics.median(row["perf/step_time"] for row in steps),
        phases={phase: statistics.fmean(part.get(phase, 0.0) for part in parts) for phase in parts[0]},
        seconds_to_accuracy=to_accuracy("perf/step_time"),
        steps_to_accuracy=to_accuracy(None),
        generated_tokens_to_accuracy=to_accuracy("rollout/generated_tokens"),
        backward_tokens_to_accuracy=to_accuracy("train/tokens"),
        final_accuracy=steps[-1]["eval/accuracy"],
    )


def crossing(rows: Sequence[dict[str, float]], accuracy: float) -> float | None:
    """The step, with its fraction, at which the line through the evaluations first reaches the accuracy."""
    points = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    for (start, below), (end, value) in zip([(0, 0.0), *points], points, strict=False):
        if value >= accuracy:
            return start if value == below else start + (end - start) * (accuracy - below) / (value - below)
    return None


def ratio(runs: Sequence[Run], name: str, figure: str) -> dict[str, Any] | None:
    """Unpruned over the arm, paired by seed, and how many seeds have the figure in both arms; None if none has it."""
    values = {(run.arm, run.seed): getattr(run, figure) for run in runs}
    seeds = sorted({run.seed for run in runs})
    have = [seed for seed in seeds if values.get((BASELINE, seed)) and values.get((name, seed))]
    if not have:
        return None
    found = paired_ratio(*([values[arm, seed] for seed in have] for arm in (BASELINE, name)))
    return {"ratio": found["ratio"], "interval": found["interval"], "seeds": len(have), "of": len(seeds)}


def accuracy_difference(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Final held-out accuracy, the arm's less unpruned, seed by seed."""
    final = {(run.arm, run.seed): run.final_accuracy for run in runs}
    mean, reach = mean_and_reach([final[name, run.seed] - run.final_accuracy for run in runs if run.arm == BASELINE])
    return {"difference": mean, "interval": [mean - reach, mean + reach] if math.isfinite(reach) else None}


def compare(runs: Sequence[Run], accuracy: float) -> dict[str, Any]:
    arms = list(dict.fromkeys(run.arm for run in runs))
    table: dict[str, dict[str, Any]] = {}
    for name in arms:
        own = [run for run in runs if run.arm == name]
        table[name] = {
            **{title: ratio(runs, name, figure) for title, figure in RATIOS.items()},
            "final_accuracy": statistics.fmean(run.final_accuracy for run in own),
            "final_accuracy_difference": accuracy_difference(runs, name),
            "rollout_share": statistics.fmean(run.rollout_share for run in own),
            "phases": {phase: statistics.fmean(run.phases.get(phase, 0.0) for run in own) for phase in own[0].phases},
        }
    default = table.get("neyman", {}).get("time_to_accuracy_ratio")
    return {
        "accuracy": accuracy,
        "rollout_share": table[BASELINE]["rollout_share"],
        "time_to_accuracy_ratio": default and default["ratio"],
        "arms": table,
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = arguments(
        __doc__,
        config=Path("configs/quickstart.yaml"),
        policy=(Path, "all arms start from it; by default the task's own"),
        seeds=3,
        first_seed=1,
        steps=60,
        pruned_steps=(int, "of all arms but the unpruned one; by default as many"),
        eval_every=4,
        accuracy=(float, "held-out accuracy to be reached; by default the task's"),
        jobs=(1, "runs at a time, where cores suffice for their ranks"),
    )
    parser.add_argument("--task", choices=(SUMS, WORD_PROBLEMS), default=SUMS)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=BY_DEFAULT, metavar="ARM")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="more settings, for all arms")
    options = parser.parse_args()
    task = Task.named(options.task)
    accuracy = task.accuracy if options.accuracy is None else options.accuracy
    names = [BASELINE, *(name for name in options.arms if name != BASELINE)]
    folder = Path(tempfile.mkdtemp(prefix="pruning-speedup-"))
    words = [str(options.config), *task.settings, f"model.path={options.policy or task.policy}"]
    words += [f"eval.every={options.eval_every}", *options.settings]

    def run_of(name: str, number: int) -> Run:
        steps = options.steps if name == BASELINE else options.pruned_steps or options.steps
        settings = [*words, f"run.steps={steps}", *ARMS[name]]
        seed = options.first_seed + number
        run = measure(name, seed, trained(settings, folder / f"{names.index(name)}-{number}", seed=seed), accuracy)
        if not options.json:
            print(run, flush=True)
        return run

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            wanted = [(name, number) for number in range(options.seeds) for name in names]
            runs = list(pool.map(lambda each: run_of(*each), wanted))
    finally:
        shutil.rmtree(folder)
    report = {"task": options.task, **compare(runs, accuracy)}
    finish(report, options)


if __name__ == "__main__":
    main()

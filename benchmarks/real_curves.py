"""Held-out accuracy over seconds: SmolLM2-135M on problems of two steps; unpruned, pruned and with
TRL.

    python benchmarks/real_curves.py [--seeds 3] [--arms "TRL, 16 prompts"] [--earlier FILE]
    [--picture PNG] [--json]

- All arms start from the policy of ``configs/smollm2_steps.yaml``, whose comments describe how to
  make the policy. All train on the problems of that file at a constant learning rate, each arm on
  two cores for about ten minutes. Seed by seed, the arms run in turn.
- Seconds are of steps, without evaluations and start-up.
- TRL's GRPOTrainer trains in bf16 by autocast, because steps in fp32 were slower. TRL's policy is
  saved at intervals, and evaluated like the policies of the remaining arms.
- Held-out accuracy is the mean over four answers to each problem, sampled like rollouts. Times to
  an accuracy are interpolated between evaluations.
- ``time_to_accuracy_ratio``: time of the unpruned arm over time of the arm, geometric mean over the
  seeds with a 95% interval; None if an arm did not reach the accuracy.
- ``equal_noise`` compares whole runs: ``EQUAL_NOISE`` has learning rate, prompts and number of
  steps of ``LIKE``, with ``pruning.target_noise=1``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from against_trl import Arm as Process
from against_trl import trl_python
from arms import UNPRUNED, neyman
from harness import arguments, finish, mean_and_reach, package_command, paired_ratio
from timed_runs import train

HERE = Path(__file__).parent
CONFIG = "configs/smollm2_steps.yaml"
TRL = "TRL, 16 prompts"
BASELINE = "unpruned, 32 prompts"
LIKE = "unpruned, 16 prompts"
EQUAL_NOISE = "prompts 0.85, tokens auto, weights to 10, noise 1, 16 prompts"
MILD = "prompts 0.7, tokens 0.5, weights to 5, 32 prompts"
SIXTEEN = "rollout.prompts_per_step=16"
TRL_PROMPTS = 16
SAMPLES = 8
MAX_TOKENS = 40
ASKED = ("eval.samples=4", "eval.problems=200")
EVALUATIONS = 4
"""Evaluations of a run, after the evaluation before the first step."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings of a training."""

    steps: int
    lr: float
    """4e-5 for 16 unpruned prompts: 8e-5 lost accuracy. For other steps, 4e-5 over the root of the
    noise, relative to 16 unpruned prompts."""
    settings: tuple[str, ...]
    colour: str


ARMS = {
    BASELINE: Arm(24, 5.6e-5, UNPRUNED, "#94a3b8"),
    LIKE: Arm(44, 4e-5, (*UNPRUNED, SIXTEEN), "#475569"),
    EQUAL_NOISE: Arm(44, 4e-5, (*neyman(0.85, "auto", target_noise=1.0), SIXTEEN), "#7c3aed"),
    MILD: Arm(36, 4.7e-5, neyman(0.7, 0.5, max_weight=5.0), "#2563eb"),
    "prompts 0.4, tokens 0.3, weights to 10, 32 prompts": Arm(
        48, 3.5e-5, neyman(0.4, 0.3), "#ea580c"
    ),
    TRL: Arm(16, 4e-5, (), "#16a34a"),
}
Points = list[tuple[float, float]]
"""At each evaluation: seconds of all previous steps, and held-out accuracy."""


def by_us(own: Arm, words: Sequence[str], seed: int, folder: Path) -> list[dict[str, float]]:
    """Train with this project's trainer, and return the rows of metrics."""
    settings = [
        f"run.seed={seed}",
        f"run.steps={own.steps}",
        f"eval.every={own.steps // EVALUATIONS}",
        f"optimizer.lr={own.lr}",
    ]
    return train(CONFIG, [*words, *settings, *own.settings], folder)


def by_trl(options: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, float]]:
    """Train with TRL's GRPOTrainer; return a row per step, with seconds, and with the accuracy of a
    saved policy."""
    steps = options.trl_steps
    every = steps // EVALUATIONS
    settings = {
        "output_dir": str(folder),
        "save_strategy": "steps",
        "save_steps": every,
        "save_only_model": True,
        "seed": seed,
        "bf16": True,
    }
    asked: dict[str, object] = {
        "policy": str(options.folder / "warm"),
        "pool": str(options.folder / "train.jsonl"),
        "prompts": TRL_PROMPTS,
        "samples": SAMPLES,
        "max_response_tokens": MAX_TOKENS,
        "steps": steps,
        "batch": 16,
        "lr": ARMS[TRL].lr,
        "threads": 2,
        "reward": "calculation",
        "settings": settings,
    }
    command = [trl_python(), str(HERE / "trl_run.py"), json.dumps(asked)]
    watched = Process(TRL, command, folder.with_suffix(".log"))
    try:
        watched.heard()
        for _ in range(steps):
            watched.take_step()
        watched.process.wait(timeout=600)
    finally:
        watched.process.kill()
    initial = accuracy_of(options.folder / "warm", options, folder)
    rows: list[dict[str, float]] = [{"step": 0, "eval/accuracy": initial}]
    for step, told in enumerate(watched.steps, start=1):
        rows.append({"step": step, "perf/step_time": told["seconds"]})
        if step % every == 0:
            rows[-1]["eval/accuracy"] = accuracy_of(folder / f"checkpoint-{step}", options, folder)
    return rows


def accuracy_of(policy: Path, options: argparse.Namespace, folder: Path) -> float:
    """Return a policy's held-out accuracy."""
    out = folder / f"answers-{policy.name}"
    settings = [*ASKED, *data_of(options), f"model.path={policy}", f"eval.out={out}"]
    package_command("eval", CONFIG, *settings)
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    (found,) = scores["benchmarks"].values()
    return float(found["avg@k"]["value"])


def data_of(options: argparse.Namespace) -> list[str]:
    return [
        f"data.train={options.folder / 'train'}.jsonl",
        f"data.eval={options.folder / 'held_out'}.jsonl",
    ]


def points_of(rows: Sequence[dict[str, float]]) -> Iterator[tuple[float, float]]:
    seconds = 0.0
    for row in rows:
        seconds += row.get("perf/step_time", 0.0)
        if "eval/accuracy" in row:
            yield seconds, row["eval/accuracy"]


def seconds_to(points: Points, accuracy: float) -> float | None:
    """Return the seconds until an accuracy, interpolated between evaluations; None if never
    reached."""
    for (start, below), (end, value) in pairwise(points):
        if below >= accuracy:
            return start
        if value >= accuracy:
            return start + (end - start) * (accuracy - below) / (value - below)
    return None


def points_by_seed(runs: Sequence[dict[str, Any]], name: str) -> dict[int, Points]:
    return {run["seed"]: run["points"] for run in runs if run["arm"] == name}


def compared(runs: Sequence[dict[str, Any]], name: str, accuracy: float) -> dict[str, Any]:
    """Compare an arm with the unpruned arm, over the seeds of both."""
    base = points_by_seed(runs, BASELINE)
    own = points_by_seed(runs, name)
    seeds = sorted(own.keys() & base.keys())
    base_times = [seconds_to(base[seed], accuracy) for seed in seeds]
    times = [seconds_to(own[seed], accuracy) for seed in seeds]
    ratio = None
    if seeds and None not in (*base_times, *times):
        ratio = paired_ratio(base_times, times)  # type: ignore[arg-type]
    gain, reach = mean_and_reach([each[-1][1] - each[0][1] for each in own.values()])
    seconds_per_step = []
    for run in runs:
        if run["arm"] == name:
            steps = run.get("steps", ARMS[name].steps)
            seconds_per_step.append(run["points"][-1][0] / steps)
    return {
        "held_out_gain": {
            "mean": gain,
            "reach": reach if len(own) > 1 else None,
            "seeds": len(own),
        },
        "final_accuracy": statistics.fmean(each[-1][1] for each in own.values()),
        "seconds_to_accuracy": times,
        "time_to_accuracy_ratio": ratio,
        "seconds_per_step": statistics.fmean(seconds_per_step),
    }


def at_equal_noise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare seconds and final accuracies of whole runs, over the seeds of both arms."""
    equal_noise = points_by_seed(runs, EQUAL_NOISE)
    like = points_by_seed(runs, LIKE)
    seeds = [seed for seed in like if seed in equal_noise]
    if not seeds:
        return {}
    ends = [equal_noise[seed][-1] for seed in seeds]
    like_ends = [like[seed][-1] for seed in seeds]
    pairs = zip(ends, like_ends, strict=True)
    mean, reach = mean_and_reach([own[1] - other[1] for own, other in pairs])
    like_seconds = [seconds for seconds, _ in like_ends]
    seconds = [seconds for seconds, _ in ends]
    return {
        "equal_noise": {
            "run_ratio": paired_ratio(like_seconds, seconds),
            "final_accuracy_difference": mean,
            "reach": reach if len(seeds) > 1 else None,
        }
    }


DRAWN = {LIKE: LIKE, MILD: "pruned: " + MILD.replace(", weights", ",\nweights"), TRL: TRL}
"""Arms, and their texts in the picture."""


def draw(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw accuracy over minutes: for each arm of ``DRAWN``, the mean and a band, the range of the
    seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=160, facecolor="white", layout="constrained")
    panel = figure.subplots()
    ends = {}
    for name in DRAWN:
        curves = [run["points"] for run in runs if run["arm"] == name]
        colour = ARMS[name].colour
        minutes = []
        accuracies = []
        for points in zip(*curves, strict=True):
            minutes.append(statistics.fmean(seconds for seconds, _ in points) / 60)
            accuracies.append([100 * accuracy for _, accuracy in points])
        means = [statistics.fmean(each) for each in accuracies]
        lowest = [min(each) for each in accuracies]
        highest = [max(each) for each in accuracies]
        panel.fill_between(minutes, lowest, highest, color=colour, alpha=0.12)
        panel.plot(minutes, means, color=colour, lw=2.5, marker="o", ms=4)
        seeds = f"{len(curves)} seeds" if len(curves) > 1 else "one seed"
        panel.annotate(
            f"{DRAWN[name]}, {seeds}",
            (minutes[-1], means[-1]),
            (8, -3),
            textcoords="offset points",
            color=colour,
        )
        ends[name] = minutes[-1], means[-1]
    low, high = sorted(ends[name][1] for name in DRAWN if name != TRL)
    soon = max(ends[name][0] for name in DRAWN if name != TRL)
    late, trl = ends[TRL]
    conclusion = f"{low:.0f}–{high:.0f}% after {soon:.0f} minutes, TRL {trl:.0f}% after {late:.0f}"
    conclusion += ". Pruning: no faster than a smaller batch"
    panel.set_title(conclusion, loc="left", fontweight="bold")
    panel.set_ylabel("held-out accuracy [%], SmolLM2-135M,\nword problems of two steps")
    panel.set_xlabel("minutes of training on two cores; bands: lowest to highest seed", loc="right")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#e2e8f0")
    panel.set_xlim(0, 1.12 * max(minutes for minutes, _ in ends.values()))
    figure.savefig(out)


def main() -> None:
    parser = arguments(
        __doc__,
        folder=(Path("runs/smollm2_steps"), "of the policy and the problems"),
        seeds=3,
        first_seed=1,
        accuracy=(0.5, "held-out accuracy to be reached"),
        trl_steps=(ARMS[TRL].steps, "of a run by TRL"),
        picture=(Path, "where to draw the curves"),
    )
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--earlier", nargs="*", type=Path, default=[], help="recorded runs, which count as well"
    )
    options = parser.parse_args()
    runs = []
    for file in options.earlier:
        commands = json.loads(file.read_text(encoding="utf-8"))
        runs += commands[Path(__file__).name]["figures"]["runs"]
    words = [*data_of(options), f"model.path={options.folder / 'warm'}", *ASKED]
    folder = Path(tempfile.mkdtemp(prefix="real-curves-"))
    try:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for number, name in enumerate(options.arms):
                place = folder / f"{number}-{seed}"
                if name == TRL:
                    rows = by_trl(options, seed, place)
                else:
                    rows = by_us(ARMS[name], words, seed, place)
                run = {
                    "arm": name,
                    "seed": seed,
                    "steps": rows[-1]["step"],
                    "points": list(points_of(rows)),
                }
                runs.append(run)
                print(json.dumps(run), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    if options.picture:
        draw(runs, options.picture)
    present = {run["arm"] for run in runs}
    names = [name for name in ARMS if name in present]
    arms = {name: compared(runs, name, options.accuracy) for name in names}
    figures = {"accuracy": options.accuracy, "arms": arms, **at_equal_noise(runs), "runs": runs}
    finish(figures, options)


if __name__ == "__main__":
    main()

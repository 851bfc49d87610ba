"""Held-out accuracy over seconds: SmolLM2-135M on problems of two steps, unpruned, pruned and by
TRL.

    python benchmarks/real_curves.py [--seeds 3] [--arms "TRL, 16 prompts"] [--earlier FILE]
    [--picture PNG] [--json]

All arms start from the policy that ``configs/smollm2_steps.yaml`` says how to make, and train on
its problems at a constant learning rate, each on two cores for about ten minutes. Seed by seed they
run in turn. Seconds are those of the steps, without evaluations and the start. TRL's GRPOTrainer
has bf16 by autocast, with which its steps were faster than in fp32; its policy is saved now and
then, and evaluated as the others are.

Held-out accuracy is the mean over four answers to each problem, sampled as rollouts are. Times to
an accuracy are interpolated between evaluations. ``time_to_accuracy_ratio`` is that of the unpruned
arm over each, the geometric mean over the seeds with its 95% interval; None where an arm did not
come so far. ``compute_tail_fraction`` has, for each run that ended before, how many times as long
as the unpruned one it had taken by then. ``equal_noise`` compares whole runs: ``EQUAL_NOISE`` has
the learning rate, the prompts and the number of steps of ``LIKE``, with ``pruning.target_noise=1``.
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
from harness import arguments, finish, mean_and_reach, package_command, paired_ratio
from time_to_accuracy import FEW, MILD, OFF

from megatron_dppo.observe.metrics import read_metrics

HERE = Path(__file__).parent
CONFIG = "configs/smollm2_steps.yaml"
TRL, BASELINE = "TRL, 16 prompts", "unpruned, 32 prompts"
LIKE, EQUAL_NOISE = "unpruned, 16 prompts", "equal noise, 16 prompts"
SIXTEEN = "rollout.prompts_per_step=16"
TRL_PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 40
ASKED = ("eval.samples=4", "eval.problems=200")
EVALUATIONS = 4
"""Evaluations of a run after the one before its first step."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    steps: int
    lr: float
    """For 16 unpruned prompts 4e-5, where 8e-5 lost accuracy; for other steps that over the root of
    their noise."""
    settings: tuple[str, ...]
    colour: str


ARMS = {
    BASELINE: Arm(24, 5.6e-5, OFF, "#94a3b8"),
    LIKE: Arm(44, 4e-5, (*OFF, SIXTEEN), "#475569"),
    EQUAL_NOISE: Arm(44, 4e-5, ("pruning.target_noise=1", SIXTEEN), "#7c3aed"),
    "pruned, mild": Arm(36, 4.7e-5, MILD, "#2563eb"),
    "pruned, strong": Arm(48, 3.5e-5, FEW, "#ea580c"),
    TRL: Arm(16, 4e-5, (), "#16a34a"),
}
Points = list[tuple[float, float]]
"""Seconds of all steps so far, and held-out accuracy."""


def trained(words: Sequence[str], folder: Path, *, seed: int) -> list[dict[str, float]]:
    """The rows of metrics of one run of ``words``, a configuration and its overrides; its folder is
    gone afterwards."""
    own = (f"run.dir={folder}", f"run.seed={seed}", "run.export=false", "run.checkpoint_every=0")
    package_command("train", *words, *own)
    rows = read_metrics(folder)
    shutil.rmtree(folder)
    return rows


def by_us(own: Arm, words: Sequence[str], seed: int, folder: Path) -> list[dict[str, float]]:
    """The rows of a training by this project's trainer."""
    settings = [
        f"run.steps={own.steps}",
        f"eval.every={own.steps // EVALUATIONS}",
        f"optimizer.lr={own.lr}",
    ]
    return trained([*words, *settings, *own.settings], folder, seed=seed)


def by_trl(options: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, float]]:
    """The rows of a training by TRL's GRPOTrainer: a step's seconds, and the accuracy where it was
    saved."""
    steps = options.trl_steps
    every = steps // EVALUATIONS
    settings = {
        "output_dir": str(folder),
        "save_strategy": "steps",
        "save_steps": every,
        "save_only_model": True,
    }
    asked: dict[str, object] = {
        "policy": str(options.folder / "warm"),
        "pool": str(options.folder / "train.jsonl"),
    }
    asked |= {
        "prompts": TRL_PROMPTS,
        "samples": SAMPLES,
        "max_response_tokens": MAX_TOKENS,
        "steps": steps,
    }
    asked |= {"batch": 16, "lr": ARMS[TRL].lr, "threads": 2, "reward": "calculation"}
    asked |= {"settings": settings | {"seed": seed, "bf16": True}}
    watched = Process(
        TRL, [trl_python(), str(HERE / "trl_run.py"), json.dumps(asked)], folder.with_suffix(".log")
    )
    try:
        watched.heard()
        for _ in range(steps):
            watched.take_step()
        watched.process.wait(timeout=600)
    finally:
        watched.process.kill()
    rows: list[dict[str, float]] = [
        {"step": 0, "eval/accuracy": accuracy_of(options.folder / "warm", options, folder)}
    ]
    for step, told in enumerate(watched.steps, start=1):
        rows.append({"step": step, "perf/step_time": told["seconds"]})
        if step % every == 0:
            rows[-1]["eval/accuracy"] = accuracy_of(folder / f"checkpoint-{step}", options, folder)
    return rows


def accuracy_of(policy: Path, options: argparse.Namespace, folder: Path) -> float:
    """Held-out accuracy of a policy."""
    out = folder / f"answers-{policy.name}"
    package_command(
        "eval", CONFIG, *ASKED, *data_of(options), f"model.path={policy}", f"eval.out={out}"
    )
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    (found,) = scores["benchmarks"].values()
    return float(found["avg@k"]["value"])


def data_of(options: argparse.Namespace) -> list[str]:
    return [
        f"data.{name}={options.folder / file}.jsonl"
        for name, file in (("train", "train"), ("eval", "held_out"))
    ]


def points_of(rows: Sequence[dict[str, float]]) -> Iterator[tuple[float, float]]:
    seconds = 0.0
    for row in rows:
        seconds += row.get("perf/step_time", 0.0)
        if "eval/accuracy" in row:
            yield seconds, row["eval/accuracy"]


def seconds_to(points: Points, accuracy: float) -> float | None:
    """When the line through the evaluations first reaches an accuracy; None if it does not."""
    for (start, below), (end, value) in pairwise(points):
        if below >= accuracy:
            return start
        if value >= accuracy:
            return start + (end - start) * (accuracy - below) / (value - below)
    return None


def compared(runs: Sequence[dict[str, Any]], name: str, accuracy: float) -> dict[str, Any]:
    """An arm beside the unpruned one, over the seeds that both have."""
    points: dict[str, dict[int, Points]] = {
        each: {run["seed"]: run["points"] for run in runs if run["arm"] == each}
        for each in (BASELINE, name)
    }
    own = points[name]
    seeds = sorted(own.keys() & points[BASELINE].keys())
    times = {each: [seconds_to(points[each][seed], accuracy) for seed in seeds] for each in points}
    reached = all(None not in each for each in times.values())
    gain, reach = mean_and_reach([each[-1][1] - each[0][1] for each in own.values()])
    return {
        "held_out_gain": {
            "mean": gain,
            "reach": reach if len(own) > 1 else None,
            "seeds": len(own),
        },
        "final_accuracy": statistics.fmean(each[-1][1] for each in own.values()),
        "seconds_to_accuracy": times[name],
        "time_to_accuracy_ratio": paired_ratio(times[BASELINE], times[name])
        if reached and seeds
        else None,  # type: ignore[arg-type]
        "longer_than": [
            own[seed][-1][0] / first
            for seed, first, found in zip(seeds, times[BASELINE], times[name], strict=True)
            if first and not found
        ],
        "seconds_per_step": statistics.fmean(
            run["points"][-1][0] / run.get("steps", ARMS[name].steps)
            for run in runs
            if run["arm"] == name
        ),
    }


def at_equal_noise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and final accuracies of whole runs, over the seeds that both arms have."""
    ends = {
        name: {run["seed"]: run["points"][-1] for run in runs if run["arm"] == name}
        for name in (EQUAL_NOISE, LIKE)
    }
    pairs = [
        (ends[EQUAL_NOISE][seed], end)
        for seed, end in ends[LIKE].items()
        if seed in ends[EQUAL_NOISE]
    ]
    if not pairs:
        return {}
    mean, reach = mean_and_reach([own[1] - like[1] for own, like in pairs])
    ratio = paired_ratio(*([pair[arm][0] for pair in pairs] for arm in (1, 0)))
    return {
        "equal_noise": {
            "run_ratio": ratio,
            "final_accuracy_difference": mean,
            "reach": reach if len(pairs) > 1 else None,
        }
    }


DRAWN = (LIKE, "pruned, mild", TRL)


def draw(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw accuracy over minutes: the mean of each arm of ``DRAWN``, and the range of its seeds as
    a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=160, facecolor="white", layout="constrained")
    panel = figure.subplots()
    ends = {}
    for name in DRAWN:
        curves = [run["points"] for run in runs if run["arm"] == name]
        colour = ARMS[name].colour
        minutes = [
            statistics.fmean(seconds) / 60
            for seconds in zip(*([s for s, _ in c] for c in curves), strict=True)
        ]
        accuracies = [
            [100 * a for a in each]
            for each in zip(*([a for _, a in c] for c in curves), strict=True)
        ]
        means = [statistics.fmean(each) for each in accuracies]
        panel.fill_between(
            minutes,
            *zip(*((min(a), max(a)) for a in accuracies), strict=True),
            color=colour,
            alpha=0.12,
        )
        panel.plot(minutes, means, color=colour, lw=2.5, marker="o", ms=4)
        seeds = f"{len(curves)} seeds" if len(curves) > 1 else "one seed"
        panel.annotate(
            f"{name}, {seeds}",
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
    stored = [json.loads(file.read_text(encoding="utf-8")) for file in options.earlier]
    runs = [run for commands in stored for run in commands[Path(__file__).name]["figures"]["runs"]]
    words = [CONFIG, *data_of(options), f"model.path={options.folder / 'warm'}", *ASKED]
    folder = Path(tempfile.mkdtemp(prefix="real-curves-"))
    try:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for number, name in enumerate(options.arms):
                place = folder / f"{number}-{seed}"
                rows = (
                    by_trl(options, seed, place)
                    if name == TRL
                    else by_us(ARMS[name], words, seed, place)
                )
                runs.append(
                    {
                        "arm": name,
                        "seed": seed,
                        "steps": rows[-1]["step"],
                        "points": list(points_of(rows)),
                    }
                )
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    if options.picture:
        draw(runs, options.picture)
    names = [name for name in ARMS if any(run["arm"] == name for run in runs)]
    arms = {name: compared(runs, name, options.accuracy) for name in names}
    finish(
        {"accuracy": options.accuracy, "arms": arms, **at_equal_noise(runs), "runs": runs}, options
    )


if __name__ == "__main__":
    main()

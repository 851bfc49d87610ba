"""The table of DPPO's paper (arXiv:2603.04135) on small tasks: seconds and final accuracy of whole
runs under GRPO, CPPO, GRESO, DPPO, and under the pruning of this project.

    python benchmarks/paper_table.py [--task word_problems] [--seeds 8] [--jobs 2] [--json]
    python benchmarks/paper_table.py --task smollm2 --seeds 3 [--jobs 2] [--json]
    python benchmarks/paper_table.py --task losses --seeds 3 [--jobs 2] [--picture PNG] [--json]

The design, with all arms and seeds, was committed before the first run.

- **Protocol**: of the paper's kind. All arms train the same warmed-up policy on one pool of
  ``POOL`` prompts for eight epochs (SmolLM2: two), in steps of 32 prompts × 8 completions, at one
  constant learning rate.
- **Learning rate**: tuned for GRPO, by mean final accuracy on ``TUNING_SEEDS``. The first three
  rates are a factor of 1.5 apart. While the best is the lowest or the highest, another is tried.
  SmolLM2 has the rate of ``real_curves.py`` for this batch.
- **Epochs**: prompts of the windows, pruned or not, over the pool. GRESO's refilled windows consume
  prompts faster: its run is evaluated every four steps, and ends at the first evaluation after the
  last epoch. Equal noise and one row of 16 prompts have GRPO's number of steps instead.
- **CPPO** fills in further prompts by larger windows: half of the completions to 64 prompts, for
  half of the steps. At its own rate of 0.875 a window would be the whole pool, so that arm has no
  fill-in.
- **Bound**: ``pruning.max_weight`` changes no weight of DPPO's rule.
- **Accuracy**: greedy answers to held-out problems of the training's kind, and of another kind
  (``longer``): sums of 7 and 8 numbers, word problems of a sixth family, or for SmolLM2 problems
  of three steps.
- **Seconds** are s₀·steps + s₁·(tokens generated) + s₂·(tokens trained on), fitted to the
  wall-clock seconds of all runs of the task. Evaluations and start-up do not count.
- **Inflation** is the run's own estimate of the variance by pruning, the mean over all steps after
  the first epoch (``prune/variance_inflation``); without an estimate for biased rules.
- Differences and ratios to GRPO are paired by seed; intervals are 95% (Student's t).
- ``losses``: GRPO, DAPO and GSPO with two updates per rollout, at ratios r from 0 to 0.9, on sums
  at the learning rate tuned for GRPO with one update.

Every run is appended to ``--store``. A repeated call skips stored runs.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from arms import UNPRUNED, describe, pruning, threshold
from harness import arguments, finish, mean_and_reach, paired_ratio
from timed_runs import Costs, Run, Store, digest, name_task, points, read_settings, train
from word_problems import composed, prepared

from megatron_dppo.data.generators import make_sums
from megatron_dppo.rl.pruning.completion_rules import find_completion_rule
from megatron_dppo.rl.pruning.prompt_rules import find_prompt_rule
from megatron_dppo.settings import load_config

CONFIG = "configs/quickstart.yaml"
POOL = 256
PROMPTS = 32
FACTOR = 1.5
TUNING_SEEDS = (101, 102)
HELD_OUT = 500
"""Problems of each kind, at most."""
WARM_UP_SUMS = 8192
"""Sums of the quickstart's warm-up, which no evaluation has."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with settings."""

    settings: tuple[str, ...]
    prompts: int = PROMPTS
    """Prompts per step, before pruning."""
    steps: float = 1.0
    """Number of steps, over GRPO's."""
    by_epochs: bool = False
    """Whether the run ends after the last epoch, before its last step."""
    paper: str = ""
    """Speed-up and gain in accuracy in the paper's table (Qwen3-4B, MATH, 8 H100)."""


OURS = {"keep": (0.85, "auto"), "max_weight": 10.0}
GRPO = "GRPO: unpruned, 32 prompts"
ARMS: Mapping[str, Arm] = {
    GRPO: Arm(UNPRUNED, paper="1.00×"),
    "CPPO: top_k 0.5, divided by the kept, 64 prompts": Arm(
        pruning(completions="top_k", keep=(1.0, 0.5), normaliser="kept"),
        prompts=64,
        steps=0.5,
        paper="1.35×, +5.22",
    ),
    "CPPO: top_k 0.125, divided by the kept, 32 prompts": Arm(
        pruning(completions="top_k", keep=(1.0, 0.125), normaliser="kept")
    ),
    "GRESO: greso, refilled, 32 prompts": Arm(
        pruning("greso", keep=(0.5, 1.0), resample="prompts"),
        by_epochs=True,
        paper="2.31×, +1.70",
    ),
    "DPPO: threshold, r 0.3 / 0.3, weights to 2.1, 32 prompts": Arm(threshold(0.3, 0.3)),
    "DPPO: threshold, r 0.5 / 0.5, weights to 4, 32 prompts": Arm(threshold(0.5, 0.5)),
    "DPPO: threshold, r 0.7 / 0.7, weights to 11.2, 32 prompts": Arm(threshold(0.7, 0.7)),
    "DPPO: threshold, r 0.9 / 0.9, weights to 100, 32 prompts": Arm(threshold(0.9, 0.9)),
    "DPPO: threshold_deterministic, r 0.5 / 0.5, 32 prompts": Arm(
        threshold(0.5, 0.5, "threshold_deterministic")
    ),
    "prompts 0.85, tokens auto, weights to 10, 32 prompts": Arm(
        pruning("neyman", "neyman", **OURS)
    ),
    "prompts 0.85, tokens auto, weights to 10, noise 1, 32 prompts": Arm(
        pruning("neyman", "neyman", **OURS, target_noise=1.0)
    ),
    "unpruned, 16 prompts": Arm(UNPRUNED, prompts=16),
    "unpruned, 16 prompts, all epochs": Arm(UNPRUNED, prompts=16, steps=2.0),
}
LOSSES = ("grpo", "dapo", "gspo")
RATIOS = (0.0, 0.3, 0.5, 0.7, 0.9)
COLOURS = ("tab:blue", "tab:orange", "tab:green")
ON_SMOLLM2 = (
    GRPO,
    "CPPO: top_k 0.5, divided by the kept, 64 prompts",
    "DPPO: threshold, r 0.5 / 0.5, weights to 4, 32 prompts",
    "prompts 0.85, tokens auto, weights to 10, 32 prompts",
    "unpruned, 16 prompts",
)


@dataclass(frozen=True, slots=True)
class Task:
    """Common properties of all arms."""

    name: str
    """With a digest of the problems."""
    policy: Path
    folder: Path
    """Folder of ``train.jsonl``, ``held_out.jsonl`` and ``longer.jsonl``."""
    lr: float
    """Middle of the first three learning rates; the only one if not ``tuned``."""
    settings: tuple[str, ...]
    epochs: int = 8
    config: str = CONFIG
    tuned: bool = True

    def words(self, arm: Arm, lr: float) -> list[str]:
        steps = round(arm.steps * self.epochs * POOL / PROMPTS)
        return [
            *self.settings,
            f"model.path={self.policy}",
            f"data.train={self.folder / 'train.jsonl'}",
            f"data.eval={{held_out: {self.folder / 'held_out.jsonl'}, "
            f"longer: {self.folder / 'longer.jsonl'}}}",
            f"eval.problems={HELD_OUT}",
            f"eval.every={4 if arm.by_epochs else 0}",
            f"optimizer.lr={lr:g}",
            f"run.steps={steps}",
            f"rollout.prompts_per_step={arm.prompts}",
            *arm.settings,
        ]


def sums(folder: Path) -> Task:
    """Return the quickstart's task; ``scripts/quickstart.sh`` makes the policy."""
    config = load_config(CONFIG, [f"data.arithmetic.problems={WARM_UP_SUMS}"]).data.arithmetic
    lessons, held_out = make_sums(config)
    known = {each.question for each in (*lessons, *held_out)}
    draw = random.Random(0)

    def fresh(lengths: Sequence[int]) -> list[dict[str, str]]:
        found: dict[str, str] = {}
        while len(found) < HELD_OUT:
            terms = [draw.randint(1, config.max_operand) for _ in range(draw.choice(lengths))]
            question = "+".join(map(str, terms)) + "="
            if question not in known:
                found[question] = str(sum(terms))
        return [{"prompt": question, "label": label} for question, label in found.items()]

    lengths = range(config.min_terms, config.max_terms + 1)
    train = [{"prompt": each.question, "label": each.label} for each in lessons[:POOL]]
    write(folder, train, fresh(lengths), fresh((7, 8)))
    policy = Path("runs/quickstart/warm")
    return Task(name_task("sums", folder), policy, folder, 1.5e-4, ("layout.tp=1",))


def losses(folder: Path) -> Task:
    """Return the quickstart's task at the rate that tuning on ``sums`` found."""
    return replace(sums(folder), lr=1e-4, tuned=False)


def word_problems(folder: Path) -> Task:
    """Return the task of ``word_problems.py``; make a missing policy."""
    made = prepared(Path("runs/word_problems"))
    longer = [{"prompt": question, "label": label} for question, label in composed(HELD_OUT)]
    write(folder, read(made.folder / "train.jsonl"), read(made.folder / "held_out.jsonl"), longer)
    limits = ("layout.tp=1", "data.max_prompt_tokens=96", "rollout.max_response_tokens=96")
    return Task(name_task("word problems", folder), made.policy, folder, 2.3e-4, limits)


def smollm2(folder: Path) -> Task:
    """Return the task of ``configs/smollm2_steps.yaml``, which has the commands for its files and
    policy. The other kind is problems of three steps.

    - Runs are in fp32, because bf16 is slow on a CPU without bf16 instructions.
    - Epochs and evaluated problems are few, because a run takes 13 to 25 minutes.
    """
    made = Path("runs/smollm2_steps")
    command = [sys.executable, "tools/smollm2/problems.py", str(folder / "three"), "--steps", "3"]
    subprocess.run(command, check=True)
    longer = read(folder / "three" / "held_out.jsonl")
    held_out = read(made / "held_out.jsonl")[:256]
    write(folder, read(made / "train.jsonl"), held_out, longer[:64])
    config = "configs/smollm2_steps.yaml"
    settings = ("layout.dp=1", "data.response_key=null", "model.dtype=fp32")
    name = name_task("smollm2", folder)
    lr = 5.6e-5
    return Task(name, made / "warm", folder, lr, settings, epochs=2, config=config, tuned=False)


TASKS = {"sums": sums, "word_problems": word_problems, "smollm2": smollm2, "losses": losses}


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write(folder: Path, train: list[Any], held_out: list[Any], longer: list[Any]) -> None:
    """Write the task's files, with the first ``POOL`` problems of ``train``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"train": train[:POOL], "held_out": held_out, "longer": longer}.items():
        text = "\n".join(map(json.dumps, rows))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


class Measurement:
    """Runs of a call."""

    def __init__(self, task: Task, store: Path, jobs: int) -> None:
        self.task = task
        self.store = Store(store)
        self.pool = ThreadPoolExecutor(jobs)
        self.folder = Path(tempfile.mkdtemp(prefix="paper-table-"))

    def run(self, name: str, arm: Arm, lr: float, seed: int) -> Run:
        """Return the stored run, or train."""
        task = self.task
        words = task.words(arm, lr)
        settings = read_settings(task.config, tuple(words))
        if found := self.store.find(task.name, seed, settings):
            return found
        folder = self.folder / f"{digest(settings)[:12]}-{seed}"
        stop = self.has_ended if arm.by_epochs else None
        rows = train(task.config, [*words, f"run.seed={seed}"], folder, stop)
        reached = list(points(rows))
        evaluated = [row for row in rows if "eval/accuracy" in row][-1]
        later = [row for row in rows if row["step"] * arm.prompts > POOL]
        figures = {key: evaluated[f"eval/{key}"] for key in ("held_out", "longer")}
        for key in ("prune/variance_inflation", "prune/max_weight"):
            if found := [row[key] for row in later if key in row]:
                figures[key] = statistics.fmean(found)
        run = Run(task.name, name, seed, settings, reached, figures)
        self.store.add(run)
        shutil.rmtree(folder, ignore_errors=True)
        print(name, f"{lr:g}", seed, figures, file=sys.stderr, flush=True)
        return run

    def has_ended(self, rows: Sequence[dict[str, float]]) -> bool:
        """Return whether the last epoch was over at the last evaluation."""
        reached = list(points(rows))
        return bool(reached) and round(reached[-1].considered) >= self.task.epochs * POOL

    def run_all(self, arms: Mapping[str, Arm], lr: float, seeds: Sequence[int]) -> list[list[Run]]:
        """Return the runs of each seed, one per arm. Seed by seed, so that other work on the
        machine affects all arms."""
        jobs = [(name, arm, lr, seed) for seed in seeds for name, arm in arms.items()]
        runs = list(self.pool.map(lambda job: self.run(*job), jobs))
        return [runs[i : i + len(arms)] for i in range(0, len(runs), len(arms))]

    def tune(self) -> tuple[float, dict[str, list[float]]]:
        """Return GRPO's best learning rate, and the final accuracies by rate."""
        if not self.task.tuned:
            return self.task.lr, {}
        tried: dict[float, list[float]] = {}
        rates = [float(f"{self.task.lr * FACTOR**by:.2g}") for by in (-1, 0, 1)]
        while True:
            for lr in rates:
                if lr not in tried:
                    runs = self.run_all({GRPO: ARMS[GRPO]}, lr, TUNING_SEEDS)
                    tried[lr] = [run.figures["held_out"] for (run,) in runs]
            best = max(tried, key=lambda lr: statistics.fmean(tried[lr]))
            if best not in (min(tried), max(tried)):
                return best, {f"{lr:g}": found for lr, found in sorted(tried.items())}
            rates = [float(f"{best * (FACTOR if best == max(tried) else 1 / FACTOR):.2g}")]


def compare(
    runs: Mapping[str, Sequence[Run]], arms: Mapping[str, Arm], costs: Costs, baseline: str
) -> dict[str, Any]:
    """Return each arm's figures, compared with a baseline."""
    base = runs[baseline]
    table = {}
    for name, own in runs.items():
        ends = [run.points[-1] for run in own]
        figures: dict[str, Any] = {"prompts": arms[name].prompts, "paper": arms[name].paper}
        figures["steps"] = statistics.fmean(end.step for end in ends)
        figures["epochs"] = statistics.fmean(end.considered for end in ends) / POOL
        for key in ("generated", "trained"):
            whole = sum(getattr(run.points[-1], key) for run in base)
            figures[key] = sum(getattr(end, key) for end in ends) / whole
        seconds = [costs.seconds(end) for end in ends]
        figures["seconds"] = statistics.fmean(seconds)
        base_seconds = [costs.seconds(run.points[-1]) for run in base]
        figures["times_faster"] = paired_ratio(base_seconds, seconds)["ratio"]
        for key in ("held_out", "longer"):
            found = [run.figures[key] for run in own]
            gains = [a - run.figures[key] for a, run in zip(found, base, strict=True)]
            mean, reach = mean_and_reach(found)
            gain, gain_reach = mean_and_reach(gains)
            figures[key] = {
                "mean": mean,
                "reach": reach,
                "gain": gain,
                "gain_reach": gain_reach,
                "by_seed": found,
            }
        pruning = load_config(CONFIG, arms[name].settings).pruning
        is_biased = (
            find_prompt_rule(pruning.prompts.named).biased
            or find_completion_rule(pruning.completions.named).biased
        )
        # In a step without dropped completions, the run of a biased rule has an estimate, too.
        for key in () if is_biased else ("prune/variance_inflation", "prune/max_weight"):
            if key in own[0].figures:
                figures[key] = statistics.fmean(run.figures[key] for run in own)
        table[name] = figures
    return table


def list_losses() -> dict[str, Arm]:
    """Return the arms of the task ``losses``."""
    arms = {}
    for loss in LOSSES:
        more = (f"loss.name={loss}", "loss.updates_per_rollout=2")
        for r in RATIOS:
            own = (*threshold(r, r), *more)
            name = describe(load_config(CONFIG, own).pruning)
            arms[f"{loss.upper()}, 2 updates: {name}"] = Arm(own)
    return arms


def draw(found: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Draw variance and accuracy of ``losses`` by ratio, with the range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=160, facecolor="white", layout="constrained")
    panels = figure.subplots(1, 2)
    for loss, colour in zip(LOSSES, COLOURS, strict=True):
        own = [arm for name, arm in found.items() if name.startswith(loss.upper())]
        style = {"color": colour, "marker": "o", "label": loss.upper()}
        panels[0].plot(RATIOS, [arm["prune/variance_inflation"] for arm in own], **style)
        by_seed = 100.0 * np.array([arm["held_out"]["by_seed"] for arm in own])
        panels[1].plot(RATIOS, by_seed.mean(axis=1), **style)
        panels[1].fill_between(
            RATIOS, by_seed.min(axis=1), by_seed.max(axis=1), color=colour, alpha=0.12
        )
    panels[0].set_yscale("log", base=2)
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_title("variance of the gradient, relative to no pruning", loc="left")
    panels[1].set_title("final accuracy [%], and the seeds' range", loc="left")
    panels[0].legend(frameon=False)
    for panel in panels:
        panel.set_xlabel("ratio r of prompts and of completions")
        panel.set_xticks(RATIOS)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out)


def main() -> None:
    parser = arguments(
        __doc__,
        seeds=8,
        jobs=(1, "runs at a time"),
        picture=(Path, "where to draw the figures of losses"),
        store=(Path, "all runs; by default a file of the task in benchmarks/results"),
    )
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    options = parser.parse_args()
    task = TASKS[options.task](Path("runs/paper_table") / options.task)
    store = options.store or Path(f"benchmarks/results/paper_table_{options.task}.jsonl")
    measurement = Measurement(task, store, options.jobs)
    arms = ARMS
    if options.task == "smollm2":
        arms = {name: ARMS[name] for name in ON_SMOLLM2}
    elif options.task == "losses":
        arms = list_losses()
    try:
        lr, tuning = measurement.tune()
        by_seed = measurement.run_all(arms, lr, range(1, 1 + options.seeds))
    finally:
        measurement.pool.shutdown(cancel_futures=True)
        shutil.rmtree(measurement.folder)
    costs = Costs.of(run for run in measurement.store if run.task == task.name)
    runs = dict(zip(arms, zip(*by_seed, strict=True), strict=True))
    found = {
        "task": task.name,
        "learning_rate": lr,
        "tuning": tuning,
        "seeds": options.seeds,
        "costs": {"step": costs.step, "generated": costs.generated, "trained": costs.trained},
        "cost_error": costs.error,
        "arms": compare(runs, arms, costs, next(iter(arms))),
    }
    if options.task == "losses" and options.picture:
        draw(found["arms"], options.picture)
    finish(found, options)


if __name__ == "__main__":
    main()

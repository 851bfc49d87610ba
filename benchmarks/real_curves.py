"""Held-out accuracy over seconds: SmolLM2-135M on problems of several steps, unpruned, pruned and by TRL.

    python benchmarks/real_curves.py [--seeds 3] [--arms trl ...] [--set optimizer.lr=2e-5 ...] [--json]

All arms start from the policy that ``configs/smollm2_steps.yaml`` says how to make, and train on its problems at a
constant learning rate: as many steps, of as many prompts unless the arm's name says another number. Seed by seed they
run in turn. Seconds are those of the steps, without evaluations and the start. TRL's GRPOTrainer has the batch and the
threads of the others, an update per step and bf16 by autocast; its policy is saved now and then, and evaluated as the
others are. ``time_to_accuracy_ratio`` is that of the unpruned arm over each, paired by seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from against_trl import Arm, trl_python
from harness import arguments, finish, package_command
from pruning_speedup import BASELINE, Run, arm, compare, measure, trained

HERE = Path(__file__).parent
CONFIG = "configs/smollm2_steps.yaml"
TRL = "trl"
PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 40
ARMS: dict[str, tuple[str, ...]] = {
    BASELINE: arm("none", "none"),
    "unpruned, 8 prompts": arm("none", "none", "rollout.prompts_per_step=8"),
    "pruned": (),
    "pruned to 0.4 and 0.3": ("pruning.prompts.keep=0.4", "pruning.completions.keep=0.3", "pruning.max_weight=10"),
    TRL: (),
}


def by_trl(options: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, float]]:
    """The rows of a training by TRL's GRPOTrainer: a step's seconds, and the accuracy where it was saved."""
    saving = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": options.eval_every}
    settings = {**saving, "save_only_model": True, "seed": seed, "bf16": True}
    asked = {"policy": str(options.folder / "warm"), "pool": str(options.folder / "train.jsonl"), "prompts": PROMPTS}
    asked |= {"samples": SAMPLES, "max_response_tokens": MAX_TOKENS, "steps": options.steps, "batch": options.trl_batch}
    asked |= {"lr": options.trl_lr, "threads": 2, "reward": "calculation", "settings": settings}
    watched = Arm(TRL, [trl_python(), str(HERE / "trl_run.py"), json.dumps(asked)], folder.with_suffix(".log"))
    try:
        watched.heard()
        for _ in range(options.steps):
            watched.take_step()
        watched.process.wait(timeout=600)
    finally:
        watched.process.kill()
    rows: list[dict[str, float]] = [{"step": 0, "eval/accuracy": accuracy_of(options.folder / "warm", options, folder)}]
    for step, told in enumerate(watched.steps, start=1):
        rows.append({"step": step, "perf/step_time": told["seconds"]})
        if step % options.eval_every == 0:
            rows[-1]["eval/accuracy"] = accuracy_of(folder / f"checkpoint-{step}", options, folder)
    return rows


def accuracy_of(policy: Path, options: argparse.Namespace, folder: Path) -> float:
    """Held-out accuracy of a policy, answered greedily."""
    out = folder / f"answers-{policy.name}"
    package_command("eval", CONFIG, *data_of(options), f"model.path={policy}", f"eval.out={out}")
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    (found,) = scores["benchmarks"].values()
    return float(found["avg@k"]["value"])


def data_of(options: argparse.Namespace) -> list[str]:
    return [f"data.{name}={options.folder / file}.jsonl" for name, file in (("train", "train"), ("eval", "held_out"))]


def main() -> None:
    parser = arguments(
        __doc__,
        folder=(Path("runs/smollm2_steps"), "of the policy and the problems"),
        seeds=3,
        first_seed=1,
        steps=60,
        eval_every=10,
        accuracy=(0.45, "held-out accuracy to be reached"),
        trl_batch=(16, "sequences in a forward and backward pass of TRL's"),
        trl_lr=(4e-5, "TRL's learning rate"),
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="more settings, for all arms but TRL's")
    options = parser.parse_args()
    names = [BASELINE, *(name for name in options.arms if name != BASELINE)]
    folder = Path(tempfile.mkdtemp(prefix="real-curves-"))
    words = [CONFIG, *data_of(options), f"model.path={options.folder / 'warm'}", "optimizer.schedule=constant"]
    words += [f"run.steps={options.steps}", f"eval.every={options.eval_every}", *options.settings]
    curves: list[dict[str, Any]] = []
    runs: list[Run] = []
    try:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for name in names:
                place = folder / f"{names.index(name)}-{seed}"
                own = by_trl(options, seed, place) if name == TRL else trained([*words, *ARMS[name]], place, seed=seed)
                runs.append(measure(name, seed, own, options.accuracy))
                curves.append({"arm": name, "seed": seed, "points": points(own)})
                print(json.dumps(curves[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    finish({**compare(runs, options.accuracy), "curves": curves}, options)


def points(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Seconds of all steps so far and held-out accuracy, where it was measured."""
    seconds, found = 0.0, []
    for row in rows:
        seconds += row.get("perf/step_time", 0.0)
        if "eval/accuracy" in row:
            found.append((seconds, row["eval/accuracy"]))
    return found


if __name__ == "__main__":
    main()

"""A student of half the layers learns from its teacher alone: how far it gets, and in how many steps, pruned or not.

    python benchmarks/distillation.py [setting=value …] [--json] [--teacher runs/quickstart/hf] [--seeds 3] [--steps 80]
                                      [--every 5] [--out DIR]

The teacher is a policy that the quickstart has trained. The student has half its layers, is warmed up as the quickstart
warms its policy up, on answers that forget two carries in three, and is then distilled on its own rollouts
(``loss.distillation``), rewards ignored. Every seed trains once in every arm, from the same student with the same
prompts. ``pruned`` trains on half of the tokens. A run has arrived where its held-out accuracy is first within
``--within`` points of the teacher's; one that has not counts with all its steps. A run that stands in ``--out`` is not
made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_dppo.init import write_model
from megatron_dppo.models.shape import read_shape
from megatron_dppo.observe.metrics import read_metrics

CONFIG = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
ARMS = {
    "unpruned": ("pruning.completions.rule=none",),
    "pruned": ("pruning.completions.rule=neyman", "pruning.completions.keep=0.5"),
}
SETTINGS = (
    "layout.tp=1",
    "rollout.prompts_per_step=32",
    "rollout.samples_per_prompt=4",
    "loss.distillation.use_task_rewards=false",
    "pruning.prompts.rule=none",
    "optimizer.lr=1e-3",
    "run.export=false",
    "run.checkpoint_every=0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="further settings of the distillation, as section.setting=value")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--teacher", type=Path, default=Path("runs/quickstart/hf"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--warm-up", type=int, default=400, help="steps of the student's warm-up")
    parser.add_argument("--within", type=float, default=0.05, help="of the teacher's accuracy")
    parser.add_argument("--out", type=Path, help="where runs are kept; otherwise they are not")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = measure(arguments, arguments.out or Path(name))
    if arguments.json:
        print(json.dumps(report))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    teacher = accuracy_of(arguments.teacher, folder / "teacher")
    student, shape = folder / "student", read_shape(arguments.teacher)
    if not (student / "config.json").exists():
        sizes = {"hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        write_model(folder / "initial", **sizes, ffn=shape.ffn, layers=shape.num_layers // 2, std=0.05, overwrite=True)
        warm_up = ("layout.tp=1", "data.arithmetic.problems=8192", f"sft.steps={arguments.warm_up}")
        run("sft", f"model.path={folder / 'initial'}", f"sft.out={student}", f"run.dir={folder / 'warm'}", *warm_up)
    goal = teacher - arguments.within
    runs = {arm: [one_run(arguments, folder, arm, seed, goal) for seed in range(arguments.seeds)] for arm in ARMS}
    before = runs["unpruned"][0]["curve"][0][1]
    print(f"held-out accuracy: the teacher {100 * teacher:.1f}%, the student before {100 * before:.1f}%")
    for arm, of_arm in runs.items():
        steps, last = [of["steps"] for of in of_arm], [100 * of["accuracy"] for of in of_arm]
        print(
            f"{arm:<9} within {100 * arguments.within:g} points after {', '.join(map(str, steps))} steps, "
            f"{mean(of['tokens'] for of in of_arm):,.0f} tokens trained on; at the end {mean(last):.1f}%"
        )
    return {
        "teacher": teacher,
        "student_before": before,
        "layers": [shape.num_layers, shape.num_layers // 2],
        "runs": runs,
        "steps_pruned_over_unpruned": mean(r["steps"] for r in runs["pruned"])
        / mean(r["steps"] for r in runs["unpruned"]),
    }


def one_run(arguments: argparse.Namespace, folder: Path, arm: str, seed: int, goal: float) -> dict[str, Any]:
    """Distil once: the accuracies by step, the step that reached the goal, and the tokens trained on until then."""
    place = folder / f"{arm}-{seed}"
    run(
        "train",
        f"model.path={folder / 'student'}",
        f"loss.distillation.teacher={arguments.teacher}",
        f"run.dir={place}",
        f"run.seed={seed + 1}",
        f"run.steps={arguments.steps}",
        f"eval.every={arguments.every}",
        *SETTINGS,
        *ARMS[arm],
        *arguments.settings,
    )
    rows = read_metrics(place)
    curve = [(int(row["step"]), float(row["eval/accuracy"])) for row in rows if "eval/accuracy" in row]
    arrived = next((step for step, accuracy in curve if accuracy >= goal), None)
    taken = [row for row in rows if 0 < row["step"] <= (arrived or arguments.steps)]
    return {
        "steps": arguments.steps if arrived is None else arrived,
        "arrived": arrived is not None,
        "accuracy": curve[-1][1],
        "tokens": sum(row["train/tokens"] for row in taken),
        "kept_token_fraction": mean(row["prune/kept_token_fraction"] for row in taken),
        "kl": [round(row["train/distillation_kl"], 4) for row in taken],
        "curve": curve,
    }


def accuracy_of(model: Path, out: Path) -> float:
    """On the problems that the runs are evaluated on."""
    run("eval", f"model.path={model}", f"eval.out={out}", "layout.tp=1")
    (scores,) = json.loads((out / "scores.json").read_text())["benchmarks"].values()
    return float(scores["avg@k"]["value"])


def run(command: str, *settings: str) -> None:
    words = [sys.executable, "-m", "megatron_dppo", command, CONFIG, *settings]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()

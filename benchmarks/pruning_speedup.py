"""What pruning buys on the quickstart's task: seconds per step and seconds to a held-out accuracy, off over on.

Both arms start from one warmed-up policy and differ in ``pruning.*`` alone; they run in turn, seed by seed, so that a
noisy machine treats them alike. Seconds are those of the steps: evaluations, checkpoints and start-up are left out.

    python benchmarks/pruning_speedup.py --policy runs/quickstart/warm [--seeds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dppo.observe.metrics import read_metrics

OFF = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
ARMS: dict[str, tuple[str, ...]] = {"unpruned": OFF, "pruned": ()}


@dataclass(frozen=True, slots=True)
class Run:
    """What one training cost and reached."""

    arm: str
    seed: int
    seconds_per_step: float
    rollout_share: float
    """Share of the steps' seconds that went into rollouts."""
    seconds_to_accuracy: float | None
    """None where the accuracy was not reached."""
    final_accuracy: float
    generated_tokens: float
    backward_tokens: float


def train(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> Run:
    settings = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"run.steps={options.steps}",
        "run.export=false",
        "run.checkpoint_every=0",
        f"model.path={options.policy}",
        f"eval.every={options.eval_every}",
        *ARMS[arm],
        *options.settings,
    ]
    command = [sys.executable, "-m", "megatron_dppo", "train", str(options.config), *settings]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return measure(arm, seed, read_metrics(folder), options.accuracy)


def measure(arm: str, seed: int, rows: Sequence[dict[str, float]], accuracy: float) -> Run:
    steps = [row for row in rows if row["step"] > 0]
    seconds, reached = 0.0, None
    for row in steps:
        seconds += row["perf/step_time"]
        if reached is None and row.get("eval/accuracy", 0.0) >= accuracy:
            reached = seconds
    return Run(
        arm=arm,
        seed=seed,
        seconds_per_step=statistics.median(row["perf/step_time"] for row in steps),
        rollout_share=sum(row["perf/rollout_time"] for row in steps) / seconds,
        seconds_to_accuracy=reached,
        final_accuracy=steps[-1]["eval/accuracy"],
        generated_tokens=sum(row["rollout/generated_tokens"] for row in steps),
        backward_tokens=sum(row.get("train/tokens", 0.0) for row in steps),
    )


def compare(runs: Sequence[Run], accuracy: float) -> dict[str, object]:
    """Ratios of the arms' medians over seeds; time to accuracy only where every run got there."""

    def ratio(figure: str) -> float | None:
        values = {arm: [getattr(run, figure) for run in runs if run.arm == arm] for arm in ARMS}
        if any(value is None for both in values.values() for value in both):
            return None
        return statistics.median(values["unpruned"]) / statistics.median(values["pruned"])

    return {
        "accuracy": accuracy,
        "step_time_ratio": ratio("seconds_per_step"),
        "time_to_accuracy_ratio": ratio("seconds_to_accuracy"),
        "generated_tokens_ratio": ratio("generated_tokens"),
        "backward_tokens_ratio": ratio("backward_tokens"),
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--policy", type=Path, default=Path("runs/quickstart/warm"), help="both arms start from it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--accuracy", type=float, default=0.6, help="held-out accuracy to be reached")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("settings", nargs="*", help="more settings, for both arms")
    options = parser.parse_args()
    runs = []
    folder = Path(tempfile.mkdtemp(prefix="pruning-speedup-"))
    try:
        for seed in range(1, options.seeds + 1):
            for arm in ARMS:
                runs.append(train(arm, seed, options, folder / f"{arm}-{seed}"))
                if not options.json:
                    print(runs[-1])
    finally:
        shutil.rmtree(folder)
    print(json.dumps(compare(runs, options.accuracy)))


if __name__ == "__main__":
    main()

"""TRL's GRPOTrainer and ours on one workload, on a CPU, one thread each.

    python benchmarks/against_trl.py [--json]

Every arm trains the same warmed-up policy of a million parameters, on the same pool of sums: 32 prompts of 8
completions a step, one optimizer step per rollout, the same learning rate and loss (GRPO without a KL term), at one
rank. On ``varied`` answers have 8 to 172 tokens, 62 on average (limit 192); on ``equal`` they have 13 (limit 16). The
reward, also the same, gives credit for being near the sum, so that few groups are all right or all wrong: ours drops
completions without advantage also where it does not prune, which costs nothing and would flatter it here.

Arms take their steps in turn, so that a noisy machine treats them alike; medians over the steps count, the first step
left out. Where other processes want the same cores, ``cpu_seconds`` says more than ``seconds``.

TRL lives in an environment of its own, which is made once, in MEGATRON_DPPO_CACHE (by default ~/.cache/megatron_dppo).
``padding`` is the share of the tokens of forward and backward passes that is padding; memory is the peak resident
memory above that after loading, of the training process alone (our verifier has another one of its own). Rewards of a
pruned arm are those of the prompts that were rolled out: harder ones on average.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from sums_of_lengths import WORKLOADS, Workload, data_settings, prepared

HERE = Path(__file__).parent
SAMPLES, LEARNING_RATE = 8, 2e-4
PACK, TRL_BATCH = 1024, {"varied": 16, "equal": 64}
"""Tokens and sequences of a forward and backward pass. On ``equal`` 64 of 8, 16, 32, 64, 128 and 1024 of 512, 1024 and
4096 took the least processor time; on ``varied`` 16 sequences of TRL's took as long as 32."""
OFF = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
OURS: dict[str, tuple[str, ...]] = {
    "unpruned": OFF,
    "pruned": ("pruning.prompts.keep=0.7", "pruning.completions.keep=0.5"),
    "pruned_to_0.3": ("pruning.prompts.keep=0.7", "pruning.completions.keep=0.3"),
    "fastest": ("pruning.prompts.keep=0.4", "pruning.completions.keep=0.3", "pruning.max_weight=10"),
}


def trl_python() -> str:
    """The interpreter of TRL's environment, made anew whenever the list of what belongs there changes."""
    wanted = HERE / "requirements-trl.txt"
    cache = Path(os.environ.get("MEGATRON_DPPO_CACHE") or Path.home() / ".cache" / "megatron_dppo")
    state = hashlib.sha256(f"{sys.version_info[:2]}".encode() + wanted.read_bytes()).hexdigest()[:16]
    place = cache / f"trl-{state}"
    python = place / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            print(f"installing TRL into {place} (once)", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "-r", wanted]
            with place.with_suffix(".log").open("w") as log:
                if subprocess.run(install, stdout=log, stderr=log).returncode:
                    raise RuntimeError(f"TRL could not be installed; the whole log is {log.name}")
            (place / "complete").touch()
    return str(python)


class Arm:
    """A training that is under way, and waits between its steps."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | settings,
            )
        self.steps: list[dict[str, Any]] = []

    def heard(self) -> dict[str, Any]:
        """What it says next; waits for it."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        tail = "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-20:])
        raise RuntimeError(f"{self.name} ended early:\n{tail}\n(the whole log is {self.log})")

    def take_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(self.heard())

    def result(self) -> dict[str, Any]:
        """Medians over all steps but the first, with what the last one told of all."""
        measured = self.steps[1:]
        figures = {name: median(step[name] for step in measured) for name in ("seconds", "cpu_seconds")}
        told = {name: value for name, value in self.steps[-1].items() if name not in figures}
        return figures | told | {"all_seconds": [step["seconds"] for step in self.steps]}


def commands(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, list[str]]:
    """What starts each arm."""
    policy, pool = prepared(workload, options.folder)
    trl = [python, str(HERE / "trl_run.py"), f"--policy={policy}", f"--pool={pool}", f"--prompts={workload.prompts}"]
    trl += [f"--samples={SAMPLES}", f"--max-response-tokens={workload.max_response_tokens}", f"--lr={LEARNING_RATE}"]
    batch = options.trl_batch or TRL_BATCH[workload.name]
    trl += [f"--steps={options.steps}", f"--batch={batch}", f"--settings={options.trl_settings}"]
    ours = [sys.executable, str(HERE / "our_run.py"), *data_settings(workload, pool), f"model.path={policy}"]
    ours += [
        "layout.dp=1",
        f"reward.function={HERE / 'near_the_sum.py'}:compute_score",
        "loss.name=grpo",
        "run.export=false",
        "run.checkpoint_every=0",
    ]
    ours += [f"run.steps={options.steps}", f"rollout.prompts_per_step={workload.prompts}", "eval.problems=0"]
    ours += [f"rollout.samples_per_prompt={SAMPLES}", f"optimizer.lr={LEARNING_RATE}", f"pack.max_tokens={PACK}"]
    arms = {"trl": trl}
    for name, settings in OURS.items():
        arms[name] = [*ours, f"run.dir={options.folder / workload.name / name}", *settings]
    return arms


def compared(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, Any]:
    """All arms on one workload, step by step in turn."""
    arms: list[Arm] = []
    try:
        for name, command in commands(workload, options, python).items():
            subprocess.run(["rm", "-rf", str(options.folder / workload.name / name)], check=True)
            arms.append(Arm(name, command, options.folder / workload.name / f"{name}.log"))
            loaded = arms[-1].heard()
            if not options.json:
                print(f"{workload.name}: {name} loaded ({loaded['loaded_mib']:.0f} MiB)", file=sys.stderr)
        for _ in range(options.steps):
            for arm in arms:
                arm.take_step()
        for arm in arms:
            arm.process.wait(timeout=60)
    finally:
        for arm in arms:
            arm.process.kill()
    results = {arm.name: arm.result() for arm in arms}
    for name in OURS:
        for figure in ("seconds", "cpu_seconds"):
            results[name][f"{figure}_ratio"] = results["trl"][figure] / results[name][figure]
    return results


def show(workload: str, results: dict[str, Any]) -> None:
    print(f"\n{workload}")
    for arm, row in results.items():
        first, last = (sum(part) / len(part) for part in (row["reward"][:3], row["reward"][-3:]))
        length = sum(row["response_length"]) / len(row["response_length"])
        print(
            f"  {arm:<14} {row['seconds']:6.2f} s a step ({row['cpu_seconds']:.2f} of the processor)"
            f"   TRL over it {row.get('seconds_ratio', 1.0):5.2f}   padding {row['padding']:5.1%} of the slots of "
            f"{row['trained_tokens']:6,.0f} tokens   memory {row['peak_above_loaded_mib']:4.0f} MiB   "
            f"length {length:5.1f}   reward {first:.3f}, then {last:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/against_trl"), help="policies, pools and logs")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--trl-batch", type=int, help="sequences in a forward and backward pass of TRL's")
    parser.add_argument("--trl-settings", default="{}", help="more settings of GRPOConfig, as JSON")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    options = parser.parse_args()
    python = trl_python()
    results = {}
    for name in options.workloads:
        results[name] = compared(WORKLOADS[name], options, python)
        if not options.json:
            show(name, results[name])
    print(json.dumps({"steps": options.steps, **results}))


if __name__ == "__main__":
    main()

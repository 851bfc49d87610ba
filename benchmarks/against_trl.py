"""Comparison of TRL's GRPOTrainer with our trainer on a CPU, one thread each.

    python benchmarks/against_trl.py [--json]

All arms train the same warmed-up policy (a million parameters) on the same pool of sums: 32 prompts
of 8 completions a step, one optimizer step per rollout, one rank, the same learning rate, loss
(GRPO without a KL term) and reward.

- **Workloads**: answers of ``varied`` have 8 to 172 tokens, 62 on average (limit 192); answers of
  ``equal`` have 13 (limit 16).
- **Reward**: partial credit near the sum, for few groups without variance. Our unpruned arm also
  drops completions without advantage: a free saving, which a sparser reward would exaggerate.
- **Order**: arms take steps in turn, to share the noise of the machine.
- **Figures**: medians over all steps except the first. If other processes use the same cores, rely
  on ``cpu_seconds`` rather than ``seconds``.
- **padding**: fraction of padding among the tokens of forward and backward passes.
- **Memory**: peak resident memory above the resident memory after loading, training process only.
  Our verifier runs in a separate process.
- **reward** of a pruned arm: mean over the prompts rolled out, harder than average.

TRL has a virtual environment in MEGATRON_DPPO_CACHE (default ~/.cache/megatron_dppo), made once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import arguments, finish, package_command, paired_ratio

from megatron_dppo.data.generators import Sum
from megatron_dppo.init import write_model

HERE = Path(__file__).parent
SAMPLES = 8
LEARNING_RATE = 2e-4
PACK = 1024
"""Tokens of our forward and backward pass. Least processor time on ``equal`` among 512, 1024 and
4096."""
TRL_BATCH = {"varied": 16, "equal": 64}
"""Sequences of TRL's forward and backward pass. On ``equal``, least processor time among 8, 16, 32,
64 and 128; on ``varied``, 16 and 32 took equally long."""
OFF = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
OURS: dict[str, tuple[str, ...]] = {
    "unpruned": OFF,
    "pruned": ("pruning.prompts.keep=0.7", "pruning.completions.keep=0.5", "pruning.max_weight=5"),
    "pruned_to_0.3": (
        "pruning.prompts.keep=0.7",
        "pruning.completions.keep=0.3",
        "pruning.max_weight=5",
    ),
    "fastest": (
        "pruning.prompts.keep=0.4",
        "pruning.completions.keep=0.3",
        "pruning.max_weight=10",
    ),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Pool of prompts, and sizes of a step's rollout."""

    name: str
    prompts: int
    """Prompts per step."""
    max_prompt_tokens: int
    max_response_tokens: int
    forgotten_carries: float
    """Fraction of carries forgotten by the warm-up's teacher, as room for learning: about half of
    the answers are right, and most groups have right and wrong answers."""
    warm_up_steps: int

    def sums(self, count: int, seed: int) -> list[Sum]:
        """Draw distinct sums.

        - ``varied``: 2 to 22 numbers, log-normal; answers of 8 to 172 tokens, 62 on average.
        - ``equal``: two numbers and a sum of two digits each; right answers of 13 tokens.
        """
        rng = np.random.default_rng(seed)
        draw = random.Random(seed)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            if self.name == "varied":
                terms = int(np.clip(np.round(rng.lognormal(np.log(8.0), 0.65)), 2, 22))
                drawn[tuple(draw.randint(1, 9) for _ in range(terms))] = None
            else:
                drawn[draw.randint(10, 49), draw.randint(10, 49)] = None
        sums = []
        for terms in drawn:
            slips = tuple(draw.random() < self.forgotten_carries for _ in terms[1:])
            sums.append(Sum(terms, slips))
        return sums


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "varied", 32, 48, max_response_tokens=192, forgotten_carries=0.12, warm_up_steps=300
        ),
        Workload("equal", 32, 8, max_response_tokens=16, forgotten_carries=0.6, warm_up_steps=200),
    )
}


def prepared(workload: Workload, folder: Path) -> tuple[Path, Path]:
    """Warm the policy up and write the prompts, unless the policy exists.

    Returns:
        A Hugging Face directory, and a JSONL file with ``prompt`` and ``label``.
    """
    place = folder / workload.name
    policy = place / "policy"
    train = place / "train.jsonl"
    if not (policy / "config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        lessons = place / "lessons.jsonl"
        initial = place / "initial"
        _write(lessons, workload.sums(1000 if workload.name == "equal" else 8192, seed=1))
        _write(train, workload.sums(512, seed=2))
        write_model(initial, std=0.05, overwrite=True)
        settings = [
            *data_settings(workload, lessons),
            "data.response_key=response",
            f"model.path={initial}",
            f"sft.out={policy}",
            "layout.dp=1",
            f"run.dir={place / 'sft'}",
            f"sft.steps={workload.warm_up_steps}",
            "sft.batch=48",
            "sft.lr=3e-3",
        ]
        package_command("sft", *settings)
    return policy, train


def data_settings(workload: Workload, file: Path) -> list[str]:
    """List our trainer's settings for a pool."""
    return [
        f"data.train={file}",
        "data.chat_template=false",
        f"data.max_prompt_tokens={workload.max_prompt_tokens}",
        f"rollout.max_response_tokens={workload.max_response_tokens}",
    ]


def _write(file: Path, sums: list[Sum]) -> None:
    rows = [
        {"prompt": one.question, "label": one.label, "response": one.worked_answer} for one in sums
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trl_python() -> str:
    """Return the interpreter of TRL's environment. Install the environment on the first call, and
    again after a change of requirements-trl.txt or of Python's minor version."""
    wanted = HERE / "requirements-trl.txt"
    cache = Path(os.environ.get("MEGATRON_DPPO_CACHE") or Path.home() / ".cache" / "megatron_dppo")
    content = f"{sys.version_info[:2]}".encode() + wanted.read_bytes()
    state = hashlib.sha256(content).hexdigest()[:16]
    place = cache / f"trl-{state}"
    python = place / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            print(f"installing TRL into {place} (once)", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
            with place.with_suffix(".log").open("w") as log:
                done = subprocess.run([*install, "-r", wanted], stdout=log, stderr=log)
                if done.returncode:
                    raise RuntimeError(f"TRL could not be installed; the whole log is {log.name}")
            (place / "complete").touch()
    return str(python)


class Arm:
    """Training process, paused between steps."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1"}
        with log.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, text=True, env=os.environ | settings, **pipes)
        self.steps: list[dict[str, Any]] = []

    def heard(self) -> dict[str, Any]:
        """Return the next message of the process (blocking)."""
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
        """Return medians over all steps except the first, and the last step's other figures."""
        measured = self.steps[1:]
        figures = {
            "seconds": median(step["seconds"] for step in measured),
            "cpu_seconds": median(step["cpu_seconds"] for step in measured),
        }
        told = {name: value for name, value in self.steps[-1].items() if name not in figures}
        return figures | told | {"all_seconds": [step["seconds"] for step in self.steps]}


def commands(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, list[str]]:
    """Build the command line of each arm."""
    policy, pool = prepared(workload, options.folder)
    trl = {
        "policy": str(policy),
        "pool": str(pool),
        "prompts": workload.prompts,
        "samples": SAMPLES,
        "max_response_tokens": workload.max_response_tokens,
        "lr": LEARNING_RATE,
        "steps": options.steps,
        "threads": 1,
        "reward": "sum",
        "batch": options.trl_batch or TRL_BATCH[workload.name],
        "settings": json.loads(options.trl_settings),
    }
    ours = [
        sys.executable,
        str(HERE / "our_run.py"),
        *data_settings(workload, pool),
        f"model.path={policy}",
        f"reward.function={HERE / 'step_watch.py'}:compute_score",
        "loss.name=grpo",
        "layout.dp=1",
        "run.export=false",
        "run.checkpoint_every=0",
        f"run.steps={options.steps}",
        f"rollout.prompts_per_step={workload.prompts}",
        "eval.problems=0",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"optimizer.lr={LEARNING_RATE}",
        f"pack.max_tokens={PACK}",
    ]
    arms = {"trl": [python, str(HERE / "trl_run.py"), json.dumps(trl)]}
    for name, settings in OURS.items():
        arms[name] = [*ours, f"run.dir={options.folder / workload.name / name}", *settings]
    return arms


def compared(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, Any]:
    """Run all arms on one workload, one step of each arm in turn."""
    arms: list[Arm] = []
    try:
        for name, command in commands(workload, options, python).items():
            shutil.rmtree(options.folder / workload.name / name, ignore_errors=True)
            arms.append(Arm(name, command, options.folder / workload.name / f"{name}.log"))
            # The first message follows the loading of the policy.
            arms[-1].heard()
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
        theirs = results["trl"]["all_seconds"][1:]
        ratio = paired_ratio(theirs, results[name]["all_seconds"][1:])
        results[name]["seconds_ratio_interval"] = ratio["interval"]
    return results


def main() -> None:
    parser = arguments(
        __doc__,
        folder=(Path("runs/against_trl"), "policies, pools and logs"),
        steps=6,
        trl_batch=(int, "sequences in a forward and backward pass of TRL's"),
        trl_settings=("{}", "more settings of GRPOConfig, as JSON"),
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    python = trl_python()
    results = {name: compared(WORKLOADS[name], options, python) for name in options.workloads}
    finish({"steps": options.steps, **results}, options)


if __name__ == "__main__":
    main()

"""TRL's GRPOTrainer and ours on one workload, on a CPU, one thread each.

    python benchmarks/against_trl.py [--json]

Every arm trains the same warmed-up policy of a million parameters, on the same pool of sums: 32
prompts of 8 completions a step, one optimizer step per rollout, the same learning rate and loss
(GRPO without a KL term), at one rank. On ``varied`` answers have 8 to 172 tokens, 62 on average
(limit 192); on ``equal`` they have 13 (limit 16). The reward, also the same, gives credit for being
near the sum, so that few groups are all right or all wrong: ours drops completions without
advantage also where it does not prune, which costs nothing and would flatter it here.

Arms take their steps in turn, so that a noisy machine treats them alike; medians over the steps
count, the first step left out. Where other processes want the same cores, ``cpu_seconds`` says more
than ``seconds``.

TRL lives in an environment of its own, which is made once, in MEGATRON_DPPO_CACHE (by default
~/.cache/megatron_dppo). ``padding`` is the share of the tokens of forward and backward passes that
is padding; memory is the peak resident memory above that after loading, of the training process
alone (our verifier has another one of its own). Rewards of a pruned arm are those of the prompts
that were rolled out: harder ones on average.
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
SAMPLES, LEARNING_RATE = 8, 2e-4
PACK, TRL_BATCH = 1024, {"varied": 16, "equal": 64}
"""Tokens and sequences of a forward and backward pass. On ``equal`` 64 of 8, 16, 32, 64, 128 and
1024 of 512, 1024 and 4096 took the least processor time; on ``varied`` 16 sequences of TRL's took
as long as 32."""
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
    """A pool of prompts, and what is rolled out of it at a step."""

    name: str
    prompts: int
    """Prompts per step."""
    max_prompt_tokens: int
    max_response_tokens: int
    forgotten_carries: float
    """Share of the carries that the warm-up's teacher forgets, so that something is left to be
    learned; such that about half of the answers are right, and most groups have right and wrong
    ones."""
    warm_up_steps: int

    def sums(self, count: int, seed: int) -> list[Sum]:
        """``varied``: 2 to 22 numbers, log-normal, whose answers have 8 to 172 tokens, 62 on
        average. ``equal``: two numbers of two digits, with a sum of two digits; every right answer
        has 13 tokens."""
        rng, draw = np.random.default_rng(seed), random.Random(seed)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            if self.name == "varied":
                terms = int(np.clip(np.round(rng.lognormal(np.log(8.0), 0.65)), 2, 22))
                drawn[tuple(draw.randint(1, 9) for _ in range(terms))] = None
            else:
                drawn[draw.randint(10, 49), draw.randint(10, 49)] = None
        return [
            Sum(terms, tuple(draw.random() < self.forgotten_carries for _ in terms[1:]))
            for terms in drawn
        ]


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
    """The warmed-up policy and the prompts, made where they are not there yet.

    Returns:
        a Hugging Face directory, and a JSONL file with ``prompt`` and ``label``.
    """
    policy, train = folder / workload.name / "policy", folder / workload.name / "train.jsonl"
    if not (policy / "config.json").exists():
        folder.joinpath(workload.name).mkdir(parents=True, exist_ok=True)
        lessons, initial = (
            folder / workload.name / "lessons.jsonl",
            folder / workload.name / "initial",
        )
        _write(lessons, workload.sums(1000 if workload.name == "equal" else 8192, seed=1))
        _write(train, workload.sums(512, seed=2))
        write_model(initial, std=0.05, overwrite=True)
        words = [
            *data_settings(workload, lessons),
            "data.response_key=response",
            f"model.path={initial}",
        ]
        words += [f"sft.out={policy}", "layout.dp=1", f"run.dir={folder / workload.name / 'sft'}"]
        package_command(
            "sft", *words, f"sft.steps={workload.warm_up_steps}", "sft.batch=48", "sft.lr=3e-3"
        )
    return policy, train


def data_settings(workload: Workload, file: Path) -> list[str]:
    """Settings of ours to read such a pool."""
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
    """The interpreter of TRL's environment, made anew whenever the list of what belongs there
    changes."""
    wanted = HERE / "requirements-trl.txt"
    cache = Path(os.environ.get("MEGATRON_DPPO_CACHE") or Path.home() / ".cache" / "megatron_dppo")
    state = hashlib.sha256(f"{sys.version_info[:2]}".encode() + wanted.read_bytes()).hexdigest()[
        :16
    ]
    place = cache / f"trl-{state}"
    python = place / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            print(f"installing TRL into {place} (once)", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            install = [
                python,
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                "--no-deps",
                "-r",
                wanted,
            ]
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
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, text=True, env=os.environ | settings, **pipes)
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
        figures = {
            name: median(step[name] for step in measured) for name in ("seconds", "cpu_seconds")
        }
        told = {name: value for name, value in self.steps[-1].items() if name not in figures}
        return figures | told | {"all_seconds": [step["seconds"] for step in self.steps]}


def commands(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, list[str]]:
    """What starts each arm."""
    policy, pool = prepared(workload, options.folder)
    trl = {
        "policy": str(policy),
        "pool": str(pool),
        "prompts": workload.prompts,
        "samples": SAMPLES,
    }
    trl |= {
        "max_response_tokens": workload.max_response_tokens,
        "lr": LEARNING_RATE,
        "steps": options.steps,
    }
    trl |= {"threads": 1, "reward": "sum"}
    trl |= {
        "batch": options.trl_batch or TRL_BATCH[workload.name],
        "settings": json.loads(options.trl_settings),
    }
    ours = [
        sys.executable,
        str(HERE / "our_run.py"),
        *data_settings(workload, pool),
        f"model.path={policy}",
    ]
    ours += [
        f"reward.function={HERE / 'step_watch.py'}:compute_score",
        "loss.name=grpo",
        "layout.dp=1",
    ]
    ours += ["run.export=false", "run.checkpoint_every=0"]
    ours += [
        f"run.steps={options.steps}",
        f"rollout.prompts_per_step={workload.prompts}",
        "eval.problems=0",
    ]
    ours += [
        f"rollout.samples_per_prompt={SAMPLES}",
        f"optimizer.lr={LEARNING_RATE}",
        f"pack.max_tokens={PACK}",
    ]
    arms = {"trl": [python, str(HERE / "trl_run.py"), json.dumps(trl)]}
    for name, settings in OURS.items():
        arms[name] = [*ours, f"run.dir={options.folder / workload.name / name}", *settings]
    return arms


def compared(workload: Workload, options: argparse.Namespace, python: str) -> dict[str, Any]:
    """All arms on one workload, step by step in turn."""
    arms: list[Arm] = []
    try:
        for name, command in commands(workload, options, python).items():
            shutil.rmtree(options.folder / workload.name / name, ignore_errors=True)
            arms.append(Arm(name, command, options.folder / workload.name / f"{name}.log"))
            arms[-1].heard()  # it is loaded
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
        pairs = (results[arm]["all_seconds"][1:] for arm in ("trl", name))
        results[name]["seconds_ratio_interval"] = paired_ratio(*pairs)["interval"]
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

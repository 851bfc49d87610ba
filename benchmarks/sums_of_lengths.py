"""Two pools of sums as JSONL, of written-out answers of very different lengths and of equal ones, and a policy of a
million parameters warmed up on each: what two trainers can be given alike."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dppo.data.generators import Sum
from megatron_dppo.init import write_model


@dataclass(frozen=True, slots=True)
class Workload:
    """A pool of prompts, and what is rolled out of it at a step."""

    name: str
    prompts: int
    """Prompts per step."""
    max_prompt_tokens: int
    max_response_tokens: int
    forgotten_carries: float
    """Share of the carries that the warm-up's teacher forgets, so that something is left to be learned; such that about
    half of the answers are right, and most groups have right and wrong ones."""
    warm_up_steps: int

    def sums(self, count: int, seed: int) -> list[Sum]:
        """``varied``: 2 to 22 numbers, log-normal, whose answers have 8 to 172 tokens, 62 on average. ``equal``: two
        numbers of two digits, with a sum of two digits; every right answer has 13 tokens."""
        rng, draw = np.random.default_rng(seed), random.Random(seed)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            if self.name == "varied":
                terms = int(np.clip(np.round(rng.lognormal(np.log(8.0), 0.65)), 2, 22))
                drawn[tuple(draw.randint(1, 9) for _ in range(terms))] = None
            else:
                drawn[draw.randint(10, 49), draw.randint(10, 49)] = None
        return [Sum(terms, tuple(draw.random() < self.forgotten_carries for _ in terms[1:])) for terms in drawn]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("varied", 32, 48, max_response_tokens=192, forgotten_carries=0.12, warm_up_steps=300),
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
        lessons, initial = folder / workload.name / "lessons.jsonl", folder / workload.name / "initial"
        _write(lessons, workload.sums(1000 if workload.name == "equal" else 8192, seed=1))
        _write(train, workload.sums(512, seed=2))
        write_model(initial, std=0.05, overwrite=True)
        command = [sys.executable, "-m", "megatron_dppo", "sft", *data_settings(workload, lessons)]
        command += ["data.response_key=response", f"model.path={initial}", f"sft.out={policy}", "layout.dp=1"]
        command += [f"run.dir={folder / workload.name / 'sft'}", f"sft.steps={workload.warm_up_steps}", "sft.batch=48"]
        subprocess.run([*command, "sft.lr=3e-3"], check=True, stdout=sys.stderr)
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
    rows = [{"prompt": one.question, "label": one.label, "response": one.worked_answer} for one in sums]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

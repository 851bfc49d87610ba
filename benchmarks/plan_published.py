"""The planner against runs that others have published: seconds of a step, and of its phases where they are told.

Every row has the run's own settings where these are public, and says what had to be assumed. All rows are planned with
one and the same set of assumptions about machines, the planner's defaults; lengths, which are a run's own, are given.
The ratio is planned over published: 1 is right, and below 1 the planner promises too much.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import server_memory
from megatron_dppo.estimate.time import StepTime, step_time
from megatron_dppo.estimate.workload import Setup, place, without_pruning
from megatron_dppo.models.shape import PUBLISHED, PolicyShape
from megatron_dppo.settings import load_config

TRAINING = ("old log-probabilities", "reference log-probabilities", "training", "pipeline bubble", "gradient reduction")
LLAMA_8B = PolicyShape(32, 4096, 32, 8, 128, 14336, 128256, False, 5e5, 1e-5, 131072)
HYBRID_27B = PolicyShape(64, 5120, 96, 4, 64, 17408, 248320, False, 1e7, 1e-6, 262144)


@dataclass(frozen=True)
class Run:
    """A published run."""

    name: str
    source: str
    shape: PolicyShape
    settings: tuple[str, ...]
    response: float
    """Mean response, tokens."""
    prompt: float
    """Mean prompt, tokens."""
    server_share: float
    """Of a GPU's memory, for a server."""
    published: dict[str, float]
    """Seconds by phase, or of the whole ``step``."""
    assumed: tuple[str, ...]
    """What is not public, or does not fit the planner's settings."""


NEMO = "docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html, and the recipes that it names"
NEMO_SETTINGS = (
    "model.dtype=bf16",
    "rollout.engine=sglang",
    "rollout.prompts_per_step=64",
    "rollout.samples_per_prompt=32",
    "rollout.max_response_tokens=4000",
    "data.max_prompt_tokens=512",
    "loss.updates_per_rollout=4",
    "loss.kl_coef=0.01",
    "cluster.gpu=h100",
)
COLOCATED = ("rollout.colocated=true",)
NEMO_ASSUMED = (
    "mean lengths are those of release 0.4's table, whose token rates and step times give the same sums",
    "2,048 samples in four updates with a KL term: passes for old and reference log-probabilities, as its defaults say",
    "what the trainer holds is in the host's memory while servers generate, so that all of their share is free",
    "weights, which never leave their GPUs' nodes, move as they would through NCCL",
)
RUNS = (
    Run(
        "NeMo-RL 0.5, Qwen3-32B, 32 H100",
        NEMO,
        PUBLISHED["qwen3-32b"],
        (
            *NEMO_SETTINGS, *COLOCATED, "cluster.nodes=4", "layout.tp=4", "layout.pp=4",
            "layout.sequence_parallel=true", "rollout.launch.count=8", "rollout.launch.tp=4", "pack.max_tokens=4608",
        ),
        3206, 110, 0.6, {"step": 376.0},
        (*NEMO_ASSUMED, "no recomputation: its recipe names none"),
    ),
    Run(
        "NeMo-RL 0.5, Qwen3-32B, 64 H100, one step ahead",
        NEMO,
        PUBLISHED["qwen3-32b"],
        (
            *NEMO_SETTINGS, "cluster.nodes=4", "cluster.server_nodes=4", "layout.tp=4", "layout.pp=4",
            "layout.sequence_parallel=true", "rollout.servers=[" + ",".join(f"http://s:{i}" for i in range(1, 9)) + "]",
            "rollout.launch.tp=4", "rollout.ahead=1", "pack.max_tokens=4608",
        ),
        3207, 110, 0.8, {"step": 200.0},
        (*NEMO_ASSUMED[:2], "no recomputation: its recipe names none"),
    ),
    Run(
        "NeMo-RL 0.5, Llama-3.1-8B, 16 H100",
        NEMO,
        LLAMA_8B,
        (
            *NEMO_SETTINGS, *COLOCATED, "cluster.nodes=2", "layout.pp=2", "model.recompute=full",
            "rollout.launch.count=16", "rollout.launch.tp=1", "pack.max_tokens=4608",
        ),
        1060, 132, 0.6, {"step": 92.8},
        (*NEMO_ASSUMED, "its shape is taken for a Qwen3's: the same but for norms of queries and keys"),
    ),
    Run(
        "NeMo-RL 0.4, Qwen3-30B-A3B, 32 H100",
        "the same page of release 0.4",
        PUBLISHED["qwen3-30b-a3b"],
        (
            *NEMO_SETTINGS, *COLOCATED, "cluster.nodes=4", "layout.tp=2", "layout.sequence_parallel=true",
            "rollout.launch.count=8", "rollout.launch.tp=4", "pack.max_tokens=4608",
        ),
        3154, 110, 0.6, {"step": 225.0},
        (*NEMO_ASSUMED, "eight-way expert parallelism in training, which the planner does not know: it changes memory"),
    ),
    Run(
        "miles, 27B, 8 H200",
        "figures as reported; layout from scripts/run-qwen3.5-27B.sh in radixark/miles",
        HYBRID_27B,
        (
            "model.dtype=bf16", "rollout.engine=sglang", *COLOCATED, "rollout.prompts_per_step=32",
            "rollout.samples_per_prompt=8", "rollout.max_response_tokens=8192", "data.max_prompt_tokens=1024",
            "loss.kl_coef=0.001", "cluster.gpu=h200", "cluster.nodes=1", "layout.tp=4", "layout.sequence_parallel=true",
            "model.recompute=full", "rollout.launch.count=8", "rollout.launch.tp=1", "pack.max_tokens=9216",
        ),
        7000, 110, 0.5, {"generation": 307.0, "training": 415.0, "weight sync": 2.5},
        (
            "mean length from the report itself: 415 s at 9% of peak are 1.8 million tokens in 256 samples",
            "the model has linear attention in three layers of four; taken for a dense one of nearly its size, whose "
            "cache is as large as the real one's (heads of 64 instead of 256)",
            "its optimizer runs on the host, which the planner does not know",
            "weights, which never leave the node, move as they would through NCCL",
            "a pack holds the longest sequence, where the script says 8,192 tokens",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A run, planned."""

    run: Run
    planned: StepTime
    ratios: dict[str, float] = field(default_factory=dict)


def planned(run: Run, assume: Assumptions) -> Row:
    """Plan a published run with the assumptions of all, and its own lengths."""
    config = without_pruning(load_config(None, [*run.settings, "cluster.gpus_per_node=8", "run.steps=1"]))
    limit = config.rollout.max_response_tokens
    assume = replace(
        assume, response_share=run.response / limit, prompt_tokens=run.prompt, server_memory_share=run.server_share
    )
    setup = Setup(config, run.shape, place(config, run.shape), assume)
    step = step_time(setup, concurrency=max(server_memory(setup, resident=0.0).concurrency, 1))
    seconds = {
        "step": step.seconds,
        "generation": step.phases["generation"],
        "training": sum(step.phases[name] for name in TRAINING),
        "weight sync": step.phases["weight sync"],
    }
    return Row(run, step, {phase: seconds[phase] / published for phase, published in run.published.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    assume = Assumptions()
    rows = [planned(run, assume) for run in RUNS]
    found: list[dict[str, Any]] = []
    for row in rows:
        run = row.run
        found.append(
            {
                "run": run.name, "source": run.source, "settings": run.settings, "response_tokens": run.response,
                "prompt_tokens": run.prompt, "server_memory_share": run.server_share, "assumed": run.assumed,
                "published_s": run.published, "planned_s": row.planned.phases | {"step": row.planned.seconds},
                "ratios": row.ratios, "within_30_percent": {k: 1 / 1.3 <= r <= 1.3 for k, r in row.ratios.items()},
            }
        )  # fmt: skip
        print(run.name)
        for phase, published in run.published.items():
            ratio = row.ratios[phase]
            print(f"  {phase:<12} published {published:6.1f} s, planned {ratio * published:6.1f} s, ratio {ratio:.2f}")
        print("  planned: " + ", ".join(f"{name} {s:.1f}" for name, s in row.planned.phases.items() if s))
        for line in run.assumed:
            print(f"  assumed: {line}")
    if arguments.json:
        print(json.dumps({"assumptions": asdict(assume), "runs": found}))


if __name__ == "__main__":
    main()

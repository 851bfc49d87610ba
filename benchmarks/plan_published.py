"""Compare the planner with published runs: seconds of a step, and of the phases if published.

    python benchmarks/plan_published.py [--json]

A run has the public settings and mean lengths, and lists each assumption. All other assumptions are
the planner's defaults. A ratio is planned / published seconds; below 1, the planner is too
optimistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness import arguments, finish

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.servers import estimate_server_memory
from megatron_dppo.estimate.time import StepTime, estimate_step_time
from megatron_dppo.estimate.workload import Setup, assign_gpus, disable_pruning
from megatron_dppo.models.shape import PUBLISHED, PolicyShape
from megatron_dppo.settings import load_config

TRAINING = (
    "old log-probabilities",
    "reference log-probabilities",
    "training",
    "messages",
    "token exchange",
    "pipeline bubble",
    "gradient reduction",
    "optimizer",
)
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
    """Mean tokens of a response."""
    prompt: float
    """Mean tokens of a prompt."""
    server_share: float
    """Fraction of a GPU's memory for a server."""
    published: dict[str, float]
    """Seconds by phase, or of the whole ``step``."""
    assumed: tuple[str, ...]
    """Values that are not public, or for which the planner lacks a setting."""
    old_pass: bool = False
    """Whether old log-probabilities are computed before a single update, unlike here."""
    server_ranks: int | None = None
    """Tensor-parallel ranks of a server, if the planner refuses this number."""


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
    "mean lengths are those of release 0.4's table, whose token rates and step times give the same "
    "sums",
    "2,048 samples in four updates with a KL term: passes for old and reference log-probabilities, "
    "as its defaults say",
    "what the trainer holds is in the host's memory while servers generate, so that all of their "
    "share is free",
    "weights, which never leave their GPUs' nodes, move as they would through NCCL",
)
NEMO_06 = (
    "docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html, and the recipes that it names"
)
NEMO_235B = (
    *NEMO_SETTINGS[:2],
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=32",
    "rollout.max_response_tokens=8000",
    "data.max_prompt_tokens=512",
    "loss.kl_coef=0.01",
    "model.recompute=full",
    "layout.ep=16",
    "layout.etp=1",
    "layout.pp=8",
    "layout.first_stage_layers=11",
    "layout.last_stage_layers=11",
    "layout.sequence_parallel=true",
    "pack.max_tokens=8704",
    "cluster.gpu=h100",
    "cluster.nodes=16",
)
NEMO_235B_ASSUMED = (
    "512 samples in one update with a KL term: a pass for reference log-probabilities, and one for "
    "old ones, which it makes before a single update, too",
)
RUNS = (
    Run(
        "NeMo-RL 0.5, Qwen3-32B, 32 H100, 64 × 32 samples",
        NEMO,
        PUBLISHED["qwen3-32b"],
        (
            *NEMO_SETTINGS, *COLOCATED, "cluster.nodes=4", "layout.tp=4", "layout.pp=4",
            "layout.sequence_parallel=true", "rollout.launch.count=8", "rollout.launch.tp=4",
            "pack.max_tokens=4608",
        ),
        3206, 110, 0.6, {"step": 376.0},
        (*NEMO_ASSUMED, "no recomputation: its recipe names none"),
    ),
    Run(
        "NeMo-RL 0.5, Qwen3-32B, 64 H100, one step ahead",
        NEMO,
        PUBLISHED["qwen3-32b"],
        (
            *NEMO_SETTINGS, "cluster.nodes=4", "cluster.server_nodes=4", "layout.tp=4",
            "layout.pp=4", "layout.sequence_parallel=true",
            "rollout.servers=[" + ",".join(f"http://s:{i}" for i in range(1, 9)) + "]",
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
        (
            *NEMO_ASSUMED,
            "its shape is taken for a Qwen3's: the same but for norms of queries and keys",
        ),
    ),
    Run(
        "NeMo-RL 0.6, Qwen3-30B-A3B, 32 H100",
        NEMO_06,
        PUBLISHED["qwen3-30b-a3b"],
        (
            *NEMO_SETTINGS, *COLOCATED, "cluster.nodes=4", "layout.ep=8", "rollout.launch.count=16",
            "rollout.launch.tp=2", "pack.max_tokens=4608",
        ),
        3203, 110, 0.6, {"step": 192.0},
        NEMO_ASSUMED[1:],
    ),
    Run(
        "NeMo-RL 0.6, Qwen3-235B-A22B, 128 H100, 16 × 32 samples",
        NEMO_06,
        PUBLISHED["qwen3-235b-a22b"],
        (
            *NEMO_235B, *COLOCATED, "layout.tp=2", "layout.cp=2", "rollout.launch.count=16",
            "rollout.launch.tp=8",
        ),
        5698, 110, 0.6, {"step": 395.0},
        (
            *NEMO_235B_ASSUMED, *NEMO_ASSUMED[2:],
            "its servers of 16 ranks are on two nodes each, which the planner refuses; their "
            "all-reduces are taken for those within a node",
        ),
        old_pass=True, server_ranks=16,
    ),
    Run(
        "NeMo-RL 0.6, Qwen3-235B-A22B, 256 H100, one step ahead",
        NEMO_06,
        PUBLISHED["qwen3-235b-a22b"],
        (
            *NEMO_235B, "cluster.server_nodes=16", "layout.tp=4", "rollout.servers=["
            + ",".join(f"http://s:{i}" for i in range(1, 17)) + "]", "rollout.launch.tp=8",
            "rollout.ahead=1",
        ),
        5721, 110, 0.8, {"step": 231.0},
        (
            *NEMO_235B_ASSUMED,
            "the rate of tokens beside that time fits 199 s, which releases 0.5 (203 s) and 0.7 "
            "(204 s) are near",
        ),
        old_pass=True,
    ),
    Run(
        "miles, 27B, 8 H200, 32 × 8 samples",
        "figures as reported; layout from scripts/run-qwen3.5-27B.sh in radixark/miles",
        HYBRID_27B,
        (
            "model.dtype=bf16", "rollout.engine=sglang", *COLOCATED, "rollout.prompts_per_step=32",
            "rollout.samples_per_prompt=8", "rollout.max_response_tokens=8192",
            "data.max_prompt_tokens=1024", "loss.kl_coef=0.001", "cluster.gpu=h200",
            "cluster.nodes=1", "layout.tp=4", "layout.sequence_parallel=true",
            "model.recompute=full", "rollout.launch.count=8", "rollout.launch.tp=1",
            "pack.max_tokens=9216",
        ),
        7000, 110, 0.5, {"rollout": 307.0, "training": 415.0, "weight sync": 2.5},
        (
            "mean length from the report itself: 415 s at 9% of peak are 1.8 million tokens in 256 "
            "samples",
            "the model has linear attention in three layers of four; taken for a dense one of "
            "nearly its size, whose cache is as large as the real one's (heads of 64 instead of "
            "256)",
            "its optimizer runs on the host, which the planner does not know",
            "weights, which never leave the node, move as they would through NCCL",
            "a pack holds the longest sequence, where the script says 8,192 tokens",
        ),
    ),
)  # fmt: skip


def plan_run(run: Run) -> StepTime:
    """Plan a published run with the run's lengths and the planner's other assumptions."""
    settings = [*run.settings, "cluster.gpus_per_node=8", "run.steps=1"]
    config = disable_pruning(load_config(None, settings))
    assume = Assumptions(
        response_share=run.response / config.rollout.max_response_tokens,
        prompt_tokens=run.prompt,
        server_memory_share=run.server_share,
    )
    placement = assign_gpus(config, run.shape)
    if run.server_ranks is not None:
        servers = sum(placement.servers) // run.server_ranks
        placement = replace(placement, servers=(run.server_ranks,) * servers)
    setup = Setup(config, run.shape, placement, assume)
    concurrency = estimate_server_memory(setup, resident=0.0).concurrency
    step = estimate_step_time(setup, concurrency=max(concurrency, 1))
    return with_old_pass(step, ahead=bool(config.rollout.ahead)) if run.old_pass else step


def with_old_pass(step: StepTime, *, ahead: bool) -> StepTime:
    """Add a pass for old log-probabilities, equal in seconds to the reference's pass."""
    phases = step.phases | {"old log-probabilities": step.phases["reference log-probabilities"]}
    generated = phases["generation"]
    seconds = sum(phases.values())
    if ahead:
        seconds = max(generated + phases["weight sync"], seconds - generated)
    return replace(step, phases=phases, seconds=seconds)


def compare_runs() -> Iterator[dict[str, Any]]:
    """Yield each published phase beside the planned phase."""
    for run in RUNS:
        step = plan_run(run)
        planned = {
            "step": step.seconds,
            "rollout": step.phases["generation"],
            "training": sum(step.phases[name] for name in TRAINING),
            "weight sync": step.phases["weight sync"],
        }
        for phase, published in run.published.items():
            yield {
                "run": run.name,
                "source": run.source,
                "assumed": run.assumed,
                "phase": phase,
                "published_s": published,
                "planned_s": planned[phase],
                "ratio": planned[phase] / published,
            }


def main() -> None:
    options = arguments(__doc__).parse_args()
    finish({"phases": list(compare_runs())}, options)


if __name__ == "__main__":
    main()

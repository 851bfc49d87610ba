"""Time a training step of real Qwen3 shapes on one GPU: packed, and padded to the longest sequence.

    python benchmarks/gpu_step.py [--json] [--shapes 0.6b 1.7b 4b] [--sequences 64]
        [--pack-tokens 8192]
    python benchmarks/gpu_step.py --shapes 1.7b --sync-debug --profile kernels.txt
    python benchmarks/gpu_step.py --tiny

Requirements:

- The package, installed or on PYTHONPATH.
- Of the package's requirements: torch, megatron-core, pydantic, PyYAML, NumPy, transformers, and
  Transformer Engine for the fast layers.
- For the 4B shape, some 67 GiB for weights, gradients and Adam's state, before any activation.

Method:

- Each shape runs in a separate process.
- Weights are random, in bf16. Lengths are long-tailed, up to 4,096 tokens with the prompt.
- A step is the trainer's: forward and backward passes over all packs, the gradient's norm, and
  Adam. The pass for log-probabilities, needed with a reference or with several updates per rollout,
  is timed separately.
- Padded sequences run through the same code. A pack is filled with sequences padded to the longest.
  The head scores only response tokens here too; few trainers that pad do so.

Figures:

- ``model_flops_share``: model FLOPs of real tokens (no padding, no recomputation) per second of a
  step, as a fraction of the rate of a product of large matrices of the weights' type in the same
  process. This is MFU with a measured rate instead of a data sheet's.
- ``peak_gib``: torch's maximum of allocated memory.
- ``planned_peak_gib``: expected sum of weights, gradients, Adam's state, activations and head, by
  ``megatron-dppo plan`` for the same shape and pack. Excluded are parts of the plan that torch does
  not count: buckets for servers (not sent here), CUDA's own memory, and fragmentation. The plan
  assumes Transformer Engine's layers; with torch's layers, the two figures are not comparable.

``--sync-debug`` counts the host's waits for the device in torch's calls (a value read, a copy from
memory that is not pinned), and prints the places in the code on standard error. Waits for the whole
device or inside a library are not counted. Two or more packs separate the waits of each pack
from the waits of the whole update.

Without CUDA, the exit code is 2. ``--tiny`` tests the script with a tiny shape on any machine, in
fp32 on a CPU; the figures have no meaning.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args, get_type_hints
from unittest import mock

import numpy as np
import torch
from gpu_watch import waits_per_pack, write_profile
from harness import (
    WARM_UP,
    arguments,
    be_the_only_rank,
    finish,
    in_own_process,
    median_seconds,
    timed,
)

from megatron_dppo import config as settings
from megatron_dppo.config import HEAD_CHUNK_MIB, LayoutConfig, ModelConfig, OptimizerConfig
from megatron_dppo.estimate.assumptions import GIB, Assumptions
from megatron_dppo.estimate.memory import estimate_actor_memory
from megatron_dppo.estimate.workload import Placement, Setup
from megatron_dppo.models.actor import Actor, Sums
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PUBLISHED, PolicyShape
from megatron_dppo.parallel.layout import compute_capacity_multiple
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.packing import pack_sequences
from megatron_dppo.rl.types import Pack
from megatron_dppo.trainer.learner import PolicyLoss

TINY = PolicyShape(2, 64, 4, 2, 16, 128, 512, True, 1e6, 1e-6, 4096)
PROMPT = 256
"""Tokens of a prompt."""
LONGEST = 4096
"""Tokens of the longest sequence."""
TYPICAL = 700
"""Median tokens of a response."""
SPREAD = 0.9
"""Standard deviation of the logarithm of a response's tokens."""
NOT_ALLOCATED = ("sync", "reserved", "fragmentation")
"""Parts of a plan that torch does not allocate in a step."""


@dataclass(frozen=True, slots=True)
class Setting:
    shape: str
    sequences: int
    pack_tokens: int
    model: ModelConfig
    optimizer: OptimizerConfig
    scale: int
    """Divisor of lengths: 1, except for the tiny shape."""
    sync_debug: bool
    profile: str | None
    """File of the profiler's table, or - for standard error."""


@dataclass(frozen=True, slots=True)
class Way:
    """Costs of one layout of the sequences."""

    packs: int
    pack_tokens: int
    fill: float
    """Fraction of slots with real tokens."""
    seconds: float
    """Seconds of a step: ``forward_backward_s`` + ``optimizer_s``."""
    forward_backward_s: float
    optimizer_s: float
    log_probabilities_s: float
    tokens_per_second: float
    model_flops_share: float
    peak_gib: float | None
    """Maximum of allocated GPU memory during a step; None on a CPU."""
    planned_peak_gib: float


def make_rows(setting: Setting, vocabulary: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    longest = LONGEST // setting.scale
    prompt = PROMPT // setting.scale
    lengths = rng.lognormal(np.log(TYPICAL / setting.scale), SPREAD, setting.sequences)
    rows = []
    for length in np.clip(lengths, 1, longest - prompt).astype(int):
        ids = rng.integers(1, vocabulary, prompt + length).astype(np.int32)
        engine = np.full(length, -np.log(vocabulary), np.float32)
        sampled = np.ones(length, bool)
        advantage = float(rng.normal())
        row = TrainingSample(
            ids[:prompt], ids[prompt:], engine, sampled, advantage, 1.0 / length, version=0
        )
        rows.append(row)
    return rows


def packed(rows: list[TrainingSample], setting: Setting, hidden: int) -> list[Pack]:
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    limit = setting.pack_tokens // setting.scale
    multiple = compute_capacity_multiple(LayoutConfig(dp=1), limit, cuda=torch.cuda.is_available())
    packing = pack_sequences(
        lengths, ranks=1, max_tokens=limit, capacity_multiple=multiple, hidden=hidden
    )
    packs = []
    for pack in packing.packs[0]:
        sequences = [rows[i] for i in pack]
        packs.append(build_pack(sequences, packing.capacity, pad_id=0, align=1))
    return packs


def padded(rows: list[TrainingSample], setting: Setting) -> list[Pack]:
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    together = max(1, setting.pack_tokens // setting.scale // longest)
    batches = [rows[start : start + together] for start in range(0, len(rows), together)]
    return [build_pack(batch, together * longest, pad_id=0, align=longest) for batch in batches]


def update(actor: Actor, packs: list[Pack]) -> None:
    """Run the trainer's update, with a learning rate too small to change the next figures."""
    loss = PolicyLoss(
        resolve_objective(settings.LossConfig()), kl_coef=0.0, tis_cap=None, version=0
    )
    # Turn off recording: a run compares log-probabilities only in a step's first update.
    loss.take_scored()
    actor.update(packs, loss, lr=1e-7)


def forward_flops(shape: PolicyShape, rows: list[TrainingSample]) -> float:
    """Count FLOPs of matrix products and causal attention for real tokens, and of the head for
    response tokens."""
    heads = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * heads + 2 * kv + 3 * shape.ffn * (shape.experts_per_token or 1))
    lengths = np.array([len(row.prompt_ids) + len(row.response_ids) for row in rows], dtype=float)
    responses = sum(len(row.response_ids) for row in rows)
    attention = 2.0 * heads * float((lengths**2).sum())
    return (
        shape.num_layers * (2.0 * layer * lengths.sum() + attention)
        + 2.0 * shape.hidden * shape.vocab_size * responses
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOPs per second of a product of square matrices, the best of several."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = min(median_seconds(lambda: a @ b, partial(wait, device)) for _ in range(3))
    return 2.0 * size**3 / best


def random_weights(chunks: Sequence[PolicyModel]) -> None:
    (chunk,) = chunks
    generator = torch.Generator(device=next(chunk.parameters()).device).manual_seed(0)
    for parameter in chunk.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)


def planned_gib(setting: Setting, shape: PolicyShape, pack_tokens: int) -> float:
    """Return the planned GiB of torch's allocations in a step on one GPU."""
    layout = LayoutConfig(dp=1)
    pack = settings.PackConfig(max_tokens=pack_tokens)
    config = settings.Config(
        model=setting.model, layout=layout, optimizer=setting.optimizer, pack=pack
    )
    placement = Placement(layout, ranks=1, servers=(1,), shared=True, gpus=1)
    parts = estimate_actor_memory(Setup(config, shape, placement, Assumptions())).parts
    return sum(size for part, size in parts.items() if part not in NOT_ALLOCATED) / GIB


def measure_way(
    actor: Actor, packs: list[Pack], rows: list[TrainingSample], rate: float, setting: Setting
) -> Way:
    device = actor.world.device
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    passes: list[float] = []
    accumulate = actor.accumulate

    def timed_passes(*given: Any) -> list[Sums]:
        seconds, outputs = timed(lambda: accumulate(*given), partial(wait, device))
        passes.append(seconds)
        return outputs

    with mock.patch.object(actor, "accumulate", timed_passes):
        step = median_seconds(lambda: update(actor, packs), partial(wait, device))
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    forward_backward = statistics.median(passes[WARM_UP:])
    scoring = median_seconds(lambda: actor.log_probabilities(packs), partial(wait, device))
    return Way(
        packs=len(packs),
        pack_tokens=len(packs[0].token_ids),
        fill=tokens / sum(len(pack.token_ids) for pack in packs),
        seconds=step,
        forward_backward_s=forward_backward,
        optimizer_s=step - forward_backward,
        log_probabilities_s=scoring,
        tokens_per_second=tokens / step,
        model_flops_share=3 * forward_flops(actor.shape, rows) / step / rate,
        peak_gib=peak,
        planned_peak_gib=planned_gib(setting, actor.shape, len(packs[0].token_ids)),
    )


def measure(setting: Setting) -> dict[str, Any]:
    """Measure one shape in this process, and return the report."""
    be_the_only_rank()
    layout = LayoutConfig(dp=1)
    world = initialize(layout, seed=1, timeout_s=600.0)
    shape = PUBLISHED.get(f"qwen3-{setting.shape}", TINY)
    rate = matrix_rate(world.device, setting.model.torch_dtype)
    actor = Actor(
        shape, setting.model, layout, setting.optimizer, world, temperature=1.0, load=random_weights
    )
    rows = make_rows(setting, shape.vocab_size)
    packs = packed(rows, setting, shape.hidden)
    ours = measure_way(actor, packs, rows, rate, setting)
    waits = None
    if setting.sync_debug:
        passes = {"update": partial(update, actor), "log_probabilities": actor.log_probabilities}
        waits = {name: waits_per_pack(name, work, packs) for name, work in passes.items()}
    if setting.profile:
        tokens = len(packs[0].token_ids)
        title = f"A step of {setting.shape} over {len(packs)} packs of {tokens} tokens"
        write_profile(lambda: update(actor, packs), world.device, setting.profile, title)
    theirs = measure_way(actor, padded(rows, setting), rows, rate, setting)
    return {
        "shape": setting.shape,
        "parameters": sum(parameter.numel() for parameter in actor.parameters()),
        "spec": "te" if actor.config.apply_rope_fusion else "torch",
        "dtype": setting.model.dtype,
        "recompute": setting.model.recompute,
        "head_chunk_mib": setting.model.head_chunk_mib or HEAD_CHUNK_MIB[world.device.type],
        "offload": setting.optimizer.offload,
        "sequences": len(rows),
        "tokens": sum(len(row.prompt_ids) + len(row.response_ids) for row in rows),
        "matrix_tflops": rate / 1e12,
        "packed": asdict(ours),
        "padded": asdict(theirs),
        "padded_over_packed_seconds": theirs.seconds / ours.seconds,
        "host_waits": waits,
    }


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    choices = {name: get_args(get_type_hints(ModelConfig)[name]) for name in ("spec", "recompute")}
    parser = arguments(
        __doc__,
        shapes=(["0.6b", "1.7b", "4b"], "of the dense Qwen3 models"),
        sequences=64,
        pack_tokens=8192,
        head_chunk_mib=(int, "as model.head_chunk_mib, whose default it has"),
        offload=(False, "as optimizer.offload"),
        sync_debug=(False, "count how often the host waits for the GPU"),
        tiny=(False, "a tiny shape, on a CPU too, to see that it works"),
    )
    parser.add_argument(
        "--spec", choices=choices["spec"], default="auto", help="layers, as model.spec"
    )
    parser.add_argument(
        "--recompute", choices=choices["recompute"], default="none", help="as model.recompute"
    )
    parser.add_argument(
        "--profile", nargs="?", const="-", metavar="FILE", help="a table of a packed step by kernel"
    )
    options = parser.parse_args(words)
    options.shapes = ["tiny"] if options.tiny else options.shapes
    known = {*PUBLISHED, "qwen3-tiny"}
    if unknown := [shape for shape in options.shapes if f"qwen3-{shape}" not in known]:
        parser.error(f"no such shape: {', '.join(unknown)}; there are {', '.join(PUBLISHED)}")
    return options


def settings_of(options: argparse.Namespace, *, cuda: bool) -> list[Setting]:
    given = {} if options.head_chunk_mib is None else {"head_chunk_mib": options.head_chunk_mib}
    model = ModelConfig(
        dtype="bf16" if cuda else "fp32", spec=options.spec, recompute=options.recompute, **given
    )
    optimizer = OptimizerConfig(offload=options.offload)
    scale = 16 if options.tiny else 1
    shared = (options.sequences, options.pack_tokens, model, optimizer, scale)
    return [
        Setting(shape, *shared, options.sync_debug and cuda, options.profile)
        for shape in options.shapes
    ]


def main() -> None:
    options = arguments_of()
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print(
            "gpu_step.py needs CUDA, and torch sees none; --tiny shows on a CPU that it works",
            file=sys.stderr,
        )
        raise SystemExit(2)
    if not cuda and options.sync_debug:
        print(
            "--sync-debug counts nothing here: without CUDA the host waits for no device",
            file=sys.stderr,
        )
    rows = [in_own_process(measure, setting) for setting in settings_of(options, cuda=cuda)]
    device = torch.cuda.get_device_name() if cuda else "cpu"
    report = {"device": device, "torch": torch.__version__, "tiny": options.tiny, "shapes": rows}
    finish(report, options)


if __name__ == "__main__":
    main()

"""A step of the real Qwen3 shapes on one GPU, packed, and the same sequences padded to the longest.

    python benchmarks/gpu_step.py [--json] [--shapes 0.6b 1.7b 4b] [--sequences 64] [--pack-tokens
    8192] python benchmarks/gpu_step.py --shapes 1.7b --sync-debug --profile kernels.txt python
    benchmarks/gpu_step.py --tiny

Needs the package's directory on PYTHONPATH where it is not installed, and of its requirements
torch, megatron-core, pydantic, PyYAML, NumPy, transformers and, for the fast layers, Transformer
Engine. The 4B shape takes some 67 GiB for weights, gradients and Adam's state before any
activation.

Weights are random, in bf16; lengths are those of long-tailed answers, up to 4,096 tokens with the
prompt. A step is the trainer's own: forward and backward passes over all packs, the gradient's
norm, and Adam; the pass for log-probabilities, which a reference or several updates per rollout ask
for, is timed beside it. Each shape has a process of its own.

The padded way goes through the same code, a pack holding as many sequences as fit once each is as
long as the longest. The head scores response tokens alone there, too, which a trainer that pads
seldom does.

``model_flops_share`` is the model's FLOPs for real tokens (no padding, nothing recomputed), over
the time of a step and over the rate that the same process reaches in a product of large matrices of
the weights' type: what is called MFU, but for a data sheet's rate.

``peak_gib`` is the most that torch had allocated at once. ``planned_peak_gib`` beside it sums what
``megatron-dppo plan`` expects of the same shape and pack: weights, gradients, Adam's state,
activations, the head. It leaves out what the plan adds and torch's count has not: buckets on their
way to servers (none are sent here), CUDA's own memory, and what is lost between allocations. The
plan reckons with Transformer Engine's layers; with torch's, the two do not compare.

``--sync-debug`` counts how often the host waits for the device in torch's own calls (a value read,
a copy from memory that is not pinned), by the places in the code, on standard error. A wait for the
whole device or inside a library is not seen. With two packs or more it tells what each pack costs
from what an update does once.

Without CUDA it ends with exit code 2. With ``--tiny`` a tiny shape runs anywhere, in fp32 on a CPU,
to see that it works; its figures say nothing.
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
PROMPT, LONGEST, TYPICAL, SPREAD = 256, 4096, 700, 0.9
"""Tokens of a prompt, of the longest sequence, and the median and log-deviation of responses."""
NOT_ALLOCATED = ("sync", "reserved", "fragmentation")
"""Parts of a plan that no allocation of a step answers to."""


@dataclass(frozen=True, slots=True)
class Setting:
    shape: str
    sequences: int
    pack_tokens: int
    model: ModelConfig
    optimizer: OptimizerConfig
    scale: int
    """What lengths are divided by: 1 but for the tiny shape."""
    sync_debug: bool
    profile: str | None
    """Where the profiler's table goes: a file, or - for standard error."""


@dataclass(frozen=True, slots=True)
class Way:
    """What one way of laying out the sequences costs."""

    packs: int
    pack_tokens: int
    fill: float
    """Share of the slots with real tokens."""
    seconds: float
    """Of a step: the next two together."""
    forward_backward_s: float
    optimizer_s: float
    log_probabilities_s: float
    tokens_per_second: float
    model_flops_share: float
    peak_gib: float | None
    """Most memory allocated on the GPU during a step; None on a CPU."""
    planned_peak_gib: float


def make_rows(setting: Setting, vocabulary: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    longest, prompt = LONGEST // setting.scale, PROMPT // setting.scale
    lengths = rng.lognormal(np.log(TYPICAL / setting.scale), SPREAD, setting.sequences)
    rows = []
    for length in np.clip(lengths, 1, longest - prompt).astype(int):
        ids = rng.integers(1, vocabulary, prompt + length).astype(np.int32)
        engine = np.full(length, -np.log(vocabulary), np.float32)
        sampled = np.ones(length, bool)
        advantage = float(rng.normal())
        rows.append(
            TrainingSample(
                ids[:prompt], ids[prompt:], engine, sampled, advantage, 1.0 / length, version=0
            )
        )
    return rows


def packed(rows: list[TrainingSample], setting: Setting, hidden: int) -> list[Pack]:
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    limit = setting.pack_tokens // setting.scale
    multiple = compute_capacity_multiple(LayoutConfig(dp=1), limit, cuda=torch.cuda.is_available())
    packing = pack_sequences(
        lengths, ranks=1, max_tokens=limit, capacity_multiple=multiple, hidden=hidden
    )
    return [
        build_pack([rows[i] for i in pack], packing.capacity, pad_id=0, align=1)
        for pack in packing.packs[0]
    ]


def padded(rows: list[TrainingSample], setting: Setting) -> list[Pack]:
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    together = max(1, setting.pack_tokens // setting.scale // longest)
    batches = [rows[start : start + together] for start in range(0, len(rows), together)]
    return [build_pack(batch, together * longest, pad_id=0, align=longest) for batch in batches]


def update(actor: Actor, packs: list[Pack]) -> None:
    """The trainer's own, by so small a rate that the next one's figures are no others."""
    loss = PolicyLoss(
        resolve_objective(settings.LossConfig()), kl_coef=0.0, tis_cap=None, version=0
    )
    loss.take_scored()  # of which a run compares those of a step's first update
    actor.update(packs, loss, lr=1e-7)


def forward_flops(shape: PolicyShape, rows: list[TrainingSample]) -> float:
    """Of the products of matrices, and of causal attention, for real tokens; the head's for
    responses."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
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
    """FLOPs per second of one product of square matrices, the best of several."""
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
    """What a plan expects of what torch allocates in a step on one GPU."""
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
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
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
    """Run one shape in this process and report it."""
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
    passes = {"update": partial(update, actor), "log_probabilities": actor.log_probabilities}
    waits = (
        {name: waits_per_pack(name, work, packs) for name, work in passes.items()}
        if setting.sync_debug
        else None
    )
    if setting.profile:
        title = (
            f"A step of {setting.shape} over {len(packs)} packs of {len(packs[0].token_ids)} tokens"
        )
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
    if unknown := [
        shape for shape in options.shapes if shape != "tiny" and f"qwen3-{shape}" not in PUBLISHED
    ]:
        parser.error(f"no such shape: {', '.join(unknown)}; there are {', '.join(PUBLISHED)}")
    return options


def settings_of(options: argparse.Namespace, *, cuda: bool) -> list[Setting]:
    given = {} if options.head_chunk_mib is None else {"head_chunk_mib": options.head_chunk_mib}
    model = ModelConfig(
        dtype="bf16" if cuda else "fp32", spec=options.spec, recompute=options.recompute, **given
    )
    optimizer, scale = OptimizerConfig(offload=options.offload), 16 if options.tiny else 1
    shared = (options.sequences, options.pack_tokens, model, optimizer, scale)
    return [
        Setting(shape, *shared, options.sync_debug and cuda, options.profile)
        for shape in options.shapes
    ]


def main() -> None:
    options, cuda = arguments_of(), torch.cuda.is_available()
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
    finish(
        {"device": device, "torch": torch.__version__, "tiny": options.tiny, "shapes": rows},
        options,
    )


if __name__ == "__main__":
    main()

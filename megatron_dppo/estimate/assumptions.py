"""Data sheets of GPUs, and assumptions of a plan, which prints them. ``assume.x=y`` sets each."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megatron_dppo.errors import UserError

GIB = 2**30
PREFIX = "assume."


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in the usual eight-way node."""

    memory_gib: float
    """Memory usable by CUDA's report."""
    bandwidth: float
    """Bytes per second of the memory."""
    flops: float
    """Dense bf16 operations (products and sums) per second."""
    nvlink: float
    """Bytes per second to GPUs of the same node, one way."""
    network: float
    """Bytes per second to other nodes, one way: the GPU's share of the node's adapters."""

    def get_peak_flops(self, dtype: str) -> float:
        """Return operations per second in a type of ``model.dtype``."""
        # fp32 has no matrix units, because TF32 is off.
        return self.flops if dtype == "bf16" else self.flops / 16


GPUS = {
    "a100-40": Gpu(39.4, 1.555e12, 312e12, 300e9, 25e9),
    "a100-80": Gpu(79.2, 2.039e12, 312e12, 300e9, 25e9),
    "h100": Gpu(79.2, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Gpu(139.8, 4.8e12, 989e12, 450e9, 50e9),
    "b200": Gpu(178.4, 7.7e12, 2250e12, 900e9, 50e9),
}
"""SXM modules; the network is one adapter of 200 (A100) or 400 Gbit/s for each GPU."""


def needs_flash_attn(gpu: str, head_dim: int) -> bool:
    """Return whether training over packs needs flash-attn: Transformer Engine 2.14.1 finds no
    kernel in cuDNN 9.19.

    Args:
        gpu: a key of :data:`GPUS`.
        head_dim: head dimension of the policy's attention.
    """
    return gpu.startswith("a100") or (gpu == "b200" and head_dim > 128)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions for every model, machine and layout; fractions of rates: of the data sheet."""

    response_share: float = 0.5
    """Mean response / rollout.max_response_tokens. NeMo-RL's published runs: 0.26 (Llama-3.1-8B,
    1,060 of 4,096), 0.78 (Qwen3-32B, 3,206 of 4,096). A run's ``rollout/response_len/mean`` is
    better."""
    prompt_tokens: float = 130.0
    """Mean prompt; 132 and 110 in the two runs above. At most data.max_prompt_tokens."""
    mixed_share: float = 0.6
    """Fraction of prompts whose answers have unequal rewards. Without a KL term only these are
    trained on, pruned or not; dynamic_sampling and greso roll out until enough are found. A guess;
    a run's 1 - ``prune/zero_advantage_fraction`` is better."""
    variance: float | None = None
    """Factor of pruning on the gradient's variance. None: as measured for the same pruning on three
    tasks (estimate/time.py). A run's ``prune/variance_inflation`` is better."""
    low_share: float = 0.5
    """Fraction of scores below the mean, pruned by the threshold rules. A guess."""
    efficient_share: float = 0.5
    """Fraction of the tokens with a gradient trained on under ``pruning.completions.keep=auto``:
    0.76 early, 0.44 midway, 0.37 late in a run on sums (benchmarks/efficiency.py)."""
    pack_fill: float = 0.99
    """Fraction of a pack's slots with tokens, if several sequences fit (benchmarks/packing.py)."""
    busy_share: float = 0.85
    """Fraction of the trainer's time in kernels and messages at the rates of
    ``estimate/kernels.py``; the rest: waiting for launches or the slowest rank, a lower clock. A
    guess: pre-training, with even packs, reaches 0.83 (2B) to 0.91 (175B) by Megatron-LM's README
    (0.41 and 0.47 of the matrix rate on H100s)."""
    expert_imbalance: float = 1.5
    """Tokens of a layer's busiest expert-parallel rank (all ranks wait) / mean of the ranks. A
    guess: routers are balanced over pretraining data, not over mathematics."""
    decode_bandwidth_share: float = 0.7
    """Fraction of the memory's bandwidth, to read weights and cache in a decode step. Streaming
    kernels reach 0.8 to 0.9, attention over a cache's pages less."""
    decode_flops_share: float = 0.5
    """Fraction of the matrix rate in prefill and in large decode batches. A guess."""
    decode_step_ms: float = 3.0
    """Milliseconds of a decode step's scheduling, sampling and launches, added to reads and
    products. A guess."""
    decode_request_us: float = 10.0
    """Microseconds of the server's host added to a decode step per completion of the batch. A
    guess."""
    all_reduce_us: float = 12.0
    """Least microseconds of an all-reduce of a server's ranks, two per layer; a large all-reduce
    takes its bytes' time over NVLink. A guess."""
    server_memory_share: float = 0.85
    """Fraction of a GPU's memory for a server's weights and cache; SGLang's default is close on
    large GPUs."""
    server_buffers_gib: float = 4.0
    """A server's activations and captured graphs. A guess."""
    reserved_gib: float = 3.0
    """CUDA's context and buffers of NCCL, cuBLAS and Transformer Engine, per rank of the trainer. A
    guess."""
    asleep_gib: float = 2.0
    """CUDA's context and NCCL's buffers of a server on the trainer's GPU, kept while a step trains.
    A guess."""
    fragmentation: float = 0.05
    """Fraction of a rank's allocations lost to fragmentation. A guess."""
    sync_network_share: float = 0.1
    """Fraction of the network (NVLink within a node) for weights sent to servers through NCCL: verl
    reports 14 to 18 s for a 32B model."""
    sync_copy_gb_s: float = 2.0
    """GB/s of weights sent by disk. A guess."""
    checkpoint_gb_s: float = 2.0
    """GB/s of a checkpoint written to shared storage. A guess."""
    overhead_s: float = 5.0
    """Seconds of a step for scoring, planning and moving tokens. A guess."""


def read_assumptions(words: Sequence[str]) -> Assumptions:
    """Return the defaults, overridden by words ``assume.x=y``.

    Raises:
        UserError: an unknown name (the message has the nearest), or a value that is no positive
            number, or a fraction above 1.
    """
    known = {field.name: field for field in fields(Assumptions)}
    given: dict[str, float] = {}
    for word in words:
        name, _, text = word.removeprefix(PREFIX).partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise UserError(
                PREFIX + name,
                text,
                "there is no such assumption",
                f"Write {PREFIX}{near}, if it is meant",
            )
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        # Fractions end at 1; a time or factor has no upper limit.
        most = 1.0 if name.endswith(("share", "fill", "fragmentation")) else float("inf")
        if not 0.0 < value <= most or value == float("inf"):
            limits = "a number above 0" + (" and at most 1" if most == 1.0 else "")
            raise UserError(PREFIX + name, text, "is no such quantity", f"Give {limits}")
        given[name] = value
    return replace(Assumptions(), **given)

"""Estimate seconds of a step by phases, and the variance measured under pruning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_dppo.config import Config
from megatron_dppo.config.loss import ScheduleConfig
from megatron_dppo.config.types import Keep
from megatron_dppo.estimate.kernels import (
    INSIDE,
    PRODUCTS,
    Seconds,
    StageTimes,
    estimate_optimizer_time,
    estimate_reduction_time,
    estimate_stage_times,
    estimate_transfer_time,
)
from megatron_dppo.estimate.layers import count_delta_flops
from megatron_dppo.estimate.memory import count_cache_bytes, count_parameter_kinds, resolve_shape
from megatron_dppo.estimate.workload import Setup, Work
from megatron_dppo.models.shape import PolicyShape

BINS = 64
"""Intervals of a response, each with a constant number of decoding completions."""


UPDATE = ("training", "messages", "token exchange", "pipeline bubble")


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    seconds: float
    """Less than the sum of the phases if generation runs ahead."""
    packs: int
    """Packs of a minibatch on each replica."""
    bubble: float
    """Waiting time of a pipeline stage / the trainer's passes."""
    batch: float
    """Maximum of completions decoded at once by a server."""
    long_tail: float
    """Decoding time / decoding time if all responses had the mean length."""
    model_flops_share: float
    """MFU of the update: FLOPs without recomputation and padding / the data sheet's."""


def estimate_step_time(setup: Setup, *, concurrency: int) -> StepTime:
    """Estimate a mean step, if a server decodes at most ``concurrency`` completions at once."""
    config = setup.config
    work = setup.work
    packs = setup.packs
    rolled = estimate_generation(setup, concurrency=concurrency)
    trainer = estimate_trainer_phases(setup)
    phases = _merge_phases(setup, rolled, trainer)
    # The backward pass has twice the forward pass's FLOPs.
    useful = 3.0 * count_forward_flops(setup)
    passing = sum(trainer[phase] for phase in UPDATE)
    waits = _compute_bubble_ratio(setup)
    return StepTime(
        work=work,
        phases=phases,
        seconds=_sum_phases(phases, config.rollout.ahead),
        packs=packs,
        bubble=waits / (1 + waits),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (setup.placement.ranks * setup.rate * passing),
    )


def _merge_phases(
    setup: Setup,
    rolled: Generation,
    trainer: Mapping[str, float],
) -> dict[str, float]:
    generated = 0.0 if setup.config.data.rollouts else rolled.seconds
    beside = {"weight sync": _estimate_sync(setup), "overhead": setup.assume.overhead_s}
    return {"generation": generated, **trainer, **beside}


def _sum_phases(phases: Mapping[str, float], ahead: int) -> float:
    seconds = sum(phases.values())
    if ahead:
        # Servers wait only for the weights, and the trainer for the longer of the two sides.
        return max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
    return seconds


def bound_step_seconds(setup: Setup, *, concurrency: int, training: float | None = None) -> float:
    """Return the least seconds of a step.

    Args:
        training: seconds of the trainer's phases; None: matrix products alone, at the rate of large
            products.
    """
    if training is None:
        # Adapters need no gradient of the frozen weights.
        passes = 2.0 if setup.config.model.lora.rank else 3.0
        rate = setup.rate * PRODUCTS * setup.assume.busy_share
        training = passes * count_forward_flops(setup) / setup.placement.ranks / rate
    rolled = estimate_generation(setup, concurrency=concurrency)
    phases = _merge_phases(setup, rolled, {"training": training})
    return _sum_phases(phases, setup.config.rollout.ahead)


def estimate_trainer_phases(setup: Setup) -> dict[str, float]:
    config = setup.config
    work = setup.work
    through = estimate_stage_times(setup)
    packs = setup.packs * work.updates
    stages = range(setup.layout.pp)
    # All stages wait for the slowest.
    train = find_slowest(each.update for each in through)
    passes = packs / setup.assume.busy_share
    forward = _estimate_scoring(setup, through, packs)
    reduction = max(estimate_reduction_time(setup, stage) for stage in stages)
    optimizer = max(estimate_optimizer_time(setup, stage) for stage in stages)
    # Estimate as if each teacher had sequences in all packs.
    teacher_seconds = []
    for path in config.loss.distillation.models:
        teacher = replace(setup, shape=resolve_shape(path))
        stage_times = estimate_stage_times(teacher)
        teacher_seconds.append(_estimate_scoring(teacher, stage_times, packs))
    return {
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        "teacher": sum(teacher_seconds),
        "training": passes * train.kernels,
        "messages": passes * train.messages,
        "token exchange": passes * train.exchange,
        "pipeline bubble": passes * train.total * _compute_bubble_ratio(setup),
        "gradient reduction": reduction * work.updates,
        "optimizer": optimizer * work.updates,
    }


def _compute_bubble_ratio(setup: Setup) -> float:
    """Return a stage's waiting time in a pass over all packs / its working time."""
    layout = setup.layout
    return (layout.pp - 1) / (layout.vpp * setup.packs)


def find_slowest(stages: Iterable[Seconds]) -> Seconds:
    return max(stages, key=lambda seconds: seconds.total)


def _estimate_scoring(setup: Setup, stages: Iterable[StageTimes], packs: float) -> float:
    slowest = find_slowest(each.forward for each in stages)
    passes = slowest.total * packs / setup.assume.busy_share
    return passes * (1 + _compute_bubble_ratio(setup))


def count_layer_flops(setup: Setup) -> float:
    """Count the FLOPs of a token's forward pass through all layers: two per active weight, and
    causal attention's products with half of the token's sequence."""
    shape = setup.shape
    context = setup.work.context
    attention_layers = shape.num_layers // shape.attention_interval
    products = 2.0 * count_parameter_kinds(shape).matrices
    attention = 2.0 * shape.heads * shape.head_dim * context * attention_layers
    delta_nets = count_delta_flops(shape) * (shape.num_layers - attention_layers)
    return products + attention + delta_nets


def count_head_flops(shape: PolicyShape) -> float:
    """Count the FLOPs of a response token's forward pass through the head."""
    return 2.0 * count_parameter_kinds(shape).head


def count_forward_flops(setup: Setup) -> float:
    """Count the FLOPs of a forward pass over all tokens trained on by a step."""
    work = setup.work
    return count_layer_flops(setup) * work.trained + count_head_flops(setup.shape) * work.responses


def _estimate_sync(setup: Setup) -> float:
    """Estimate seconds to send the weights to all servers, over a node's links, the network or a
    disk."""
    size = count_parameter_kinds(setup.shape).total * setup.width
    rollout = setup.config.rollout
    cluster = setup.config.cluster
    if rollout.served and rollout.sync.transport == "disk":
        return size / (setup.assume.sync_copy_gb_s * 1e9)
    near = not rollout.served or (cluster.nodes == 1 and not cluster.server_nodes)
    rate = setup.gpu.nvlink if near else setup.gpu.network
    return size / (rate * setup.assume.sync_network_share)


@dataclass(frozen=True, slots=True)
class Generation:
    seconds: float
    batch: float
    """Maximum of completions decoded at once by a server."""
    long_tail: float
    """As in :class:`StepTime`; at least 1."""


def estimate_generation(setup: Setup, *, concurrency: int) -> Generation:
    """Estimate the rollouts: prefill, and decode steps until the longest completion ends."""
    # The servers' GPUs share the prompts equally. Assume the fewest ranks for all.
    tp = min(setup.placement.servers)
    gpus = sum(setup.placement.servers)
    rollout = setup.config.rollout
    work = setup.work
    lengths = setup.lengths
    prompt = setup.prompt
    each = work.completions * tp / gpus
    in_flight = rollout.samples_per_prompt * rollout.max_in_flight * gpus
    batch = max(min(each, concurrency, in_flight), 1.0)
    decode = _estimate_decoding(setup, tp, each, batch)
    mean_step = _estimate_decode_step(setup, tp, batch, prompt + lengths.mean / 2)
    equal_lengths = each * lengths.mean / batch * mean_step
    # Each prompt once, because the cache shares the prompt among its completions.
    tokens = work.prompts * prompt * tp / gpus
    rate = tp * setup.rate * setup.assume.decode_flops_share
    prefill = 2.0 * count_parameter_kinds(setup.shape).active * tokens / rate
    return Generation(decode + prefill, batch, max(decode / equal_lengths, 1.0))


def _estimate_decoding(setup: Setup, tp: int, completions: float, batch: float) -> float:
    """Estimate seconds of a full batch while completions wait, then of the rest."""
    lengths = setup.lengths
    prompt = setup.prompt
    waiting = max(completions - batch, 0.0)
    full_step = _estimate_decode_step(setup, tp, batch, prompt + lengths.token_weighted_mean / 2)
    seconds = waiting * lengths.mean / batch * full_step
    width = lengths.limit / BINS
    for i in range(BINS):
        middle = (i + 0.5) * width
        active = batch * lengths.compute_tail_fraction(middle)
        # The longest completion has ended.
        if active < 0.5:
            break
        seconds += width * _estimate_decode_step(setup, tp, max(active, 1.0), prompt + middle)
    return seconds


def _estimate_decode_step(setup: Setup, tp: int, active: float, context: float) -> float:
    """Estimate seconds of a decode step: the longer of reading and multiplying, then all-reduces
    and overheads.

    Args:
        active: completions in the batch.
        context: tokens, mean present length of completions, prompts included.
    """
    shape = setup.shape
    assume = setup.assume
    weights = count_parameter_kinds(setup.shape)
    unread = 0.0
    if shape.experts:
        # Experts without a token of the batch are not read.
        missed = (1 - shape.experts_per_token / shape.experts) ** (active - 1)
        unread = (weights.total - weights.active) * missed
    read = (weights.total - unread) * setup.width / tp
    read += active * context * count_cache_bytes(shape, tp, setup.width)
    moved = read / (setup.gpu.bandwidth * assume.decode_bandwidth_share)
    multiplied = 2.0 * weights.active * active / tp / (setup.rate * assume.decode_flops_share)
    wire = estimate_transfer_time(setup, INSIDE, tp, active * shape.hidden * setup.width, times=2.0)
    reduced = 2 * shape.num_layers * max(wire, assume.all_reduce_us / 1e6) if tp > 1 else 0.0
    overhead = assume.decode_step_ms / 1e3
    requests = active * assume.decode_request_us / 1e6
    return max(moved, multiplied) + reduced + overhead + requests


VARIANCES: Mapping[tuple[Keep, Keep], tuple[float, float]] = {
    (1.0, 1.0): (1.0, 1.0),
    (1.0, 0.5): (1.0, 1.0),
    (1.0, "auto"): (1.0, 1.05),
    (0.85, 1.0): (1.04, 1.19),
    (0.85, "auto"): (1.07, 1.23),
    (0.85, 0.5): (1.04, 1.19),
    (0.7, 1.0): (1.13, 1.49),
    (0.7, "auto"): (1.16, 1.53),
    (0.7, 0.5): (1.15, 1.49),
    (0.7, 0.3): (1.22, 1.5),
    (0.5, 0.3): (1.65, 2.15),
    (0.4, 0.3): (1.99, 2.52),
    (0.3, 0.3): (2.84, 3.47),
}
"""Factor of ``neyman`` on the gradient's variance, by the kept fractions of prompts and of
completions' tokens: minimum and maximum over all stages of two toy tasks and of SmolLM2's problems
(``benchmarks/efficiency.py``)."""


def get_measured_variance(config: Config) -> tuple[float, float] | None:
    """Return the row of :data:`VARIANCES` for a run's pruning; None if not measured."""
    levels = config.pruning.prompts, config.pruning.completions
    keeps: list[Keep] = []
    for level in levels:
        if level.named not in ("none", "neyman") or level.schedule != ScheduleConfig():
            return None
        keeps.append(1.0 if level.named == "none" else level.keep)
    return VARIANCES.get((keeps[0], keeps[1]))

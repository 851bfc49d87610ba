"""Seconds of a step, phase by phase, and the variance that pruning was measured to leave."""

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
"""Into so many stretches a response is cut. In each, the number of completions still decoding
counts as constant."""


UPDATE = ("training", "messages", "token exchange", "pipeline bubble")
"""Phases of an update's passes."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    """Seconds by phase."""
    seconds: float
    """Seconds of the step, less than the sum of the phases if generation runs ahead."""
    packs: int
    """Packs of a minibatch on each replica."""
    bubble: float
    """Share of the trainer's passes in which a pipeline stage waits."""
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length."""
    model_flops_share: float
    """MFU of the update: useful FLOPs, without recomputation and padding, over what the data sheet
    promises."""


def estimate_step_time(setup: Setup, *, concurrency: int) -> StepTime:
    """The time of a step's phases, if a server decodes at most ``concurrency`` completions at
    once."""
    config = setup.config
    work = setup.work
    packs = setup.packs
    rolled = estimate_generation(setup, concurrency=concurrency)
    trainer = estimate_trainer_phases(setup)
    phases = _merge_phases(setup, rolled, trainer)
    useful = 3.0 * count_forward_flops(setup)
    passing = sum(trainer[phase] for phase in UPDATE)
    return StepTime(
        work=work,
        phases=phases,
        seconds=_sum_phases(phases, config.rollout.ahead),
        packs=packs,
        bubble=_compute_bubble_ratio(setup) / (1 + _compute_bubble_ratio(setup)),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (setup.placement.ranks * setup.rate * passing),
    )


def _merge_phases(
    setup: Setup, rolled: Generation, trainer: Mapping[str, float]
) -> dict[str, float]:
    generated = 0.0 if setup.config.data.rollouts else rolled.seconds
    beside = {"weight sync": _estimate_sync(setup), "overhead": setup.assume.overhead_s}
    return {"generation": generated, **trainer, **beside}


def _sum_phases(phases: Mapping[str, float], ahead: int) -> float:
    seconds = sum(phases.values())
    return (
        max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
        if ahead
        else seconds
    )


def bound_step_seconds(setup: Setup, *, concurrency: int, training: float | None = None) -> float:
    """Least seconds of a step.

    Args:
        setup: of the run.
        concurrency: completions that a server decodes at once, at most.
        training: seconds of the trainer's phases; None: as if it only multiplied, at the rate of
            large products.
    """
    if training is None:
        passes = 2.0 if setup.config.model.lora.rank else 3.0
        rate = setup.rate * PRODUCTS * setup.assume.busy_share
        training = passes * count_forward_flops(setup) / setup.placement.ranks / rate
    rolled = estimate_generation(setup, concurrency=concurrency)
    return _sum_phases(
        _merge_phases(setup, rolled, {"training": training}), setup.config.rollout.ahead
    )


def estimate_trainer_phases(setup: Setup) -> dict[str, float]:
    """Seconds of a step's phases on the trainer's GPUs."""
    config = setup.config
    work = setup.work
    through = estimate_stage_times(setup)
    packs = setup.packs * work.updates
    stages = range(setup.layout.pp)
    train = find_slowest(each.update for each in through)
    passes = packs / setup.assume.busy_share
    forward = _estimate_scoring(setup, through, packs)
    teachers = [
        replace(setup, shape=resolve_shape(teacher)) for teacher in config.loss.distillation.models
    ]
    return {
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        # as if each had sequences in all packs
        "teacher": sum(
            _estimate_scoring(teacher, estimate_stage_times(teacher), packs) for teacher in teachers
        ),
        "training": passes * train.kernels,
        "messages": passes * train.messages,
        "token exchange": passes * train.exchange,
        "pipeline bubble": passes * train.total * _compute_bubble_ratio(setup),
        "gradient reduction": max(estimate_reduction_time(setup, stage) for stage in stages)
        * work.updates,
        "optimizer": max(estimate_optimizer_time(setup, stage) for stage in stages) * work.updates,
    }


def _compute_bubble_ratio(setup: Setup) -> float:
    """Time that a stage waits in a pass over all packs, over the time that it works."""
    layout = setup.layout
    return (layout.pp - 1) / (layout.vpp * setup.packs)


def find_slowest(stages: Iterable[Seconds]) -> Seconds:
    """The stage that the others wait for."""
    return max(stages, key=lambda seconds: seconds.total)


def _estimate_scoring(setup: Setup, stages: Iterable[StageTimes], packs: float) -> float:
    """Seconds of forward passes of log-probabilities over so many packs."""
    return (
        find_slowest(each.forward for each in stages).total
        * packs
        / setup.assume.busy_share
        * (1 + _compute_bubble_ratio(setup))
    )


def count_layer_flops(setup: Setup) -> float:
    """FLOPs of a token's forward pass through all layers: two for each weight that it meets, and
    causal attention's products with half of its sequence."""
    shape = setup.shape
    context = setup.work.context
    of_attention = shape.num_layers // shape.attention_interval
    attention = 2.0 * shape.heads * shape.head_dim * context * of_attention
    return (
        2.0 * count_parameter_kinds(shape).matrices
        + attention
        + count_delta_flops(shape) * (shape.num_layers - of_attention)
    )


def count_head_flops(shape: PolicyShape) -> float:
    """FLOPs of a response token's forward pass through the head."""
    return 2.0 * count_parameter_kinds(shape).head


def count_forward_flops(setup: Setup) -> float:
    """FLOPs of a forward pass over all that a step trains on."""
    work = setup.work
    return count_layer_flops(setup) * work.trained + count_head_flops(setup.shape) * work.responses


def _estimate_sync(setup: Setup) -> float:
    """Seconds to bring the weights to all servers, over a node's links, over the network, or by
    disk."""
    size = count_parameter_kinds(setup.shape).total * setup.width
    rollout = setup.config.rollout
    cluster = setup.config.cluster
    if rollout.served and rollout.sync.transport == "disk":
        return size / (setup.assume.sync_copy_gb_s * 1e9)
    near = not rollout.served or (cluster.nodes == 1 and not cluster.server_nodes)
    return size / (
        (setup.gpu.nvlink if near else setup.gpu.network) * setup.assume.sync_network_share
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """How long a step's rollouts take."""

    seconds: float
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length; at least 1."""


def estimate_generation(setup: Setup, *, concurrency: int) -> Generation:
    """The time of the rollouts: of all decode steps until the longest completion is done, and of
    the prefill.

    The GPUs of the servers share the prompts equally. All servers are taken to be like the one with
    the fewest ranks.

    Args:
        setup: of the run.
        concurrency: completions that a server holds at once.
    """
    tp = min(setup.placement.servers)
    gpus = sum(setup.placement.servers)
    rollout = setup.config.rollout
    work = setup.work
    lengths = setup.lengths
    prompt = setup.prompt
    each = work.completions * tp / gpus
    batch = max(
        min(each, concurrency, rollout.samples_per_prompt * rollout.max_in_flight * gpus), 1.0
    )
    decode = _estimate_decoding(setup, tp, each, batch)
    full_rounds = (
        each
        * lengths.mean
        / batch
        * _estimate_decode_step(setup, tp, batch, prompt + lengths.mean / 2)
    )
    tokens = (
        work.prompts * prompt * tp / gpus
    )  # each prompt once: the cache shares it among its completions
    rate = tp * setup.rate * setup.assume.decode_flops_share
    prefill = 2.0 * count_parameter_kinds(setup.shape).active * tokens / rate
    return Generation(decode + prefill, batch, max(decode / full_rounds, 1.0))


def _estimate_decoding(setup: Setup, tp: int, completions: float, batch: float) -> float:
    """Seconds of decoding: with a full batch while completions wait, then with those that are
    left."""
    lengths = setup.lengths
    prompt = setup.prompt
    waiting = max(completions - batch, 0.0)
    seconds = (
        waiting
        * lengths.mean
        / batch
        * _estimate_decode_step(setup, tp, batch, prompt + lengths.token_weighted_mean / 2)
    )
    width = lengths.limit / BINS
    for i in range(BINS):
        middle = (i + 0.5) * width
        active = batch * lengths.compute_tail_fraction(middle)
        if active < 0.5:  # the longest of them is done
            break
        seconds += width * _estimate_decode_step(setup, tp, max(active, 1.0), prompt + middle)
    return seconds


def _estimate_decode_step(setup: Setup, tp: int, active: float, context: float) -> float:
    """Seconds of one decode step: the longer of reading and multiplying, then all-reduces and the
    overheads.

    Args:
        setup: of the run.
        tp: tensor-parallel ranks of the server.
        active: completions in the batch.
        context: their mean length so far, prompts included, tokens.
    """
    shape = setup.shape
    assume = setup.assume
    weights = count_parameter_kinds(setup.shape)
    unread = 0.0
    if shape.experts:  # those that no token of the batch goes to
        unread = (weights.total - weights.active) * (
            1 - shape.experts_per_token / shape.experts
        ) ** (active - 1)
    read = (weights.total - unread) * setup.width / tp + active * context * count_cache_bytes(
        shape, tp, setup.width
    )
    moved = read / (setup.gpu.bandwidth * assume.decode_bandwidth_share)
    multiplied = 2.0 * weights.active * active / tp / (setup.rate * assume.decode_flops_share)
    wire = estimate_transfer_time(setup, INSIDE, tp, active * shape.hidden * setup.width, times=2.0)
    reduced = 2 * shape.num_layers * max(wire, assume.all_reduce_us / 1e6) if tp > 1 else 0.0
    return (
        max(moved, multiplied)
        + reduced
        + assume.decode_step_ms / 1e3
        + active * assume.decode_request_us / 1e6
    )


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
"""By how much ``neyman`` at these shares of prompts and of completions' tokens multiplies the
gradient's variance: the least and the most of all stages of two toy tasks and of SmolLM2's problems
(``benchmarks/efficiency.py``)."""


def get_measured_variance(config: Config) -> tuple[float, float] | None:
    """The row of :data:`VARIANCES` for a run's pruning; None where none was measured."""
    levels = config.pruning.prompts, config.pruning.completions
    if any(
        level.named not in ("none", "neyman") or level.schedule != ScheduleConfig()
        for level in levels
    ):
        return None
    prompts, completions = (1.0 if level.named == "none" else level.keep for level in levels)
    return VARIANCES.get((prompts, completions))

"""Seconds of a step, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_dppo.config import Config
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.generation import generation
from megatron_dppo.estimate.hardware import Gpu
from megatron_dppo.estimate.parameters import parameters_of, rank_elements
from megatron_dppo.estimate.placement import Placement
from megatron_dppo.estimate.work import Work, lengths_of, prompt_tokens, work_of
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rl.packing import packs_wanted
from megatron_dppo.trainer.disk_room import WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    """Seconds by phase."""
    seconds: float
    """Of the step; less than the phases' sum where generation runs one step ahead."""
    packs: int
    """Of a minibatch, on each replica."""
    bubble: float
    """Share of the trainer's passes in which a pipeline stage waits."""
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """By how much unequal lengths stretch the decoding."""
    model_flops_share: float
    """Of the matrix rate while the trainer updates, without what is recomputed or padding: what is called MFU."""


def step_time(
    config: Config, shape: PolicyShape, placement: Placement, gpu: Gpu, assume: Assumptions, *, concurrency: int
) -> StepTime:
    """The phases of a step, where a server holds ``concurrency`` completions at once."""
    work, layout, weights = work_of(config, assume), placement.layout, parameters_of(shape)
    rolled = generation(config, shape, gpu, assume, work, sizes=placement.servers, most=concurrency)
    packs = _packs(config, placement, assume, work.trained / work.updates)
    waits = (layout.pp - 1) / packs
    context = prompt_tokens(config, assume) + lengths_of(config, assume).typical
    # Forward: two for each weight that a token meets, and causal attention's products with half of its sequence.
    layers = 2.0 * weights.matrices + 2.0 * shape.heads * shape.head_dim * context * shape.num_layers
    head = 2.0 * weights.head
    share = assume.expert_flops_share if shape.experts else assume.train_flops_share
    peak = gpu.rate(config.model.dtype)
    rate = layout.tp * layout.cp * (layout.dp or 1) * peak * share * assume.pack_fill

    def passes(tokens: float, responses: float, of_layers: float = 1.0, of_head: float = 1.0) -> float:
        """Seconds of the slowest pipeline stage: the last, which has the head besides its layers."""
        return (of_layers * layers * tokens / layout.pp + of_head * head * responses) / rate

    # The head always multiplies once more for its gradient, a layer where it is recomputed.
    feed_forward = 3 * shape.hidden * shape.ffn * (shape.experts_per_token or 1) * shape.num_layers
    again = {"none": 0.0, "selective": 2.0 * feed_forward / layers, "full": 1.0}[config.model.recompute]
    train = passes(work.trained, work.responses, 3.0 + again, 4.0)
    forward = passes(work.trained, work.responses) * (1 + waits)
    everything = passes(work.seen, work.generated) * (1 + waits)
    # An fp32 sum to each rank's shard, and the weights back.
    moved = (4.0 + WEIGHT_BYTES[config.model.dtype]) * rank_elements(shape, 0, layout.pp, layout.tp) * work.updates
    phases = {
        "generation": rolled.seconds,
        "score norms": everything if config.pruning.completions.score == "head" else 0.0,
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        "training": train,
        "pipeline bubble": train * waits,
        "gradient reduction": moved / (gpu.network * assume.reduce_share) if placement.replica > 1 else 0.0,
        "weight sync": _sync_seconds(config, shape, gpu, assume),
        "overhead": assume.overhead_s,
    }
    seconds = sum(phases.values())
    if config.rollout.ahead:
        seconds = max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
    useful = 3.0 * (layers * work.trained + head * work.responses)
    return StepTime(
        work=work,
        phases=phases,
        seconds=seconds,
        packs=packs,
        bubble=waits / (1 + waits),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (placement.ranks * peak * train * (1 + waits)),
    )


def _packs(config: Config, placement: Placement, assume: Assumptions, tokens: float) -> int:
    """Packs of a minibatch on a replica, as the packer chooses them: few, but enough for the pipeline."""
    replicas = placement.layout.dp or 1
    sequences = tokens / (prompt_tokens(config, assume) + lengths_of(config, assume).mean) / replicas
    full = ceil(tokens / (replicas * config.pack.max_tokens * assume.pack_fill))
    return max(full, min(packs_wanted(config.pack.min_per_rank, placement.layout.pp), int(sequences)), 1)


def _sync_seconds(config: Config, shape: PolicyShape, gpu: Gpu, assume: Assumptions) -> float:
    """From the trainer to all servers: over a node's links or the network, or by disk."""
    size, rollout = parameters_of(shape).total * WEIGHT_BYTES[config.model.dtype], config.rollout
    if rollout.engine != "local" and rollout.sync.transport == "disk":
        return size / (assume.sync_copy_gb_s * 1e9)
    near = rollout.engine == "local" or (config.cluster.nodes == 1 and not config.cluster.server_nodes)
    return size / ((gpu.nvlink if near else gpu.network) * assume.sync_network_share)

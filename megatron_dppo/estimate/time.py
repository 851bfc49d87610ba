"""Seconds of a step, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_dppo.estimate.memory import cache_bytes, parameters_of, rank_elements
from megatron_dppo.estimate.workload import Setup, Work, work_of
from megatron_dppo.rl.packing import packs_wanted

BINS = 64
"""Into so many stretches a response is cut. In each, the number of completions still decoding counts as constant."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    """Seconds by phase."""
    seconds: float
    """Of the step. It is less than the sum of the phases if generation runs one step ahead."""
    packs: int
    """Packs of a minibatch on each replica."""
    bubble: float
    """Share of the trainer's passes in which a pipeline stage waits."""
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length."""
    model_flops_share: float
    """MFU of the update: useful FLOPs, without recomputation and padding, over what the data sheet promises."""


def step_time(setup: Setup, *, concurrency: int) -> StepTime:
    """The time of a step's phases, if a server decodes at most ``concurrency`` completions at once."""
    config, layout, work = setup.config, setup.placement.layout, work_of(setup)
    rolled = generation(setup, work, most=concurrency)
    packs = _packs(setup, work.trained / work.updates)
    waits = (layout.pp - 1) / packs
    passes = _passes(setup)
    # The head always multiplies once more for its gradient, a layer where it is recomputed.
    train = passes.seconds(work.trained, work.responses, 3.0 + passes.recomputed, 4.0)
    forward = passes.seconds(work.trained, work.responses) * (1 + waits)
    everything = passes.seconds(work.seen, work.generated) * (1 + waits)
    # An fp32 sum to each rank's shard, and the weights back.
    moved = (4.0 + setup.width) * rank_elements(setup.shape, 0, layout.pp, layout.tp) * work.updates
    reduction = moved / (setup.gpu.network * setup.assume.reduce_share)
    phases = {
        "generation": rolled.seconds,
        "score norms": everything if config.pruning.completions.score == "head" else 0.0,
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        "training": train,
        "pipeline bubble": train * waits,
        "gradient reduction": reduction if setup.placement.replica > 1 else 0.0,
        "weight sync": _sync_seconds(setup),
        "overhead": setup.assume.overhead_s,
    }
    seconds = sum(phases.values())
    if config.rollout.ahead:
        seconds = max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
    useful = 3.0 * (passes.layers * work.trained + passes.head * work.responses)
    return StepTime(
        work=work,
        phases=phases,
        seconds=seconds,
        packs=packs,
        bubble=waits / (1 + waits),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (setup.placement.ranks * setup.rate * train * (1 + waits)),
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """What the trainer's passes multiply, and how fast."""

    layers: float
    """FLOPs of a token's forward pass through all layers."""
    head: float
    """FLOPs of a response token's forward pass through the head."""
    recomputed: float
    """Share of the layers' forward pass that the backward pass repeats."""
    stages: int
    rate: float
    """FLOPs per second of all ranks."""

    def seconds(self, tokens: float, responses: float, of_layers: float = 1.0, of_head: float = 1.0) -> float:
        """Seconds of the slowest pipeline stage: the last one, which also has the head.

        Args:
            tokens: that go through the layers.
            responses: those of them that go through the head.
            of_layers, of_head: FLOPs, in forward passes.
        """
        return (of_layers * self.layers * tokens / self.stages + of_head * self.head * responses) / self.rate


def _passes(setup: Setup) -> _Passes:
    shape, layout, assume, weights = setup.shape, setup.placement.layout, setup.assume, parameters_of(setup.shape)
    # Forward: two for each weight that a token meets, and causal attention's products with half of its sequence.
    context = setup.prompt + setup.lengths.typical
    layers = 2.0 * weights.matrices + 2.0 * shape.heads * shape.head_dim * context * shape.num_layers
    feed_forward = 3 * shape.hidden * shape.ffn * (shape.experts_per_token or 1) * shape.num_layers
    again = {"none": 0.0, "selective": 2.0 * feed_forward / layers, "full": 1.0}[setup.config.model.recompute]
    share = assume.expert_flops_share if shape.experts else assume.train_flops_share
    rate = layout.tp * layout.cp * (layout.dp or 1) * setup.rate * share * assume.pack_fill
    return _Passes(layers, 2.0 * weights.head, again, layout.pp, rate)


def _packs(setup: Setup, tokens: float) -> int:
    """Packs of a minibatch on a replica. The packer makes as few as it can, but enough for the pipeline."""
    pack, replicas = setup.config.pack, setup.placement.layout.dp or 1
    sequences = tokens / (setup.prompt + setup.lengths.mean) / replicas
    full = ceil(tokens / (replicas * pack.max_tokens * setup.assume.pack_fill))
    return max(full, min(packs_wanted(pack.min_per_rank, setup.placement.layout.pp), int(sequences)), 1)


def _sync_seconds(setup: Setup) -> float:
    """Seconds to bring the weights to all servers, over a node's links, over the network, or by disk."""
    size, rollout, cluster = parameters_of(setup.shape).total * setup.width, setup.config.rollout, setup.config.cluster
    if rollout.engine != "local" and rollout.sync.transport == "disk":
        return size / (setup.assume.sync_copy_gb_s * 1e9)
    near = rollout.engine == "local" or (cluster.nodes == 1 and not cluster.server_nodes)
    return size / ((setup.gpu.nvlink if near else setup.gpu.network) * setup.assume.sync_network_share)


@dataclass(frozen=True, slots=True)
class Generation:
    """How long a step's rollouts take."""

    seconds: float
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length; at least 1."""


def generation(setup: Setup, work: Work, *, most: int) -> Generation:
    """The time of the rollouts: of all decode steps until the longest completion is done, and of the prefill.

    The GPUs of the servers share the prompts equally. All servers are taken to be like the one with the fewest ranks.

    Args:
        setup: of the run.
        work: of a step.
        most: completions that a server holds at once.
    """
    tp, gpus, rollout = min(setup.placement.servers), sum(setup.placement.servers), setup.config.rollout
    lengths, prompt = setup.lengths, setup.prompt
    each = work.completions * tp / gpus
    batch = max(min(each, most, rollout.samples_per_prompt * rollout.max_in_flight * gpus), 1.0)
    decode = _until_done(setup, tp, each, batch)
    alike = each * lengths.mean / batch * _decode_step(setup, tp, batch, prompt + lengths.mean / 2)
    tokens = work.prompts * prompt * tp / gpus  # each prompt once: the cache shares it among its completions
    rate = tp * setup.rate * setup.assume.decode_flops_share
    prefill = 2.0 * parameters_of(setup.shape).active * tokens / rate
    return Generation(decode + prefill, batch, max(decode / alike, 1.0))


def _until_done(setup: Setup, tp: int, completions: float, batch: float) -> float:
    """Seconds of decoding: with a full batch while completions wait, then with those that are left."""
    lengths, prompt = setup.lengths, setup.prompt
    waiting = max(completions - batch, 0.0)
    seconds = waiting * lengths.mean / batch * _decode_step(setup, tp, batch, prompt + lengths.typical / 2)
    width = lengths.limit / BINS
    for i in range(BINS):
        middle = (i + 0.5) * width
        active = batch * lengths.longer_than(middle)
        if active < 0.5:  # the longest of them is done
            break
        seconds += width * _decode_step(setup, tp, max(active, 1.0), prompt + middle)
    return seconds


def _decode_step(setup: Setup, tp: int, active: float, context: float) -> float:
    """Seconds of one decode step: the longer of reading and multiplying, then all-reduces and the overhead.

    Args:
        setup: of the run.
        tp: tensor-parallel ranks of the server.
        active: completions in the batch.
        context: their mean length so far, prompts included, tokens.
    """
    shape, assume, weights = setup.shape, setup.assume, parameters_of(setup.shape)
    unread = 0.0
    if shape.experts:  # those that no token of the batch goes to
        unread = (weights.total - weights.active) * (1 - shape.experts_per_token / shape.experts) ** (active - 1)
    read = (weights.total - unread) * setup.width / tp + active * context * cache_bytes(shape, tp, setup.width)
    moved = read / (setup.gpu.bandwidth * assume.decode_bandwidth_share)
    multiplied = 2.0 * weights.active * active / tp / (setup.rate * assume.decode_flops_share)
    reduced = 2e-6 * shape.num_layers * assume.all_reduce_us if tp > 1 else 0.0
    return max(moved, multiplied) + reduced + assume.decode_step_ms / 1e3

"""Seconds of a step, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.estimate.memory import layers_of_stage, parameters_of, rank_elements, shape_of
from megatron_dppo.estimate.server import cache_bytes
from megatron_dppo.estimate.workload import Setup, Work, packs_of, work_of
from megatron_dppo.models.shape import PolicyShape

BINS = 64
"""Into so many stretches a response is cut. In each, the number of completions still decoding counts as constant."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    """Seconds by phase."""
    seconds: float
    """Of the step. It is less than the sum of the phases if generation runs ahead."""
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
    packs = packs_of(setup)
    waits = (layout.pp - 1) / (layout.vpp * packs)
    once, update = forward_pass(setup), update_pass(setup)
    train = update.seconds(work.trained, work.responses)
    exchange = update.exchange_seconds(work.trained)
    forward = once.both(work.trained, work.responses) * (1 + waits)
    everything = once.both(work.seen, work.generated) * (1 + waits)
    taught = 0.0
    for teacher in config.loss.distillation.models:  # as if each had sequences in all packs
        theirs = forward_pass(replace(setup, shape=shape_of(teacher)))
        taught += theirs.both(work.trained, work.responses) * (1 + waits)
    phases = {
        "generation": 0.0 if config.data.rollouts else rolled.seconds,
        "score norms": everything if config.pruning.completions.score == "head" else 0.0,
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        "teacher": taught,
        "training": train,
        "token exchange": exchange,
        "pipeline bubble": (train + exchange) * waits,
        "gradient reduction": _reduction_seconds(setup) * work.updates,
        "weight sync": _sync_seconds(setup),
        "overhead": setup.assume.overhead_s,
    }
    seconds = sum(phases.values())
    if config.rollout.ahead:
        seconds = max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
    useful = 3.0 * (sum(layer_flops(setup)) * work.trained + head_flops(setup.shape) * work.responses)
    return StepTime(
        work=work,
        phases=phases,
        seconds=seconds,
        packs=packs,
        bubble=waits / (1 + waits),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (setup.placement.ranks * setup.rate * (train + exchange) * (1 + waits)),
    )


def layer_flops(setup: Setup) -> tuple[float, float]:
    """FLOPs of a token's forward pass through all layers: two for each weight that it meets, and causal attention's
    products with half of its sequence. Those of the feed-forward parts, or of its experts, come second."""
    shape, context = setup.shape, work_of(setup).context
    feed_forward = 6.0 * shape.hidden * shape.ffn * (shape.experts_per_token or 1) * shape.num_layers
    attention = 2.0 * shape.heads * shape.head_dim * context * shape.num_layers
    return 2.0 * parameters_of(shape).matrices - feed_forward + attention, feed_forward


def head_flops(shape: PolicyShape) -> float:
    """FLOPs of a response token's forward pass through the head."""
    return 2.0 * parameters_of(shape).head


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds that a pass of the trainer takes for each token, if the ranks of one stage had all layers."""

    layers: float
    """Of products and sums."""
    head: float
    """Of them, for each response token."""
    exchange: float
    """Of the way to the experts and back."""
    longest: float
    """Share of the layers of the stage that has the most."""
    last: float
    """Share of the layers of the last stage, which also has the head."""

    def seconds(self, tokens: float, responses: float) -> float:
        """Seconds of the slowest pipeline stage, without the exchange.

        Args:
            tokens: that go through the layers.
            responses: those of them that go through the head.
        """
        return max(self.longest * self.layers * tokens, self.last * self.layers * tokens + self.head * responses)

    def exchange_seconds(self, tokens: float) -> float:
        return self.longest * self.exchange * tokens

    def both(self, tokens: float, responses: float) -> float:
        return self.seconds(tokens, responses) + self.exchange_seconds(tokens)


def forward_pass(setup: Setup) -> Pass:
    """A forward pass of log-probabilities."""
    return _pass(setup, attention=1.0, feed_forward=1.0, head=1.0, exchange=1.0)


def update_pass(setup: Setup) -> Pass:
    """A forward and a backward pass, with what the latter repeats: the head always, a layer where it is recomputed."""
    recompute = setup.config.model.recompute
    again, feed_forward = float(recompute == "full"), float(recompute != "none")
    return _pass(setup, attention=3.0 + again, feed_forward=3.0 + feed_forward, head=4.0, exchange=2.0 + feed_forward)


def _pass(setup: Setup, *, attention: float, feed_forward: float, head: float, exchange: float) -> Pass:
    """So many forward passes of each part. Every layer waits for the busiest of its expert-parallel ranks."""
    shape, layout, assume = setup.shape, setup.placement.layout, setup.assume
    ranks = layout.tp * layout.cp * (layout.dp or 1) * assume.pack_fill
    stages = [layers_of_stage(shape, stage, layout) / shape.num_layers for stage in range(layout.pp)]
    of_attention, of_feed_forward = layer_flops(setup)
    share = assume.expert_flops_share if shape.experts else assume.train_flops_share
    layers = attention * of_attention / assume.train_flops_share
    layers += feed_forward * of_feed_forward * setup.imbalance / share
    return Pass(
        layers=layers / (ranks * setup.rate),
        head=head * head_flops(shape) / (ranks * setup.rate * assume.train_flops_share),
        exchange=exchange * exchange_seconds(setup) * shape.num_layers / ranks,
        longest=max(stages),
        last=stages[-1],
    )


def exchange_seconds(setup: Setup) -> float:
    """Seconds in which a layer's router sends a token to the busiest rank of its experts and has it back.

    A token is sent once for each of its experts: to another expert-parallel rank, if the expert is there, over NVLink
    or, to another node, over the network; then to the other tensor-parallel ranks of the expert.
    """
    shape, layout, gpu = setup.shape, setup.placement.layout, setup.gpu
    token = float(shape.hidden * setup.width)
    near_ranks = max(setup.config.cluster.gpus_per_node // layout.expert_tp, 1)
    far = max(layout.ep - near_ranks, 0) / layout.ep
    near = (min(layout.ep, near_ranks) - 1) / layout.ep + layout.expert_tp - 1
    copies = shape.experts_per_token * setup.imbalance
    return 2.0 * copies * token * max(near / gpu.nvlink, far / gpu.network) / setup.assume.exchange_share


def _reduction_seconds(setup: Setup) -> float:
    """Seconds to bring an update's gradients to each rank's shard as fp32 sums, and the weights back."""
    placement = setup.placement
    stages = (rank_elements(setup.shape, stage, placement.layout) for stage in range(placement.layout.pp))
    moved = max(
        elements.dense * (placement.replica > 1) + elements.experts * (placement.expert_replica > 1)
        for elements in stages
    )
    return (4.0 + setup.width) * moved / (setup.gpu.network * setup.assume.reduce_share)


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

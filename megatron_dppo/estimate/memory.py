"""How many weights a policy has, and how many bytes the fullest rank of the trainer needs on a
GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path

from megatron_dppo.bridge.mapping import EMBEDDING, list_adapter_entries, list_entries
from megatron_dppo.config import HEAD_CHUNK_MIB, Config, LayoutConfig, LoraConfig
from megatron_dppo.estimate.assumptions import GIB
from megatron_dppo.estimate.layers import count_delta_elements
from megatron_dppo.estimate.workload import Setup
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import (
    PUBLISHED,
    PolicyShape,
    match_published_model,
    padded_vocab,
    read_shape,
)
from megatron_dppo.parallel.layout import count_interleaved_packs, list_stage_layers


def resolve_shape(path: str) -> PolicyShape:
    """The shape of a policy, from its directory or else from the published model of its name.

    Raises:
        UserError: on ``model.path``, if it is neither.
    """
    name = match_published_model(path)
    return (
        PUBLISHED[name]
        if name and not Path(path).is_dir()
        else read_shape(policy_folder(path, weights=False))
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights, without the padding of the vocabulary."""

    total: int
    active: int
    """Weights that one token is multiplied with. Of the experts, only those that it goes to
    count."""
    matrices: int
    """The active weights in the layers. A token's forward pass takes two FLOPs for each."""
    head: int
    """Weights of the output layer, which only response tokens go through."""


@dataclass(frozen=True, slots=True)
class RankElements:
    """Numbers of weights on a rank of the trainer, the vocabulary's padding included."""

    dense: int
    """Those that the ranks of a replica hold alike, whatever layout.ep is: all but the experts'."""
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@cache
def count_parameter_kinds(shape: PolicyShape) -> Parameters:
    """Count a policy's weights."""
    sizes = _count_sizes(shape)
    experts = shape.experts * sizes.expert * shape.num_layers
    outside = sizes.embedding if shape.tied else 2 * sizes.embedding
    total = outside + sizes.norm + sum(map(sizes.layers.__getitem__, shape.layer_types)) + experts
    unused = experts - experts * shape.experts_per_token // max(shape.experts, 1)
    return Parameters(total, total - unused, total - unused - outside, sizes.embedding)


@cache
def count_rank_elements(
    shape: PolicyShape, stage: int, layout: LayoutConfig, lora: LoraConfig | None = None
) -> RankElements:
    """Weights that a rank of a pipeline stage holds: the policy's, or those of its adapters."""
    sizes = _count_sizes(shape, layout, lora)
    dense = sum(
        sizes.layers[shape.layer_types[layer]]
        for layers in list_stage_layers(shape.num_layers, stage, layout)
        for layer in layers
    )
    if stage == 0:
        dense += sizes.embedding
    if stage == layout.pp - 1:
        dense += sizes.norm + (0 if shape.tied and stage == 0 else sizes.embedding)
    return RankElements(
        dense, shape.experts // layout.ep * sizes.expert * count_stage_layers(shape, stage, layout)
    )


def count_stage_layers(shape: PolicyShape, stage: int, layout: LayoutConfig) -> int:
    """How many layers a pipeline stage has, all its virtual stages together."""
    return sum(map(len, list_stage_layers(shape.num_layers, stage, layout)))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers of weights on a rank."""

    embedding: int
    norm: int
    """The last one, before the output layer."""
    layers: dict[str, int]
    """One layer of each kind, without its experts."""
    expert: int
    """One expert of one layer."""


@cache
def _count_sizes(
    shape: PolicyShape, layout: LayoutConfig | None = None, lora: LoraConfig | None = None
) -> _Sizes:
    """Count one expert and one layer of each kind, because a mixture has thousands of entries.

    Args:
        shape: of the policy.
        layout: that cuts the weights; None: all weights, without the padding of the vocabulary.
        lora: count its adapters.
    """
    kinds = shape.layer_types
    thin = dataclasses.replace(
        shape, num_layers=shape.attention_interval, experts=min(shape.experts, 1), tied=True
    )
    layers: dict[str, int] = dict.fromkeys(kinds, 0)
    found = {"embedding": 0, "norm": 0, "expert": 0}
    for entry in list_adapter_entries(thin, lora) if lora else list_entries(thin):
        whole = dataclasses.replace(entry, shape=shape)
        size = prod(whole.shard_shape(whole.count_parts(layout))) if layout else whole.elements
        if entry.layer is None:
            found["embedding" if entry.mapping is EMBEDDING else "norm"] += size
        elif entry.expert is None:
            layers[kinds[entry.layer]] += size * (kinds.index(kinds[entry.layer]) == entry.layer)
        elif entry.layer == 0:
            found["expert"] += size
    return _Sizes(layers=layers, **found)


SYNC_BUCKET_MIB = 512
"""The value of ``rollout.sync.bucket_mib`` on a GPU, if it is not set."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How many tensors a layer keeps of a token for the backward pass, by their width."""

    norms: int
    """As wide as the hidden state; under sequence parallelism each rank has its share of the
    tokens."""
    queries: int
    """As wide as all queries; cut by tensor parallelism, as are the next two."""
    keys: int
    """As wide as all keys."""
    feed_forward: int
    """As wide as the feed-forward layer."""
    copies: int
    """As wide as the hidden state, of each expert that works on the token."""


FUSED = Saved(norms=4, queries=3, keys=3, feed_forward=3, copies=1)
"""GPU kernels. Norms keep input and output, those of queries and keys only what they read.
Attention shares its output with the next operator, SwiGLU keeps its input and the input of the down
projection. Routing weights are multiplied in there, so that what experts return is not kept."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU, part by part."""

    stage: int
    """The pipeline stage of the rank; 0 for a server."""
    parts: dict[str, float]
    """Bytes by what they are for."""
    room: float
    """Bytes that the GPU has for them."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def lack(self) -> float:
        """Bytes that are missing; 0 where it fits."""
        return max(self.total - self.room, 0.0)

    @property
    def fits(self) -> bool:
        return not self.lack


def estimate_actor_memory(setup: Setup) -> Memory:
    """Memory of the rank of the trainer that holds the most, at its peak."""
    return max(
        (estimate_rank_memory(setup, stage) for stage in range(setup.layout.pp)),
        key=attrgetter("total"),
    )


def estimate_rank_memory(setup: Setup, stage: int) -> Memory:
    """Memory of a rank of a pipeline stage at its peak: in a step in which nothing is pruned."""
    config = setup.config
    assume = setup.assume
    packs = setup.unpruned.packs
    parts = count_persistent_bytes(setup, stage)
    even, uneven = (
        (
            count_activation_bytes(setup, stage, FUSED, packs=packs, imbalance=imbalance),
            count_backward_bytes(setup, FUSED, imbalance=imbalance),
        )
        for imbalance in (1.0, setup.imbalance)
    )
    parts["activations"] = sum(even)
    parts["uneven experts"] = sum(uneven) - sum(even)
    # The head's backward pass is over when the first layer's begins: the larger of the two makes
    # the peak.
    parts["head"] = (
        max(_count_head_bytes(setup) - uneven[1], 0.0) if stage == setup.layout.pp - 1 else 0.0
    )
    buckets = 4 if config.rollout.served else 2  # two in the stream, two in the sender
    parts["sync"] = float(buckets * get_bucket_bytes(config))
    # What is on the host during the passes needs room on the GPU when they are done, in the place
    # of their activations.
    passes = parts["activations"] + parts["uneven experts"] + parts["head"]
    for part, waits in (
        ("optimizer", config.optimizer.offload),
        ("reference", config.model.reference_on_host),
    ):
        parts[part] = max(parts[part] - passes, 0.0) if waits else parts[part]
    parts["reserved"] = assume.reserved_gib * GIB
    parts["asleep"] = assume.asleep_gib * GIB if config.rollout.colocated else 0.0
    parts["fragmentation"] = assume.fragmentation * (passes + parts["sync"])
    return Memory(stage, parts, setup.gpu.memory_gib * GIB)


def get_bucket_bytes(config: Config) -> int:
    """Bytes of a bucket of weights on their way to the servers."""
    return (config.rollout.sync.bucket_mib or SYNC_BUCKET_MIB) * 2**20


def count_resident_bytes(config: Config, memory: Memory) -> float:
    """Bytes that a rank of the trainer keeps while its GPU generates.

    Gradients are freed before a server on the same GPU wakes. What waits on the host is there
    during generation, too.
    """
    keeps = {"weights": True, "teacher": True, "reserved": True}
    keeps["gradients"] = not config.rollout.colocated
    keeps["optimizer"] = not config.optimizer.offload
    keeps["reference"] = not config.model.reference_on_host
    return sum(memory.parts[name] for name, kept in keeps.items() if kept)


def count_persistent_bytes(setup: Setup, stage: int) -> dict[str, float]:
    """Bytes that a rank holds during the whole run, exact except for the padding of buffers."""
    config = setup.config
    lora = setup.config.model.lora
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    adapters = (
        count_rank_elements(setup.shape, stage, setup.layout, lora)
        if lora.rank
        else RankElements(0, 0)
    )
    trained = adapters if lora.rank else elements
    # Two moments, and a master copy where the weights are not fp32 themselves.
    state = 12 if config.model.dtype == "bf16" else 8
    weights = float((elements.total + adapters.total) * setup.width)
    return {
        "weights": weights,
        "gradients": 4.0 * trained.total,
        "optimizer": state * count_optimizer_elements(setup, trained),
        "reference": weights if config.loss.kl_coef > 0 and not lora.rank else 0.0,
        "teacher": _count_teacher_bytes(setup, stage),
    }


def count_optimizer_elements(setup: Setup, trained: RankElements) -> float:
    """Weights whose optimizer state is on a rank that trains ``trained`` weights."""
    if not setup.config.optimizer.distributed:
        return trained.total
    return (
        trained.dense / setup.placement.replica + trained.experts / setup.placement.expert_replica
    )


def _count_teacher_bytes(setup: Setup, stage: int) -> float:
    """Its weights, and on the last stage the states of a minibatch's packs, as if every token were
    a response's. Of several the largest is counted, and on the last stage the output layers of all,
    which are needed in training."""
    config = setup.config
    layout = setup.layout
    shapes = [resolve_shape(path) for path in config.loss.distillation.models]
    if not shapes:
        return 0.0
    packs = setup.unpruned.packs if stage == layout.pp - 1 else 0
    states = packs * config.loss.updates_per_rollout * config.pack.max_tokens / layout.cp
    weights = {shape: count_rank_elements(shape, stage, layout).total for shape in shapes}
    largest = max(shapes, key=lambda shape: weights[shape])
    heads = 0
    if stage == layout.pp - 1:
        sizes = [_count_sizes(shape, layout).embedding for shape in shapes]
        heads = sum(sizes) - sizes[shapes.index(largest)]
    return float(
        setup.width * (weights[largest] + heads + states * max(shape.hidden for shape in shapes))
    )


def count_chunks_in_flight(stage: int, layout: LayoutConfig, packs: int) -> int:
    """How many forward passes of a virtual stage wait for their backward pass at once, at most.

    Without virtual stages (one forward, one backward) stage i of p has p - i packs in flight.
    Interleaved, it has made 2(p - i - 1) + (v - 1)g + 1 passes of one of its v virtual stages
    before the first backward pass is over, where g packs go through a virtual stage before the next
    one's turn.

    Args:
        stage: of the pipeline.
        layout: of the run.
        packs: of a minibatch on each replica.
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, packs)
    most = (
        2 * (layout.pp - stage - 1)
        + (layout.vpp - 1) * count_interleaved_packs(packs, layout.pp)
        + 1
    )
    return min(most, packs * layout.vpp)


def count_activation_bytes(
    setup: Setup, stage: int, saved: Saved, *, packs: int, imbalance: float = 1.0
) -> float:
    """Bytes that a stage keeps for backward passes, with all packs in flight.

    Args:
        setup: of the run.
        stage: of the pipeline.
        saved: what operators keep.
        packs: of a minibatch on each replica.
        imbalance: tokens of this rank's experts over those of a mean rank's.
    """
    shape = setup.shape
    layout = setup.layout
    kept = {
        "none": count_mixer_elements(shape, layout, saved)
        + count_feed_forward_elements(shape, layout, saved, imbalance),
        "selective": count_mixer_elements(shape, layout, saved),
        "full": shape.hidden / count_shared_ranks(layout),
    }[setup.config.model.recompute]
    kept *= (
        count_stage_layers(shape, stage, layout)
        / layout.vpp
        * count_chunks_in_flight(stage, layout, packs)
    )
    if (
        stage == layout.pp - 1
    ):  # the last norm, and what the head reads: its backward pass follows at once
        kept += 2 * shape.hidden / count_shared_ranks(layout) + shape.hidden
    if layout.pp > 1:  # a pack's input from the stage before, and the gradient that goes back
        kept += 2 * shape.hidden / count_shared_ranks(layout)
    return _count_token_bytes(setup) * kept


def count_backward_bytes(setup: Setup, saved: Saved, *, imbalance: float) -> float:
    """Bytes that a layer takes beside what is kept for backward passes: what is recomputed, and
    tensors that soon go.

    These are the gradient of the layer's output and SwiGLU's gradient, which is twice the
    feed-forward width, less the down projection's saved input, one width, which is free by then.
    With experts they are three more copies of routed tokens: as sent, received and returned.
    """
    shape = setup.shape
    layout = setup.layout
    feed_forward = count_feed_forward_elements(shape, layout, saved, imbalance)
    again = {
        "none": 0.0,
        "selective": feed_forward,
        "full": count_mixer_elements(shape, layout, saved) + feed_forward,
    }[setup.config.model.recompute]
    swiglu = shape.ffn * (shape.experts_per_token or 1) / layout.tp
    passing = max(swiglu, 3 * shape.hidden * shape.experts_per_token * layout.expert_tp / layout.tp)
    return _count_token_bytes(setup) * (
        again + shape.hidden / count_shared_ranks(layout) + passing * imbalance
    )


def _count_token_bytes(setup: Setup) -> float:
    """Bytes of one element of each token of a pack on a rank."""
    return setup.config.pack.max_tokens / setup.layout.cp * setup.width


def count_mixer_elements(shape: PolicyShape, layout: LayoutConfig, saved: Saved) -> float:
    """Elements that the norms and the attention of one layer keep of one token for its backward
    pass; of a hybrid policy, a layer on average."""
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    gate = queries if shape.hybrid else 0
    attention = (
        saved.queries * queries + saved.keys * keys + gate
    ) / layout.tp + 4 * shape.head_dim
    share = 1 / shape.attention_interval
    attention = share * attention + (1 - share) * count_delta_elements(shape) / layout.tp
    return saved.norms * shape.hidden / count_shared_ranks(layout) + attention


def count_shared_ranks(layout: LayoutConfig) -> int:
    """Ranks that share norms and residuals."""
    return layout.tp if layout.sequence_parallel else 1


def count_vocabulary_rows(setup: Setup) -> int:
    """Tokens of the vocabulary that a rank has, padding included."""
    tp = setup.layout.tp
    return padded_vocab(setup.shape.vocab_size, tp) // tp


def get_head_chunk_bytes(setup: Setup) -> float:
    """Most bytes of the policy head's logits at a time."""
    return (setup.config.model.head_chunk_mib or HEAD_CHUNK_MIB["cuda"]) * 2.0**20


def count_feed_forward_elements(
    shape: PolicyShape, layout: LayoutConfig, saved: Saved, imbalance: float
) -> float:
    """Elements that the feed-forward part of a layer keeps of one token, without its input.

    With experts, the tokens that a rank sends away are as many as it is sent, if the experts are
    chosen alike. All ranks of one expert have copies of what any of them routes to it. A shared
    expert keeps what its gate multiplies.
    """
    routed = saved.copies * shape.hidden * shape.experts_per_token * layout.expert_tp / layout.tp
    widths = shape.ffn * (shape.experts_per_token or 1) * imbalance + shape.shared_ffn
    gated = shape.hidden / count_shared_ranks(layout) if shape.shared_ffn else 0.0
    return saved.feed_forward * widths / layout.tp + routed * imbalance + gated


def _count_head_bytes(setup: Setup) -> float:
    """Bytes of the policy head in its backward pass: a chunk of logits, then autograd's gradient of
    the weight, beside the gradient of what the head reads. DDP keeps the gradient that is summed,
    which is not counted here.
    """
    config = setup.config
    shape = setup.shape
    layout = setup.layout
    rows = count_vocabulary_rows(setup)
    chunk = min(
        get_head_chunk_bytes(setup), config.pack.max_tokens / layout.cp * rows * (4 + setup.width)
    )
    chunk *= (
        2 if config.loss.distillation.models else 1
    )  # the policy's logits may be kept beside the divergence's
    handed_over = 0 if shape.tied and layout.pp == 1 else rows * shape.hidden * setup.width
    return max(chunk, handed_over) + _count_token_bytes(setup) * shape.hidden


def count_cache_bytes(shape: PolicyShape, tp: int, width: int) -> int:
    """Bytes of a token's keys and values on each rank of a server. With more ranks than heads,
    heads are copied."""
    layers = shape.num_layers // shape.attention_interval
    return 2 * layers * -(-shape.kv_heads // tp) * shape.head_dim * width

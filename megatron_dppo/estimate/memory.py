"""Count a policy's weights, and the bytes of the trainer's fullest rank on a GPU."""

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
    """Return a policy's shape, from the directory ``path``, else the published model of this name.

    Raises:
        UserError: ``model.path`` is no directory and no published model.
    """
    name = match_published_model(path)
    if name and not Path(path).is_dir():
        return PUBLISHED[name]
    return read_shape(policy_folder(path, weights=False))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights, without vocabulary padding."""

    total: int
    active: int
    """Weights that multiply one token; of experts, only the token's."""
    matrices: int
    """Active weights in the layers: two FLOPs each in a token's forward pass."""
    head: int
    """Weights of the output layer, used by response tokens only."""


@dataclass(frozen=True, slots=True)
class RankElements:
    """Numbers of weights on a trainer rank, vocabulary padding included."""

    dense: int
    """All weights except the experts': equal on all ranks of a replica, for any layout.ep."""
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@cache
def count_parameter_kinds(shape: PolicyShape) -> Parameters:
    sizes = _count_sizes(shape)
    experts = shape.experts * sizes.expert * shape.num_layers
    outside = sizes.embedding if shape.tied else 2 * sizes.embedding
    total = outside + sizes.norm + sum(map(sizes.layers.__getitem__, shape.layer_types)) + experts
    unused = experts - experts * shape.experts_per_token // max(shape.experts, 1)
    return Parameters(total, total - unused, total - unused - outside, sizes.embedding)


@cache
def count_rank_elements(
    shape: PolicyShape,
    stage: int,
    layout: LayoutConfig,
    lora: LoraConfig | None = None,
) -> RankElements:
    """Count the weights on a rank of a pipeline stage: the policy's, or its ``lora`` adapters'."""
    sizes = _count_sizes(shape, layout, lora)
    dense = sum(
        sizes.layers[shape.layer_types[layer]]
        for layers in list_stage_layers(shape.num_layers, stage, layout)
        for layer in layers
    )
    if stage == 0:
        dense += sizes.embedding
    if stage == layout.pp - 1:
        # On one stage, tied embeddings share the weight. The last of several stages has a copy.
        dense += sizes.norm + (0 if shape.tied and stage == 0 else sizes.embedding)
    layer_experts = shape.experts // layout.ep * sizes.expert
    return RankElements(dense, layer_experts * count_stage_layers(shape, stage, layout))


def count_stage_layers(shape: PolicyShape, stage: int, layout: LayoutConfig) -> int:
    return sum(map(len, list_stage_layers(shape.num_layers, stage, layout)))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers of weights."""

    embedding: int
    norm: int
    """The last norm, before the output layer."""
    layers: dict[str, int]
    """Weights of a layer by kind, without experts."""
    expert: int
    """Weights of a single expert."""


@cache
def _count_sizes(
    shape: PolicyShape,
    layout: LayoutConfig | None = None,
    lora: LoraConfig | None = None,
) -> _Sizes:
    """Count one expert and one layer of each kind, of ``lora`` adapters if given. Without
    ``layout``: all weights, without vocabulary padding."""
    # A thin policy is enough; a mixture of experts has thousands of entries.
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
"""Default of ``rollout.sync.bucket_mib`` on a GPU."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors that a layer keeps per token for the backward pass: their number by width."""

    norms: int
    """Width of the hidden state; under sequence parallelism each rank has its part of the tokens.
    """
    queries: int
    """Width of all queries; sharded by tensor parallelism, like ``keys`` and ``feed_forward``."""
    keys: int
    feed_forward: int
    copies: int
    """Width of the hidden state, per expert of the token."""


FUSED = Saved(norms=4, queries=3, keys=3, feed_forward=3, copies=1)
"""Tensors that GPU kernels keep.

- Norms: input and output; norms of queries and keys only the input.
- Attention: the output is shared with the next operator.
- SwiGLU: the input, and the down projection's input, which routing weights have multiplied, so that
  experts' outputs are not kept."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU by parts."""

    stage: int
    """Pipeline stage of the rank; 0 for a server."""
    parts: dict[str, float]
    """Bytes by use."""
    room: float
    """Bytes of the GPU that ``parts`` may use."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def lack(self) -> float:
        """Missing bytes; 0 if all parts fit."""
        return max(self.total - self.room, 0.0)

    @property
    def fits(self) -> bool:
        return not self.lack


def estimate_actor_memory(setup: Setup) -> Memory:
    return max(
        (estimate_rank_memory(setup, stage) for stage in range(setup.layout.pp)),
        key=attrgetter("total"),
    )


def estimate_rank_memory(setup: Setup, stage: int) -> Memory:
    config = setup.config
    assume = setup.assume
    # The peak occurs in a step without pruning.
    packs = setup.unpruned.packs
    parts = count_persistent_bytes(setup, stage)

    def count_pass_bytes(imbalance: float) -> tuple[float, float]:
        return (
            count_activation_bytes(setup, stage, FUSED, packs=packs, imbalance=imbalance),
            count_backward_bytes(setup, FUSED, imbalance=imbalance),
        )

    even = count_pass_bytes(1.0)
    uneven = count_pass_bytes(setup.imbalance)
    parts["activations"] = sum(even)
    parts["uneven experts"] = sum(uneven) - sum(even)
    parts["head"] = 0.0
    if stage == setup.layout.pp - 1:
        # The head's backward pass ends before the first layer's begins: the larger is the peak.
        parts["head"] = max(_count_head_bytes(setup) - uneven[1], 0.0)
    # Two buckets in the stream, two in the sender.
    buckets = 4 if config.rollout.served else 2
    parts["sync"] = float(buckets * get_bucket_bytes(config))
    # Parts on the host during passes use the room on the GPU that activations leave afterwards.
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
    """Bytes of a bucket of weights for the servers."""
    return (config.rollout.sync.bucket_mib or SYNC_BUCKET_MIB) * 2**20


def count_resident_bytes(config: Config, memory: Memory) -> float:
    """Count the bytes that a rank of the trainer keeps while its GPU generates."""
    # Gradients are freed before a server on the same GPU wakes; parts on the host stay there.
    keeps = {"weights": True, "teacher": True, "reserved": True}
    keeps["gradients"] = not config.rollout.colocated
    keeps["optimizer"] = not config.optimizer.offload
    keeps["reference"] = not config.model.reference_on_host
    return sum(memory.parts[name] for name, kept in keeps.items() if kept)


def count_persistent_bytes(setup: Setup, stage: int) -> dict[str, float]:
    """Count a rank's bytes of the whole run, exact except for buffers' padding."""
    config = setup.config
    lora = setup.config.model.lora
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    adapters = RankElements(0, 0)
    if lora.rank:
        adapters = count_rank_elements(setup.shape, stage, setup.layout, lora)
    trained = adapters if lora.rank else elements
    # Two moments of fp32, and a master copy if the weights are not fp32.
    state = 12 if config.model.dtype == "bf16" else 8
    weights = float((elements.total + adapters.total) * setup.width)
    return {
        "weights": weights,
        "gradients": 4.0 * trained.total,
        "optimizer": state * count_optimizer_elements(setup, trained),
        # With adapters, the reference is the policy without them: no second copy.
        "reference": weights if config.loss.kl_coef > 0 and not lora.rank else 0.0,
        "teacher": _count_teacher_bytes(setup, stage),
    }


def count_optimizer_elements(setup: Setup, trained: RankElements) -> float:
    """Count the weights whose optimizer state is on a rank that trains ``trained`` weights."""
    if not setup.config.optimizer.distributed:
        return trained.total
    return (
        trained.dense / setup.placement.replica + trained.experts / setup.placement.expert_replica
    )


def _count_teacher_bytes(setup: Setup, stage: int) -> float:
    """Count the bytes of teachers on a stage.

    - Weights: of several teachers, the largest.
    - Last stage: all teachers' output layers, needed in training, and the states of a minibatch's
      packs, as if every token were a response's.
    """
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
        # The largest teacher's output layer is among its weights.
        heads = sum(sizes) - sizes[shapes.index(largest)]
    widest = max(shape.hidden for shape in shapes)
    return float(setup.width * (weights[largest] + heads + states * widest))


def count_chunks_in_flight(stage: int, layout: LayoutConfig, packs: int) -> int:
    """Return the maximum number of a virtual stage's forward passes that wait for a backward pass.

    Args:
        packs: packs of a minibatch on each replica.
    """
    # With one forward, one backward (1F1B), stage i of p has p - i packs in flight.
    if layout.vpp == 1:
        return min(layout.pp - stage, packs)
    # Interleaved, with v virtual stages: before the first backward pass ends, a virtual stage has
    # made 2(p - i - 1) + (v - 1)g + 1 passes; g packs pass before the next virtual stage's turn.
    turn = count_interleaved_packs(packs, layout.pp)
    most = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * turn + 1
    return min(most, packs * layout.vpp)


def count_activation_bytes(
    setup: Setup,
    stage: int,
    saved: Saved,
    *,
    packs: int,
    imbalance: float = 1.0,
) -> float:
    """Count the bytes that a stage keeps for backward passes, with all packs in flight.

    Args:
        imbalance: tokens of this rank's experts / a mean rank's.
    """
    shape = setup.shape
    layout = setup.layout
    mixer = count_mixer_elements(shape, layout, saved)
    kept = {
        "none": mixer + count_feed_forward_elements(shape, layout, saved, imbalance),
        "selective": mixer,
        "full": shape.hidden / count_shared_ranks(layout),
    }[setup.config.model.recompute]
    chunk_layers = count_stage_layers(shape, stage, layout) / layout.vpp
    kept *= chunk_layers * count_chunks_in_flight(stage, layout, packs)
    # The last norm and the head's input, once: the head's backward pass follows at once.
    if stage == layout.pp - 1:
        kept += 2 * shape.hidden / count_shared_ranks(layout) + shape.hidden
    # A pack's input from the previous stage, and the gradient sent back.
    if layout.pp > 1:
        kept += 2 * shape.hidden / count_shared_ranks(layout)
    return _count_token_bytes(setup) * kept


def count_backward_bytes(setup: Setup, saved: Saved, *, imbalance: float) -> float:
    """Count the bytes of a layer's recomputed and short-lived tensors, beside kept activations."""
    shape = setup.shape
    layout = setup.layout
    feed_forward = count_feed_forward_elements(shape, layout, saved, imbalance)
    again = {
        "none": 0.0,
        "selective": feed_forward,
        "full": count_mixer_elements(shape, layout, saved) + feed_forward,
    }[setup.config.model.recompute]
    # SwiGLU's gradient has twice the feed-forward width; the down projection's saved input, one
    # width, is free by then. Routed tokens have three more copies: as sent, received and returned.
    swiglu = shape.ffn * (shape.experts_per_token or 1) / layout.tp
    passing = max(swiglu, 3 * shape.hidden * shape.experts_per_token * layout.expert_tp / layout.tp)
    # The gradient of the layer's output.
    gradient = shape.hidden / count_shared_ranks(layout)
    return _count_token_bytes(setup) * (again + gradient + passing * imbalance)


def _count_token_bytes(setup: Setup) -> float:
    """Count the bytes of one element per token of a pack on a rank."""
    return setup.config.pack.max_tokens / setup.layout.cp * setup.width


def count_mixer_elements(shape: PolicyShape, layout: LayoutConfig, saved: Saved) -> float:
    """Count the elements per token kept by a layer's norms and attention, averaged over layers."""
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    gate = queries if shape.hybrid else 0
    sharded = saved.queries * queries + saved.keys * keys + gate
    attention = sharded / layout.tp + 4 * shape.head_dim
    share = 1 / shape.attention_interval
    attention = share * attention + (1 - share) * count_delta_elements(shape) / layout.tp
    return saved.norms * shape.hidden / count_shared_ranks(layout) + attention


def count_shared_ranks(layout: LayoutConfig) -> int:
    """Count the ranks that share norms and residuals."""
    return layout.tp if layout.sequence_parallel else 1


def count_vocabulary_rows(setup: Setup) -> int:
    """Count the vocabulary's tokens on a rank, padding included."""
    tp = setup.layout.tp
    return padded_vocab(setup.shape.vocab_size, tp) // tp


def get_head_chunk_bytes(setup: Setup) -> float:
    """Return the maximum bytes of the policy head's logits at a time."""
    return (setup.config.model.head_chunk_mib or HEAD_CHUNK_MIB["cuda"]) * 2.0**20


def count_feed_forward_elements(
    shape: PolicyShape,
    layout: LayoutConfig,
    saved: Saved,
    imbalance: float,
) -> float:
    """Count the elements per token kept by a layer's feed-forward part, without its input."""
    # All ranks of one expert have copies of all its tokens. With equally chosen experts, a rank
    # sends and receives equal numbers of tokens.
    routed = saved.copies * shape.hidden * shape.experts_per_token * layout.expert_tp / layout.tp
    widths = shape.ffn * (shape.experts_per_token or 1) * imbalance + shape.shared_ffn
    # A shared expert keeps the gate's input.
    gated = shape.hidden / count_shared_ranks(layout) if shape.shared_ffn else 0.0
    return saved.feed_forward * widths / layout.tp + routed * imbalance + gated


def _count_head_bytes(setup: Setup) -> float:
    """Count the bytes of the policy head in the backward pass, without DDP's summed gradient."""
    config = setup.config
    shape = setup.shape
    layout = setup.layout
    rows = count_vocabulary_rows(setup)
    pack_bytes = config.pack.max_tokens / layout.cp * rows * (4 + setup.width)
    chunk = min(get_head_chunk_bytes(setup), pack_bytes)
    # The policy's logits may be kept beside the divergence's.
    chunk *= 2 if config.loss.distillation.models else 1
    handed_over = 0 if shape.tied and layout.pp == 1 else rows * shape.hidden * setup.width
    # A chunk of logits is followed by autograd's gradient of the weight, beside the gradient of the
    # head's input.
    return max(chunk, handed_over) + _count_token_bytes(setup) * shape.hidden


def count_cache_bytes(shape: PolicyShape, tp: int, width: int) -> int:
    """Count the bytes of a token's keys and values on each rank of a server."""
    layers = shape.num_layers // shape.attention_interval
    # If a server has more ranks than key heads, heads are copied.
    return 2 * layers * -(-shape.kv_heads // tp) * shape.head_dim * width

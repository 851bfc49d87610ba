"""Bytes on one GPU, part by part: of the most loaded rank of the trainer, and of a server."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.config import HEAD_CHUNK_MIB, WEIGHT_BYTES, Config
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.hardware import GIB, Gpu
from megatron_dppo.estimate.parameters import parameters_of, rank_elements
from megatron_dppo.estimate.placement import Placement
from megatron_dppo.models.shape import PolicyShape, padded_vocab

SYNC_BUCKET_MIB = 512
"""What ``rollout.sync.bucket_mib`` is from a GPU, unless it is set."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How many tensors, of a token and layer, a forward pass keeps for the backward one, by their width."""

    norms: int
    """As wide as the hidden state; under sequence parallelism each rank has its share of the tokens."""
    queries: int
    """As wide as all queries; cut by tensor parallelism, as are the next two."""
    keys: int
    """As wide as all keys."""
    feed_forward: int
    """As wide as the feed-forward layer."""


EAGER = Saved(norms=6, queries=6, keys=4, feed_forward=5)
"""Torch's own operators, counted on a CPU: a norm keeps its input, the normed and the scaled; so on."""
FUSED = Saved(norms=4, queries=4, keys=4, feed_forward=3)
"""GPU kernels: norms keep input and output; attention shares its output with what follows; SwiGLU keeps its input and
what goes into the down projection."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one GPU holds."""

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
    def fits(self) -> bool:
        return self.total <= self.room


def actor_memory(config: Config, shape: PolicyShape, placement: Placement, gpu: Gpu, assume: Assumptions) -> Memory:
    """Of the rank of the trainer that holds the most, at the moment when it does."""
    stages = range(placement.layout.pp)
    ranks = [_rank(config, shape, placement, gpu, assume, stage) for stage in stages]
    return max(ranks, key=lambda memory: memory.total)


def _rank(
    config: Config, shape: PolicyShape, placement: Placement, gpu: Gpu, assume: Assumptions, stage: int
) -> Memory:
    parts = held_bytes(config, shape, placement, stage)
    parts["activations"] = activation_bytes(config, shape, placement, stage, FUSED)
    parts["head"] = _head_bytes(config, shape, placement) if stage == placement.layout.pp - 1 else 0.0
    buckets = 4 if config.rollout.engine != "local" else 2  # two in the stream, two in the sender
    parts["sync"] = float(buckets * (config.rollout.sync.bucket_mib or SYNC_BUCKET_MIB) * 2**20)
    # What is on the host during the passes needs room on the GPU when they are done, in the place of their activations.
    passes = parts["activations"] + parts["head"]
    for part, waits in (("optimizer", config.optimizer.offload), ("reference", config.model.reference_on_host)):
        parts[part] = max(parts[part] - passes, 0.0) if waits else parts[part]
    parts["reserved"] = assume.reserved_gib * GIB
    parts["asleep"] = assume.asleep_gib * GIB if config.rollout.colocated else 0.0
    parts["fragmentation"] = assume.fragmentation * (parts["activations"] + parts["head"] + parts["sync"])
    return Memory(stage, parts, gpu.memory_gib * GIB)


def resident_bytes(config: Config, memory: Memory) -> float:
    """Of a rank's memory, what it keeps while its GPU generates.

    Before servers wake that share its GPU, the gradients go; what waits on the host does so then, too.
    """
    keeps = {"weights": True, "reserved": True}
    keeps["gradients"] = not config.rollout.colocated
    keeps["optimizer"] = not config.optimizer.offload
    keeps["reference"] = not config.model.reference_on_host
    return sum(memory.parts[name] for name, kept in keeps.items() if kept)


def held_bytes(config: Config, shape: PolicyShape, placement: Placement, stage: int) -> dict[str, float]:
    """What a rank holds from the first step to the last, exact but for the padding of buffers."""
    layout, dtype = placement.layout, config.model.dtype
    elements = rank_elements(shape, stage, layout.pp, layout.tp)
    state = 12 if dtype == "bf16" else 8  # two moments, and a master copy where the weights are not fp32 themselves
    weights = float(elements * WEIGHT_BYTES[dtype])
    return {
        "weights": weights,
        "gradients": 4.0 * elements,
        "optimizer": state * elements / (placement.replica if config.optimizer.distributed else 1),
        "reference": weights if config.loss.kl_coef > 0 else 0.0,
    }


def activation_bytes(config: Config, shape: PolicyShape, placement: Placement, stage: int, saved: Saved) -> float:
    """Activations of a stage at its fullest: of all packs in flight, and with recomputation of one layer besides.

    Under Megatron's schedule (one forward, one backward) stage i of p has p - i packs in flight.
    """
    layout, width = placement.layout, WEIGHT_BYTES[config.model.dtype]
    tokens, layers = config.pack.max_tokens / layout.cp, shape.num_layers // layout.pp
    shared = layout.tp if layout.sequence_parallel else 1
    layer = layer_elements(shape, layout.tp, shared, saved)
    of_feed_forward = feed_forward_elements(shape, layout.tp, saved)
    kept, once = {
        "none": (layer, 0.0),
        "selective": (layer - of_feed_forward, of_feed_forward),
        "full": (shape.hidden / shared, layer),
    }[config.model.recompute]
    kept *= layers
    if stage == layout.pp - 1:
        kept += 2 * shape.hidden / shared + shape.hidden  # the last norm, and what the head reads
    return tokens * width * (kept * (layout.pp - stage) + once)


def layer_elements(shape: PolicyShape, tp: int, shared: int, saved: Saved) -> float:
    """Elements that one layer keeps of one token for its backward pass.

    Args:
        shape: of the policy.
        tp: tensor-parallel ranks.
        shared: ranks that share norms and residuals: tp under sequence parallelism, else 1.
        saved: the operators.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = (saved.queries * queries + saved.keys * keys) / tp + 4 * shape.head_dim
    return saved.norms * shape.hidden / shared + attention + feed_forward_elements(shape, tp, saved)


def feed_forward_elements(shape: PolicyShape, tp: int, saved: Saved) -> float:
    """Those of them that its feed-forward part keeps, but for its input."""
    # A token is copied for each of its experts, once before they work and once after.
    routed = 2 * shape.hidden * shape.experts_per_token
    return saved.feed_forward * shape.ffn * (shape.experts_per_token or 1) / tp + routed


def _head_bytes(config: Config, shape: PolicyShape, placement: Placement) -> float:
    """The policy head in its backward pass: a chunk of logits, then what stands for the weight's gradient in autograd.

    The gradient itself is where DDP keeps it.
    """
    rows = padded_vocab(shape.vocab_size, placement.layout.tp) // placement.layout.tp
    width = WEIGHT_BYTES[config.model.dtype]
    gathered = 2 * width * config.pack.max_tokens / placement.layout.cp * shape.hidden
    chunk = (config.model.head_chunk_mib or HEAD_CHUNK_MIB["cuda"]) * 2**20
    handed_over = 0 if shape.tied and placement.layout.pp == 1 else rows * shape.hidden * width
    return max(chunk, handed_over) + gathered


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """A server's GPU, and what it means for how many completions are decoded at once."""

    memory: Memory
    tokens: int
    """Of cache, over all ranks of the server."""
    concurrency: int
    """Completions of mean length whose cache is there at once."""

    @property
    def fits(self) -> bool:
        return self.memory.fits and self.concurrency >= 1


def cache_bytes(shape: PolicyShape, tp: int, width: int) -> int:
    """Bytes of keys and values of a token on each of a server's ranks; with more ranks than heads these are copied."""
    return 2 * shape.num_layers * -(-shape.kv_heads // tp) * shape.head_dim * width


def server_memory(
    config: Config, shape: PolicyShape, gpu: Gpu, assume: Assumptions, *, tp: int, resident: float, mean_tokens: float
) -> ServerMemory:
    """Of one server.

    Args:
        config, shape, gpu, assume: as everywhere.
        tp: its tensor-parallel ranks.
        resident: bytes that the trainer leaves on the same GPU while it generates.
        mean_tokens: of a prompt and its response.
    """
    width = WEIGHT_BYTES[config.model.dtype]
    room = min(gpu.memory_gib * GIB * assume.server_memory_share, gpu.memory_gib * GIB - resident)
    parts = {"weights": float(parameters_of(shape).total * width // tp)}
    parts["sync"] = float((config.rollout.sync.bucket_mib or SYNC_BUCKET_MIB) * 2**20)
    parts["buffers"] = assume.server_buffers_gib * GIB
    per_token = cache_bytes(shape, tp, width)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(int((room - sum(parts.values())) / per_token), 0)
    parts["cache"] = float(max(tokens, longest) * per_token)  # less than one sequence is no server
    rollout = config.rollout
    most = rollout.max_batch if rollout.engine == "local" else 10**9
    return ServerMemory(Memory(0, parts, room), tokens, min(int(tokens / mean_tokens), most))

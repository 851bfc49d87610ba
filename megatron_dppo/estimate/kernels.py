"""Estimate seconds of a pack's kernels and messages on a rank, by formula, at rates of well-made
kernels. Needs no torch.

- A rehearsal (``tests/rehearsal``) of the trainer with Transformer Engine listed the kernels;
  ``tests/rehearsal/test_command.py`` compares their sums.
- Kernels run without gaps and without overlap.
- Sizes are elements of ``model.dtype`` unless named bytes.
- Pairs are *forward* and *backward*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_dppo.config import WEIGHT_BYTES
from megatron_dppo.estimate.layers import count_delta_flops
from megatron_dppo.estimate.memory import (
    count_optimizer_elements,
    count_rank_elements,
    count_shared_ranks,
    count_stage_layers,
    count_vocabulary_rows,
    get_head_chunk_bytes,
)
from megatron_dppo.estimate.workload import MeanPack, Setup
from megatron_dppo.rl.types import Floats

PRODUCTS = 0.72
STREAMS = 0.85
LINKS = 0.8
"""``PRODUCTS``, ``STREAMS``, ``LINKS``: fractions of the data sheet's rates reached by large
products (cuBLAS on an H100: 650 to 750 TFLOP/s), streaming kernels and collectives."""
ATTENTION_FORWARD = 0.40
ATTENTION_BACKWARD = 0.30
"""``ATTENTION_FORWARD``, ``ATTENTION_BACKWARD``: fractions of the matrix rate over the pairs of
causal attention."""
LEAST_SECONDS = 2e-6
"""Least seconds of a kernel."""
PROCESSORS = {"a100-40": 108, "a100-80": 108, "b200": 148}
"""Multiprocessors of a GPU; 132 if not listed."""
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))
"""Rows and columns of the tiles of products, and the fraction of the rate reached."""

REPLICAS = "replicas: gradients and weights"
EXCHANGE = "experts: exchange"
PIPELINE = "pipeline: activations"
INSIDE = "tensor and context parallelism"
COLLECTIVES = (INSIDE, EXCHANGE, REPLICAS, PIPELINE)
"""Kinds of collectives, by use."""


def estimate_kernel_time(
    setup: Setup, flops: float, size: float, *, share: float = PRODUCTS, dtype: str | None = None,
    product: tuple[int, int] | None = None,
) -> float:  # fmt: skip
    """Estimate the least seconds of a kernel.

    Args:
        flops: products and sums.
        size: bytes read and written.
        share: fraction of the matrix rate reached.
        dtype: type of the operands; None: the model's.
        product: rows and columns of a matrix product, to count idle parts of tiles.
    """
    rate = setup.gpu.get_peak_flops(dtype or setup.config.model.dtype) * share
    if product and flops:
        rate *= compute_tile_utilization(*product, PROCESSORS.get(setup.config.cluster.gpu, 132))
    return max(flops / rate, size / (setup.gpu.bandwidth * STREAMS), LEAST_SECONDS)


@cache
def compute_tile_utilization(rows: int, columns: int, processors: int) -> float:
    """Return the fraction of the multiprocessors' time used by a product under the best tiling."""
    best = 0.0
    for height, width, reached in TILES:
        down = -(-rows // height)
        across = -(-columns // width)
        rounds = -(-down * across // processors)
        best = max(best, reached * rows * columns / (rounds * processors * height * width))
    return best


def estimate_transfer_time(
    setup: Setup,
    kind: str,
    ranks: int,
    size: float,
    *,
    times: float = 1.0,
) -> float:
    """Estimate the seconds of a ring over NVLink, or over the network if the group spans nodes.

    Args:
        kind: one of :data:`COLLECTIVES`.
        size: bytes of the full tensor.
        times: 2 for an all-reduce, 1 for a gather, a scatter or an exchange.
    """
    layout = setup.layout
    gpu = setup.gpu
    size = size / LINKS
    per_node = setup.config.cluster.gpus_per_node
    # Experts' tokens are sent to ranks of the same node and of other nodes at once.
    if kind == EXCHANGE:
        near = min(max(per_node // layout.expert_tp, 1), ranks)
        return size * max((near - 1) / ranks / gpu.nvlink, (ranks - near) / ranks / gpu.network)
    # A ring uses the adapters of all its ranks in a node.
    inside = min(max(per_node // (1 if kind == INSIDE else layout.tp), 1), ranks)
    rate = gpu.nvlink if ranks <= inside else min(gpu.nvlink, inside * gpu.network)
    return times * (ranks - 1) / max(ranks, 1) * size / rate


def estimate_message_time(setup: Setup, kind: str, size: float) -> float:
    """Estimate the seconds of a message between two ranks, sent and received at once."""
    layout = setup.layout
    gpu = setup.gpu
    per_node = setup.config.cluster.gpus_per_node
    crosses = (layout.tp * layout.cp if kind == INSIDE else setup.placement.ranks) > per_node
    return size / LINKS / (gpu.network if crosses else gpu.nvlink)


EXPERT_LAUNCHES = 12
CONTEXT_LAUNCHES = 8
LOSS_LAUNCHES = 75
"""``EXPERT_LAUNCHES``, ``CONTEXT_LAUNCHES``, ``LOSS_LAUNCHES``: kernels of the least length per
router's pass, per step of attention over context-parallel ranks, and per pack's loss."""


class Seconds(NamedTuple):
    """Seconds of a rank."""

    kernels: float
    messages: float
    """Messages of tensor, context and pipeline parallelism."""
    exchange: float
    """Transfer of tokens to the experts and back."""

    @property
    def total(self) -> float:
        return sum(self)


FORWARD = 0
BACKWARD = 1
"""``FORWARD``, ``BACKWARD``: rows of an array of :class:`Seconds`, [2, 3], or of kernels or
messages, [2]."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A pack's passes through a stage's rank."""

    forward: Seconds
    """A pass of log-probabilities."""
    update: Seconds
    """A forward and a backward pass, recomputation included."""


def estimate_stage_times(setup: Setup) -> list[StageTimes]:
    """Estimate passes of the mean pack through each pipeline stage, stages' messages included."""
    layout = setup.layout
    pack = setup.mean_pack
    attention = _estimate_attention(setup, pack)
    feed_forward = (_estimate_experts if setup.shape.experts else _estimate_dense)(setup, pack)
    if setup.shape.hybrid:
        share = 1 / setup.shape.attention_interval
        attention = share * attention + (1 - share) * _estimate_delta_net(setup, pack)
    layer = attention + feed_forward
    if setup.config.model.recompute != "none":
        recomputed = layer if setup.config.model.recompute == "full" else feed_forward
        layer[BACKWARD] += recomputed[FORWARD]
    found = []
    for stage in range(layout.pp):
        layers = count_stage_layers(setup.shape, stage, layout)
        seconds = layers * layer + _estimate_stage_messages(setup, pack, stage)
        if stage == 0:
            seconds += _estimate_embedding(setup, pack)
        if stage == layout.pp - 1:
            seconds += _estimate_head(setup, pack)
        forward = seconds[FORWARD].tolist()
        update = seconds.sum(axis=0).tolist()
        found.append(StageTimes(Seconds(*forward), Seconds(*update)))
    return found


def estimate_optimizer_time(setup: Setup, stage: int) -> float:
    """Estimate an update's passes over gradients, moments and weights."""
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    # 4 bytes per element of a rank's gradient, 46 per element of its optimizer shard.
    size = 4.0 * elements.total + 46.0 * count_optimizer_elements(setup, elements)
    return estimate_kernel_time(setup, 0.0, size)


def estimate_reduction_time(setup: Setup, stage: int) -> float:
    """Estimate the seconds to bring gradients to ranks' shards as fp32 sums, and weights back."""
    shape = setup.shape
    layout = setup.layout
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    placement = setup.placement
    groups = ((placement.replica, elements.dense), (placement.expert_replica, elements.experts))
    # The experts have a separate optimizer, and Megatron gathers all weights after each of the two.
    moved = 4.0 + setup.width * (2 if shape.experts else 1)
    tied = shape.tied and layout.pp > 1 and stage in (0, layout.pp - 1)
    # The first and the last stage sum their gradients of tied embeddings.
    embedding = 0.0
    if tied:
        size = 4.0 * count_vocabulary_rows(setup) * shape.hidden
        embedding = estimate_message_time(setup, PIPELINE, size)
    return embedding + sum(
        estimate_transfer_time(setup, REPLICAS, ranks, moved * size) for ranks, size in groups
    )


# Layers


def _estimate_attention(setup: Setup, pack: MeanPack) -> Floats:
    """Estimate norm, projections, norms and rotary embedding of queries and keys, attention,
    residual."""
    shape = setup.shape
    layout = setup.layout
    queries, keys = (heads * shape.head_dim // layout.tp for heads in (shape.heads, shape.kv_heads))
    q, k, h = (
        pack.tokens * width for width in (queries, keys, shape.hidden / count_shared_ranks(layout))
    )
    gates = queries if shape.hybrid else 0
    sizes = [(queries + gates + 2 * keys, shape.hidden), (shape.hidden, queries)]
    products = _estimate_products(setup, [(pack.tokens, *size) for size in sizes])
    forward = [2 * h, 3 * h, *3 * [2 * q, 2 * k], 2 * k, q]
    backward = [3 * h, 3 * h, 3 * q, 3 * k, 2 * q, 2 * k, 2 * (q + 2 * k), q + 2 * k]
    # Gradients of norms; adapters leave norms frozen.
    small = 4.0 if not setup.config.model.lora.rank else 0.0
    messages = _estimate_tensor_parallelism(setup, pack)
    if layout.cp > 1:
        forward += [4.5 * layout.cp * q, 4 * k]
        backward += [3.8 * layout.cp * q, 4 * k]
        small += CONTEXT_LAUNCHES * layout.cp
        sent = (layout.cp - 1) * estimate_message_time(setup, INSIDE, 2 * k * setup.width)
        messages += [sent, 2 * sent]
    flops = queries * pack.pairs / layout.cp
    products += _estimate_scores(setup, 2 * flops, 5 * flops)
    return _sum_pass_times(setup, products, (forward, backward), messages, launches=(small, small))


def _estimate_delta_net(setup: Setup, pack: MeanPack) -> Floats:
    """Estimate norm, projections, convolution, delta rule, gated norm, residual."""
    shape = setup.shape
    layout = setup.layout
    mixed = shape.extents["delta_mixed"]
    values = shape.extents["delta_values"]
    held = pack.tokens / layout.tp
    inputs = (mixed + values + 2 * shape.delta_values) // layout.tp
    products = _estimate_products(
        setup,
        [(pack.tokens, inputs, shape.hidden), (pack.tokens, shape.hidden, values // layout.tp)],
    )
    h = pack.tokens * shape.hidden / count_shared_ranks(layout)
    m = held * mixed
    v = held * values
    # Queries and keys, for each value head.
    r = 2 * held * shape.delta_values * shape.delta_key_dim
    streams = (
        [2 * h, 3 * h, 2 * m, m, 2 * r, 2 * v, 4 * v],
        [3 * h, 3 * h, 3 * m, 2 * m, 3 * r, 4 * v, 6 * v],
    )
    messages = _estimate_tensor_parallelism(setup, pack)
    # Context parallelism exchanges heads for tokens, and back.
    if layout.cp > 1:
        messages += estimate_message_time(setup, INSIDE, (pack.tokens * inputs + v) * setup.width)
    # The delta rule runs at attention's fraction of the matrix rate.
    flops = count_delta_flops(shape) * held
    return _sum_pass_times(
        setup, products + _estimate_scores(setup, flops, 2.5 * flops), streams, messages
    )


def _estimate_dense(setup: Setup, pack: MeanPack) -> Floats:
    """Estimate norm, SwiGLU and residual."""
    shape = setup.shape
    layout = setup.layout
    h = pack.tokens * shape.hidden / count_shared_ranks(layout)
    f = pack.tokens * shape.ffn / layout.tp
    sizes = [(2 * shape.ffn // layout.tp, shape.hidden), (shape.hidden, shape.ffn // layout.tp)]
    products = _estimate_products(setup, [(pack.tokens, *size) for size in sizes])
    streams = ([2 * h, 3 * h, 3 * f], [3 * h, 3 * h, 5 * f])
    return _sum_pass_times(setup, products, streams, _estimate_tensor_parallelism(setup, pack))


def _estimate_experts(setup: Setup, pack: MeanPack) -> Floats:
    """Estimate norm, router, exchange of tokens with the experts, SwiGLU, residual."""
    shape = setup.shape
    layout = setup.layout
    mine = pack.tokens // count_shared_ranks(layout)
    etp = layout.expert_tp
    h = mine * shape.hidden
    sent = mine * shape.experts_per_token * shape.hidden
    # Every rank waits for the rank with the busiest experts.
    got = etp * mine * shape.experts_per_token * setup.imbalance
    experts = shape.experts // layout.ep
    ffn = shape.ffn // etp
    copies = got * shape.hidden
    sizes = [(2 * ffn, shape.hidden), (shape.hidden, ffn)]
    products = experts * _estimate_products(
        setup, [(got / experts, *size) for size in sizes], use_tiles=False
    )
    # Router and routing keep fp32; ``scores`` counts bytes, in elements of ``model.dtype``.
    scores = mine * shape.experts / setup.width
    products[FORWARD] += _estimate_product(setup, mine, shape.experts, shape.hidden)
    products[BACKWARD] += _estimate_product(setup, mine, shape.hidden, shape.experts, dtype="fp32")
    products[BACKWARD] += _estimate_product(setup, shape.experts, shape.hidden, mine, dtype="fp32")
    routed = h + sent
    moved = [routed, routed, 2 * copies, 2 * copies]
    # Convert to fp32 for the sum over the ranks of an expert, and back.
    if etp > 1:
        moved += [3 * copies, 3 * copies / etp]
    forward = [2 * h, 3 * h, 13 * scores, 9 * scores, 8 * scores, 8 * scores, *moved, 3 * got * ffn]
    backward = [3 * h, 3 * h, 3 * h, 3 * h, 13 * scores, *moved, 5 * got * ffn]
    size = sent * setup.imbalance * setup.width
    exchange = 2 * estimate_transfer_time(setup, EXCHANGE, layout.ep, size)
    exchange += estimate_transfer_time(
        setup, INSIDE, etp, etp * size * (setup.width + 4) / setup.width
    )
    launches = (EXPERT_LAUNCHES, EXPERT_LAUNCHES / 2)
    seconds = _sum_pass_times(
        setup, products, (forward, backward), launches=launches, exchange=exchange
    )
    # A shared expert's gate and sum take a norm's and a residual's time.
    if shape.shared_ffn:
        seconds += _estimate_dense(replace(setup, shape=replace(shape, ffn=shape.shared_ffn)), pack)
    return seconds


# The ends of the policy


def _estimate_embedding(setup: Setup, pack: MeanPack) -> Floats:
    shape = setup.shape
    layout = setup.layout
    weight = count_vocabulary_rows(setup) * shape.hidden
    h = pack.tokens * shape.hidden
    cut = layout.tp > 1
    # The look-up reads the weight. Its gradient is full-size, and added to the sum of all packs.
    summed = (4.0 + 4.0 + setup.width) / setup.width * weight
    streams = ([weight + h] + [2 * h] * cut, [weight + h, summed] + [2 * h] * cut)
    return _sum_pass_times(
        setup, 0.0, streams, _estimate_tensor_parallelism(setup, pack, moves=(1, 1), sums=(1, 0))
    )


def _estimate_head(setup: Setup, pack: MeanPack) -> Floats:
    """Estimate last norm, and log-probabilities of responses chunk by chunk."""
    shape = setup.shape
    rows = count_vocabulary_rows(setup)
    chunk = get_head_chunk_bytes(setup)
    scored = pack.responses
    h = pack.tokens * shape.hidden / count_shared_ranks(setup.layout)
    at_once, kept = (min(scored, chunk / (rows * size)) for size in (4, 4 + setup.width))

    def estimate_logits(size: float) -> float:
        return _estimate_product(setup, size, rows, shape.hidden, output_bytes=4)

    forward = estimate_logits(at_once) + estimate_kernel_time(setup, 0.0, at_once * rows * 4)
    backward = estimate_kernel_time(setup, 0.0, kept * rows * (4 + setup.width))
    backward += _estimate_product(setup, kept, shape.hidden, rows)
    backward += _estimate_product(setup, rows, shape.hidden, kept, output_bytes=8)
    # Logits are recomputed for the gradient, unless one chunk holds all.
    backward += estimate_logits(kept) if kept < scored else 0.0
    products = np.array([forward / at_once, backward / kept]) * scored
    picked = scored * shape.hidden
    streams = ([2 * h, 2 * picked], [3 * h, *4 * [2 * picked]])
    messages = _estimate_tensor_parallelism(setup, pack, moves=(1, 1), sums=(0, 1))
    return _sum_pass_times(setup, products, streams, messages, launches=(20, LOSS_LAUNCHES))


def _estimate_stage_messages(setup: Setup, pack: MeanPack, stage: int) -> Floats:
    """Estimate messages to the next stage and back; each virtual stage sends its own."""
    layout = setup.layout
    size = pack.tokens * setup.shape.hidden / count_shared_ranks(layout) * setup.width
    # With virtual stages the last rank sends to the first: only the ends of the policy send less.
    ring = layout.vpp > 1
    forward = layout.vpp - (stage == layout.pp - 1) if ring else int(stage < layout.pp - 1)
    backward = layout.vpp - (stage == 0) if ring else int(stage > 0)
    one = estimate_message_time(setup, PIPELINE, size)
    return np.array([Seconds(0.0, one * count, 0.0) for count in (forward, backward)])


# Kernels


def _sum_pass_times(
    setup: Setup, products: Floats | float, streams: tuple[Sequence[float], Sequence[float]],
    messages: Floats | float = 0.0, *, launches: tuple[float, float] = (0.0, 0.0),
    exchange: float = 0.0,
) -> Floats:  # fmt: skip
    """Sum the seconds of a forward and a backward pass, [2, 3].

    Args:
        products: seconds of matrix products, [2].
        streams: elements read and written by each other kernel.
        messages: seconds, [2].
        launches: kernels of the least length.
        exchange: seconds of each pass.
    """
    found = np.zeros((2, 3))
    for row, sizes in enumerate(streams):
        found[row, 0] = sum(estimate_kernel_time(setup, 0.0, size * setup.width) for size in sizes)
    found[:, 0] = products + found[:, 0] + LEAST_SECONDS * np.array(launches)
    found[:, 1] = messages
    found[:, 2] = exchange
    return found


def _estimate_product(
    setup: Setup, rows: float, columns: float, inner: float, *,
    output_bytes: int | None = None, dtype: str | None = None, use_tiles: bool = True,
) -> float:  # fmt: skip
    """Estimate the seconds of [rows, inner] · [inner, columns].

    Args:
        output_bytes: bytes per element of the product; None: the operands' width.
        dtype: type of the operands; None: the model's.
        use_tiles: whether to count idle parts of tiles.
    """
    width = WEIGHT_BYTES[dtype] if dtype else setup.width
    output_width = width if output_bytes is None else output_bytes
    size = width * (rows * inner + inner * columns) + output_width * rows * columns
    product = (max(round(rows), 1), max(round(columns), 1)) if use_tiles else None
    return estimate_kernel_time(
        setup, 2.0 * rows * columns * inner, size, dtype=dtype, product=product
    )


def _estimate_products(
    setup: Setup,
    sizes: list[tuple[float, float, float]],
    *,
    use_tiles: bool = True,
) -> Floats:
    """Estimate the seconds of products with weights, forward and for both gradients, [2].

    Args:
        sizes: rows, columns and inner size of each product.
    """
    found = np.zeros(2)
    for rows, columns, inner in sizes:
        found[FORWARD] += _estimate_product(setup, rows, columns, inner, use_tiles=use_tiles)
        found[BACKWARD] += _estimate_product(setup, rows, inner, columns, use_tiles=use_tiles)
        # Under adapters, the policy's frozen weights have no gradient.
        if not setup.config.model.lora.rank:
            found[BACKWARD] += _estimate_product(
                setup, columns, inner, rows, output_bytes=8, use_tiles=use_tiles
            )
    return found


def _estimate_scores(setup: Setup, forward: float, backward: float) -> Floats:
    """Estimate the seconds of attention kernels by their FLOPs, [2]."""
    both = ((forward, ATTENTION_FORWARD), (backward, ATTENTION_BACKWARD))
    return np.array([estimate_kernel_time(setup, flops, 0.0, share=share) for flops, share in both])


def _estimate_tensor_parallelism(
    setup: Setup,
    pack: MeanPack,
    *,
    moves: tuple[int, int] = (2, 3),
    sums: tuple[int, int] = (1, 1),
) -> Floats:
    """Estimate the seconds of tensor parallelism, [2]: gathers and scatters under sequence
    parallelism, else all-reduces."""
    layout = setup.layout
    size = pack.tokens * setup.shape.hidden * setup.width
    one = estimate_transfer_time(setup, INSIDE, layout.tp, size)
    if layout.sequence_parallel:
        return one * np.array(moves, float)
    # An all-reduce moves twice the bytes of a gather or a scatter.
    return 2 * one * np.array(sums, float)

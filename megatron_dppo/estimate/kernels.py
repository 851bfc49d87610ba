"""Seconds of a pack's kernels and messages on one rank, by formula, at the rates that well-made
kernels reach.

Needs no torch. A rehearsal (``tests/rehearsal``) of the trainer with Transformer Engine found which
kernels there are, and ``tests/rehearsal/test_command.py`` compares their sums. Kernels follow each
other without a gap, and no two overlap. Sizes are elements of ``model.dtype`` unless they are said
to be bytes; *forward* and *backward* come in pairs.
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
"""Share of the data sheet's rates that large products (cuBLAS on an H100: 650 to 750 TFLOP/s),
streaming kernels, and collectives reach."""
ATTENTION_FORWARD = 0.40
ATTENTION_BACKWARD = 0.30
"""Share of the matrix rate over the pairs of causal attention."""
LEAST_SECONDS = 2e-6
"""Least seconds of a kernel."""
PROCESSORS = {"a100-40": 108, "a100-80": 108, "b200": 148}
"""Multiprocessors of a GPU; others have 132."""
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))
"""Rows and columns of the tiles into which products are cut, and the share of the rate that such
tiles reach."""

REPLICAS, EXCHANGE, PIPELINE, INSIDE = (
    "replicas: gradients and weights", "experts: exchange", "pipeline: activations", "tensor and "
                                                                                     "context "
                                                                                     "parallelism",
)  # fmt: skip
COLLECTIVES = (INSIDE, EXCHANGE, REPLICAS, PIPELINE)
"""Kinds of collectives, by what they are for."""


def estimate_kernel_time(
    setup: Setup, flops: float, size: float, *, share: float = PRODUCTS, dtype: str | None = None,
    product: tuple[int, int] | None = None,
) -> float:  # fmt: skip
    """Least seconds of a kernel.

    Args:
        setup: of the run.
        flops: products and sums.
        size: bytes read and written.
        share: of the matrix rate that the kernel reaches.
        dtype: of the operands; None: the model's.
        product: rows and columns of a matrix product, to count what its tiles leave idle.
    """
    rate = setup.gpu.get_peak_flops(dtype or setup.config.model.dtype) * share
    if product and flops:
        rate *= compute_tile_utilization(*product, PROCESSORS.get(setup.config.cluster.gpu, 132))
    return max(flops / rate, size / (setup.gpu.bandwidth * STREAMS), LEAST_SECONDS)


@cache
def compute_tile_utilization(rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that a product of ``rows`` x ``columns`` uses, by
    the best of the tilings."""
    best = 0.0
    for height, width, reached in TILES:
        down = -(-rows // height)
        across = -(-columns // width)
        rounds = -(-down * across // processors)
        best = max(best, reached * rows * columns / (rounds * processors * height * width))
    return best


def estimate_transfer_time(
    setup: Setup, kind: str, ranks: int, size: float, *, times: float = 1.0
) -> float:
    """Seconds of a ring over NVLink, or over the network if the group spans nodes.

    Experts' tokens go to both kinds of ranks at once. A ring of several ranks a node has as many
    adapters.

    Args:
        setup: of the run.
        kind: one of :data:`COLLECTIVES`.
        ranks: of the group.
        size: bytes of the full tensor.
        times: 2 for an all-reduce, 1 for a gather, a scatter or an exchange.
    """
    layout = setup.layout
    gpu = setup.gpu
    size = size / LINKS
    per_node = setup.config.cluster.gpus_per_node
    if kind == EXCHANGE:
        near = min(max(per_node // layout.expert_tp, 1), ranks)
        return size * max((near - 1) / ranks / gpu.nvlink, (ranks - near) / ranks / gpu.network)
    inside = min(max(per_node // (1 if kind == INSIDE else layout.tp), 1), ranks)
    rate = gpu.nvlink if ranks <= inside else min(gpu.nvlink, inside * gpu.network)
    return times * (ranks - 1) / max(ranks, 1) * size / rate


def estimate_message_time(setup: Setup, kind: str, size: float) -> float:
    """Seconds of a message of ``size`` bytes between two ranks; sent and received at once."""
    layout = setup.layout
    gpu = setup.gpu
    per_node = setup.config.cluster.gpus_per_node
    crosses = (layout.tp * layout.cp if kind == INSIDE else setup.placement.ranks) > per_node
    return size / LINKS / (gpu.network if crosses else gpu.nvlink)


EXPERT_LAUNCHES = 12
CONTEXT_LAUNCHES = 8
LOSS_LAUNCHES = 75
"""Kernels of the least length: of a router's counts in a layer's pass, of each step of attention
over context-parallel ranks, of a pack's loss."""


class Seconds(NamedTuple):
    """Seconds of a rank."""

    kernels: float
    messages: float
    """Messages of tensor, context and pipeline parallelism."""
    exchange: float
    """The way of tokens to the experts and back."""

    @property
    def total(self) -> float:
        return sum(self)


FORWARD = 0
BACKWARD = 1
"""Rows of an array of :class:`Seconds`, [2, 3], and of an array of their kernels or messages,
[2]."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Passes of a pack through a rank of a pipeline stage."""

    forward: Seconds
    """A pass of log-probabilities."""
    update: Seconds
    """A forward and a backward pass, with what the latter computes again."""


def estimate_stage_times(setup: Setup) -> list[StageTimes]:
    """Passes of the mean pack through each pipeline stage, its messages to other stages
    included."""
    layout = setup.layout
    pack = setup.mean_pack
    attention = _estimate_attention(setup, pack)
    feed_forward = (_estimate_experts if setup.shape.experts else _estimate_dense)(setup, pack)
    if setup.shape.hybrid:
        share = 1 / setup.shape.attention_interval
        attention = share * attention + (1 - share) * _estimate_delta_net(setup, pack)
    layer = attention + feed_forward
    if setup.config.model.recompute != "none":
        layer[BACKWARD] += (
            layer[FORWARD] if setup.config.model.recompute == "full" else feed_forward[FORWARD]
        )
    found = []
    for stage in range(layout.pp):
        seconds = count_stage_layers(setup.shape, stage, layout) * layer + _estimate_stage_messages(
            setup, pack, stage
        )
        if stage == 0:
            seconds += _estimate_embedding(setup, pack)
        if stage == layout.pp - 1:
            seconds += _estimate_head(setup, pack)
        forward = seconds[FORWARD].tolist()
        update = seconds.sum(axis=0).tolist()
        found.append(StageTimes(Seconds(*forward), Seconds(*update)))
    return found


def estimate_optimizer_time(setup: Setup, stage: int) -> float:
    """An update's passes over gradients, moments and weights: 4 bytes of a rank's gradient, 46 of
    its shard of them."""
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    return estimate_kernel_time(
        setup, 0.0, 4.0 * elements.total + 46.0 * count_optimizer_elements(setup, elements)
    )


def estimate_reduction_time(setup: Setup, stage: int) -> float:
    """Seconds to bring an update's gradients to each rank's shard as fp32 sums, and the weights
    back.

    The experts have an optimizer of their own, and Megatron gathers all weights after each of the
    two. The first and the last stage sum their gradients of tied embeddings.
    """
    shape = setup.shape
    layout = setup.layout
    elements = count_rank_elements(setup.shape, stage, setup.layout)
    placement = setup.placement
    groups = ((placement.replica, elements.dense), (placement.expert_replica, elements.experts))
    moved = 4.0 + setup.width * (2 if shape.experts else 1)
    tied = shape.tied and layout.pp > 1 and stage in (0, layout.pp - 1)
    embedding = (
        estimate_message_time(setup, PIPELINE, 4.0 * count_vocabulary_rows(setup) * shape.hidden)
        if tied
        else 0.0
    )
    return embedding + sum(
        estimate_transfer_time(setup, REPLICAS, ranks, moved * size) for ranks, size in groups
    )


# Layers


def _estimate_attention(setup: Setup, pack: MeanPack) -> Floats:
    """Norm, projections, norms and rotary embedding of queries and keys, attention, residual."""
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
    small = 4.0 if not setup.config.model.lora.rank else 0.0  # gradients of norms
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
    """Norm, projections, convolution, delta rule at attention's share of the matrix rate, gated
    norm, residual."""
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
    r = 2 * held * shape.delta_values * shape.delta_key_dim  # queries and keys, for each value head
    streams = (
        [2 * h, 3 * h, 2 * m, m, 2 * r, 2 * v, 4 * v],
        [3 * h, 3 * h, 3 * m, 2 * m, 3 * r, 4 * v, 6 * v],
    )
    messages = _estimate_tensor_parallelism(setup, pack)
    if layout.cp > 1:  # heads for tokens, and back
        messages += estimate_message_time(setup, INSIDE, (pack.tokens * inputs + v) * setup.width)
    flops = count_delta_flops(shape) * held
    return _sum_pass_times(
        setup, products + _estimate_scores(setup, flops, 2.5 * flops), streams, messages
    )


def _estimate_dense(setup: Setup, pack: MeanPack) -> Floats:
    """Norm, SwiGLU and residual."""
    shape = setup.shape
    layout = setup.layout
    h = pack.tokens * shape.hidden / count_shared_ranks(layout)
    f = pack.tokens * shape.ffn / layout.tp
    sizes = [(2 * shape.ffn // layout.tp, shape.hidden), (shape.hidden, shape.ffn // layout.tp)]
    products = _estimate_products(setup, [(pack.tokens, *size) for size in sizes])
    streams = ([2 * h, 3 * h, 3 * f], [3 * h, 3 * h, 5 * f])
    return _sum_pass_times(setup, products, streams, _estimate_tensor_parallelism(setup, pack))


def _estimate_experts(setup: Setup, pack: MeanPack) -> Floats:
    """Norm, router, the way of tokens to the experts and back, SwiGLU, residual. Every rank waits
    for the one whose experts are sent the most. Router and routing keep fp32. A shared expert's
    gate and sum take a norm's and a residual's time."""
    shape = setup.shape
    layout = setup.layout
    mine = pack.tokens // count_shared_ranks(layout)
    etp = layout.expert_tp
    h = mine * shape.hidden
    sent = mine * shape.experts_per_token * shape.hidden
    got = etp * mine * shape.experts_per_token * setup.imbalance
    experts = shape.experts // layout.ep
    ffn = shape.ffn // etp
    copies = got * shape.hidden
    sizes = [(2 * ffn, shape.hidden), (shape.hidden, ffn)]
    products = experts * _estimate_products(
        setup, [(got / experts, *size) for size in sizes], use_tiles=False
    )
    scores = mine * shape.experts / setup.width  # of one byte
    products[FORWARD] += _estimate_product(setup, mine, shape.experts, shape.hidden)
    products[BACKWARD] += _estimate_product(setup, mine, shape.hidden, shape.experts, dtype="fp32")
    products[BACKWARD] += _estimate_product(setup, shape.experts, shape.hidden, mine, dtype="fp32")
    routed = h + sent
    moved = [routed, routed, 2 * copies, 2 * copies]
    moved += [3 * copies, 3 * copies / etp] * (
        etp > 1
    )  # to fp32 for the sum over the ranks of an expert, and back
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
    if shape.shared_ffn:
        seconds += _estimate_dense(replace(setup, shape=replace(shape, ffn=shape.shared_ffn)), pack)
    return seconds


# The ends of the policy


def _estimate_embedding(setup: Setup, pack: MeanPack) -> Floats:
    """The look-up reads the weight; its gradient is made whole and added to the sum of all
    packs."""
    shape = setup.shape
    layout = setup.layout
    weight = count_vocabulary_rows(setup) * shape.hidden
    h = pack.tokens * shape.hidden
    cut = layout.tp > 1
    summed = (4.0 + 4.0 + setup.width) / setup.width * weight
    streams = ([weight + h] + [2 * h] * cut, [weight + h, summed] + [2 * h] * cut)
    return _sum_pass_times(
        setup, 0.0, streams, _estimate_tensor_parallelism(setup, pack, moves=(1, 1), sums=(1, 0))
    )


def _estimate_head(setup: Setup, pack: MeanPack) -> Floats:
    """Last norm, and log-probabilities of responses chunk by chunk. Logits are made again for the
    gradient, unless one chunk takes all."""
    shape = setup.shape
    rows = count_vocabulary_rows(setup)
    chunk = get_head_chunk_bytes(setup)
    scored = pack.responses
    h = pack.tokens * shape.hidden / count_shared_ranks(setup.layout)
    at_once, kept = (min(scored, chunk / (rows * size)) for size in (4, 4 + setup.width))

    def estimate_logits(size: float) -> float:
        return _estimate_product(setup, size, rows, shape.hidden, output_bytes=4)

    forward = estimate_logits(at_once) + estimate_kernel_time(setup, 0.0, at_once * rows * 4)
    backward = estimate_kernel_time(
        setup, 0.0, kept * rows * (4 + setup.width)
    ) + _estimate_product(setup, kept, shape.hidden, rows)
    backward += _estimate_product(setup, rows, shape.hidden, kept, output_bytes=8)
    backward += estimate_logits(kept) if kept < scored else 0.0
    products = np.array([forward / at_once, backward / kept]) * scored
    picked = scored * shape.hidden
    streams = ([2 * h, 2 * picked], [3 * h, *4 * [2 * picked]])
    messages = _estimate_tensor_parallelism(setup, pack, moves=(1, 1), sums=(0, 1))
    return _sum_pass_times(setup, products, streams, messages, launches=(20, LOSS_LAUNCHES))


def _estimate_stage_messages(setup: Setup, pack: MeanPack, stage: int) -> Floats:
    """Messages to the stage after, and back to the stage before; each virtual stage sends its
    own."""
    layout = setup.layout
    size = pack.tokens * setup.shape.hidden / count_shared_ranks(layout) * setup.width
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
    """Seconds of a forward and a backward pass, [2, 3].

    Args:
        setup: of the run.
        products: seconds of matrix products, [2].
        streams: elements that each other kernel reads and writes.
        messages: seconds, [2].
        launches: kernels of the least length.
        exchange: seconds of each pass.
    """
    found = np.zeros((2, 3))
    moved = [
        sum(estimate_kernel_time(setup, 0.0, size * setup.width) for size in sizes)
        for sizes in streams
    ]
    found[:, 0] = products + np.array(moved) + LEAST_SECONDS * np.array(launches)
    found[:, 1] = messages
    found[:, 2] = exchange
    return found


def _estimate_product(
    setup: Setup, rows: float, columns: float, inner: float, *,
    output_bytes: int | None = None, dtype: str | None = None, use_tiles: bool = True,
) -> float:  # fmt: skip
    """Seconds of [rows, inner] · [inner, columns].

    Args:
        setup: of the run.
        rows: of the product.
        columns: of the product.
        inner: summed over.
        output_bytes: bytes for each element of the product; None: as wide as the operands.
        dtype: of the operands; None: the model's.
        use_tiles: whether the roofline counts what tiles leave idle.
    """
    width = WEIGHT_BYTES[dtype] if dtype else setup.width
    size = (
        width * (rows * inner + inner * columns)
        + (width if output_bytes is None else output_bytes) * rows * columns
    )
    product = (max(round(rows), 1), max(round(columns), 1)) if use_tiles else None
    return estimate_kernel_time(
        setup, 2.0 * rows * columns * inner, size, dtype=dtype, product=product
    )


def _estimate_products(
    setup: Setup, sizes: list[tuple[float, float, float]], *, use_tiles: bool = True
) -> Floats:
    """Seconds of products with weights, and of those for the gradients of inputs and weights, [2].

    Args:
        setup: of the run. Frozen weights of a policy with adapters have no gradient.
        sizes: rows, columns and inner size of each product.
        use_tiles: as for :func:`_estimate_product`.
    """
    found = np.zeros(2)
    for rows, columns, inner in sizes:
        found[FORWARD] += _estimate_product(setup, rows, columns, inner, use_tiles=use_tiles)
        found[BACKWARD] += _estimate_product(setup, rows, inner, columns, use_tiles=use_tiles)
        if not setup.config.model.lora.rank:
            found[BACKWARD] += _estimate_product(
                setup, columns, inner, rows, output_bytes=8, use_tiles=use_tiles
            )
    return found


def _estimate_scores(setup: Setup, forward: float, backward: float) -> Floats:
    """Seconds of kernels of attention by their FLOPs, [2]."""
    both = ((forward, ATTENTION_FORWARD), (backward, ATTENTION_BACKWARD))
    return np.array([estimate_kernel_time(setup, flops, 0.0, share=share) for flops, share in both])


def _estimate_tensor_parallelism(
    setup: Setup, pack: MeanPack, *, moves: tuple[int, int] = (2, 3), sums: tuple[int, int] = (1, 1)
) -> Floats:
    """Seconds of tensor parallelism, [2]: gathers and scatters under sequence parallelism, else
    all-reduces."""
    layout = setup.layout
    size = pack.tokens * setup.shape.hidden * setup.width
    one = estimate_transfer_time(setup, INSIDE, layout.tp, size)
    return (
        one * np.array(moves, float)
        if layout.sequence_parallel
        else 2 * one * np.array(sums, float)
    )

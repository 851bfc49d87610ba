"""Least seconds of kernels and collectives, at the rates that well-made ones reach. Needs no torch.

``estimate/kernels.py`` applies these rates to formulas, ``rehearse/command.py`` to the kernels of a rehearsal. Kernels
follow each other without a gap, and no two overlap.
"""

from __future__ import annotations

from functools import cache

from megatron_dppo.estimate.workload import Setup

PRODUCTS, STREAMS, LINKS = 0.72, 0.85, 0.8
"""Share of the data sheet's rates that large products (cuBLAS on an H100: 650 to 750 TFLOP/s), streaming kernels, and
collectives reach."""
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.40, 0.30
"""Share of the matrix rate over the pairs of causal attention."""
LEAST_SECONDS = 2e-6
"""Least seconds of a kernel."""
PROCESSORS = {"a100-40": 108, "a100-80": 108, "b200": 148}
"""Multiprocessors of a GPU; others have 132."""
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))
"""Rows and columns of the tiles into which products are cut, and the share of the rate that such tiles reach."""

REPLICAS, EXCHANGE, PIPELINE, INSIDE = (
    "replicas: gradients and weights", "experts: exchange", "pipeline: activations", "tensor and context parallelism",
)  # fmt: skip
COLLECTIVES = (INSIDE, EXCHANGE, REPLICAS, PIPELINE)
"""Kinds of collectives, by what they are for."""


def kernel_seconds(
    setup: Setup, flops: float, size: float, *, share: float = PRODUCTS, dtype: str = "bf16",
    product: tuple[int, int] | None = None,
) -> float:  # fmt: skip
    """Least seconds of a kernel.

    Args:
        setup: of the run.
        flops: products and sums.
        size: bytes read and written.
        share: of the matrix rate that the kernel reaches.
        dtype: of the operands, as ``model.dtype`` has it.
        product: rows and columns of a matrix product, to count what its tiles leave idle.
    """
    rate = setup.gpu.rate(dtype) * share
    if product and flops:
        rate *= tile_share(*product, PROCESSORS.get(setup.config.cluster.gpu, 132))
    return max(flops / rate, size / (setup.gpu.bandwidth * STREAMS), LEAST_SECONDS)


@cache
def tile_share(rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that a product of ``rows`` x ``columns`` uses, by the best of the tilings."""
    best = 0.0
    for height, width, reached in TILES:
        down, across = -(-rows // height), -(-columns // width)
        rounds = -(-down * across // processors)
        best = max(best, reached * rows * columns / (rounds * processors * height * width))
    return best


def wire_seconds(setup: Setup, kind: str, ranks: int, size: float, *, times: float = 1.0) -> float:
    """Seconds of a ring over NVLink, or over the network if the group spans nodes.

    Experts' tokens go to both kinds of ranks at once. A ring of several ranks a node has as many adapters.

    Args:
        setup: of the run.
        kind: one of :data:`COLLECTIVES`.
        ranks: of the group.
        size: bytes of the full tensor.
        times: 2 for an all-reduce, 1 for a gather, a scatter or an exchange.
    """
    layout, gpu, size = setup.placement.layout, setup.gpu, size / LINKS
    per_node = setup.config.cluster.gpus_per_node
    if kind == EXCHANGE:
        near = min(max(per_node // layout.expert_tp, 1), ranks)
        return size * max((near - 1) / ranks / gpu.nvlink, (ranks - near) / ranks / gpu.network)
    inside = min(max(per_node // (1 if kind == INSIDE else layout.tp), 1), ranks)
    rate = gpu.nvlink if ranks <= inside else min(gpu.nvlink, inside * gpu.network)
    return times * (ranks - 1) / max(ranks, 1) * size / rate


def message_seconds(setup: Setup, kind: str, size: float) -> float:
    """Seconds of a message of ``size`` bytes between two ranks; sent and received at once."""
    layout, gpu, per_node = setup.placement.layout, setup.gpu, setup.config.cluster.gpus_per_node
    crosses = (layout.tp * layout.cp if kind == INSIDE else setup.placement.ranks) > per_node
    return size / LINKS / (gpu.network if crosses else gpu.nvlink)

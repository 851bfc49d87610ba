"""Seconds of booked work on a GPU, kernel by kernel, at the rates that well-made kernels reach.

Kernels follow each other without a gap, and no two overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dppo.estimate.workload import Setup
from megatron_dppo.rehearse.booking import KernelLaunch

PRODUCTS, STREAMS, LINKS = 0.72, 0.85, 0.8
"""Share of the data sheet's rates that large products (cuBLAS on an H100: 650 to 750 TFLOP/s), streaming kernels, and
collectives reach."""
ATTENTION = {"te::attention_fwd": 0.40, "te::attention_bwd": 0.30}
"""Share of the matrix rate over the pairs of causal attention."""
LEAST_SECONDS = 2e-6
"""Of a kernel."""
PROCESSORS = {"a100-40": 108, "a100-80": 108, "b200": 148}
"""Multiprocessors of a GPU; others have 132."""
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))
"""Rows and columns of the tiles into which products are cut, and the share of the rate that such tiles reach."""

REPLICAS, EXCHANGE, PIPELINE, INSIDE = (
    "replicas: gradients and weights", "experts: exchange", "pipeline: activations", "tensor and context parallelism",
)  # fmt: skip
COLLECTIVES = (INSIDE, EXCHANGE, REPLICAS, PIPELINE)
"""Kinds of collectives, by what they are for."""
MESSAGES = ("c10d::send", "c10d::recv")


@dataclass(slots=True)
class KernelCost:
    """Work of one kind."""

    kernels: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def towards(self, more: KernelCost, times: float) -> KernelCost:
        """This cost and so many times what ``more`` has beyond it."""
        pairs = ((getattr(self, name), getattr(more, name)) for name in self.__slots__)
        return KernelCost(*(mine + times * (theirs - mine) for mine, theirs in pairs))


def costs(kernels: Sequence[KernelLaunch], setup: Setup) -> dict[str, KernelCost]:
    """Work by kind."""
    found: dict[str, KernelCost] = defaultdict(KernelCost)
    for kernel in kernels:
        cost = found[kind_of(kernel)]
        cost.kernels += 1
        cost.flops += kernel.flops
        cost.bytes += kernel.bytes
        cost.seconds += seconds(kernel, setup)
    return dict(found)


def kind_of(kernel: KernelLaunch) -> str:
    """What a kernel is a part of."""
    name, place = kernel.name, kernel.place
    optimizer = "multi_tensor" in name or "/optimizer/" in place or "param_and_grad_buffer" in place
    if name.startswith("c10d::"):
        if "context_parallel" in place:
            return INSIDE
        if name.startswith(MESSAGES):
            return PIPELINE
        return REPLICAS if optimizer else EXCHANGE if "token_dispatcher" in place or "alltoall" in name else INSIDE
    if optimizer:
        return "optimizer"
    if "policy_head" in place or "policy_head" in name:
        return "head: products" if kernel.flops else "head: passes over logits"
    if name in ATTENTION:
        return "layers: attention"
    return "layers: products" if kernel.flops else "layers: norms, activations, copies"


def seconds(kernel: KernelLaunch, setup: Setup) -> float:
    """Least seconds of a kernel."""
    if kernel.name.startswith("c10d::"):
        return _wire_seconds(kernel, setup)
    rate = setup.gpu.rate("bf16" if kernel.dtype in (torch.bfloat16, torch.float16) else "fp32")
    rate *= ATTENTION.get(kernel.name, PRODUCTS)
    if kernel.product:
        rate *= tile_share(*kernel.product, PROCESSORS.get(setup.config.cluster.gpu, 132))
    return max(kernel.flops / rate, kernel.bytes / (setup.gpu.bandwidth * STREAMS), LEAST_SECONDS)


def tile_share(rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that a product of ``rows`` x ``columns`` uses, by the best of the tilings."""
    best = 0.0
    for height, width, reached in TILES:
        down, across = -(-rows // height), -(-columns // width)
        rounds = -(-down * across // processors)
        best = max(best, reached * rows * columns / (rounds * processors * height * width))
    return best


def _wire_seconds(kernel: KernelLaunch, setup: Setup) -> float:
    """Seconds of a ring or a message, over NVLink, or over the network if the group spans nodes.

    Messages are sent and received at once. Experts' tokens go to both kinds of ranks at once. A ring of several ranks a
    node has as many adapters.
    """
    layout, gpu = setup.placement.layout, setup.gpu
    per_node, ranks = setup.config.cluster.gpus_per_node, int(kernel.name.rpartition(" ")[2])
    kind, size = kind_of(kernel), kernel.bytes / LINKS
    if kernel.name.startswith(MESSAGES):
        crosses = (layout.tp * layout.cp if kind == INSIDE else setup.placement.ranks) > per_node
        return 0.0 if "recv" in kernel.name else size / (gpu.network if crosses else gpu.nvlink)
    if kind == EXCHANGE:
        near = min(max(per_node // layout.expert_tp, 1), ranks)
        return size * max((near - 1) / ranks / gpu.nvlink, (ranks - near) / ranks / gpu.network)
    inside = min(max(per_node // (1 if kind == INSIDE else layout.tp), 1), ranks)
    times = (2.0 if "allreduce" in kernel.name else 1.0) * (ranks - 1) / max(ranks, 1)
    return times * size / (gpu.nvlink if ranks <= inside else min(gpu.nvlink, inside * gpu.network))

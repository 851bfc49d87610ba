"""Seconds of booked work on a GPU, kernel by kernel, at the rates of ``estimate/roofline.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dppo.estimate.roofline import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    EXCHANGE,
    INSIDE,
    PIPELINE,
    PRODUCTS,
    REPLICAS,
    kernel_seconds,
    message_seconds,
    wire_seconds,
)
from megatron_dppo.estimate.workload import Setup
from megatron_dppo.rehearse.booking import KernelLaunch

ATTENTION = {"te::attention_fwd": ATTENTION_FORWARD, "te::attention_bwd": ATTENTION_BACKWARD}
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
    """Kind of work of a kernel or collective."""
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
    """Least seconds of a kernel or a collective."""
    if kernel.name.startswith("c10d::"):
        kind = kind_of(kernel)
        if kernel.name.startswith(MESSAGES):
            return 0.0 if "recv" in kernel.name else message_seconds(setup, kind, kernel.bytes)
        ranks, times = int(kernel.name.rpartition(" ")[2]), 2.0 if "allreduce" in kernel.name else 1.0
        return wire_seconds(setup, kind, ranks, kernel.bytes, times=times)
    dtype = "bf16" if kernel.dtype in (torch.bfloat16, torch.float16) else "fp32"
    share = ATTENTION.get(kernel.name, PRODUCTS)
    return kernel_seconds(setup, kernel.flops, kernel.bytes, share=share, dtype=dtype, product=kernel.product)

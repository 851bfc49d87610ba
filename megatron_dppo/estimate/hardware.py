"""What the kinds of GPU can do, by their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in its usual eight-way node."""

    memory_gib: float
    """What CUDA reports as usable."""
    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """Dense bf16 products and sums per second."""
    nvlink: float
    """Bytes per second to the other GPUs of its node, one way."""
    network: float
    """Bytes per second to other nodes, one way: its share of the node's adapters."""

    def rate(self, dtype: str) -> float:
        """Products and sums per second in a type of ``model.dtype``; fp32 has no matrix units (TF32 is off)."""
        return self.flops if dtype == "bf16" else self.flops / 16


GPUS = {
    "a100-40": Gpu(39.4, 1.555e12, 312e12, 300e9, 25e9),
    "a100-80": Gpu(79.2, 2.039e12, 312e12, 300e9, 25e9),
    "h100": Gpu(79.2, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Gpu(139.8, 4.8e12, 989e12, 450e9, 50e9),
    "b200": Gpu(178.4, 7.7e12, 2250e12, 900e9, 50e9),
}
"""SXM modules; the network is one adapter of 200 (A100) or 400 Gbit/s for each GPU."""

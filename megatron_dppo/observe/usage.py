"""How well a step used the machines: their memory, their matrix rate, and the trainer's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.observe.timers import COMPUTING
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import StepPlan

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Usage:
    """Measures a step on all ranks together."""

    world: World
    shape: PolicyShape
    matrices: int
    """Weights that a token meets in the layers."""
    head: int
    """Weights of the output layer, which response tokens meet."""
    peak: float
    """FLOPs per second of one GPU, by its maker's data sheet."""
    frozen: bool = False
    """Whether the weights need no gradient, because adapters are trained beside them."""

    def measure(self, plan: StepPlan, seconds: Mapping[str, float]) -> dict[str, float]:
        """``perf/…`` of the step that has just ended. Collective.

        Args:
            plan: of the step.
            seconds: ``perf/…_time`` of this rank's timers; the leader's are those that its metrics hold.
        """
        cuda = self.world.device.type == "cuda"
        memory = psutil.virtual_memory()
        used = [(memory.total - memory.available) / GIB]
        if cuda:
            used.append(torch.cuda.max_memory_reserved() / GIB)
            torch.cuda.reset_peak_memory_stats()
        largest = np.max(self.world.gather(used), axis=0)
        metrics = dict(zip(("perf/host_memory_gib", "perf/gpu_memory_gib"), largest.tolist(), strict=False))
        if step := seconds.get("perf/step_time"):
            computing = sum(seconds.get(f"perf/{phase}_time", 0.0) for phase in COMPUTING)
            metrics["perf/wait_time_ratio"] = max(1.0 - computing / step, 0.0)
        if training := seconds.get("perf/actor_train_time"):
            rate = self._training_flops(plan) / training / self.world.size
            metrics["perf/actor_train_tflops"] = rate / 1e12
            if cuda:
                metrics["perf/actor_train_peak_share"] = rate / self.peak
        return metrics

    def _training_flops(self, plan: StepPlan) -> float:
        """FLOPs of a forward and a backward pass over the tokens trained on, shared ones once, without padding and
        recomputation.

        Forward, a token takes two FLOPs for each weight that it meets, and the two products of causal attention take
        2·heads·head_dim·n² a layer for a sequence of n tokens, of which a token sees half. Backward takes twice that;
        products with frozen weights once. Adapters' own are not counted.
        """
        shape, total = self.shape, 0.0
        for minibatch in plan.minibatches:
            samples = minibatch.samples
            lengths, shared = samples.lengths.astype(np.float64), samples.shared_length.astype(np.float64)
            pairs = np.square(lengths) - np.square(shared)
            attention = 2.0 * shape.num_layers * shape.heads * shape.head_dim * pairs.sum()
            products = 2.0 * (self.matrices * (lengths - shared).sum() + self.head * samples.response_length.sum())
            total += (2.0 if self.frozen else 3.0) * products + 3.0 * attention
        return float(total)

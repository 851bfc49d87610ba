"""Measure a step's seconds by phase, and the use of machines: memory, matrix rate, trainer time.

Does not import torch, because a report reads the phases.

In the steps of ``run.profile``, torch's profiler writes for each rank
``RUN/profile/step_0000003-rank_0.json.gz`` (Perfetto, chrome://tracing), with phases above
operators and kernels, and on CUDA ``step_0000003-rank_0.pickle``, the allocator's history
(https://docs.pytorch.org/memory_viz).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron_dppo.models.shape import PolicyShape
    from megatron_dppo.parallel.world import World
    from megatron_dppo.rl.types import StepPlan

PHASES: Mapping[str, str] = {
    "rollout": "rollout",
    "reward": "reward",
    "plan": "plan",
    "deliver": "deliver",
    "log_probs": "log-probs",
    "actor_train": "train",
    "update_weights": "sync",
}
"""Phases of a step in order, with display names. ``step`` also contains the rest, ``other``, but
not ``eval``."""

TRAINING = ("deliver", "log_probs", "actor_train")
"""Phases with seconds proportional to the tokens trained on."""
ROLLED_OUT = ("train/tokens", "prune/saved_tokens_completions", "prune/zero_advantage_tokens")
"""Rolled-out tokens: trained on; pruned with a gradient; without a gradient."""
COMPUTING = ("log_probs", "actor_train")
"""Phases of the trainer's passes."""


class PhaseTimers:
    """Wall-clock seconds per phase on this rank, summed until :meth:`take`.

    - ``with timers("rollout"): ...`` is reported as ``perf/rollout_time``.
    - An outer phase includes inner phases.
    - A phase counts up to an exception.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []
        self.named: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Context manager around a phase, given the phase's name; set by a profiler."""
        self.entered = 0
        """Phases entered. Equal on ranks with equal progress."""
        self.moved = time.monotonic()
        """Time of the last start or end."""

    @property
    def phase(self) -> str:
        """Innermost current phase, or empty."""
        return self._within[-1] if self._within else ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        # Count a step and the step's phases, but no phases further inside.
        self.entered += len(self._within) < 2
        self._within.append(phase)
        self.moved = time.monotonic()
        try:
            with self.named(phase):
                yield
        finally:
            self._within.pop()
            self.moved = time.monotonic()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return and clear ``perf/<phase>_time``, in seconds."""
        metrics = {f"perf/{phase}_time": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def compute_breakdown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return seconds of a step by phase, in order, then the rest as ``other``."""
    parts = {
        word: metrics[f"perf/{phase}_time"]
        for phase, word in PHASES.items()
        if f"perf/{phase}_time" in metrics
    }
    rest = metrics.get("perf/step_time", 0.0) - sum(parts.values())
    # The sum of the parts may exceed the step by rounding.
    return parts | {"other": max(rest, 0.0)}


def saved_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of the seconds saved by pruning.

    - ``perf/saved_prompts_time``, ``perf/saved_completions_time``: see :func:`estimate_savings`;
      absent without tokens.
    - ``perf/pruning_efficiency``: variance × seconds without pruning, relative to the step's. 1 for
      a smaller batch; absent for a biased rule.
    """
    if not {"prune/saved_tokens_prompts", "prune/saved_tokens_completions"} <= metrics.keys():
        return {}
    by_prompts, by_completions, by_both = estimate_savings(metrics)
    saved = {}
    if sum(metrics.get(key, 0.0) for key in ROLLED_OUT):
        saved["perf/saved_prompts_time"] = by_prompts
    if metrics.get("train/tokens"):
        saved["perf/saved_completions_time"] = by_completions
        inflation = metrics.get("prune/variance_inflation")
        seconds = metrics.get("perf/step_time")
        if inflation and seconds:
            saved["perf/pruning_efficiency"] = (seconds + by_both) / seconds / inflation
    return saved


def estimate_savings(metrics: Mapping[str, float]) -> tuple[float, float, float]:
    """Estimate the further seconds of a step with all prompts, with all completions, and with both.

    The estimate with all prompts keeps the pruning of completions, and vice versa. The model:

    - ``rollout`` costs equal seconds per rolled-out token, ``TRAINING`` equal seconds per token
      trained on.
    - A pruned prompt would have cost rollouts, and training of the fraction of tokens that other
      prompts kept.
    - Costs independent of the step's size (a sync, a server's latency) are not saved.
    """
    # Completions with zero advantage are no saving, because a run without pruning drops such
    # completions, too.
    trained, pruned, zero_advantage = (metrics.get(key, 0.0) for key in ROLLED_OUT)
    rolled_out = trained + pruned + zero_advantage
    # With ``rollout.ahead``, only the trainer's wait for rollouts counts.
    rolling_out = metrics.get("perf/rollout_time", 0.0)
    training = sum(metrics.get(f"perf/{phase}_time", 0.0) for phase in TRAINING)
    more_prompts = (
        metrics.get("prune/saved_tokens_prompts", 0.0) / rolled_out if rolled_out else 0.0
    )
    more_completions = pruned / trained if trained else 0.0
    return (
        (rolling_out + training) * more_prompts,
        training * more_completions,
        rolling_out * more_prompts
        + training * ((1.0 + more_prompts) * (1.0 + more_completions) - 1.0),
    )


def format_duration(seconds: float) -> str:
    """Format seconds in at most two units: 0.35 s, 1.24 s, 42 s, 3 min 20 s, 5 h 12 min."""
    if 0 < seconds < 0.001:
        return "<0.001 s"
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02} min"


# The history keeps the latest entries.
ALLOCATIONS = 1_000_000


class Profiler:
    """Profiler of chosen steps: ``with profiler(3): ...`` around every step, counted from 1."""

    def __init__(
        self,
        folder: Path,
        steps: Collection[int],
        *,
        rank: int,
        on_cuda: bool,
        timers: PhaseTimers,
    ) -> None:
        self._folder = folder / "profile"
        self._steps = steps
        self._timers = timers
        self._rank = rank
        self._on_cuda = on_cuda

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step not in self._steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        self._timers.named = record_function
        try:
            with profile(activities=activities, record_shapes=True) as seen:
                yield
        finally:
            self._timers.named = nullcontext
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"step_{step:07d}-rank_{self._rank}"
        seen.export_chrome_trace(f"{file}.json.gz")
        if self._on_cuda:
            torch.cuda.memory._dump_snapshot(f"{file}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


GIB = 2**30


@dataclass(frozen=True, slots=True)
class Usage:
    """Measurement on all ranks."""

    world: World
    shape: PolicyShape
    matrices: int
    """Weights of the layers per token."""
    head: int
    """Weights of the output layer, for response tokens only."""
    peak: float
    """FLOPs per second of a GPU, from the data sheet."""
    frozen: bool = False
    """True if only adapters are trained."""

    def measure(self, plan: StepPlan, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return ``perf/…`` metrics of the last step, from this rank's timers. Collective."""
        import psutil

        cuda = self.world.device.type == "cuda"
        memory = psutil.virtual_memory()
        used = [(memory.total - memory.available) / GIB]
        if cuda:
            import torch

            used.append(torch.cuda.max_memory_reserved() / GIB)
            torch.cuda.reset_peak_memory_stats()
        # The fullest rank, because a run fails on the first rank without memory.
        largest = np.max(self.world.gather(used), axis=0)
        metrics = dict(
            zip(("perf/host_memory_gib", "perf/gpu_memory_gib"), largest.tolist(), strict=False)
        )
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
        """Return FLOPs of the passes over the tokens trained on, without padding and
        recomputation."""
        shape = self.shape
        total = 0.0
        for minibatch in plan.minibatches:
            lengths = minibatch.lengths.astype(np.float64)
            # Shared tokens count once. Adapters' weights do not count.
            shared = minibatch.shared_length.astype(np.float64)
            # Two products take 2·heads·head_dim·n² per layer and sequence of n tokens, because in
            # causal attention a token sees half of the sequence.
            pairs = np.square(lengths) - np.square(shared)
            attention = 2.0 * shape.num_layers * shape.heads * shape.head_dim * pairs.sum()
            # A token takes two FLOPs per weight.
            products = 2.0 * (
                self.matrices * (lengths - shared).sum()
                + self.head * minibatch.response_length.sum()
            )
            # Backward takes twice the FLOPs of forward, or once for products with frozen weights.
            total += (2.0 if self.frozen else 3.0) * products + 3.0 * attention
        return float(total)

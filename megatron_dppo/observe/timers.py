"""Where a step's time goes, phase by phase, and how well it used the machines: memory, matrix rate,
the trainer's time.

Needs no torch to be imported: a report reads the phases.

In chosen steps (``run.profile``) torch's profiler records what a rank does:
``RUN/profile/step_0000003-rank_0.json.gz`` is a trace for Perfetto or chrome://tracing, with the
phases of the step above its operators and kernels. On CUDA ``step_0000003-rank_0.pickle`` is the
allocator's history besides, for https://docs.pytorch.org/memory_viz.
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
"""The phases of a step in their order, with the words that people read. Other phases are timed too:
``step`` holds all of these, and ``eval`` lies outside of it. What a step spends in none of these is
shown as ``other``."""

TRAINING = ("deliver", "log_probs", "actor_train")
"""Phases whose seconds grow with the tokens trained on."""
ROLLED_OUT = ("train/tokens", "prune/saved_tokens_completions", "prune/zero_advantage_tokens")
"""Row tokens rolled out: trained on; pruned with a gradient; without a gradient."""
COMPUTING = ("log_probs", "actor_train")
"""Phases in which the trainer passes tokens through the policy."""


class PhaseTimers:
    """Wall-clock seconds per phase on this rank, summed until they are taken.

    ``with timers("rollout"): ...`` is reported as ``perf/rollout_time``. Phases may nest: the outer
    one holds the inner one's time too. A phase that an exception leaves is counted up to there.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []
        self.named: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Entered with a phase's name around it; a profiler sets it."""
        self.entered = 0
        """Phases entered so far, without those within a phase of a step. Equal on ranks that are
        equally far."""
        self.moved = time.monotonic()
        """When a phase was last entered or left."""

    @property
    def phase(self) -> str:
        """The innermost phase that this rank is in, empty between phases."""
        return self._within[-1] if self._within else ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
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
        """``perf/<phase>_time`` in seconds, for the phases entered since this was called last."""
        metrics = {f"perf/{phase}_time": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def compute_breakdown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step by phase, in the order of ``PHASES``, with ``other`` for the rest of
    ``perf/step_time``."""
    parts = {
        word: metrics[f"perf/{phase}_time"]
        for phase, word in PHASES.items()
        if f"perf/{phase}_time" in metrics
    }
    rest = metrics.get("perf/step_time", 0.0) - sum(parts.values())
    return parts | {"other": max(rest, 0.0)}


def saved_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """``perf/saved_prompts_time`` and ``perf/saved_completions_time``: the first two of
    ``saving``, from a step's own counts. Each is left out where the step has no tokens to
    go by. And ``perf/pruning_efficiency``: how many times less variance × seconds the step has than
    without pruning; 1 for a smaller batch. Not of a biased rule."""
    if not {"prune/saved_tokens_prompts", "prune/saved_tokens_completions"} <= metrics.keys():
        return {}
    by_prompts, by_completions, by_both = estimate_savings(metrics)
    saved = {}
    if sum(metrics.get(key, 0.0) for key in ROLLED_OUT):
        saved["perf/saved_prompts_time"] = by_prompts
    if metrics.get("train/tokens"):
        saved["perf/saved_completions_time"] = by_completions
        if (inflation := metrics.get("prune/variance_inflation")) and (
            seconds := metrics.get("perf/step_time")
        ):
            saved["perf/pruning_efficiency"] = (seconds + by_both) / seconds / inflation
    return saved


def estimate_savings(metrics: Mapping[str, float]) -> tuple[float, float, float]:
    """Estimate from a step's own timers how many seconds longer it would have taken with all
    prompts, with all completions, and with both. In the first two the other level stays pruned as
    it was.

    The model: ``rollout`` costs the same seconds for every row token rolled out, ``TRAINING`` the
    same for every row token trained on. Prompts that were not rolled out would have cost rollouts,
    and training of the share of their tokens that was kept of the others. What a step costs
    whatever its size (a sync, a server's latency) is not saved; with ``rollout.ahead`` only the
    seconds that the trainer waited for rollouts count. Completions with zero advantage are dropped
    with pruning off too, and are no saving.
    """
    trained, pruned, zero_advantage = (metrics.get(key, 0.0) for key in ROLLED_OUT)
    rolled_out = trained + pruned + zero_advantage
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
    """Seconds in at most two units, as console and report say them: 0.35 s, 1.24 s, 42 s, 3 min 20
    s, 5 h 12 min."""
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


ALLOCATIONS = 1_000_000
"""Most that the allocator's history holds, the latest ones."""


class Profiler:
    """``with profile(3): ...`` around a step; around one that was not chosen it does nothing.

    Args:
        folder: of the run.
        steps: counted from 1, as in the log.
        rank: of this process.
        on_cuda: whether its tensors are on a GPU.
        timers: whose phases are named in the trace.
    """

    def __init__(
        self, folder: Path, steps: Collection[int], *, rank: int, on_cuda: bool, timers: PhaseTimers
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
            seconds: ``perf/…_time`` of this rank's timers; the leader's are those that its metrics
                hold.
        """
        import psutil

        cuda = self.world.device.type == "cuda"
        memory = psutil.virtual_memory()
        used = [(memory.total - memory.available) / GIB]
        if cuda:
            import torch

            used.append(torch.cuda.max_memory_reserved() / GIB)
            torch.cuda.reset_peak_memory_stats()
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
        """FLOPs of a forward and a backward pass over the tokens trained on, shared ones once,
        without padding and recomputation.

        Forward, a token takes two FLOPs for each weight that it meets, and the two products of
        causal attention take 2·heads·head_dim·n² a layer for a sequence of n tokens, of which a
        token sees half. Backward takes twice that; products with frozen weights once. Adapters' own
        are not counted.
        """
        shape = self.shape
        total = 0.0
        for minibatch in plan.minibatches:
            lengths = minibatch.lengths.astype(np.float64)
            shared = minibatch.shared_length.astype(np.float64)
            pairs = np.square(lengths) - np.square(shared)
            attention = 2.0 * shape.num_layers * shape.heads * shape.head_dim * pairs.sum()
            products = 2.0 * (
                self.matrices * (lengths - shared).sum()
                + self.head * minibatch.response_length.sum()
            )
            total += (2.0 if self.frozen else 3.0) * products + 3.0 * attention
        return float(total)

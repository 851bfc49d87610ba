"""What a rank does in chosen steps (``run.profile``), as torch's profiler sees it.

``RUN/profile/step_0000003-rank_0.json.gz`` is a trace for Perfetto or chrome://tracing, with the phases of the step
above its operators and kernels. On CUDA ``step_0000003-rank_0.pickle`` is the allocator's history besides, for
https://docs.pytorch.org/memory_viz.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megatron_dppo.observe.timers import PhaseTimers

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

    def __init__(self, folder: Path, steps: Collection[int], *, rank: int, on_cuda: bool, timers: PhaseTimers) -> None:
        self._folder, self._steps, self._timers = folder / "profile", steps, timers
        self._rank, self._on_cuda = rank, on_cuda

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

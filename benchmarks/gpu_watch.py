"""What a step on a GPU does beside its arithmetic: where the host waits for the device, and its
kernels by cost."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dppo.rl.types import Pack


def host_waits(work: Callable[[], object]) -> Counter[str]:
    """How often the host waits for the device in torch's calls, by the place that calls.

    What waits in a backward pass is counted where that is called from.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{one.filename}:{one.lineno}"
        for one in said
        if "called a synchronizing" in str(one.message)
    )


def waits_per_pack(
    name: str, work: Callable[[list[Pack]], object], packs: list[Pack]
) -> dict[str, float]:
    """How often the host waits for each of some packs, and besides. The places are written to
    standard error.

    Args:
        name: of the work.
        work: done on one pack, and on all.
        packs: two or more, to tell the one from the other; with a single one all is its own.
    """
    one, places = host_waits(lambda: work(packs[:1])), host_waits(lambda: work(packs))
    for place, count in places.most_common():
        print(
            f"{name}, {len(packs)} packs: the host waits {count} times at {place}", file=sys.stderr
        )
    each = (
        (places.total() - one.total()) / (len(packs) - 1) if len(packs) > 1 else float(one.total())
    )
    return {"per_pack": each, "besides": one.total() - each}


def write_profile(work: Callable[[], object], device: torch.device, to: str, title: str) -> None:
    """The operators and kernels of some work, the costliest first, appended to a file or on
    standard error (-)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
    if to == "-":
        print(title, table, sep="\n", file=sys.stderr)
    else:
        with Path(to).open("a") as file:
            print(title, table, sep="\n", file=file)

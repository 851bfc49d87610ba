"""Watch a step on a GPU: the host's waits for the device, and kernels by cost."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dppo.rl.types import Pack


def host_waits(work: Callable[[], object]) -> Counter[str]:
    """Count the host's waits for the device in torch's calls, by file and line of the call.

    Waits in a backward pass are counted at the line that calls the backward pass.
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
    """Count the host's waits per pack, and the waits that all packs share (``besides``). Print the
    places to standard error.

    Args:
        name: name of the work.
        work: work on any number of packs; runs on the first pack, then on all packs.
        packs: two or more packs, to separate the two counts. All waits of a single pack count as
            waits per pack.
    """
    one = host_waits(lambda: work(packs[:1]))
    places = host_waits(lambda: work(packs))
    for place, count in places.most_common():
        print(
            f"{name}, {len(packs)} packs: the host waits {count} times at {place}", file=sys.stderr
        )
    each = float(one.total())
    if len(packs) > 1:
        each = (places.total() - one.total()) / (len(packs) - 1)
    return {"per_pack": each, "besides": one.total() - each}


def write_profile(work: Callable[[], object], device: torch.device, to: str, title: str) -> None:
    """Profile work: append a table of operators and kernels, the costliest first, to a file, or
    print the table to standard error (``-``)."""
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

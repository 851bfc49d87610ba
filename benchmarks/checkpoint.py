"""Seconds of a checkpoint: of its save, of what checksums and flushing take of it, and of the check at a resume.

    python benchmarks/checkpoint.py [--json] [--megabytes 1024] [--repetitions 5] [--work-dir DIR]

The state is of one rank, fp32 tensors of 16 MiB, written by the trainer's own writer in Megatron's format, in two
files. Each repetition saves six times, in an order of its own: flushed to the disk or not; with our checksums, without
any, or with torch's own instead, which were taken before there were ours. Before each save the last one is removed and
the disk is left to finish. Figures are the least of all repetitions, which others' work on the machine disturbs least;
``cpu`` ones are processor seconds of the whole process. ``check_seconds`` reads all of it again, from the page cache
where memory allows that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_dppo.bridge import checksums
from megatron_dppo.bridge.checksums import Checksums
from megatron_dppo.parallel import without_cuda
from megatron_dppo.trainer.shard_writer import ShardWriter

TENSOR_MIB = 16
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=None, help="on the disk to measure (default: a temporary one)")
    chosen = parser.parse_args()
    without_cuda.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=chosen.work_dir) as folder:
        figures = measure(Path(folder), chosen.megabytes, chosen.repetitions)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<44}{value:>10.3f}")


def measure(folder: Path, megabytes: int, repetitions: int) -> dict[str, float]:
    """The least of each."""
    tensors = {f"{i}": torch.randn(TENSOR_MIB * MIB // 4) for i in range(max(megabytes // TENSOR_MIB, 2))}
    figures: dict[str, list[float]] = defaultdict(list)
    kinds = [(durable, checked) for durable in (True, False) for checked in ("ours", "none", "torch")]
    for _ in range(repetitions):
        for durable, checked in random.sample(kinds, len(kinds)):
            name = f"save_{'durable' if durable else 'not_durable'}_checksums_{checked}"
            seconds, cpu_seconds = save(folder / "checkpoint", tensors, durable=durable, checked=checked)
            figures[f"{name}_seconds"].append(seconds)
            figures[f"{name}_cpu_seconds"].append(cpu_seconds)
            if checked == "ours":
                figures["check_seconds"].append(check(folder / "checkpoint"))
    found = {name: min(values) for name, values in sorted(figures.items())}
    for kind in ("durable", "not_durable"):
        ours, torch_s = (found[f"save_{kind}_checksums_{of}_seconds"] for of in ("ours", "torch"))
        found[f"save_{kind}_over_before"] = ours / torch_s
    found["megabytes"] = sum(t.numel() * t.element_size() for t in tensors.values()) / MIB
    return found


def save(place: Path, tensors: dict[str, torch.Tensor], *, durable: bool, checked: str) -> tuple[float, float]:
    """Seconds of a save, and processor seconds."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.sync()
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    with ExitStack() as stack:
        if checked != "ours":
            stack.enter_context(mock.patch.object(checksums.zlib, "crc32", lambda data, value=0: 0))
        if checked == "torch":
            stack.enter_context(mock.patch.object(torch.serialization, "set_crc32_options", lambda taken: None))
        began, cpu = time.perf_counter(), time.process_time()
        blocks = ShardWriter(state, place, background=False, durable=durable).finish()
        Checksums(place, blocks).write()
        return time.perf_counter() - began, time.process_time() - cpu


def check(place: Path) -> float:
    found = Checksums.read(place)
    assert found is not None
    began = time.perf_counter()
    found.check()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

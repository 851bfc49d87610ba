"""Compare seconds, memory and traffic of the two conversions with ``cp -r`` of the same files.

    python benchmarks/convert.py [--json] [--shape qwen3-1.7b | --model DIR] [--work-dir DIR]
        [--repetitions 5]

- The model has random weights in a published shape, in bf16, in shards of a gigabyte.
- A repetition copies the model, converts the model, copies the checkpoint, and converts the
  checkpoint back. Before each of these four, the last output is removed and the disk finishes
  writing.
- A conversion is the real command in a fresh process. The seconds begin after the imports.

Figures:

- ``*_over_cp``: median seconds of the conversion / median seconds of the copy.
- ``peak_gb``: maximum anonymous memory (RssAnon, every 10 ms) above the process's memory after the
  imports; the larger of both directions.
- ``io_over_model``: bytes read and written by system calls of the process (rchar and wchar of
  /proc/self/io) / twice the bytes of the model's weights; the larger of both directions. Reads of
  mapped files are not included: a few pages per file, to find the beginnings of archives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import PeakMemory, arguments, finish, in_own_process, own_status, timed

# Import the commands before the time is taken.
from megatron_dppo.bridge import convert_commands  # noqa: F401
from megatron_dppo.cli import main as run_command

GB = 10**9
COMMANDS = {
    "to_megatron": ["convert", "from-hf"],
    "to_hf": ["convert", "to-hf", "--shard-gb", "1"],
}


@dataclass(frozen=True, slots=True)
class Measurement:
    seconds: float
    peak_bytes: int = 0
    io_bytes: int = 0


def converted(way: str, *words: str) -> Measurement:
    """Run a conversion in this process, and measure."""
    traffic = sum(own_status(field, "io") for field in ("rchar", "wchar"))
    with contextlib.redirect_stdout(sys.stderr), PeakMemory("RssAnon", every_s=0.01) as memory:
        seconds, _ = timed(lambda: run_command([*COMMANDS[way], *words]))
    traffic = sum(own_status(field, "io") for field in ("rchar", "wchar")) - traffic
    return Measurement(seconds, memory.grown, traffic)


def measured(way: str, source: Path, out: Path, workers: int) -> Measurement:
    """Run ``cp`` or a conversion in a separate process, on a disk at rest, and measure."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    if way == "cp":
        seconds, _ = timed(lambda: subprocess.run(["cp", "-r", source, out], check=True))
        return Measurement(seconds)
    return in_own_process(converted, way, str(source), str(out), "--workers", str(workers))


def measure(
    model: Path, folder: Path, repetitions: int, workers: int
) -> dict[str, list[Measurement]]:
    megatron = folder / "megatron"
    steps = {
        "cp of the model": ("cp", model, folder / "copy"),
        "to_megatron": ("to_megatron", model, megatron),
        "cp of the checkpoint": ("cp", megatron, folder / "copy"),
        "to_hf": ("to_hf", megatron, folder / "hf"),
    }
    found = defaultdict(list)
    for _ in range(repetitions):
        for name, (way, source, out) in steps.items():
            found[name].append(measured(way, source, out, workers))
            if out != megatron:
                shutil.rmtree(out)
    return found


def summary(found: dict[str, list[Measurement]], model: Path) -> dict[str, object]:
    def middle(name: str, field: str) -> float:
        return median(getattr(measurement, field) for measurement in found[name])

    def greatest(field: str) -> int:
        return max(getattr(measurement, field) for way in COMMANDS for measurement in found[way])

    shards = [file.stat().st_size for file in model.glob("*.safetensors")]
    report: dict[str, object] = {
        "model_gb": round(sum(shards) / GB, 3),
        "largest_shard_gb": round(max(shards) / GB, 3),
    }
    for name in found:
        report[f"{name.replace(' ', '_')}_seconds"] = round(middle(name, "seconds"), 2)
    for way, copied in {"to_megatron": "cp of the model", "to_hf": "cp of the checkpoint"}.items():
        report[f"{way}_over_cp"] = round(middle(way, "seconds") / middle(copied, "seconds"), 3)
    report["peak_gb"] = round(greatest("peak_bytes") / GB, 4)
    report["io_over_model"] = round(greatest("io_bytes") / (2 * sum(shards)), 4)
    return report


def main() -> None:
    options = arguments(
        __doc__,
        shape=("qwen3-1.7b", "a published shape (default: %(default)s)"),
        model=(Path, "a model directory to convert instead"),
        work_dir=(Path("/var/tmp"), "on a disk (default: %(default)s)"),
        repetitions=5,
        workers=min(4, os.cpu_count() or 1),
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.work_dir) as made:
        folder = Path(made)
        if not (model := options.model):
            # Keep this import out of the measured processes, which import this module.
            from megatron_dppo.init import write_model

            model = folder / "model"
            write_model(model, shape=options.shape, dtype="bf16", max_shard_bytes=GB)
        found = measure(model, folder, options.repetitions, options.workers)
        figures = summary(found, model)
        report = {"repetitions": options.repetitions, "workers": options.workers, **figures}
    finish(report, options)


if __name__ == "__main__":
    main()

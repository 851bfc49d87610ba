"""How well the P² law predicts the loss of recovering policies that it has not seen, beside a plain power law.

    python benchmarks/compress_law.py [--json] [--widths 48 64 96 128] [--keeps 0.75 0.5 0.25] [--more DIR …]
                                      [--out DIR]

A policy of each width learns written-out sums by ``sft``, loses layers (``shapley-loss``), and is trained on by
``sft`` on other sums. ``megatron-dppo compress fit`` then reads the losses of all these recoveries.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path

from compress import SUMS, compress, init, run, sft, write_calibration

from megatron_dppo.compress.curves import COLUMNS, read_curves
from megatron_dppo.compress.law import Points
from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import make_sums

WHOLE, RECOVERY = 300, 150
"""Steps of training, and of recovery."""


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--widths", type=int, nargs="+", default=[48, 64, 96, 128])
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--more", type=Path, nargs="+", default=[], help="further policies that sft has recovered")
    parser.add_argument("--out", type=Path, help="where policies and runs are kept, and not made again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.out or Path(name)
        recovered = [each for width in arguments.widths for each in of_width(folder, width, arguments.keeps)]
        curves, fit = folder / "curves.csv", folder / "fit.json"
        write_curves(read_curves([*recovered, *arguments.more]), curves)
        run("compress", "fit", curves, "--out", fit, "--overwrite")
        found = json.loads(fit.read_text())
    if arguments.json:
        found.pop("draws")
        print(json.dumps(found))


def write_curves(points: Points, file: Path) -> None:
    with file.open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow([*COLUMNS, "curve"])
        columns = points.size, points.rate, points.tokens, points.loss, points.whole
        for row, curve in zip(zip(*columns, strict=True), points.curve, strict=True):
            writer.writerow([*(f"{value:.6g}" for value in row), curve])


def of_width(folder: Path, width: int, keeps: list[float]) -> list[Path]:
    """The recovered policies."""
    place = folder / str(width)
    place.mkdir(parents=True, exist_ok=True)
    whole = place / "whole"
    write_calibration(place / "calibration.jsonl", make_sums(ArithmeticConfig(**SUMS, seed=1))[0])
    init(place / "fresh", width, 4, 2 * width, 1)
    sft(place / "fresh", whole, WHOLE, 1)
    recovered = []
    for keep in keeps:
        small, out = place / f"{keep:g}", place / f"{keep:g}-recovered"
        compress(whole, small, keep, "depth", "shapley-loss", seed=1)
        sft(small, out, RECOVERY, 2)
        recovered.append(out)
    return recovered


if __name__ == "__main__":
    measure()

"""Seconds and memory of a run on a large file of prompts: tokenised the first time, and read from the cache again.

    python benchmarks/loading.py [--json] [--rows 1000000] [--kind jsonl] [--tp 2] [--work-dir DIR]

Rows are of 1 kB each, made-up words and a label. Each command is a whole run of one step of a tiny policy, from the
start of its launcher to its end: on a file of 64 rows (the baseline), on all rows with an empty cache, and on them once
more. Memory is the most that all processes of a run had at one time, by their proportional set sizes: pages that they
share, such as the file's, count once. ``gb_over_baseline`` is of the first or the second run, whichever took more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet

from megatron_dppo.data.stored import CACHE
from megatron_dppo.init import write_model

ROW_BYTES = 1000
FEW = 64
LOOK_EVERY_S = 0.25
SETTINGS = (
    "run.steps=1",
    "run.checkpoint_every=0",
    "run.export=false",
    "reward.function=exact",
    "data.max_prompt_tokens=1024",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=8",
    "pack.max_tokens=4096",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=10**6, help="(default: %(default)s)")
    parser.add_argument("--kind", choices=("jsonl", "parquet"), default="jsonl", help="(default: %(default)s)")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=None, help="on the disk to use (default: a temporary one)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.work_dir) as folder:
        figures = measure(Path(folder), chosen.rows, chosen.kind, chosen.tp)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<24}{value:>12,.2f}")


def measure(folder: Path, rows: int, kind: str, tp: int) -> dict[str, float]:
    words = random.Random(1).choices(
        ["".join(random.Random(i).choices("etaoinshrdlu", k=i % 8 + 2)) for i in range(3000)], k=40_000
    )
    text = " ".join(words)
    few, many = folder / f"few.{kind}", folder / f"many.{kind}"
    write_rows(few, text, FEW)
    write_rows(many, text, rows)
    corpus, policy = folder / "corpus.jsonl", folder / "policy"
    corpus.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 32}
    write_model(policy, tokenizer="bpe", corpus=corpus, **sizes)
    seconds, peaks = {}, {}
    for name, file in (("baseline", few), ("first", many), ("again", many)):
        seconds[name], peaks[name] = run(
            folder, name, [f"model.path={policy}", f"data.train={file}", f"layout.tp={tp}"]
        )
    return {
        "rows": rows,
        "file_gb": many.stat().st_size / 1e9,
        "cache_gb": sum(file.stat().st_size for file in (folder / "cache").rglob("*")) / 1e9,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        **{f"gb_{name}": value for name, value in peaks.items()},
        "gb_over_baseline": max(peaks["first"], peaks["again"]) - peaks["baseline"],
    }


def write_rows(file: Path, text: str, count: int) -> None:
    rows = _rows(text, count)
    if file.suffix == ".jsonl":
        with file.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        return
    schema = pyarrow.schema({"prompt": pyarrow.string(), "label": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(file, schema) as out:
        while batch := [row for _, row in zip(range(10_000), rows, strict=False)]:
            out.write_table(pyarrow.Table.from_pylist(batch, schema))


def _rows(text: str, count: int) -> Iterator[dict[str, str]]:
    draw, length = random.Random(2), ROW_BYTES - len('{"prompt": "", "label": ""}\n') - 16
    for number in range(count):
        start = draw.randrange(len(text) - length)
        yield {"prompt": f"{number:08d}{text[start : start + length]}", "label": f"{number:08d}"}


def run(folder: Path, name: str, settings: list[str]) -> tuple[float, float]:
    """Seconds of a run, and the most GB that it had."""
    words = [*SETTINGS, *settings, f"run.dir={folder / name}"]
    environ = {**os.environ, CACHE: str(folder / "cache")}
    began, peak = time.monotonic(), 0.0
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "megatron_dppo", "train", *words]
        process = psutil.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, sum(map(_bytes, [process, *_below(process)])))
            time.sleep(LOOK_EVERY_S)
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text(encoding="utf-8", errors="replace"))
    return time.monotonic() - began, peak / 1e9


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


if __name__ == "__main__":
    main()

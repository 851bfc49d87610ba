"""Curves that a law is fitted to: files of points, or policies that ``megatron-dppo sft`` has recovered."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.compress.law import Points
from megatron_dppo.compress.surgery import RECORD
from megatron_dppo.data.rows import read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.trainer.resume import WARM_UP

COLUMNS = ("size", "rate", "tokens", "loss", "whole_loss")
"""Columns of a file: N₀, ρ, D, L, L₀. Rows of equal N₀, ρ, L₀ and, if there is such a column, ``curve`` are one
curve."""
WINDOWS, FIRST = 12, 1 / 32
"""Points of a recovery, and the share of its tokens that is left out: losses fall fast at first."""


def read_curves(sources: Sequence[Path]) -> Points:
    """The points of all sources.

    Raises:
        UserError: naming the file and the row, or the folder, and what it lacks.
    """
    rows: list[list[float]] = []
    curves: dict[tuple[Any, ...], int] = {}
    for source in sources:
        for place, values in _recovery(source) if source.is_dir() else _rows(source):
            point = [_number(values, name, place) for name in COLUMNS]
            key = source, values.get("curve"), *(point[COLUMNS.index(name)] for name in ("size", "rate", "whole_loss"))
            rows.append([*point, curves.setdefault(key, len(curves))])
    size, rate, tokens, loss, whole, curve = np.array(rows, np.float64).T
    return Points(size, rate, tokens, loss, whole, curve.astype(np.int64))


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if file.suffix != ".csv":
        yield from ((row.place, row.values) for row in read_rows(str(file), "FILES"))
        return
    try:
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError("FILES", file, f"cannot be read ({error})", "Give a CSV or JSONL file") from error
    if not rows:
        raise UserError("FILES", file, "holds no rows", f"Give a file with columns {', '.join(COLUMNS)}")
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))


def _number(values: Mapping[str, Any], name: str, place: str) -> float:
    if values.get(name) is None:
        have = ", ".join(str(column) for column in values) or "none"
        raise UserError("FILES", place, f"has no {name} (it has {have})", f"Name the columns {', '.join(COLUMNS)}")
    try:
        number = float(values[name])
    except (TypeError, ValueError):
        number = math.nan
    if not (0 < number < math.inf and (name != "rate" or number < 1)):
        wanted = "a share between 0 and 1" if name == "rate" else "a number above 0"
        raise UserError("FILES", place, f"has {values[name]!r} as {name}", f"Give {wanted}")
    return number


def _recovery(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Points of a policy that ``sft`` has written: its training loss, in windows of tokens, evenly in their logarithm.

    The training loss of a batch that is new to the policy is that of held-out data. Its L₀ is ``loss_before`` of
    compress.json, which is of the sequences that ``compress`` was given: they have to be of the same kind.
    """
    try:
        settings = json.loads((folder / WARM_UP).read_text())
        record = json.loads((Path(settings["model.path"]) / RECORD).read_text())
        known = {name: record[name] for name in ("weights_before", "weights_after", "loss_before")}
    except (OSError, ValueError, KeyError) as error:
        problem = f"is a folder, and not of a policy that `compress --calibrate` made and `sft` trained on ({error})"
        raise UserError("FILES", folder, problem, "Give the folder that sft.out named, or a file of points") from error
    log = Path(settings["run.dir"]) / "sft-log"
    rows = read_metrics(log)
    if len(rows) < 2 * WINDOWS:
        problem = f"has {len(rows)} steps in {log}, too few for {WINDOWS} points"
        raise UserError("FILES", folder, problem, f"Train for {2 * WINDOWS} steps or more")
    tokens = np.cumsum([row["train/tokens"] for row in rows])
    losses = np.array([row["train/loss"] for row in rows])
    window = np.digitize(tokens, np.geomspace(FIRST * tokens[-1], tokens[-1], WINDOWS + 1)[:-1])
    for number in range(1, WINDOWS + 1):
        if (inside := window == number).any():
            yield (
                str(folder),
                {
                    "size": known["weights_before"],
                    "rate": 1 - known["weights_after"] / known["weights_before"],
                    "tokens": tokens[inside].mean(),
                    "loss": losses[inside].mean(),
                    "whole_loss": known["loss_before"],
                },
            )

"""The numbers of a run, step by step: ``metrics.jsonl`` for programs, and ``run.loggers`` for people.

What depends on the machine or the clock stands under ``perf/``. All else in a row depends on the run's settings and its
seed alone, so that the file of a resumed run equals that of a run that never stopped, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.bridge.checkpoint_folder import latest_step
from megatron_dppo.errors import UserError
from megatron_dppo.observe.loggers import Loggers
from megatron_dppo.process.files import replacing_file
from megatron_dppo.process.streams import tell

FILE = "metrics.jsonl"


class StepLog:
    """A file with one line of JSON per step, on the disk before the next step.

    Args:
        file: its folder is made where there is none.
        resume_step: finished steps of the checkpoint that the run goes on from. Rows past it are dropped, because these
            steps are taken again; 0 or less drops every row.
    """

    def __init__(self, file: Path, resume_step: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _drop_rows_past(file, resume_step)
        self._file = file.open("a", encoding="utf-8")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Add one row. Floats are written so that reading gives the same bits back."""
        self._file.write(json.dumps({"step": int(step), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Appends to ``metrics.jsonl``, and gives every row to the loggers; only the leader has one.

    Args:
        run_dir: where ``metrics.jsonl`` and what loggers write lie.
        resume_step: as of ``StepLog``.
        loggers: ``run.loggers``.
        settings: of the run, by their dotted keys, for loggers.
        say: takes words for the log.

    Raises:
        UserError: a logger cannot be opened.
    """

    def __init__(
        self,
        run_dir: Path | str,
        resume_step: int,
        *,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        folder = Path(run_dir)
        self._rows = StepLog(folder / FILE, resume_step)
        past = read_metrics(folder)
        self._loggers = Loggers(loggers, folder, resume_step=resume_step, past=past, settings=settings or {}, say=say)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one row, its keys sorted."""
        row = {key: _plain(metrics[key]) for key in sorted(metrics)}
        self._rows.write(step, row)
        self._loggers.write(step, row)

    def close(self, *, finished: bool = True) -> None:
        """Safe to call twice.

        Args:
            finished: whether the run has come to its last step.
        """
        self._rows.close()
        self._loggers.close(finished=finished)


class RowFollower:
    """Calls back with each new row of ``metrics.jsonl``; rows up to the last checkpoint are not new.

    Args:
        run_dir: of the run.
        callback: called with each row; None: nobody is told.
    """

    def __init__(self, run_dir: Path, callback: Callable[[dict[str, float]], object] | None) -> None:
        self._file, self._callback = run_dir / FILE, callback
        done = latest_step(run_dir / "checkpoints")
        self._last, self._size = -1 if done is None else done, 0
        self._before = self._file.stat().st_ino if self._file.exists() else None

    def look(self) -> None:
        if self._callback is None:
            return
        now = self._file.stat() if self._file.exists() else None
        if now is None or now.st_ino == self._before:
            return  # the run has not replaced the file yet, by one without the rows of steps that it takes again
        if now.st_size == self._size:
            return
        self._size = now.st_size
        for row in read_rows(self._file):
            if row["step"] > self._last:
                self._last = row["step"]
                self._callback(row)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return read_rows(Path(run_dir) / FILE)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a ``StepLog``, in order; none if there is no such file. A line cut short by a kill is left out.

    Raises:
        UserError: naming the file and the line, if another one is no row: rows are never left out in silence.
    """
    return [row for _, row in _rows(file)]


def _rows(file: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each row with its line."""
    if not os.path.lexists(file):
        return []
    lines, rows = file.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, 1):
        if (row := _parse(line)) is not None:
            rows.append((line, row))
        elif number < len(lines):  # after the last newline there is nothing, or what a kill has left of a row
            problem = f"line {number} is no row of a run: {line[:60].decode(errors='replace')!r}"
            remedy = "Fetch the file again, take that line out, or move the file away; the run goes on without it"
            raise UserError("run.dir", file, problem, remedy)
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _drop_rows_past(file: Path, step: int) -> None:
    """Replace the file in one piece by one without rows past ``step``. Kept lines keep their bytes."""
    rows = _rows(file)
    if not file.exists():
        return
    kept = [line for line, row in rows if row["step"] <= step] if step > 0 else []
    last = max((row["step"] for _, row in rows), default=0)
    if step > 0 and last < step:
        text = f"note: {file} ends at step {last}, and the run goes on from step {step}: the rows between are lost"
        tell(text)
    with replacing_file(file) as partial, partial.open("wb") as rewritten:
        rewritten.writelines(line + b"\n" for line in kept)
        rewritten.flush()
        os.fsync(rewritten.fileno())


def _plain(value: float) -> float:
    """A Python number: NumPy's and torch's scalars have other JSON forms, or none."""
    return value if type(value) in (int, float) else float(value)

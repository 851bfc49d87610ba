"""Folders of runs that never were, as training leaves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_dppo.config import Config, EvalConfig, PruningConfig, RunConfig
from megatron_dppo.config.loss import CompletionPruningConfig, PromptPruningConfig
from megatron_dppo.report.charts import Chart
from megatron_dppo.settings import as_yaml
from tests.observe.made_up import made_up_census, made_up_rows

PRUNED = PruningConfig()
UNPRUNED = PruningConfig(
    prompts=PromptPruningConfig(rule="none"),
    completions=CompletionPruningConfig(rule="none", keep=0.4),
)


def write_run(
    folder: Path,
    steps: int = 6,
    *,
    pruning: PruningConfig = PRUNED,
    answers: Sequence[Mapping[str, Any]] | None = None,
    held: Mapping[str, float] | None = None,
    problems: Mapping[str, int] | None = None,
) -> Path:
    """A run of sums; ``answers`` are those of one evaluation, ``held`` goes into every row."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunConfig(dir=str(folder), steps=steps)
    (folder / "config.yaml").write_text(
        as_yaml(Config(run=run, eval=EvalConfig(problems=50), pruning=pruning))
    )
    write_lines(folder / "metrics.jsonl", [row | dict(held or {}) for row in made_up_rows(steps)])
    write_lines(folder / "pruning.jsonl", made_up_census(steps))
    shown = answers or [{"prompt": "2+2=", "answer": "#5", "label": "4", "correct": False}]
    asked = {"": 50} if problems is None else dict(problems)
    rows = [
        {"step": step, "problems": asked, "answers": list(shown)} for step in range(0, steps + 1, 2)
    ]
    write_lines(folder / "answers.jsonl", rows)
    return folder


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def drawn_on_axes(chart: Chart) -> Axes:
    """Draw a chart, and return the axes with what was drawn."""
    axes: Axes = Figure().subplots()
    assert chart.draw is not None
    chart.draw(axes)
    return axes

"""How well a run foresaw its groups, before anything of them was generated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_dppo.report.plot import Line, Plot, line_plot
from megatron_dppo.report.run import Run
from megatron_dppo.rl.types import Floats

PREDICTORS: Mapping[str, tuple[str, str]] = {
    "model": ("from its text", "good"),
    "record": ("its visits", "bad"),
    "pool": ("all prompts", "slate"),
}
"""What a line is called, and its colour."""
SOURCES = "predicted from a prompt's text, from its earlier visits, or by the mean of all prompts"


def reliability_plot(run: Run) -> Plot:
    """Predicted against observed, in tenths of the prediction, over the whole run."""
    what = "right answers" if all(row["binary"] for row in run.census) else "groups whose rewards differ"
    title = "What was foreseen"
    about = f"share of {what}, by the chance {SOURCES}; Brier scores"
    lines = [
        Line(f"{words}, {score:.3f}", colour, *cells.T)
        for name, (words, colour) in PREDICTORS.items()
        if len(cells := _cells(run, name)) and (score := run.mean(f"prune/brier_{name}")) is not None
    ]
    if lines:
        lines.append(Line("as predicted", "pale", np.array([0.0, 1.0]), np.array([0.0, 1.0])))
    return line_plot(
        title,
        about,
        lines,
        x_label="predicted chance",
        x_form="share",
        form="share",
        low=0.0,
        high=1.02,
        empty="nothing was predicted",
    )


def brier_plot(run: Run) -> Plot:
    """The squared error of each predictor over the steps."""
    lines = [
        Line(words, colour, *run.series(f"prune/brier_{name}"), noisy=True)
        for name, (words, colour) in PREDICTORS.items()
    ]
    about = f"mean squared distance from the share that was right, sampling's noise included; {SOURCES}"
    return line_plot("Error of predictions", about, lines, low=0.0, empty="nothing was predicted")


def _cells(run: Run, name: str) -> Floats:
    """[bins, 2], mean predicted and mean observed chance of the groups in each tenth, over all steps."""
    total: dict[int, Floats] = {}
    for row in run.census:
        for who, tenth, *sums in row.get("by_prediction", ()):
            if who == name:
                total[tenth] = total.get(tenth, np.zeros(3)) + np.array(sums)
    rows = [(said / count, seen / count) for _, (count, said, seen) in sorted(total.items())]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)

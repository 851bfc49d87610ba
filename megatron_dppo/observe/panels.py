"""How all pictures of a run look: the palette, and the parts that panels are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

INK, FAINT, GRID = "#22303c", "#8795a1", "#e6eaed"
BLUE, ORANGE, GREEN = "#2f5d8a", "#d9762b", "#3f8f6b"

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": "#b4bec6",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": "#5b6b78",
    "ytick.labelcolor": "#5b6b78",
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "lines.solid_capstyle": "round",
}

Rows = Sequence[Mapping[str, float]]


@contextmanager
def picture(out: Path, *, height: float, title: str = "") -> Iterator[np.ndarray]:
    """Four panels [2, 2] to draw in; then a PNG file, 1,760 pixels wide, replaced in one piece."""
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.14, wspace=0.05, hspace=0.05)
        figure = Figure(figsize=(11, height), dpi=160, facecolor="white", layout=layout)
        panels = figure.subplots(2, 2)
        if title:
            figure.suptitle(title, x=0.016, ha="left", fontsize=14, fontweight="bold")
        yield panels
        partial = out.with_name(out.name + ".partial")
        figure.savefig(partial, format="png")
        partial.replace(out)


def series(metrics: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have ``key``."""
    rows = [(row["step"], row[key]) for row in metrics if key in row]
    return np.array([step for step, _ in rows], float), np.array([value for _, value in rows], float)


def stack(panel: Axes, steps: np.ndarray, layers: Sequence[tuple[np.ndarray, str]]) -> np.ndarray:
    """Bars of (heights, colour) on top of each other, the first at the bottom. Returns where they end, [steps]."""
    floor = np.zeros(len(steps))
    for layer, colour in layers:
        panel.bar(steps, layer, width=_bar_width(steps), bottom=floor, color=colour, linewidth=0)
        floor = floor + layer
    return floor


def key(panel: Axes, entries: Sequence[tuple[str, str]], *, columns: int) -> None:
    """What (words, colour) stand for, above the bars."""
    panel.legend(
        handles=[Patch(color=colour, label=words) for words, colour in entries],
        loc="upper left", ncols=columns, facecolor="white", framealpha=1.0, edgecolor="none", fontsize=10,
        handlelength=0.9, handleheight=0.9, columnspacing=1.4, handletextpad=0.5, borderaxespad=0.2,
    )  # fmt: skip


def usual_top(ends: np.ndarray) -> float:
    """Of a stack, without the few bars that are long: the first step often is."""
    return float(np.quantile(ends, 0.98)) if len(ends) > 20 else float(ends.max())


def _bar_width(steps: np.ndarray) -> float:
    """Bars touch where there are many steps, and stand apart where there are few."""
    return 1.0 if len(steps) > 40 else 0.8


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Heights for labels: as near to their lines as leaves ``gap`` between them, the highest at most 1."""
    order = sorted(range(len(places)), key=lambda i: -places[i])
    heights, ceiling = [0.0] * len(places), 1.0
    for i in order:
        heights[i] = min(places[i], ceiling)
        ceiling = heights[i] - gap
    return heights


def title(panel: Axes, title: str, subtitle: str) -> None:
    panel.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=22)
    panel.annotate(subtitle, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", color=FAINT)


def label_end(panel: Axes, step: float, value: float, text: str, colour: str) -> None:
    note(panel, step, value, text, colour, (9, 0), "left")


def note(panel: Axes, x: float, y: float, text: str, colour: str, offset: tuple[float, float], align: str) -> None:
    panel.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        color=colour,
        fontsize=10,
        fontweight="bold",
        ha=align,
        va="center",
        annotation_clip=False,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def nothing(panel: Axes, words: str) -> None:
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color=FAINT, fontstyle="italic")
    panel.set_xticks([])
    panel.set_yticks([])


def finish(panel: Axes, metrics: Rows) -> None:
    steps = [row["step"] for row in metrics]
    if steps:
        low, high = min(steps), max(max(steps), min(steps) + 1)
        panel.set_xlim(low - 0.02 * (high - low) - 0.5, high + 0.02 * (high - low) + 0.5)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))

"""One picture of a run: what it learned, what pruning kept, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_dppo.observe.console import COLOURS
from megatron_dppo.observe.timers import breakdown

INK, FAINT, GRID = "#22303c", "#8795a1", "#e6eaed"
BLUE, ORANGE, GREEN = "#2f5d8a", "#d9762b", "#3f8f6b"

_STYLE: dict[Any, Any] = {
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


def draw_progress(metrics: Rows, out: Path, *, title: str = "") -> None:
    """Draw reward, held-out accuracy, what pruning kept, and the step-time breakdown.

    Args:
        metrics: rows of ``metrics.jsonl``. A panel whose numbers are in none of them says so.
        out: a PNG file, 1,760 pixels wide; replaced in one piece.
        title: a line above the panels.
    """
    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.14, wspace=0.05, hspace=0.05)
        figure = Figure(figsize=(11, 6.8), dpi=160, facecolor="white", layout=layout)
        (reward, accuracy), (kept, seconds) = figure.subplots(2, 2)
        if title:
            figure.suptitle(title, x=0.016, ha="left", fontsize=14, fontweight="bold")
        _draw_reward(reward, metrics)
        _draw_accuracy(accuracy, metrics)
        _draw_kept(kept, metrics)
        _draw_seconds(seconds, metrics)
        for panel in (reward, accuracy, kept, seconds):
            _finish(panel, metrics)
        for panel in (kept, seconds):
            panel.set_xlabel("step", loc="right")
        partial = out.with_name(out.name + ".partial")
        figure.savefig(partial, format="png")
        partial.replace(out)


def _series(metrics: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have ``key``."""
    rows = [(row["step"], row[key]) for row in metrics if key in row]
    return np.array([step for step, _ in rows], float), np.array([value for _, value in rows], float)


def _draw_reward(panel: Axes, metrics: Rows) -> None:
    _title(panel, "Reward", "mean over the step's completions")
    steps, values = _series(metrics, "rollout/raw_reward")
    if not len(steps):
        return _nothing(panel, "no rollouts")
    smooth = _smooth(values)
    panel.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1.2)
    panel.plot(steps, smooth, color=BLUE, linewidth=2.4)
    _label_end(panel, steps[-1], smooth[-1], f"{smooth[-1]:.2f}", BLUE)
    panel.margins(y=0.12)


def _draw_accuracy(panel: Axes, metrics: Rows) -> None:
    _title(panel, "Held-out accuracy", "greedy answers")
    steps, values = _series(metrics, "eval/accuracy")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if not len(steps):
        return _nothing(panel, "no evaluation")
    panel.plot(steps, values, color=GREEN, linewidth=2.4, marker="o", markersize=6.5, markeredgecolor="white", zorder=3)
    panel.margins(y=0.2)
    if len(steps) > 1:
        panel.axhline(values[0], color=GREEN, linewidth=1, linestyle=(0, (2, 3)), alpha=0.7, zorder=1)
        below = -1 if values[-1] >= values[0] else 1
        _note(panel, steps[0], values[0], f"{100 * values[0]:.1f}%", GREEN, (0, 13 * below - 4), "left")
    _label_end(panel, steps[-1], values[-1], f"{100 * values[-1]:.1f}%", GREEN)


def _draw_kept(panel: Axes, metrics: Rows) -> None:
    _title(panel, "Kept by pruning, and packed", "shares, step by step; the figures are means")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.set_ylim(0, 1.14)
    panel.set_yticks(np.linspace(0, 1, 5))
    wanted = (
        ("pack slots filled", "pack/fill", FAINT),
        ("prompts rolled out", "prune/kept_prompt_fraction", BLUE),
        ("tokens trained on", "prune/kept_token_fraction", ORANGE),
    )
    lines: list[tuple[float, float, str, str]] = []
    for label, key, colour in wanted:
        steps, values = _series(metrics, key)
        if len(steps):
            panel.plot(steps, values, color=colour, linewidth=2.0, marker="o" if len(steps) < 15 else None)
            late = float(values[-max(1, len(values) // 4) :].max())  # a label stands above the end of its line
            lines.append((float(steps[-1]), late, f"{label} {100 * np.mean(values):.0f}%", colour))
    if not lines:
        return _nothing(panel, "no pruning, no packing")
    for place, (step, _, label, colour) in zip(_spread([line[1] for line in lines], 0.1), lines, strict=True):
        _note(panel, step, place, label, colour, (0, 9), "right")


def _draw_seconds(panel: Axes, metrics: Rows) -> None:
    _title(panel, "Seconds per step", "by phase, on the leading rank")
    rows = [row for row in metrics if "perf/step_time" in row]
    if not rows:
        return _nothing(panel, "no timings")
    parts = [breakdown(row) for row in rows]
    phases = [phase for phase in COLOURS if any(part.get(phase, 0.0) > 0 for part in parts)]
    layers = np.array([[part.get(phase, 0.0) for part in parts] for phase in phases])
    share = layers.sum(axis=1) / max(layers.sum(), 1e-12)
    steps = np.array([row["step"] for row in rows], float)
    floor = np.zeros(len(steps))
    for layer, phase in zip(layers, phases, strict=True):
        panel.bar(steps, layer, width=_bar_width(steps), bottom=floor, color=COLOURS[phase], linewidth=0)
        floor = floor + layer
    top = float(np.quantile(floor, 0.98)) if len(floor) > 20 else float(floor.max())
    panel.set_ylim(0, 1.4 * top)  # the first step may be long, and the key wants room
    key = [
        Patch(color=COLOURS[phase], label=f"{phase} {100 * part:.0f}%")
        for phase, part in zip(phases, share, strict=True)
        if part >= 0.005
    ]
    panel.legend(
        handles=key, loc="upper left", ncols=3, frameon=False, fontsize=10, handlelength=0.9, handleheight=0.9,
        columnspacing=1.4, handletextpad=0.5, borderaxespad=0.2,
    )  # fmt: skip


def _bar_width(steps: np.ndarray) -> float:
    """Bars touch where there are many steps, and stand apart where there are few."""
    return 1.0 if len(steps) > 40 else 0.8


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean over a tenth of the run, narrower at the ends."""
    reach = max(1, len(values) // 20)
    return np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Heights for labels: as near to their lines as leaves ``gap`` between them, the highest at most 1."""
    order = sorted(range(len(places)), key=lambda i: -places[i])
    heights, ceiling = [0.0] * len(places), 1.0
    for i in order:
        heights[i] = min(places[i], ceiling)
        ceiling = heights[i] - gap
    return heights


def _title(panel: Axes, title: str, subtitle: str) -> None:
    panel.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=22)
    panel.annotate(subtitle, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", color=FAINT)


def _label_end(panel: Axes, step: float, value: float, text: str, colour: str) -> None:
    _note(panel, step, value, text, colour, (9, 0), "left")


def _note(panel: Axes, x: float, y: float, text: str, colour: str, offset: tuple[float, float], align: str) -> None:
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


def _nothing(panel: Axes, words: str) -> None:
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color=FAINT, fontstyle="italic")
    panel.set_yticks([])


def _finish(panel: Axes, metrics: Rows) -> None:
    steps = [row["step"] for row in metrics]
    if steps:
        low, high = min(steps), max(max(steps), min(steps) + 1)
        panel.set_xlim(low - 0.02 * (high - low) - 0.5, high + 0.02 * (high - low) + 0.5)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))

"""The two pictures of a run: the page's charts, drawn as PNG files. This file alone needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from megatron_dppo.observe.console import colour_of
from megatron_dppo.process.files import replacing_file
from megatron_dppo.report.learning import accuracy_plot, reward_plot
from megatron_dppo.report.parts import Key, Mark, Plot, titled
from megatron_dppo.report.plot import Line, line_plot
from megatron_dppo.report.pruning import answers_plot, causes_plot, noise_plot, tokens_plot
from megatron_dppo.report.run import RunRecord
from megatron_dppo.report.timing import phase_plot

INK, SOFT, RULE = colour_of("ink"), colour_of("soft"), colour_of("rule")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "lines.solid_capstyle": "round",
}
ABOVE = 36
"""Points between a chart and its words, where the key has two rows."""
KEY_WIDTH = 62
"""Characters of a row of the key."""


def draw_pictures(run: RunRecord, folder: Path, *, prefix: str = "", title: str = "") -> None:
    """Write ``progress.png``, on what was learned and where the time went, and ``pruning.png``, on what was kept, why,
    and what it cost. A chart whose numbers the run does not have says so.

    Args:
        run: as far as it has come.
        folder: of the pictures, each 1,760 pixels wide and replaced in one piece.
        prefix: of the files' names.
        title: a line above the charts.
    """
    seconds = phase_plot(run, "Seconds per step", "by phase, on the leading rank")
    progress = [reward_plot([run]), accuracy_plot([run]), _kept(run), seconds]
    _draw(progress, folder / f"{prefix}progress.png", title)
    kept = [answers_plot(run), causes_plot(run), noise_plot(run), tokens_plot(run)]
    _draw(kept, folder / f"{prefix}pruning.png", title)


@titled("Kept by pruning, and packed")
def _kept(run: RunRecord) -> Plot:
    """Three shares in one chart, which the page has in three."""
    wanted = (("pack slots filled", "pack/fill", "slate"), ("prompts rolled out", "prune/kept_prompt_fraction", "blue"),
              ("tokens trained on", "prune/kept_token_fraction", "orange"))  # fmt: skip
    lines = [Line(name, colour, *run.series(key)) for name, key, colour in wanted]
    plot = line_plot(
        "Kept by pruning, and packed", "shares, step by step; the figures are means", lines,
        form="share", low=0.0, high=1.02, empty="no pruning, no packing",
    )  # fmt: skip
    key = [Key(line.colour, line.name, f"{100 * line.y.mean():.0f}%") for line in lines if len(line.y)]
    return replace(plot, labels=(), key=key)


def _draw(plots: Sequence[Plot], out: Path, title: str) -> None:
    """Four charts, two by two."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.6), dpi=160, facecolor="white")
        if title:
            words = title.replace("$", r"\$")  # between two $ is a formula
            figure.suptitle(words, x=0.02, ha="left", fontsize=14, fontweight="bold")
        sides = {"left": 0.07, "right": 0.94, "bottom": 0.08, "top": 0.81 if title else 0.86}
        panels = figure.subplots(2, 2, gridspec_kw=sides | {"wspace": 0.3, "hspace": 0.7})
        for panel, plot in zip(panels.flat, plots, strict=True):
            _draw_plot(panel, plot)
        with replacing_file(out) as partial:
            figure.savefig(partial, format="png")


def _draw_plot(panel: Axes, plot: Plot) -> None:
    panel.set_title(plot.title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=ABOVE + 16)
    panel.annotate(
        plot.about, (0, 1), xytext=(0, ABOVE), xycoords="axes fraction", textcoords="offset points", color=SOFT
    )
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, labelcolor=SOFT)
    panel.set_xticks([at for at, _ in plot.x_ticks], [words for _, words in plot.x_ticks])
    panel.set_yticks([at for at, _ in plot.y_ticks], [words for _, words in plot.y_ticks])
    if plot.empty:
        panel.text(0.5, 0.5, plot.empty, ha="center", va="center", color=SOFT, fontstyle="italic")
        return
    panel.set_xlabel(plot.x_label, loc="right")
    for mark in plot.marks:
        _draw_mark(panel, mark)
    for label in plot.labels:
        panel.annotate(
            label.value, (label.x, label.y), xytext=(9, 0), textcoords="offset points",
            color=colour_of(label.colour), fontsize=10, fontweight="bold", va="center", annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    _draw_key(panel, plot)


def _draw_key(panel: Axes, plot: Plot) -> None:
    """Above the chart, in as many rows as it needs. What a line's key says stands at the line's end already."""
    words = [key.name if plot.labels else f"{key.name} {key.said}".rstrip() for key in plot.key]
    rows = ceil(sum(len(word) + 3 for word in words) / KEY_WIDTH)
    if not rows:
        return
    handles = [Patch(color=colour_of(key.colour), label=word) for key, word in zip(plot.key, words, strict=True)]
    panel.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=ceil(len(words) / rows), frameon=False,
        fontsize=9.5, handlelength=0.9, handleheight=0.9, columnspacing=1.2, handletextpad=0.5, borderpad=0.2,
        borderaxespad=0.3, labelspacing=0.2,
    )  # fmt: skip


def _draw_mark(panel: Axes, mark: Mark) -> None:
    colour = colour_of(mark.colour or "bad")
    shapes = np.clip(mark.shapes, 0.0, 1.0)
    if mark.kind in ("line", "faint", "limit"):
        width, opacity = {"line": (2.4, 1.0), "faint": (1.2, 0.35), "limit": (1.3, 1.0)}[mark.kind]
        style = (0, (4, 4)) if mark.kind == "limit" else "solid"
        panel.plot(*shapes[0].T, color=colour, linewidth=width, alpha=opacity, linestyle=style, clip_on=False)
    elif mark.kind == "dots":
        panel.scatter(shapes[:, 0, 0], shapes[:, 0, 1], s=44, color=colour, edgecolor="white", clip_on=False, zorder=3)
    elif mark.kind == "band":
        panel.fill(*shapes[0].T, color=colour, alpha=0.14, linewidth=0)
    else:
        (left, bottom), (right, top) = shapes.transpose(1, 2, 0)
        corners = np.stack([left, bottom, right, bottom, right, top, left, top], axis=-1).reshape(-1, 4, 2)
        panel.add_collection(PolyCollection(list(corners), facecolor=colour, alpha=mark.opacity, linewidth=0))

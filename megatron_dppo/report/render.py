"""Charts as SVG and PNG. The only module with matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_dppo.observe.console import PALETTE, get_colour
from megatron_dppo.process.files import replace_file
from megatron_dppo.report.charts import Chart, Line, make_line_chart, try_or_explain, with_title
from megatron_dppo.report.learning import make_accuracy_chart, make_reward_chart
from megatron_dppo.report.pruning import (
    make_answers_chart,
    make_causes_chart,
    make_noise_chart,
    make_tokens_chart,
)
from megatron_dppo.report.run import RunRecord
from megatron_dppo.report.timing import make_phase_chart

INK = get_colour("ink")
SOFT = get_colour("soft")
RULE = get_colour("rule")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": RULE,
    "grid.color": RULE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "none",
}
ABOVE = 34
"""Points between chart and title, for two rows of legend."""


def render_svg(chart: Chart) -> str:
    """Return a chart as an SVG element.

    Raises:
        Exception: any error from the values of a damaged file.
    """
    assert chart.draw is not None
    # A fixed salt gives the same ids for the same chart.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": chart.title}), warnings.catch_warnings():
        # A font may lack letters; the page's font draws these letters.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(5.6, 2.8))
        axes = figure.subplots(
            gridspec_kw={"left": 0.11, "right": 0.9, "bottom": 0.18, "top": 0.84}
        )
        _draw(axes, chart)
        data = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(data, format="svg", transparent=True, metadata=empty)
    # The page sets the size, and needs no namespaces.
    text = data.getvalue()
    unwanted = r' xmlns(:\w+)?="[^"]*"| (width|height)="[^"]*pt"| clip-path="[^"]*"'
    text = re.sub(unwanted, "", text[text.index("<svg") :])
    # CSS variables let the colours follow the reader's light or dark theme.
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    return text


def draw_pictures(run: RunRecord, folder: Path, *, prefix: str = "", title: str = "") -> None:
    """Write ``progress.png`` (learning and time) and ``pruning.png``, each replaced atomically."""
    seconds = make_phase_chart(run, "by phase, on the leading rank")
    progress = [
        make_reward_chart([run]),
        make_accuracy_chart([run]),
        _make_kept_chart(run),
        seconds,
    ]
    _write_picture(progress, folder / f"{prefix}progress.png", title)
    kept = [
        make_answers_chart(run),
        make_causes_chart(run),
        make_noise_chart(run),
        make_tokens_chart(run),
    ]
    _write_picture(kept, folder / f"{prefix}pruning.png", title)


@with_title("Kept by pruning, and packed")
def _make_kept_chart(run: RunRecord) -> Chart:
    wanted = (
        ("pack slots filled", "pack/fill", "slate"),
        ("prompts rolled out", "prune/kept_prompt_fraction", "blue"),
        ("tokens trained on", "prune/kept_token_fraction", "orange"),
    )
    lines = [Line(name, colour, *run.get_series(key)) for name, key, colour in wanted]
    return make_line_chart("shares", lines, form="share", low=0.0, high=1.02, empty="no pruning")


def _write_picture(charts: Sequence[Chart], out: Path, title: str) -> None:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(11, 7.6), dpi=160, facecolor="white")
        if title:
            figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold")
        sides = {"left": 0.07, "right": 0.94, "bottom": 0.08, "top": 0.83 if title else 0.88}
        panels = figure.subplots(2, 2, gridspec_kw=sides | {"wspace": 0.25, "hspace": 0.65})
        for axes, chart in zip(panels.flat, charts, strict=True):
            axes.set_title(
                chart.title, loc="left", fontsize=12.5, fontweight="bold", pad=ABOVE + 16
            )
            place: dict[str, Any] = {
                "xytext": (0, ABOVE),
                "xycoords": "axes fraction",
                "textcoords": "offset points",
            }
            axes.annotate(chart.about, (0, 1), **place, color=SOFT)
            try_or_explain(partial(_draw, axes, chart), partial(_write_empty, axes))
        with replace_file(out) as draft:
            figure.savefig(draft, format="png")


def _draw(axes: Axes, chart: Chart) -> None:
    if chart.draw is None:
        _write_empty(axes, chart.empty)
        return
    chart.draw(axes)
    axes.xaxis.label.set_horizontalalignment("right")
    axes.xaxis.label.set_x(1.0)
    # Do not clip, because points lie at the ends of the axes.
    for artist in axes.get_children():
        artist.set_clip_on(False)
    names = [label for label in axes.get_legend_handles_labels()[1] if label]
    if names:
        # A row has about 80 characters, with 6 beside each name.
        columns = max(80 // (max(map(len, names)) + 6), 2)
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            frameon=False,
            fontsize=9,
            handlelength=0.9,
            columnspacing=1.2,
            borderaxespad=0.3,
        )


def _write_empty(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        text,
        ha="center",
        va="center",
        color=SOFT,
        fontstyle="italic",
        transform=axes.transAxes,
    )

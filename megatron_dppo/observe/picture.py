"""One picture of a run: what it learned, what pruning kept, and where the time went."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from megatron_dppo.observe import panels
from megatron_dppo.observe.console import COLOURS
from megatron_dppo.observe.panels import BLUE, FAINT, GREEN, ORANGE, Rows
from megatron_dppo.observe.timers import breakdown


def draw_progress(metrics: Rows, out: Path, *, title: str = "") -> None:
    """Draw reward, held-out accuracy, what pruning kept, and the step-time breakdown.

    Args:
        metrics: rows of ``metrics.jsonl``. A panel whose numbers are in none of them says so.
        out: a PNG file, 1,760 pixels wide; replaced in one piece.
        title: a line above the panels.
    """
    with panels.picture(out, height=6.8, title=title) as ((reward, accuracy), (kept, seconds)):
        _draw_reward(reward, metrics)
        _draw_accuracy(accuracy, metrics)
        _draw_kept(kept, metrics)
        _draw_seconds(seconds, metrics)
        for panel in (reward, accuracy, kept, seconds):
            panels.finish(panel, metrics)
        for panel in (kept, seconds):
            panel.set_xlabel("step", loc="right")


def _draw_reward(panel: Axes, metrics: Rows) -> None:
    panels.title(panel, "Reward", "mean over the step's completions")
    steps, values = panels.series(metrics, "rollout/raw_reward")
    if not len(steps):
        return panels.nothing(panel, "no rollouts")
    smooth = _smooth(values)
    panel.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1.2)
    panel.plot(steps, smooth, color=BLUE, linewidth=2.4)
    panels.label_end(panel, steps[-1], smooth[-1], f"{smooth[-1]:.2f}", BLUE)
    panel.margins(y=0.12)


def _draw_accuracy(panel: Axes, metrics: Rows) -> None:
    panels.title(panel, "Held-out accuracy", "greedy answers")
    steps, values = panels.series(metrics, "eval/accuracy")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if not len(steps):
        return panels.nothing(panel, "no evaluation")
    panel.plot(steps, values, color=GREEN, linewidth=2.4, marker="o", markersize=6.5, markeredgecolor="white", zorder=3)
    panel.margins(y=0.2)
    if len(steps) > 1:
        panel.axhline(values[0], color=GREEN, linewidth=1, linestyle=(0, (2, 3)), alpha=0.7, zorder=1)
        below = -1 if values[-1] >= values[0] else 1
        panels.note(panel, steps[0], values[0], f"{100 * values[0]:.1f}%", GREEN, (0, 13 * below - 4), "left")
    panels.label_end(panel, steps[-1], values[-1], f"{100 * values[-1]:.1f}%", GREEN)


def _draw_kept(panel: Axes, metrics: Rows) -> None:
    panels.title(panel, "Kept by pruning, and packed", "shares, step by step; the figures are means")
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
        steps, values = panels.series(metrics, key)
        if len(steps):
            panel.plot(steps, values, color=colour, linewidth=2.0, marker="o" if len(steps) < 15 else None)
            late = float(values[-max(1, len(values) // 4) :].max())  # a label stands above the end of its line
            lines.append((float(steps[-1]), late, f"{label} {100 * np.mean(values):.0f}%", colour))
    if not lines:
        return panels.nothing(panel, "no pruning, no packing")
    for place, (step, _, label, colour) in zip(panels.spread([line[1] for line in lines], 0.1), lines, strict=True):
        panels.note(panel, step, place, label, colour, (0, 9), "right")


def _draw_seconds(panel: Axes, metrics: Rows) -> None:
    panels.title(panel, "Seconds per step", "by phase, on the leading rank")
    rows = [row for row in metrics if "perf/step_time" in row]
    if not rows:
        return panels.nothing(panel, "no timings")
    parts = [breakdown(row) for row in rows]
    phases = [phase for phase in COLOURS if any(part.get(phase, 0.0) > 0 for part in parts)]
    layers = np.array([[part.get(phase, 0.0) for part in parts] for phase in phases])
    share = layers.sum(axis=1) / max(layers.sum(), 1e-12)
    steps = np.array([row["step"] for row in rows], float)
    ends = panels.stack(panel, steps, [(layer, COLOURS[phase]) for layer, phase in zip(layers, phases, strict=True)])
    panel.set_ylim(0, 1.4 * panels.usual_top(ends))  # the key wants room
    named = [
        (f"{phase} {100 * part:.0f}%", COLOURS[phase])
        for phase, part in zip(phases, share, strict=True)
        if part >= 0.005
    ]
    panels.key(panel, named, columns=3)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean over a tenth of the run, narrower at the ends."""
    reach = max(1, len(values) // 20)
    return np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])

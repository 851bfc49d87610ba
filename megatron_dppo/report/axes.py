"""Axes of plots: their ticks, how numbers are written, and how a line is thinned, smoothed and labelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from typing import Literal

import numpy as np

from megatron_dppo.rl.types import Floats

Form = Literal["share", "number", "count", "times"]
"""The kind of a number: a share of 1, written in percent; any number; a whole number; a factor."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From low to high, which differ."""

    low: float
    high: float
    form: Form = "number"
    log: bool = False
    """In powers of ten; both ends are then above 0."""

    def position(self, values: Floats) -> Floats:
        """Where values lie, 0 at the low end and 1 at the high end."""
        if self.log:
            return (np.log10(np.maximum(values, 1e-300)) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (values - self.low) / (self.high - self.low)

    def ticks(self, wanted: int) -> list[tuple[float, str]]:
        """About ``wanted`` round numbers: where they lie, and as words."""
        at = _powers(self, wanted) if self.log else _round_numbers(self, wanted)
        positions = self.position(np.array(at, dtype=np.float64))
        return [(float(position), _tick(value, at, self)) for position, value in zip(positions, at, strict=True)]


def around(values: Floats, *, form: Form, low: float | None = None, high: float | None = None) -> Axis:
    """An axis with room for the values; it starts at ``low`` and ends at ``high`` where these are given."""
    bottom, top = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.08 * (top - bottom) or 0.05 * abs(top) or 0.5
    first, last = bottom - room if low is None else low, top + room if high is None else high
    if form == "share":
        first, last = max(first, 0.0), min(last, max(1.0, top))
    if form == "count" and bottom >= 0.0:
        first = max(first, 0.0)
    return Axis(first, last if last > first else first + 1.0, form)


def _round_numbers(axis: Axis, wanted: int) -> list[float]:
    least = (axis.high - axis.low) / wanted
    power = 10.0 ** floor(log10(least))
    steps = [power * mantissa for mantissa in (1.0, 2.0, 2.5, 5.0, 10.0)]
    if axis.form == "count":  # nothing lies between whole numbers
        steps = [step for step in steps if step.is_integer()] or [1.0]
    step = next((step for step in steps if step >= least * 0.999), steps[-1])
    slack = 1e-9 * step
    return [i * step for i in range(ceil((axis.low - slack) / step), floor((axis.high + slack) / step) + 1)]


def _powers(axis: Axis, wanted: int) -> list[float]:
    first, last = ceil(log10(axis.low) - 1e-9), floor(log10(axis.high) + 1e-9)
    return [10.0**power for power in range(first, last + 1, max(1, ceil((last - first + 1) / wanted)))]


def _tick(value: float, all_of: Sequence[float], axis: Axis) -> str:
    if axis.log:
        return f"1e{round(log10(value))}".replace("-", "−")
    scale, unit = {"share": (100.0, "%"), "times": (1.0, "×")}.get(axis.form, (1.0, ""))
    scaled = scale * value
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(scaled) >= max(size, 10_000):
            return f"{scaled / size:.3g}{letter}"
    step = scale * (all_of[1] - all_of[0]) if len(all_of) > 1 else abs(scaled) or 1.0
    decimals = next((d for d in range(6) if abs(step * 10**d - round(step * 10**d)) < 1e-6), 6)
    return f"{scaled:,.{decimals}f}{unit}".replace("-", "−")


def say(value: float | None, form: Form) -> str:
    """A number in running text; a dash where there is none."""
    if value is None:
        return "–"
    if form == "share":
        return f"{100 * value:.1f}%"
    if form == "count":
        return f"{value:,.0f}"
    if form == "times":
        return f"{value:.2f}×"
    if value == 0.0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("-", "−")


@dataclass(frozen=True, slots=True)
class Thinned:
    """A line of at most so many points: each stands for as many neighbours, the last perhaps for fewer. All [n]."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    """The least and the greatest of the neighbours."""


def thin(x: Floats, y: Floats, most: int) -> Thinned:
    """Means of neighbours, and their range; every point by itself where there are few enough."""
    if len(x) <= most:
        return Thinned(x, y, y, y)
    starts = np.arange(0, len(x), ceil(len(x) / most))
    counts = np.diff([*starts, len(x)])
    positions, mean = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return Thinned(positions, mean, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def smooth(values: Floats) -> Floats:
    """A centred mean over a tenth of the line, narrower at its ends."""
    ends = smoothed_at_ends(len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first, last = (np.clip(np.arange(len(values)) + by, 0, len(values)) for by in (1 - ends, ends))
    smoothed: Floats = (sums[last] - sums[first]) / (last - first)
    return smoothed


def smoothed_at_ends(count: int) -> int:
    """How many of ``count`` values the first and the last smoothed one are each a mean of."""
    return min(count, max(1, count // 20) + 1)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Heights for labels, from 0 to 1: as near to their lines as leaves ``gap`` between any two."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    heights = [min(max(position, 0.0), 1.0) for position in positions]
    for lower, upper in pairwise(order):
        heights[upper] = max(heights[upper], heights[lower] + gap)
    ceiling = 1.0
    for i in reversed(order):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - gap
    return heights

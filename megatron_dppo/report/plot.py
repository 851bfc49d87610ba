"""Plots of lines and of stacked bars: axes with their ticks, and values smoothed, thinned and placed on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10

import numpy as np

from megatron_dppo.report.parts import Form, Key, Label, Mark, Plot
from megatron_dppo.rl.types import Floats

MOST_POINTS = 240
"""Most points of a line; a plot is about 500 pixels wide."""
MOST_BARS = 120
MOST_LINES = 3
"""A plot with more lines has no bands, no single values and no names: they would hide each other."""
LABEL = 0.085
"""Height of a label, as a share of a plot's."""


@dataclass(frozen=True, slots=True)
class Line:
    """One of several in a plot. All arrays [n]."""

    name: str
    colour: str
    x: Floats
    y: Floats
    low: Floats | None = None
    """Lower end of each point's interval, to ``high``."""
    high: Floats | None = None
    noisy: bool = False
    """Whether to draw a centred mean over it."""

    @property
    def drawn(self) -> Floats:
        """The values of the bold line, [n]: its own, or of a noisy line their mean."""
        return smooth(self.y) if self.noisy else self.y

    @property
    def first(self) -> float:
        """The value at its beginning, as the bold line has it."""
        return float(self.drawn[0])

    @property
    def last(self) -> float:
        """The value at its end, as the bold line has it."""
        return float(self.drawn[-1])

    def aloud(self, form: Form) -> str:
        return f"{self.name} from {say(self.first, form)} to {say(self.last, form)}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One of several that are stacked."""

    name: str
    colour: str
    values: Floats
    """[n]"""
    said: str = ""
    """The key's text besides its name."""


def line_plot(
    title: str,
    about: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_form: Form = "count",
    form: Form = "number",
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    limit: tuple[float, str] | None = None,
    empty: str = "not measured",
) -> Plot:
    """Lines over one axis, each labelled at its end.

    Args:
        lines: those without points are left out.
        low, high: ends of the axis of values; None: as the values need them.
        log: values in powers of ten; those that are not above 0 are left out.
        limit: a value to mark, and what it is.
    """
    lines = [_above_zero(line) if log else line for line in lines]
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Plot(title, about, empty=empty)
    ends = [values for line in lines for values in (line.y, line.low, line.high) if values is not None]
    everything = np.concatenate([*ends, *([np.array([limit[0]])] if limit else [])])
    down = _powers_of_ten(everything) if log else around(everything, form=form, low=low, high=high)
    along = _along(np.concatenate([line.x for line in lines]), x_form)
    several, crowded = len(lines) > 1, len(lines) > MOST_LINES
    marks = [mark for line in lines for mark in _marks(line, along, down, alone=crowded)]
    labels = _labels(lines, along, down, named=several and not crowded)
    if limit:
        at = float(down.position(np.array([limit[0]]))[0])
        marks.insert(0, Mark("limit", "", _points(np.array([0.0, 1.0]), np.full(2, at))))
        labels.append(Label(0.0, at, "", limit[1], "of-limit"))
    return Plot(
        title,
        about,
        x_label,
        form,
        x_ends=(along.low, along.high),
        x_ticks=along.ticks(5),
        y_ticks=down.ticks(4),
        marks=marks,
        labels=labels,
        key=[Key(line.colour, line.name, say(line.last, form)) for line in lines] * several,
        direct=not crowded,
        aloud=f"{title}, {about}: " + "; ".join(line.aloud(form) for line in lines),
    )


def stack_plot(
    title: str,
    about: str,
    x: Floats,
    layers: Sequence[Layer],
    *,
    form: Form,
    top: float | None = None,
    empty: str = "not measured",
) -> Plot:
    """Bars of layers on top of each other, the first at the bottom; of many, each stands for its neighbours' mean.

    Args:
        x: steps, [n].
        layers: of n values each.
        top: where the axis ends; None: at ``usual_top`` of these layers.
    """
    if not len(x):
        return Plot(title, about, empty=empty)
    thinned = [thin(x, layer.values, MOST_BARS) for layer in layers]
    centres = thinned[0].x
    down = around(np.zeros(1), form=form, low=0.0, high=usual_top(layers) if top is None else top)
    left, right = _around_each(centres)
    along = Axis(float(left[0]), float(right[-1]), "count")
    gap = (right - left) * (0.0 if len(centres) > 40 else 0.1)
    sides = along.position(left + gap), along.position(right - gap)
    floor, marks = np.zeros(len(centres)), []
    for layer, points in zip(layers, thinned, strict=True):
        bottom, floor = floor, floor + points.mean
        shapes = boxes(*sides, down.position(bottom), down.position(floor))
        marks.append(Mark("fill", layer.colour, shapes, layer.name, _numbers(centres), _numbers(points.mean)))
    return Plot(
        title,
        about,
        "step",
        form,
        x_ends=(along.low, along.high),
        x_ticks=along.ticks(5),
        y_ticks=down.ticks(4),
        marks=marks,
        key=[Key(layer.colour, layer.name, layer.said) for layer in layers if layer.said != "<1%"],
        aloud=f"{title}, {about}: " + "; ".join(f"{layer.name} {layer.said}" for layer in layers),
    )


def usual_top(layers: Sequence[Layer]) -> float:
    """Top of a stack, with a little room, and without the few bars that are long: the first step often is."""
    ends = np.sum([thin(layer.values, layer.values, MOST_BARS).mean for layer in layers], axis=0)
    return 1.06 * float(np.quantile(ends, 0.98) if len(ends) > 20 else ends.max(initial=0.0))


def boxes(left: Floats, right: Floats, bottom: Floats, top: Floats) -> Floats:
    """Shapes of a ``fill``, [n, 2, 2], from their sides, [n] each."""
    return np.stack([np.stack([left, bottom], axis=-1), np.stack([right, top], axis=-1)], axis=1)


def _marks(line: Line, along: Axis, down: Axis, *, alone: bool) -> list[Mark]:
    """The line, over its bands and single values unless it is to be ``alone``."""
    points = thin(line.x, line.y, MOST_POINTS)
    x = along.position(points.x)
    y = down.position(smooth(points.mean) if line.noisy else points.mean)
    marks = [] if alone else _marks_around(line, points, along, down)
    values = (_numbers(points.x), _numbers(points.mean))
    marks.append(Mark("line", line.colour, _points(x, y), line.name, *values))
    if len(line.x) == 1 or (len(line.x) < 30 and not line.noisy):
        marks.append(Mark("dots", line.colour, _points(x, y).reshape(-1, 1, 2)))
    return marks


def _marks_around(line: Line, points: Thinned, along: Axis, down: Axis) -> list[Mark]:
    """Its interval; and of a long line the range of the neighbours, of a short one every value."""
    x, marks = along.position(points.x), []

    def band(low: Floats, high: Floats) -> Mark:
        outline = np.concatenate([down.position(high), down.position(low)[::-1]])
        return Mark("band", line.colour, _points(np.concatenate([x, x[::-1]]), outline))

    if line.low is not None and line.high is not None:
        marks.append(band(thin(line.x, line.low, MOST_POINTS).mean, thin(line.x, line.high, MOST_POINTS).mean))
    if len(points.x) < len(line.x):
        marks.append(band(points.low, points.high))
    elif line.noisy:
        marks.append(Mark("faint", line.colour, _points(x, down.position(points.mean))))
    return marks


def _labels(lines: Sequence[Line], along: Axis, down: Axis, *, named: bool) -> list[Label]:
    """Each line's last value, where the line ends."""
    across = along.position(np.array([line.x[-1] for line in lines])).tolist()
    heights = spread(down.position(np.array([line.last for line in lines])).tolist(), LABEL)
    return [
        Label(x, y, say(line.last, down.form), line.name * named, line.colour)
        for line, x, y in zip(lines, across, heights, strict=True)
    ]


def _points(x: Floats, y: Floats) -> Floats:
    """One shape, [1, n, 2]."""
    return np.stack([x, y], axis=-1)[None]


def _numbers(values: Floats) -> str:
    return " ".join(f"{value:.5g}" for value in values)


def _around_each(centres: Floats) -> tuple[Floats, Floats]:
    """Where bars with these centres begin and end: half-way to their neighbours. [n] each."""
    if len(centres) == 1:
        return centres - 0.5, centres + 0.5
    half = np.diff(centres) / 2
    return centres - np.concatenate([half[:1], half]), centres + np.concatenate([half, half[-1:]])


def _above_zero(line: Line) -> Line:
    return replace(line, x=line.x[line.y > 0.0], y=line.y[line.y > 0.0], low=None, high=None, noisy=False)


def _powers_of_ten(values: Floats) -> Axis:
    low, high = float(np.floor(np.log10(values.min()))), float(np.ceil(np.log10(values.max())))
    return Axis(10.0**low, 10.0 ** max(high, low + 1), log=True)


def _along(x: Floats, form: Form) -> Axis:
    low, high = float(x.min()), float(x.max())
    return Axis(low, high if high > low else low + 1.0, form)


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

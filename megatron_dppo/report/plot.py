"""Plots of lines and of stacked bars, as data: ``page.html`` draws them as SVG, ``pictures.py`` as PNG.

Values are smoothed, thinned and positioned here; the two renderers only draw. All positions are from 0 to 1, from the
left and from the bottom. A renderer stretches this square to the space that it has; lines and words keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, ParamSpec

import numpy as np

from megatron_dppo.report.axes import Axis, Form, Thinned, around, say, smooth, spread, thin
from megatron_dppo.rl.types import Floats

P = ParamSpec("P")

SIZE = 1000
"""Width and height of the SVG's square."""
MOST_POINTS = 240
"""Most points of a line; a plot is about 500 pixels wide."""
MOST_BARS = 120
MOST_LINES = 3
"""A plot with more lines has no bands, no single values and no names: they would hide each other."""
NAME = 16
"""Most characters of a name at a line's end; ``style.css`` has the room for them."""
LABEL = 0.085
"""Height of a label, as a share of a plot's."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Shapes of one kind and one colour."""

    kind: Literal["line", "faint", "dots", "band", "fill", "limit"]
    colour: str
    """A name in ``observe/console.py``; empty for a limit."""
    shapes: Floats
    """[shapes, points, 2], x and y: the points of a line, the outline of a band, a dot, or opposite corners of a box
    (``fill``). What lies outside the square is drawn at its edge."""
    name: str = ""
    """If it is not empty, the page shows values under the pointer: ``x`` and ``y``, equally many."""
    x: str = ""
    y: str = ""
    opacity: float | None = None

    @property
    def css(self) -> str:
        return f"{'line faint' if self.kind == 'faint' else self.kind} {self.colour}".rstrip()

    @property
    def path(self) -> str:
        """In SVG's language, whose y points down."""
        svg = np.stack([self.shapes[..., 0], 1.0 - self.shapes[..., 1]], axis=-1)
        shapes = np.round(SIZE * np.clip(svg, 0.0, 1.0), 1).tolist()
        if self.kind == "fill":
            return "".join(f"M{a:g} {b:g}H{c:g}V{d:g}H{a:g}Z" for (a, b), (c, d) in shapes if b != d)
        if self.kind == "dots":
            return " ".join(f"M{a:g} {b:g}h0" for ((a, b),) in shapes)
        (points,) = shapes
        return "M" + "L".join(f"{a:g} {b:g}" for a, b in points) + "Z" * (self.kind == "band")


@dataclass(frozen=True, slots=True)
class Label:
    """Words at the end of a line."""

    x: float
    y: float
    value: str
    name: str
    colour: str

    @property
    def short(self) -> str:
        """The name, without its middle where it is longer than there is room for: ends tell runs apart, too."""
        half = NAME // 2
        return self.name if len(self.name) <= NAME else f"{self.name[:half]}…{self.name[half + 1 - NAME :]}"


@dataclass(frozen=True, slots=True)
class Key:
    """Meaning of a colour."""

    colour: str
    name: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """All that a renderer needs to draw one."""

    title: str
    about: str
    """Drawn quantity and unit."""
    x_label: str = ""
    form: Form = "number"
    empty: str = ""
    """Text in place of the drawing, if there is nothing to draw."""
    x_ends: tuple[float, float] = (0.0, 1.0)
    """The least and the greatest value of the lower axis."""
    x_ticks: Sequence[tuple[float, str]] = ()
    """Places and words."""
    y_ticks: Sequence[tuple[float, str]] = ()
    marks: Sequence[Mark] = ()
    labels: Sequence[Label] = ()
    key: Sequence[Key] = ()
    direct: bool = False
    """Whether the labels say all that the key says, where there is room for them."""
    aloud: str = ""
    """The drawing in words, for a reader who does not see it."""


def titled(title: str) -> Callable[[Callable[P, Plot]], Callable[P, Plot]]:
    """Decorate a function that makes a plot: if it fails, the plot under this title says why, and stays empty."""

    def decorate(make: Callable[P, Plot]) -> Callable[P, Plot]:
        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> Plot:
            try:
                return make(*args, **kwargs)
            except Exception as error:  # what a damaged file holds
                return Plot(title, "", empty=failure(error))

        return made

    return decorate


def failure(error: Exception) -> str:
    """Why something cannot be shown, in one line of at most 100 characters."""
    said = " ".join(str(error).split())
    return f"cannot be drawn: {type(error).__name__}{said and ': '}{said:.60}"


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

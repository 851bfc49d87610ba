"""Charts of lines and stacked layers: functions that draw on matplotlib's axes.

Does not import matplotlib, because ranks import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np

from megatron_dppo.observe.console import get_colour
from megatron_dppo.rl.types import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Literal["share", "number", "count", "times"]
"""A fraction in percent; any number; a whole number; a factor."""
# A chart is about 500 pixels wide.
MOST_POINTS = 240
"""Most points of a line or stack."""
# More bands would overlap.
MOST_LINES = 3
"""Most lines with bands and single values."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chart:
    """Drawing without title, see :func:`with_title`."""

    about: str
    """Quantity and unit."""
    draw: Callable[[Axes], None] | None = None
    empty: str = ""
    """Replaces an empty drawing."""
    description: str = ""
    """For readers who cannot see the drawing."""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Arrays are [n]."""

    name: str
    colour: str
    """Name in ``observe/console.py``."""
    x: Floats
    y: Floats
    low: Floats | None = None
    """Lower end of an interval, up to ``high``."""
    high: Floats | None = None
    noisy: bool = False
    """True to draw a centred mean over the values."""

    @property
    def bold_values(self) -> Floats:
        """[n], the centred mean if noisy."""
        return compute_running_mean(self.y) if self.noisy else self.y

    @property
    def first(self) -> float:
        return float(self.bold_values[0])

    @property
    def last(self) -> float:
        return float(self.bold_values[-1])


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer of a stack."""

    name: str
    colour: str
    values: Floats
    """[n]"""
    label: str = ""
    """Legend text beside the name."""


def make_line_chart(
    about: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_form: Form = "count",
    form: Form = "number",
    low: float | None = None,
    high: float | None = None,
    empty: str = "not measured",
) -> Chart:
    """Chart lines over a shared axis, with last values. Empty lines are left out.

    ``low`` and ``high`` are the ends of the value axis; None: automatic.
    """
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Chart(about, empty=empty)

    def draw(axes: Axes) -> None:
        for line in lines:
            # The legend has the last value; a single line has no legend, and the value at the end.
            label = f"{line.name} {format_number(line.last, form)}"
            _draw_line(
                axes, line, label if len(lines) > 1 else "", bold_only=len(lines) > MOST_LINES
            )
        axes.set_xlabel(x_label)
        axes.set_ylim(low, high)
        _write_ticks(axes.xaxis, x_form)
        _write_ticks(axes.yaxis, form)
        if len(lines) == 1:
            colour = get_colour(lines[0].colour)
            end = float(lines[0].x[-1]), lines[0].last
            offset: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points"}
            axes.annotate(
                format_number(end[1], form), end, **offset, color=colour, weight="bold", va="center"
            )

    courses = (
        f"{line.name} from {format_number(line.first, form)} to {format_number(line.last, form)}"
        for line in lines
    )
    return Chart(about, draw, description="; ".join(courses))


def make_stack_chart(
    about: str,
    x: Floats,
    layers: Sequence[Layer],
    *,
    form: Form,
    top: float | None = None,
    empty: str = "not measured",
) -> Chart:
    """Chart layers of n values over steps [n], the first layer at the bottom.

    Args:
        top: end of the value axis; None: :func:`compute_stack_top`.
    """
    if not len(x):
        return Chart(about, empty=empty)

    def draw(axes: Axes) -> None:
        thinned = [reduce_points(x, layer.values, MOST_POINTS) for layer in layers]
        end = compute_stack_top(layers) if top is None else top
        steps = thinned[0][0]
        # Draw the last step with the width of the step before.
        edges = np.concatenate(
            [steps, [2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1.0]]
        )
        floor = np.zeros(len(edges))
        for layer, (_, means, _, _) in zip(layers, thinned, strict=True):
            ceiling = np.minimum(floor + np.append(means, means[-1]), end)
            label = f"{layer.name} {layer.label}".rstrip()
            colour = get_colour(layer.colour)
            axes.fill_between(
                edges, floor, ceiling, step="post", color=colour, linewidth=0, label=label
            )
            floor = ceiling
        axes.set_xlabel("step")
        axes.set_ylim(0.0, end)
        _write_ticks(axes.xaxis, "count")
        _write_ticks(axes.yaxis, form)

    return Chart(
        about, draw, description="; ".join(f"{layer.name} {layer.label}" for layer in layers)
    )


def compute_stack_top(layers: Sequence[Layer]) -> float:
    """Return the end of the value axis, with some room."""
    ends = np.sum(
        [reduce_points(layer.values, layer.values, MOST_POINTS)[1] for layer in layers], axis=0
    )
    # Ignore a few long steps, often the first, because the other steps would be flat.
    return 1.06 * float(np.quantile(ends, 0.98) if len(ends) > 20 else ends.max(initial=0.0)) or 1.0


def with_title(title: str) -> Callable[[Callable[P, Chart]], Callable[P, Chart]]:
    """Decorate a chart's maker: add the title, and show the reason of a failure."""

    def decorate(make: Callable[P, Chart]) -> Callable[P, Chart]:
        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> Chart:
            chart = try_or_explain(partial(make, *args, **kwargs), lambda why: Chart("", empty=why))
            return replace(chart, title=title)

        return made

    return decorate


def try_or_explain(make: Callable[[], T], fallback: Callable[[str], T]) -> T:
    """Return ``make()``, or ``fallback(reason)`` with a line of at most 100 characters."""
    # A damaged file must not hide the other charts.
    try:
        return make()
    except Exception as error:
        text = " ".join(str(error).split())
        return fallback(f"cannot be drawn: {type(error).__name__}{text and ': '}{text:.60}")


def _draw_line(axes: Axes, line: Line, label: str, *, bold_only: bool) -> None:
    colour = get_colour(line.colour)
    x, y, least, greatest = reduce_points(line.x, line.y, MOST_POINTS)
    band: dict[str, Any] = {"color": colour, "alpha": 0.14, "linewidth": 0}
    if not bold_only and line.low is not None and line.high is not None:
        axes.fill_between(
            x,
            reduce_points(line.x, line.low, MOST_POINTS)[1],
            reduce_points(line.x, line.high, MOST_POINTS)[1],
            **band,
        )
    if not bold_only and len(x) < len(line.x):
        axes.fill_between(x, least, greatest, **band)
    elif not bold_only and line.noisy:
        axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.35)
    marker = "o" if len(x) == 1 or (len(x) < 30 and not line.noisy) else None
    bold = compute_running_mean(y) if line.noisy else y
    axes.plot(x, bold, color=colour, linewidth=2.0, marker=marker, markersize=5, label=label)


def _write_ticks(axis: Any, form: Form) -> None:
    if form == "count":
        axis.get_major_locator().set_params(integer=True)
    axis.set_major_formatter(lambda value, _: format_tick(value, form))


def format_tick(value: float, form: Form) -> str:
    """Format for an axis: short, with letters from thousands on."""
    scaled, unit = {"share": (100.0 * value, "%"), "times": (value, "×")}.get(form, (value, ""))
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(scaled) >= max(size, 10_000):
            return f"{scaled / size:.3g}{letter}"
    return f"{round(scaled, 9):,.6g}{unit}".replace("-", "−")


def format_number(value: float | None, form: Form) -> str:
    """Format for text; a dash for None."""
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


def reduce_points(x: Floats, y: Floats, max_points: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return mean x, and mean, least and greatest y, of at most ``max_points`` neighbourhoods."""
    if len(x) <= max_points:
        return x, y, y, y
    starts = np.arange(0, len(x), ceil(len(x) / max_points))
    counts = np.diff([*starts, len(x)])
    positions, means = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return positions, means, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def compute_running_mean(values: Floats) -> Floats:
    """Return a centred mean over a tenth of the line, narrower at the ends."""
    ends = count_end_values(len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first, last = (np.clip(np.arange(len(values)) + by, 0, len(values)) for by in (1 - ends, ends))
    smoothed: Floats = (sums[last] - sums[first]) / (last - first)
    return smoothed


def count_end_values(count: int) -> int:
    """Return the number of values in the mean at either end."""
    return min(count, max(1, count // 20) + 1)

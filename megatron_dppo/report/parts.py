"""The parts that sections of the page are made of, as data: ``page.html`` draws each by its ``kind``.

Plots are data, too: ``page.html`` draws them as SVG, ``pictures.py`` as PNG. All positions are from 0 to 1, from the
left and from the bottom. A renderer stretches this square to the space that it has; lines and words keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ClassVar, Literal, ParamSpec

import numpy as np

from megatron_dppo.rl.types import Floats

Form = Literal["share", "number", "count", "times"]
"""The kind of a number: a share of 1, written in percent; any number; a whole number; a factor."""
SIZE = 1000
"""Width and height of the SVG's square."""
NAME = 16
"""Most characters of a name at a line's end; ``style.css`` has the room for them."""
P = ParamSpec("P")


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
class Plots:
    """Plots beside each other."""

    plots: Sequence[Plot]
    heading: str = ""
    about: str = ""
    """Said under the heading."""
    axis: str = ""
    """The axis that these are drawn over, where the reader chooses among several."""
    kind: ClassVar = "plots"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. The first cell of a row is its heading; the others are aligned on the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Whether cells are words, which are aligned on the left."""
    kind: ClassVar = "table"


@dataclass(frozen=True, slots=True)
class Segment:
    colour: str
    name: str
    percent: float
    """Relative to the longest bar."""
    said: str


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each run, all on one scale, in coloured parts."""

    rows: Sequence[tuple[str, str, Sequence[Segment]]]
    """A run's name, its total, its parts."""
    key: Sequence[Key]
    kind: ClassVar = "bars"


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

    text: str
    kind: ClassVar = "note"


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    step: int
    text: str
    correct: bool


@dataclass(frozen=True, slots=True)
class SampleProblem:
    prompt: str
    label: str
    runs: Sequence[tuple[str, str, Sequence[SampleAnswer]]]
    """Name, colour and answers of each run that was shown it."""


@dataclass(frozen=True, slots=True)
class SampleAnswers:
    problems: Sequence[SampleProblem]
    steps: Sequence[int]
    """All steps at which any run answered."""
    kind: ClassVar = "answers"


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that a reader unfolds."""

    title: str
    text: str
    kind: ClassVar = "folded"


Part = Plots | Table | Bars | Note | SampleAnswers | Folded


@dataclass(frozen=True, slots=True)
class Chapter:
    id: str
    title: str
    lead: str
    """How to read it."""
    parts: Sequence[Part]
    nothing: str = "Nothing is recorded."
    """Said where it has no parts."""

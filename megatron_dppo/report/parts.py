"""Parts of the page's sections, as data; ``page.html`` renders each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.report.charts import Chart


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]
    heading: str = ""
    about: str = ""
    """Text under the heading."""
    axis: str = ""
    """Axis of these charts, if the reader can choose among several."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. A row's first cell is the heading; further cells are right-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Whether cells are words, then left-aligned."""


@dataclass(frozen=True, slots=True)
class Segment:
    colour: str
    name: str
    percent: float
    """Length relative to the longest bar."""
    said: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar per run, on a common scale, in coloured segments."""

    rows: Sequence[tuple[str, str, Sequence[Segment]]]
    """Name, total and segments of each run."""
    key: Sequence[tuple[str, str]]
    """Colours, each with the segment's name."""


@dataclass(frozen=True, slots=True)
class Note:
    """Paragraph."""

    text: str


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
    """Name, colour and answers of each run with the problem."""


@dataclass(frozen=True, slots=True)
class SampleAnswers:
    problems: Sequence[SampleProblem]
    steps: Sequence[int]
    """All steps with answers of any run."""


@dataclass(frozen=True, slots=True)
class CollapsibleText:
    """Collapsible text."""

    title: str
    text: str


Part = Charts | Table | Bars | Note | SampleAnswers | CollapsibleText


@dataclass(frozen=True, slots=True)
class Section:
    lead: str
    """Reading instructions."""
    parts: Sequence[Part]
    nothing: str = "Nothing is recorded."
    """Text without parts."""

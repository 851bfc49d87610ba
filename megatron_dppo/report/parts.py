"""The parts that sections of the page are made of, as data: ``page.html`` draws each by its
class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.report.charts import Chart


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts beside each other."""

    charts: Sequence[Chart]
    heading: str = ""
    about: str = ""
    """Said under the heading."""
    axis: str = ""
    """The axis that these are drawn over, where the reader chooses among several."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. The first cell of a row is its heading; the others are aligned on the
    right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Whether cells are words, which are aligned on the left."""


@dataclass(frozen=True, slots=True)
class Segment:
    colour: str
    name: str
    percent: float
    """Relative to the longest bar."""
    label: str


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each run, all on one scale, in coloured parts."""

    rows: Sequence[tuple[str, str, Sequence[Segment]]]
    """A run's name, its total, its parts."""
    key: Sequence[tuple[str, str]]
    """Colours, each with the name of its part."""


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

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
    """Name, colour and answers of each run that was shown it."""


@dataclass(frozen=True, slots=True)
class SampleAnswers:
    problems: Sequence[SampleProblem]
    steps: Sequence[int]
    """All steps at which any run answered."""


@dataclass(frozen=True, slots=True)
class CollapsibleText:
    """Text that a reader unfolds."""

    title: str
    text: str


Part = Charts | Table | Bars | Note | SampleAnswers | CollapsibleText


@dataclass(frozen=True, slots=True)
class Section:
    lead: str
    """How to read it."""
    parts: Sequence[Part]
    nothing: str = "Nothing is recorded."
    """Said where it has no parts."""

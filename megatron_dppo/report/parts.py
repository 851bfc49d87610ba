"""Parts of the page's sections, as data; ``page.html`` renders each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.report.charts import Chart


@dataclass(frozen=True, slots=True)
class Charts:
    """Side by side."""

    charts: Sequence[Chart]
    heading: str = ""
    about: str = ""
    """Under the heading."""
    axis: str = ""
    """The reader chooses among the axes of a section."""


@dataclass(frozen=True, slots=True)
class Table:
    """A row's first cell is the heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """True to align cells left."""


@dataclass(frozen=True, slots=True)
class Segment:
    colour: str
    name: str
    percent: float
    """Fraction of the longest bar, in percent."""
    label: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar per run, on a common scale."""

    rows: Sequence[tuple[str, str, Sequence[Segment]]]
    """Name, total and segments."""
    key: Sequence[tuple[str, str]]
    """Colours with names."""


@dataclass(frozen=True, slots=True)
class Note:
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
    """Name, colour and answers of each run."""


@dataclass(frozen=True, slots=True)
class SampleAnswers:
    problems: Sequence[SampleProblem]
    steps: Sequence[int]
    """Steps with answers of any run."""


@dataclass(frozen=True, slots=True)
class CollapsibleText:
    title: str
    text: str


Part = Charts | Table | Bars | Note | SampleAnswers | CollapsibleText


@dataclass(frozen=True, slots=True)
class Section:
    lead: str
    """Reading instructions."""
    parts: Sequence[Part]
    nothing: str = "Nothing is recorded."
    """Replaces missing parts."""

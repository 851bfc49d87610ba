"""What sections of the page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.report.plot import Key, Plot


@dataclass(frozen=True, slots=True)
class Plots:
    """Drawings beside each other."""

    plots: Sequence[Plot]
    heading: str = ""
    about: str = ""
    """Said under the heading."""
    axis: str = ""
    """Where one of several axes is chosen: which of them these are drawn over."""
    kind: str = field(default="plots", init=False)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell of a row is its heading, the others are aligned as numbers are."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Whether cells are words, and aligned as words are."""
    kind: str = field(default="table", init=False)


@dataclass(frozen=True, slots=True)
class Segment:
    colour: str
    name: str
    percent: float
    """Of the room."""
    said: str


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar a run, all on one scale, with what they are made of."""

    rows: Sequence[tuple[str, str, Sequence[Segment]]]
    """A run's name, its total, its parts."""
    key: Sequence[Key]
    kind: str = field(default="bars", init=False)


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

    text: str
    kind: str = field(default="note", init=False)


@dataclass(frozen=True, slots=True)
class Answer:
    step: int
    text: str
    correct: bool


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str
    label: str
    runs: Sequence[tuple[str, str, Sequence[Answer]]]
    """Name, colour and answers of each run that was shown it."""


@dataclass(frozen=True, slots=True)
class Answers:
    problems: Sequence[Problem]
    steps: Sequence[int]
    """At which any run was asked."""
    kind: str = field(default="answers", init=False)


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that is there for who wants it."""

    title: str
    text: str
    kind: str = field(default="folded", init=False)


Part = Plots | Table | Bars | Note | Answers | Folded


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    title: str
    lead: str
    """One sentence on how to read it."""
    parts: Sequence[Part]
    nothing: str = "Nothing is recorded."
    """Said where it has no parts."""

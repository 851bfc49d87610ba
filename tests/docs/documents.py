"""What the documentation shows: commands to type, files to write, changes to apply."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
HEADERS = ("configs/*.yaml", "scripts/slurm/*.sh")
"""Files whose header comments show commands, indented."""
DOCUMENTS = tuple(
    str(f.relative_to(ROOT)) for glob in (*PAGES, *HEADERS) for f in sorted(ROOT.glob(glob))
)

_FENCE = re.compile(
    r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)
_PROGRAMS = "bash|python|megatron-dppo|torchrun|srun|sbatch|ruff|mypy|mkdocs|pip|jq"
_SPAN = re.compile(rf"(?!megatron-dppo \S+$)(?:{_PROGRAMS}) .+")
_IN_HEADER = re.compile(rf"^#   ((?:{_PROGRAMS}) (?:.*\\\n# +)*.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    """The file that it shows, empty for any other block."""
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Something to type, in one line."""

    text: str
    document: str
    """Relative to the root."""


@cache
def text_of(document: str) -> str:
    """The text of a document, or of one of its :func:`get_sections`."""
    name, _, section = document.partition("#")
    text = (ROOT / name).read_text()
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)[int(section)] if section else text


def sections(document: str) -> list[str]:
    """The parts of a page between its headings, each a document for the other functions:
    ``docs/pruning.md#0``."""
    return [f"{document}#{number}" for number in range(text_of(document).count("\n## ") + 1)]


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    return [
        Block(language, title, text)
        for _, language, title, text in _FENCE.findall(text_of(document))
    ]


def prose(document: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text_of(document))


def spans(document: str) -> list[str]:
    """Inline code of a page's prose; in tables a bar is escaped."""
    return [
        span.replace("\\|", "|").replace("\n", " ")
        for span in re.findall(r"`([^`]+)`", prose(document))
    ]


def commands(document: str) -> list[Command]:
    """All commands that a document shows, in their order; those of the prose come last.

    What has an ellipsis in it shows a part of a command, and ``megatron-dppo train`` alone is a
    name.
    """
    if ".md" not in document:
        found = _IN_HEADER.findall(text_of(document))
        return [
            Command(line, document) for text in found for line in _lines(text.replace("\n#", "\n"))
        ]
    typed = [
        line
        for block in blocks(document)
        if block.language == "bash"
        for line in _lines(block.text)
    ]
    mentioned = [span for span in spans(document) if _SPAN.fullmatch(span) and "…" not in span]
    return [Command(text, document) for text in (*typed, *mentioned)]


def all_commands() -> list[Command]:
    return [command for document in DOCUMENTS for command in commands(document)]


def _lines(text: str) -> Iterator[str]:
    """Whole commands: continued lines joined, comments gone."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if command := re.sub(r"(^|\s+)#\s.*$", "", line).strip():
            yield re.sub(r"\s+", " ", command)

"""Counts what a reader of the documentation has to read, and the sentences that are hard to read.

    python benchmarks/words.py [--pages] [--json]

``words`` counts all words of the pages but fenced blocks, without README, CHANGELOG, pages made from the code and
tables made from stored figures. A sentence ends with a period, a question mark, an exclamation mark or a colon, or with
its list item or paragraph. Code spans and links count as the words that they show. ``--pages`` prints the words of each
page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness import arguments, finish

ROOT = Path(__file__).resolve().parents[1]
MADE = {"settings.md", "command_line.md"}
"""Pages made from the code."""
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
RULE = re.compile(r"[-| :]+")
LONG, TOO_LONG, LONG_CELL = 25, 35, 25
BEGINS_BADLY = re.compile(r"\W*(Of\b|What\b(?=.*\b(is|are|was|were)\b))")


def plain(page: Path) -> str:
    """The text as a reader sees it, without fenced blocks, comments and tables made from stored figures."""
    text = FENCE.sub("", TABLE.sub("", page.read_text(encoding="utf-8")))
    return LINK.sub(r"\1", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))


def is_row(line: str) -> bool:
    """Whether it is a table's, with or without bars at its ends."""
    return line.lstrip().startswith("|") or bool(re.search(r" \| |-\|-", line))


def cells(text: str) -> list[str]:
    rows = [line.strip().strip("|") for line in text.splitlines() if is_row(line)]
    return [cell.strip() for row in rows if not RULE.fullmatch(row) for cell in re.split(r"(?<!\\)\|", row)]


def sentences(text: str) -> list[str]:
    """Those of paragraphs and list items, without headings and tables."""
    lines = ["" if is_row(line) or line.startswith("#") else line for line in text.splitlines()]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.) )", "\n".join(lines))
    found = [part for block in blocks for part in re.split(r"(?<=[.?!:])[*`)\"]*\s+", " ".join(block.split()))]
    return [part for part in found if re.search(r"\w", part)]


def main() -> None:
    options = arguments(__doc__, pages=(False, "print the words of each page")).parse_args()
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
    texts = {str(page.relative_to(ROOT)): plain(page) for page in pages if page.name not in MADE}
    readme = plain(ROOT / "README.md")
    said = {name: sentences(text) for name, text in {**texts, "README.md": readme}.items()}
    everything = [sentence for each in said.values() for sentence in each]
    lengths = [len(sentence.split()) for sentence in everything]
    longest = [(len(s.split()), name, s) for name, each in said.items() for s in each if len(s.split()) > TOO_LONG]
    in_cells = [cell for text in (*texts.values(), readme) for cell in cells(text)]
    words = {name: len(text.split()) for name, text in texts.items()}
    if options.pages:
        for name, count in sorted(words.items(), key=lambda each: -each[1]):
            print(f"{count:6} {name}", file=sys.stderr)
        for count, name, sentence in sorted(longest, reverse=True):
            print(f"{count:6} {name}: {sentence}", file=sys.stderr)
        for cell in in_cells:
            if len(cell.split()) > LONG_CELL:
                print(f"  cell {cell}", file=sys.stderr)
        for sentence in filter(BEGINS_BADLY.match, everything):
            print(f"   Of/What {sentence}", file=sys.stderr)
    figures = {
        "words": sum(words.values()),
        "readme_words": len((ROOT / "README.md").read_text(encoding="utf-8").split()),
        "pages": words,
        "sentences": len(everything),
        "sentences_over_35_words": len(longest),
        "share_over_25_words": sum(length > LONG for length in lengths) / len(lengths),
        "cells_over_25_words": sum(len(cell.split()) > LONG_CELL for cell in in_cells),
        "sentences_beginning_of_or_what_is": sum(bool(BEGINS_BADLY.match(sentence)) for sentence in everything),
    }
    finish(figures, options)


if __name__ == "__main__":
    main()

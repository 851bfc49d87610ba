"""The shape of an answer: lists, sets, brackets, intervals, unions, matrices, and the name before an equals sign."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dppo.rewards.spelling import CLOSE_SET, OPEN_SET, unspaced

OPENING, CLOSING = "([{⟨" + OPEN_SET, ")]}⟩" + CLOSE_SET
NAME = (
    r"(?:\\text\{[^{}]*\}|\\(?!in(?![a-zA-Z]))[a-zA-Z]++(?!\{)|[a-zA-Z](?:_\{?\w++\}?)?'*+"
    r"|\([a-zA-Z, \\]+\)|(?<=[a-zA-Z])\([^()=]*\)|\|[a-zA-Z]\||\s)++"
)
SIDE = re.compile(rf"({NAME})(?:=|\\in(?![a-zA-Z]))(.+)")
RELATION = re.compile(r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
UNKNOWN = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?")
BUILDER = re.compile(rf"{OPEN_SET}([^|:]*?)(?:\||:|\\mid)(.*){CLOSE_SET}")
MATRIX = re.compile(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}")


@dataclass(frozen=True, slots=True)
class Bracketed:
    """What stands between two brackets; an interval where it has two ends and one of them is square."""

    opening: str
    elements: tuple[str, ...]
    closing: str
    unknown: str | None = None
    """Of an inequality that was read as an interval."""

    def same_brackets(self, other: Bracketed) -> bool:
        """Whether the brackets say the same: of a vector of three or more they say nothing."""
        if len(self.elements) != 2:
            return True
        return [b in "[]" for b in (self.opening, self.closing)] == [b in "[]" for b in (other.opening, other.closing)]


def split(text: str, separator: str) -> list[str]:
    """The parts of ``text`` between separators (a regular expression) that stand in no bracket."""
    parts, start, depth = [], 0, 0
    for found in re.finditer(rf"(?P<separator>{separator})|[{re.escape(OPENING + CLOSING)}]", text):
        if found["separator"] is None:
            depth += 1 if found[0] in OPENING else -1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, contents and closing bracket, where one pair holds the whole text; ``(1, 2]`` is a pair."""
    if len(text) < 2 or text[0] not in OPENING or text[-1] not in CLOSING:
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return (text[0], text[1:-1], text[-1]) if place == len(text) - 1 else None
    return None


def elements(text: str) -> tuple[list[str], bool]:
    """The members of a list or set, a plus-minus sign making two of one; and whether they stand in braces."""
    whole = enclosed(text)
    braces = whole is not None and whole[0] == OPEN_SET
    inside = whole[1] if whole is not None and braces else text
    members = [member for part in split(inside, "[,;]") if part for member in _signs(part)]
    return members, braces


def sides(text: str) -> tuple[str | None, str]:
    """The name before the first equals sign and what stands behind the last; None where no name is given a value."""
    found = SIDE.fullmatch(text)
    if found is None or RELATION.search(text):
        return None, text
    return unspaced(found[1].strip()), split(found[2], "=")[-1].strip()


def bracketed(text: str) -> Bracketed | None:
    """A tuple, vector or interval; an inequality in one unknown is the interval of its solutions."""
    built = BUILDER.fullmatch(text)
    text = built[2].strip() if built else text
    if unspaced(text) == r"\mathbb{R}":
        return Bracketed("(", (r"-\infty", r"\infty"), ")")
    whole = enclosed(text)
    if whole is not None and whole[0] in "([⟨" and whole[2] in ")]⟩":
        inside = split(whole[1], "[,;]")
        return Bracketed(whole[0], tuple(inside), whole[2]) if len(inside) > 1 else None
    return _solutions(text)


def matrix(text: str) -> list[list[str]] | None:
    """The entries of a matrix, row by row."""
    found = MATRIX.fullmatch(text) or MATRIX.fullmatch((enclosed(text) or ("", "", ""))[1].strip())
    if found is None:
        return None
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def _signs(text: str) -> list[str]:
    if r"\pm" not in text and r"\mp" not in text:
        return [text]
    return [
        re.sub(r"^\s*\+", "", text.replace(r"\pm", up).replace(r"\mp", down).replace("=  +", "= "))
        for up, down in (("+", "-"), ("-", "+"))
    ]


def _solutions(text: str) -> Bracketed | None:
    parts = [part.strip() for part in RELATION.split(text)]
    relations = RELATION.findall(text)
    if not relations or len(relations) > 2 or not all(parts) or "=" in text:
        return None
    if all(r in (">", r"\ge") for r in relations):
        parts, relations = parts[::-1], [{">": "<"}.get(r, r"\le") for r in reversed(relations)]
    elif not all(r in ("<", r"\le") for r in relations):
        return None
    opening, closing = ("(" if relations[0] == "<" else "["), (")" if relations[-1] == "<" else "]")
    if len(parts) == 3 and UNKNOWN.fullmatch(parts[1]):
        return Bracketed(opening, (parts[0], parts[2]), closing, parts[1])
    if len(parts) == 2 and UNKNOWN.fullmatch(parts[0]):
        return Bracketed("(", (r"-\infty", parts[1]), closing, parts[0])
    if len(parts) == 2 and UNKNOWN.fullmatch(parts[1]):
        return Bracketed(opening, (parts[0], r"\infty"), ")", parts[1])
    return None

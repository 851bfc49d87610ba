"""The shape of an answer: lists, sets, brackets, intervals, unions, matrices, and the name before an equals sign."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dppo.rewards.spelling import CLOSE_SET, OPEN_SET, unspaced

OPENING, CLOSING = "([{⟨" + OPEN_SET, ")]}⟩" + CLOSE_SET
NAME = (
    r"(?:\\text\{[^{}]*\}|\\(?!(?:in|log|ln|sqrt|lg|not)(?![a-zA-Z]))[a-zA-Z]++(?!\{)|[a-zA-Z](?:_\{?\w++\}?)?'*+"
    r"|\([a-zA-Z, \\]+\)|(?<=[a-zA-Z])\([^()=]*\)|\|[a-zA-Z]+\||(?<=[a-zA-Z ]):(?=\s*[a-zA-Z])|\s)++"
)
GIVEN = r"(?:=|\\in(?![a-zA-Z]))"
SIDE = re.compile(rf"({NAME}){GIVEN}(.+)")
RELATION = re.compile(r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
UNKNOWN = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?")
BUILDER = re.compile(rf"{OPEN_SET}([^|:]*?)(?:\||:|\\mid)(.*){CLOSE_SET}")
COMMA = r"(?:(?<![0-9]),|,(?!0[0-9]{2}(?![0-9]))|;)"
"""Parts members of a list; in 12,000 it parts none."""
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


def parts(text: str, separator: str) -> list[tuple[str, str]]:
    """The parts of ``text`` between separators (a regular expression) that stand in no bracket, each behind its own."""
    found, before, start, depth = [], "", 0, 0
    for match in re.finditer(rf"(?P<separator>{separator})|[{re.escape(OPENING + CLOSING)}]", text):
        if match["separator"] is None:
            depth += 1 if match[0] in OPENING else -1
        elif depth == 0:
            found.append((before, text[start : match.start()].strip()))
            before, start = match[0], match.end()
    return [*found, (before, text[start:].strip())]


def split(text: str, separator: str) -> list[str]:
    """The parts without their separators."""
    return [part for _, part in parts(text, separator)]


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


def sides(text: str) -> tuple[str | None, str]:
    """The name before the one equals sign and what stands behind; None where not just one name is given a value."""
    found = SIDE.fullmatch(text)
    if found is None or RELATION.search(text) or len(split(found[2], GIVEN)) > 1:
        return None, text
    return unspaced(found[1].strip()), found[2].strip()


def members(text: str) -> tuple[list[tuple[str | None, str]], bool]:
    """The members of a list or set, each with its name, a plus-minus sign making two of one; and whether in braces.

    A name counts for what is listed behind it: n is 3, too, in ``n = 2, 3``.
    """
    name, value = sides(text)
    whole = enclosed(value)
    if whole is not None and whole[0] == OPEN_SET:
        return [(None, member) for part in split(whole[1], COMMA) if part for member in _signs(part)], True
    found, name = [], None
    for part in split(text, COMMA):
        own, value = sides(part)
        name = own if own is not None or "=" in part else name
        found += [(name, member) for member in _signs(value) if part]
    return found, False


def unpacked(text: str) -> list[tuple[str | None, str]] | None:
    """The members of a tuple of names that is given one of values: ``(x, y) = (1, 2)``; None for any other text."""
    name, value = sides(text)
    names, values = enclosed(name or ""), bracketed(value)
    if names is None or values is None or len(split(names[1], ",")) != len(values.elements):
        return None
    return list(zip(split(names[1], ","), values.elements, strict=True))


def links(text: str) -> list[str]:
    """The sides of a chain of equations; the whole text where there is no equals sign, or another relation."""
    return [text] if RELATION.search(text) else split(text, "=")


def is_name(text: str) -> bool:
    """Whether a text is what a value may be given to."""
    return SIDE.fullmatch(text + "=0") is not None


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
    sides = [part.strip() for part in RELATION.split(text)]
    relations = RELATION.findall(text)
    if not relations or len(relations) > 2 or not all(sides) or "=" in text:
        return None
    if all(r in (">", r"\ge") for r in relations):
        sides, relations = sides[::-1], [{">": "<"}.get(r, r"\le") for r in reversed(relations)]
    elif not all(r in ("<", r"\le") for r in relations):
        return None
    opening, closing = ("(" if relations[0] == "<" else "["), (")" if relations[-1] == "<" else "]")
    if len(sides) == 3 and UNKNOWN.fullmatch(sides[1]):
        return Bracketed(opening, (sides[0], sides[2]), closing, sides[1])
    if len(sides) == 2 and UNKNOWN.fullmatch(sides[0]):
        return Bracketed("(", (r"-\infty", sides[1]), closing, sides[0])
    if len(sides) == 2 and UNKNOWN.fullmatch(sides[1]):
        return Bracketed(opening, (sides[0], r"\infty"), ")", sides[1])
    return None

"""Sets of real numbers: unions of intervals and points, and what is left without some points."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from megatron_dppo.rewards.math.algebra import constant
from megatron_dppo.rewards.math.notation import OPEN_SET, bracketed, enclosed, split
from megatron_dppo.rewards.math.values import Value

End = tuple[int, Value]
"""-1, 0 or 1 for minus infinity, a number and infinity; and the number."""
Piece = tuple[End, bool, End, bool]
"""Lower end, whether it belongs to the set, upper end, whether it does."""
EVERYWHERE: Piece = ((-1, 0), False, (1, 0), False)
UNEQUAL = re.compile(r"([a-zA-Z])\s*\\ne(?![a-zA-Z])(.+)")
CLOSE = 30
"""Digits that two ends have in common that are one."""


def same_real_set(label: str, answer: str) -> bool | None:
    """Whether two texts are one set of numbers; None where one is none that is read here."""
    expected, found = _pieces(label), _pieces(answer)
    if expected is None or found is None:
        return None
    if expected[1] and found[1] and expected[1] != found[1]:
        return False
    one, other = _joined(expected[0]), _joined(found[0])
    return len(one) == len(other) and all(
        _compared(a[0], b[0]) == 0 and _compared(a[2], b[2]) == 0 and (a[1], a[3]) == (b[1], b[3])
        for a, b in zip(one, other, strict=True)
    )


def _pieces(text: str) -> tuple[list[Piece], str | None] | None:
    """The pieces of a set, and the name of its unknown."""
    pieces: list[Piece] = []
    unknowns: set[str] = set()
    parts = split(text, r"\\cup(?![a-zA-Z])|,")
    unequal = [found for part in parts if (found := UNEQUAL.fullmatch(part))]
    if unequal and len(parts) > 1:  # of what is excluded, all is: no union
        same = len(unequal) == len(parts) and len({found[1] for found in unequal}) == 1
        return _without(unequal[0][1] + r"\ne " + ",".join(found[2] for found in unequal)) if same else None
    for part in parts:
        read = _without(part) or _interval(part)
        if read is None:
            return None
        pieces += read[0]
        unknowns |= {read[1]} if read[1] else set()
    return (pieces, next(iter(unknowns), None)) if len(unknowns) <= 1 else None


def _without(text: str) -> tuple[list[Piece], str | None] | None:
    r"""All real numbers but some: ``\mathbb{R} \setminus \{0\}``, ``x \ne 0``."""
    unequal = UNEQUAL.fullmatch(text)
    parts = split(text, r"\\setminus(?![a-zA-Z])|-(?=\s*⦃)")
    if unequal is None and (len(parts) != 2 or re.sub(r"\s", "", parts[0]) != r"\mathbb{R}"):
        return None
    points = _points("⦃" + unequal[2] + "⦄" if unequal else parts[1])
    if points is None:
        return None
    ends: list[End] = [(-1, 0), *sorted(points, key=cmp_to_key(_compared)), (1, 0)]
    return [(low, False, high, False) for low, high in pairwise(ends)], unequal and unequal[1]


def _interval(text: str) -> tuple[list[Piece], str | None] | None:
    points = _points(text)
    if points is not None:
        return [(point, True, point, True) for point in points], None
    found = bracketed(text)
    if found is None or len(found.elements) != 2:
        return None
    low, high = (_end(part) for part in found.elements)
    if low is None or high is None:
        return None
    return [(low, found.opening == "[", high, found.closing == "]")], found.unknown


def _points(text: str) -> list[End] | None:
    whole = enclosed(text.strip())
    if whole is None or whole[0] != OPEN_SET:
        return None
    ends = [_end(part) for part in split(whole[1], "[,;]")]
    return None if None in ends else [end for end in ends if end is not None and end[0] == 0]


def _end(text: str) -> End | None:
    plain = re.sub(r"[\s+]", "", text)
    if plain in (r"\infty", r"-\infty"):
        return (-1 if plain[0] == "-" else 1, 0)
    value = constant(text)
    return None if value is None else (0, value)


def _compared(one: End, other: End) -> int:
    if one[0] or other[0]:
        return (one[0] > other[0]) - (one[0] < other[0])
    a, b = one[1], other[1]
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return (a > b) - (a < b)
    context = (b if isinstance(a, Fraction) else a).context
    first, second = (context.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v for v in (a, b))
    if abs(first - second) <= max(abs(first), abs(second)) * context.mpf(10) ** -CLOSE:
        return 0
    return 1 if first > second else -1


def _earlier(one: Piece, other: Piece) -> int:
    return _compared(one[0], other[0]) or other[1] - one[1]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces in order, those that touch as one, without empty ones."""
    kept = [
        piece
        for piece in pieces
        if (order := _compared(piece[0], piece[2])) < 0 or (order == 0 and piece[1] and piece[3])
    ]
    kept.sort(key=cmp_to_key(_earlier))
    joined: list[Piece] = []
    for low, low_in, high, high_in in kept:
        if joined:
            before = joined[-1]
            touch = _compared(low, before[2])
            if touch < 0 or (touch == 0 and (low_in or before[3])):
                order = _compared(high, before[2])
                ends = (high, high_in) if order > 0 else (before[2], before[3] or (order == 0 and high_in))
                joined[-1] = (before[0], before[1], *ends)
                continue
        joined.append((low, low_in, high, high_in))
    return joined

"""A value with what it is counted in: units, money, percent, degrees."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron_dppo.rewards.numerals import Number, number_of
from megatron_dppo.rewards.units import Unit, is_named, multiple_of, unit_of

START = re.compile(r"\\text\{|[°%¢€£]|\\\$|(?<![a-zA-Z\\{_])[a-zA-Z]+")
CURRENCY = re.compile(r"(-?)\s*(\\\$|€|£)\s*(-?.+)")
NO_NOUN = re.compile(
    r"^(?:\\text\{\s*)?(?:squared|cubed)\b"
    r"|\b(?:sin|cos|tan|log|exp|mod|sqrt|cot|csc|not|but|or|and|if|when|because|as|more|less|least|most|about"
    r"|to|from|is|for|plus|minus|times|than|over|with|where|only|approximately|other|infinity|solutions?"
    r"|factorial|choose|hal(?:f|ves)|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?"
    r"|thousandths?|millionths?|base|below|above|under|short|wrong|false|incorrect|divided|multiplied|negative|inverse"
    r"|reciprocal|root|power|missing|into|except)\b"
)
MOST_WORDS = 3


Same = Callable[[str, str], bool]
"""Compares two values that are no plain numbers."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value and its unit."""

    text: str
    number: Number | None
    unit: Unit | None


def same_number(label: str, answer: str) -> bool | None:
    """Whether two written-out numbers are one; None if either is no number."""
    one, other = number_of(label), number_of(answer)
    if one is None or other is None:
        return None
    # 108,135,189 may be a number and a list: where it is not this number, it may be that list.
    return one.same(other) or (None if "," in label or "," in answer else False)


def same_share(label: str, answer: str, same: Same) -> bool | None:
    """Whether two texts are one share, of which one at least is written with a percent sign; else None."""
    one, other = quantity_of(label), quantity_of(answer)
    units = [q.unit for q in (one, other) if q.unit is not None]
    if "share" not in [unit.dimension for unit in units]:
        return None
    if len(units) == 2:
        return units[0] == units[1] and _same_value(one, other, same)
    percent, bare = (one, other) if one.unit is not None else (other, one)
    if percent.number is None or bare.number is None:
        return same(percent.text, bare.text) or same(rf"\frac{{{percent.text}}}{{100}}", bare.text)
    if abs(bare.number.value) > 1 and percent.number.same(bare.number):
        return True
    return _scaled(percent, Fraction(1, 100)).same(bare.number)


def same_amount(label: str, answer: str, same: Same) -> bool | None:
    """Whether two texts are the same amount of the same; None if neither names a unit."""
    one, other = quantity_of(label), quantity_of(answer)
    if one.unit is None and other.unit is None:
        multiple = one.number is not None and other.number is not None
        return _same_value(one, other, same) if multiple and {one.text, other.text} != {label, answer} else None
    if any(q.unit is None and "°" in q.text for q in (one, other)):  # the sign stands within: a sum of degrees
        return None
    dimensions = [q.unit.dimension for q in (one, other) if q.unit is not None]
    in_radians = dimensions == ["angle"] and any(r"\pi" in q.text for q in (one, other) if q.unit is None)
    if in_radians or {*dimensions} == {"angle", "radian"}:
        return same(_radians(one), _radians(other))
    if one.unit is None or other.unit is None or one.unit == other.unit:
        return _same_value(one, other, same)
    if one.unit.dimensions != other.unit.dimensions or one.number is None or other.number is None:
        return False
    return _scaled(one, one.unit.size).same(_scaled(other, other.unit.size))


def quantity_of(text: str) -> Quantity:
    """Value and unit of a text; without a unit the text is the value."""
    if number := number_of(text):
        return Quantity(text, number, None)
    if money := CURRENCY.fullmatch(text):
        amount = quantity_of(money[1] + money[3])
        return replace(amount, unit=unit_of(money[2])) if amount.unit is None else Quantity(text, None, None)
    for start in START.finditer(text):
        value, named = text[: start.start()].strip(), text[start.start() :]
        if not value or NO_NOUN.search(named) or not _may_name(text, start, value):
            continue
        many, named = multiple_of(named)
        unit = unit_of(named) if named else None
        if named and unit is None:
            continue
        number = number_of(value)
        if many > 1:
            value, number = rf"({value})\cdot {many}", number and Number(number.value * many)
        return Quantity(value, number, unit)
    return Quantity(text, None, None)


def _may_name(text: str, start: re.Match[str], value: str) -> bool:
    """Whether what begins here is a unit and no factor: ``5 m`` is five metres, ``5m`` a product."""
    word = start[0]
    if value[-1] in "%°¢€£":
        return False
    if not word.isalpha():
        return word != r"\text{" or len(text[start.start() :].split()) <= MOST_WORDS + 2
    spaced = text[start.start() - 1] == " "
    if is_named(word):
        return (spaced and number_of(value) is not None) or (len(word) > 1 and value[-1] in "0123456789)} ")
    few = len(text[start.start() :].split()) <= MOST_WORDS
    return spaced and few and len(word) >= 3 and number_of(value) is not None


def _same_value(one: Quantity, other: Quantity, same: Same) -> bool:
    if one.number is not None and other.number is not None:
        return one.number.same(other.number)
    return same(one.text, other.text)


def _radians(angle: Quantity) -> str:
    in_degrees = angle.unit is not None and angle.unit.dimension == "angle"
    return rf"\frac{{({angle.text}) \pi}}{{180}}" if in_degrees else angle.text


def _scaled(quantity: Quantity, size: Fraction) -> Number:
    assert quantity.number is not None
    return Number(quantity.number.value * size)

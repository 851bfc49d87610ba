"""Numbers as answers write them, read as exact rationals. Nothing here is evaluated by sympy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?"
POWER = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?[0-9]{1,4})\s*\}?|[eE]\{?([-+]?[0-9]{1,4})\}?)"
DECIMAL = re.compile(rf"(-?)\+?({DIGITS}){POWER}?\.?")
FRACTION = re.compile(rf"(-?)\+?\s*(?:([0-9]+)\s*)?\\frac\{{(-?{DIGITS})\}}\{{(-?{DIGITS})\}}")
SLASHED = re.compile(r"(-?)\+?\s*(?:([0-9]+) )?\(?(-?[0-9,.]+)\)?\s*/\s*\(?(-?[0-9,.]+)\)?")
TEN = re.compile(r"(-?)\+?10\s*\^\s*\{?\s*([-+]?[0-9]{1,4})\s*\}?")
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{([0-9]{1,50})\}")
NUMERAL = re.compile(r"([0-9A-Z]+)_(?:([a-z0-9]+)|\{([a-z0-9]+)\}|\{?\\text\{([a-z0-9]+)\}\}?)")
BASES = {
    name: str(base)
    for base, name in enumerate(("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), start=2)
}
MOST_DIGITS = 4000


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was written out."""

    value: Fraction
    decimals: int | None = None
    """Digits behind the point; None unless it was a decimal without a power of ten."""

    def same(self, other: Number) -> bool:
        """Equal; or one is a decimal of six or more digits behind the point, six of them after the noughts, and the
        other is it before rounding or before its further digits were cut off."""
        if self.value == other.value:
            return True
        if (self.decimals is None) == (other.decimals is None):
            return False
        short, full = (self, other) if self.decimals is not None else (other, self)
        unit = Fraction(1, 10 ** (short.decimals or 0))
        cut = 0 <= (full.value - short.value) * (1 if full.value > 0 else -1) < unit
        told = (short.decimals or 0) >= 6 and abs(short.value) >= unit * 10**5
        return told and (cut or abs(full.value - short.value) * 2 <= unit)


def number_of(text: str) -> Number | None:
    """The number that the whole of a spelled text writes out, else None."""
    text = text.strip()
    if len(text) > MOST_DIGITS or not any(c in "0123456789" for c in text):
        return None
    if found := TEN.fullmatch(text):
        return Number((-1 if found[1] else 1) * Fraction(10) ** int(found[2]))
    if found := REPEATING.fullmatch(text):
        sign, whole, fixed, period = found.groups()
        lead, tail = Fraction(f"{whole or 0}.{fixed or 0}"), Fraction(int(period), 10 ** len(period) - 1)
        return Number((-1 if sign else 1) * (lead + tail / 10 ** len(fixed)))
    if found := DECIMAL.fullmatch(text):
        return _decimal(*found.groups())
    if found := FRACTION.fullmatch(text) or SLASHED.fullmatch(text):
        return _fraction(*found.groups())
    return None


def numeral_of(text: str) -> tuple[str, str] | None:
    """Digits and base of a numeral such as ``2516_8``, else None."""
    found = NUMERAL.fullmatch(text.replace(" ", ""))
    if found is None or not found[1][0].isdigit():
        return None
    base = found[2] or found[3] or found[4]
    return found[1].lstrip("0"), BASES.get(base, base)


def _decimal(sign: str, digits: str, power: str | None, exponent: str | None) -> Number | None:
    plain = re.sub(r"[, ]", "", digits)
    if not plain:
        return None
    value = Fraction(plain) * (-1 if sign else 1)
    raised = power or exponent
    if raised is not None:
        return Number(value * Fraction(10) ** int(raised))
    return Number(value, len(plain.partition(".")[2]))


def _fraction(sign: str, whole: str | None, top: str, bottom: str) -> Number | None:
    numbers = [DECIMAL.fullmatch(part.strip()) for part in (top, bottom)]
    read = [_decimal(*found.groups()) for found in numbers if found]
    if len(read) < 2 or read[0] is None or read[1] is None or read[1].value == 0:
        return None
    above, below = read[0], read[1]
    value = above.value / below.value
    if whole is not None:
        if not 0 < value < 1:  # 2\frac{5}{3} is a product, and read as algebra
            return None
        value += int(whole)
    return Number(-value if sign else value)

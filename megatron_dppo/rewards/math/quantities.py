"""Numbers in the notations of answers, parsed as exact fractions, and quantities with units, money,
percent and degrees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron_dppo.rewards.math.notation import strip_spaces

DIGITS = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?"
)
POWER = (
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?[0-9]{1,4})\s*\}?"
    r"|[eE]\{?([-+]?[0-9]{1,4})\}?)"
)
DECIMAL = re.compile(rf"(-?)\+?({DIGITS}){POWER}?\.?")
FRACTION = re.compile(rf"(-?)\+?\s*(?:([0-9]+)\s*)?\\frac\{{(-?{DIGITS})\}}\{{(-?{DIGITS})\}}")
SLASHED = re.compile(r"(-?)\+?\s*(?:([0-9]+) )?\(?(-?[0-9,.]+)\)?\s*/\s*\(?(-?[0-9,.]+)\)?")
TEN = re.compile(r"(-?)\+?10\s*\^\s*\{?\s*([-+]?[0-9]{1,4})\s*\}?")
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{([0-9]{1,50})\}")
NUMERAL = re.compile(r"([0-9A-Z]+)_(?:([a-z0-9]+)|\{([a-z0-9]+)\}|\{?\\text\{([a-z0-9]+)\}\}?)")
BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BASES = {name: str(base) for base, name in enumerate(BASE_NAMES, start=2)}
MOST_DIGITS = 4000


@dataclass(frozen=True, slots=True)
class Number:
    """Written-out number."""

    value: Fraction
    decimals: int | None = None
    """Digits after the decimal point; None unless a decimal without a power of ten."""

    def matches(self, other: Number) -> bool:
        """Return whether two numbers are equal, or a decimal is the rounded or cut-off value of an
        exact number, with six or more decimal places and six digits after the leading zeros."""
        if self.value == other.value:
            return True
        if (self.decimals is None) == (other.decimals is None):
            return False
        short, full = (self, other) if self.decimals is not None else (other, self)
        unit = Fraction(1, 10 ** (short.decimals or 0))
        cut = 0 <= (full.value - short.value) * (1 if full.value > 0 else -1) < unit
        precise = (short.decimals or 0) >= 6 and abs(short.value) >= unit * 10**5
        return precise and (cut or abs(full.value - short.value) * 2 <= unit)


def parse_number(text: str) -> Number | None:
    """Parse a normalized text as one number; None if the whole text is not a number."""
    text = text.strip()
    if len(text) > MOST_DIGITS or not any(c in "0123456789" for c in text):
        return None
    if found := TEN.fullmatch(text):
        return Number((-1 if found[1] else 1) * Fraction(10) ** int(found[2]))
    if found := REPEATING.fullmatch(text):
        sign, whole, fixed, period = found.groups()
        lead = Fraction(f"{whole or 0}.{fixed or 0}")
        tail = Fraction(int(period), 10 ** len(period) - 1)
        return Number((-1 if sign else 1) * (lead + tail / 10 ** len(fixed)))
    if found := DECIMAL.fullmatch(text):
        return _parse_decimal(*found.groups())
    if found := FRACTION.fullmatch(text) or SLASHED.fullmatch(text):
        return _parse_fraction(*found.groups())
    return None


def parse_numeral(text: str) -> tuple[str, str] | None:
    """Return digits and base of a numeral such as ``2516_8``; None for any other text."""
    found = NUMERAL.fullmatch(text.replace(" ", ""))
    if found is None or not found[1][0].isdigit():
        return None
    base = found[2] or found[3] or found[4]
    return found[1].lstrip("0"), BASES.get(base, base)


def _parse_decimal(
    sign: str,
    digits: str,
    power: str | None,
    exponent: str | None,
) -> Number | None:
    plain = re.sub(r"[, ]", "", digits)
    if not plain:
        return None
    value = Fraction(plain) * (-1 if sign else 1)
    raised = power or exponent
    if raised is not None:
        return Number(value * Fraction(10) ** int(raised))
    return Number(value, len(plain.partition(".")[2]))


def _parse_fraction(sign: str, whole: str | None, top: str, bottom: str) -> Number | None:
    numbers = [DECIMAL.fullmatch(part.strip()) for part in (top, bottom)]
    read = [_parse_decimal(*found.groups()) for found in numbers if found]
    if len(read) < 2 or read[0] is None or read[1] is None or read[1].value == 0:
        return None
    above = read[0]
    below = read[1]
    value = above.value / below.value
    if whole is not None:
        # 2\frac{5}{3} is a product, a case for algebra.
        if not 0 < value < 1:
            return None
        value += int(whole)
    return Number(-value if sign else value)


TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre", "1/1000": "mm millimeter millimetre",
        "1/100": "cm centimeter centimetre", "1/10": "dm decimeter decimetre",
        "1000": "km kilometer kilometre", "0.0254": "in inch inche", "0.3048": "ft foot feet",
        "0.9144": "yd yard", "1609.344": "mi mile", "1/1000000000": "nm nanometer",
        "1/1000000": "um micrometer micron",
    },
    "time": {
        "1": "s sec second", "1/1000": "ms millisecond", "60": "min minute", "3600": "h hr hour",
        "86400": "day", "604800": "week",
    },
    "month": {"1": "month", "12": "yr year"},
    "mass": {"1": "g gram", "1000": "kg kilogram", "1/1000": "mg milligram", "1000000": "tonne"},
    "weight": {"1": "oz ounce", "16": "lb lbs pound"},
    "volume": {"1": "L l liter litre", "1/1000": "mL ml milliliter millilitre"},
    "measure": {"1": "cup", "2": "pint", "4": "quart", "16": "gallon"},
    "angle": {"1": "°", "1/60": "arcminute", "1/3600": "arcsecond arcsec"},
    "radian": {"1": "rad radian"},
    "money": {"1": r"\$ dollar usd", "1/100": "¢ cent"},
    "euro": {"1": "€ euro"},
    "pound sterling": {"1": "£"},
    "share": {"1/100": "%"},
    "energy": {"1": "J joule", "1000": "kJ kilojoule"},
    "magnetic field": {"1": "T tesla"},
    "resistance": {"1": "ohm", "1000": "kohm kiloohm", "1000000": "Mohm megaohm"},
    "pressure": {"1": "Pa pascal", "1000": "kPa"},
    "power": {"1": "W watt", "1000": "kW kilowatt"},
    "force": {"1": "N newton"},
    "voltage": {"1": "V volt"},
    "temperature": {"1": "K kelvin"},
    "celsius": {"1": "degC celsius"},
    "fahrenheit": {"1": "degF fahrenheit"},
    "electronvolt": {"1": "eV"},
    "frequency": {"1": "Hz hertz"},
    "quantity": {"1": "mol mole"},
    "current": {"1": "ampere amp"},
    "charge": {"1": "coulomb"},
    "capacitance": {"1": "farad"},
    "inductance": {"1": "henry"},
}  # fmt: skip
"""Relative size and names of each unit, by dimension; sizes compare units of one dimension."""
UPRIGHT = {"A": "ampere", "C": "coulomb", "F": "farad", "H": "henry"}
"""Letters read as units only in upright type: ``\\frac{1}{2} C V^2`` is a product."""
PREFIXES = {"p": -12, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9}
"""Powers of ten."""
PREFIXED = {
    "m",
    "s",
    "g",
    "L",
    "l",
    "J",
    "T",
    "ohm",
    "Pa",
    "W",
    "N",
    "V",
    "K",
    "eV",
    "Hz",
    "mol",
    *UPRIGHT.values(),
}
MICRO = re.compile(rf"\\mu\s*(?=(?:{'|'.join(PREFIXED)})(?![a-zA-Z]))")
MULTIPLES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
MULTIPLE = re.compile(rf"(\\text\{{)?\s*({'|'.join(MULTIPLES)})s?\b\s*")
SPEEDS = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}
NAMES = {
    name: (dimension, Fraction(size))
    for dimension, sizes in TABLE.items()
    for size, names in sizes.items()
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Unit:
    """Product of powers of dimensions. An unknown word, such as ``apples``, is a separate
    dimension."""

    dimensions: frozenset[tuple[str, int]]
    size: Fraction

    @property
    def dimension(self) -> str | None:
        """Name of the single dimension with power 1; None for any other unit."""
        return next(
            (name for name, power in self.dimensions if power == 1 and len(self.dimensions) == 1),
            None,
        )


def parse_unit(text: str) -> Unit | None:
    r"""Parse a unit (``cm^2``, ``\text{km}/\text{h}``, ``miles per hour``); None for any other
    text."""
    # All notations become words with powers, separated by spaces and at most one slash.
    text = re.sub(r"°\s*(?:\\text\{\s*([CF])\s*\}|([CF])(?![a-zA-Z]))", r" deg\1\2 ", text)
    text = re.sub(
        r"\\text\{([^{}]*)\}",
        lambda found: f" {UPRIGHT_LETTER.sub(_replace_upright, found[1])} ",
        text,
    )
    text = re.sub(r"\s*\^\s*\{?\s*(-?[1-9])\s*\}?", r"^\1", text.replace(r"\cdot", " "))
    text = re.sub(r"([kM]?)\s*\\Omega(?![a-zA-Z])", r" \1ohm", text)
    text = MICRO.sub("u", text)
    text = re.sub(r"\bper\b", "/", text).strip(" .")
    text = re.sub(
        r"\b(square|sq\.?|cubic)\s+([a-zA-Z]+)",
        lambda m: f"{m[2]}^{3 if m[1] == 'cubic' else 2}",
        text,
    )
    text = re.sub(
        r"\b([a-zA-Z]+)\s+(squared|cubed)\b",
        lambda m: f"{m[1]}^{3 if m[2] == 'cubed' else 2}",
        text,
    )
    for name, means in SPEEDS.items():
        text = re.sub(rf"\b{name}\b", means, text)
    powers: Counter[str] = Counter()
    size = Fraction(1)
    if not re.fullmatch(r"/?\s*[^\s/]+(?:\s*/\s*[^\s/]+|\s+[^\s/]+)*", text) or text.count("/") > 1:
        return None
    for sign, words in zip((1, -1), text.split("/"), strict=False):
        for word in words.split():
            named = re.fullmatch(r"([a-zA-Z°%¢€£'-]+|\\\$)(?:\^(-?[1-9]))?", word)
            if named is None:
                return None
            power = sign * int(named[2] or 1)
            # A letter without a unit is a factor.
            if (len(word) == 1 or re.search("[°%¢€£]", word)) and named[1] not in NAMES:
                return None
            dimension, scale = _parse_unit_word(named[1])
            powers[dimension] += power
            size *= scale**power
    # A power of percent is no unit.
    if powers["share"] not in (0, 1):
        return None
    return Unit(frozenset((name, power) for name, power in powers.items() if power), size)


def is_named(word: str) -> bool:
    """Return whether a bare word after a number is a unit of the table."""
    return word in MULTIPLES or any(
        word in NAMES or word.lower() in NAMES for word in (word, word.removesuffix("s"))
    )


def parse_multiplier(text: str) -> tuple[int, str]:
    r"""Split a text into multiplier and unit: ``million people`` after 5 means 5,000,000 people."""
    many = 1
    while found := MULTIPLE.match(text):
        many *= MULTIPLES[found[2]]
        text = (found[1] or "") + text[found.end() :] if text[found.end() :].strip(" }") else ""
    return many, text


def _replace_upright(found: re.Match[str]) -> str:
    return found[1] + UPRIGHT[found[2]]


def _parse_unit_word(word: str) -> tuple[str, Fraction]:
    lower = word.lower()
    for spelling in (word, lower, lower.removesuffix("s")) if len(word) > 1 else (word,):
        if spelling in NAMES:
            return NAMES[spelling]
    if word[0] in PREFIXES and word[1:] in PREFIXED:
        dimension, size = NAMES[word[1:]]
        return dimension, size * Fraction(10) ** PREFIXES[word[0]]
    return word.lower().removesuffix("s"), Fraction(1)


UPRIGHT_LETTER = re.compile(
    rf"(?<![a-zA-Z])([{''.join(PREFIXES)}]?)([{''.join(UPRIGHT)}])(?![a-zA-Z])"
)
START = re.compile(
    r"\\mu\s*(?=\\text\{|\\Omega)|\\text\{|\\Omega(?![a-zA-Z])|[°%¢€£]|\\\$|(?<![a-zA-Z\\{_])[a-zA-Z]+"
)
CLOCK = re.compile(r"([0-9]{1,2})\s*:\s*([0-5][0-9])\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
"""Time of day, possibly without a.m. or p.m."""
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
ROUND_ARGUMENT = re.compile(r"(?:sin|cos|tan|cot|sec|csc)[^()]*$")
"""Argument with a degree sign as a part: the degrees in ``\\sin 30°`` are not a unit."""

Matcher = Callable[[str, str], bool]
"""Function to compare two values other than plain numbers."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Value with unit."""

    text: str
    number: Number | None
    unit: Unit | None


def match_number(label: str, answer: str) -> bool | None:
    """Return whether two written-out numbers are equal; None if a text is not a number."""
    one = parse_number(label)
    other = parse_number(answer)
    if one is None or other is None:
        return None
    # With commas undecided, because 108,135,189 may be a number or a list.
    return one.matches(other) or (None if "," in label or "," in answer else False)


def match_percent(label: str, answer: str, matches: Matcher) -> bool | None:
    """Return whether two texts are the same fraction; None if no text has a percent sign."""
    one = parse_quantity(label)
    other = parse_quantity(answer)
    units = [q.unit for q in (one, other) if q.unit is not None]
    if "share" not in [unit.dimension for unit in units]:
        return None
    if len(units) == 2:
        return units[0] == units[1] and _match_values(one, other, matches)
    percent, bare = (one, other) if one.unit is not None else (other, one)
    if percent.number is None or bare.number is None:
        return matches(percent.text, bare.text) or matches(
            rf"\frac{{{percent.text}}}{{100}}", bare.text
        )
    # A bare number above 1 may be percent without the sign.
    if abs(bare.number.value) > 1 and percent.number.matches(bare.number):
        return True
    return _scale_quantity(percent, Fraction(1, 100)).matches(bare.number)


def match_quantity(label: str, answer: str, matches: Matcher) -> bool | None:
    """Return whether two texts are equal quantities; None if no text has a unit."""
    # An answer may omit a.m. or p.m. of a time of day.
    clocks = [
        CLOCK.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip())
        for text in (label, answer)
    ]
    if clocks[0] and clocks[1]:
        (hour, minute, half), (other_hour, other_minute, other_half) = (
            clock.groups() for clock in clocks if clock
        )
        same_half = other_half is None or (half or "").lower() == other_half.lower()
        return int(hour) == int(other_hour) and minute == other_minute and same_half
    one = parse_quantity(label)
    other = parse_quantity(answer)
    # Reject a bare number against dozens, because the number may count dozens or single items.
    if None in (one.unit, other.unit) and ("dozen" in label) != ("dozen" in answer):
        return False
    if one.unit is None and other.unit is None:
        multiple = one.number is not None and other.number is not None
        if multiple and {one.text, other.text} != {label, answer}:
            return _match_values(one, other, matches)
        return None
    # Leave a degree sign inside a value to algebra: the value is a sum of degrees.
    if any(q.unit is None and "°" in q.text for q in (one, other)):
        return None
    dimensions = [q.unit.dimension for q in (one, other) if q.unit is not None]
    in_radians = dimensions == ["angle"] and any(
        r"\pi" in q.text for q in (one, other) if q.unit is None
    )
    # A bare value with π next to degrees is in radians.
    if in_radians or {*dimensions} == {"angle", "radian"}:
        return matches(_convert_to_radians(one), _convert_to_radians(other))
    if one.unit is None or other.unit is None or one.unit == other.unit:
        # Compare the letters first, because only one text may use upright type.
        letters = {
            strip_spaces(re.sub(r"\\text\{([^{}]*)\}", r"\1", text)) for text in (label, answer)
        }
        return len(letters) == 1 or _match_values(one, other, matches)
    if one.unit.dimensions != other.unit.dimensions or one.number is None or other.number is None:
        return False
    return _scale_quantity(one, one.unit.size).matches(_scale_quantity(other, other.unit.size))


def parse_quantity(text: str) -> Quantity:
    """Parse value and unit of a text; without a unit, the whole text is the value."""
    if number := parse_number(text):
        return Quantity(text, number, None)
    if money := CURRENCY.fullmatch(text):
        amount = parse_quantity(money[1] + money[3])
        if amount.unit is None:
            return replace(amount, unit=parse_unit(money[2]))
        return Quantity(text, None, None)
    for start in START.finditer(text):
        value = text[: start.start()].strip()
        named = text[start.start() :]
        if not value or NO_NOUN.search(named) or not _is_unit_start(text, start, value):
            continue
        many, named = parse_multiplier(named)
        unit = parse_unit(named) if named else None
        if named and unit is None:
            continue
        number = parse_number(value)
        if many > 1:
            value = rf"({value})\cdot {many}"
            number = number and Number(number.value * many)
        return Quantity(value, number, unit)
    return Quantity(text, None, None)


def _is_unit_start(text: str, start: re.Match[str], value: str) -> bool:
    """Return whether a unit begins at ``start``, not a factor: ``5 m`` is five metres, ``5m`` a
    product."""
    word = start[0]
    if value[-1] in "%°¢€£" or (word == "°" and ROUND_ARGUMENT.search(value)):
        return False
    if not word.isalpha():
        return word != r"\text{" or len(text[start.start() :].split()) <= MOST_WORDS + 2
    spaced = text[start.start() - 1] == " "
    if is_named(word):
        ended = re.search(r"[0-9)} ]$|\\pi$", value) is not None
        return (spaced and parse_number(value) is not None) or (len(word) > 1 and ended)
    few = len(text[start.start() :].split()) <= MOST_WORDS
    return spaced and few and len(word) >= 3 and parse_number(value) is not None


def _match_values(one: Quantity, other: Quantity, matches: Matcher) -> bool:
    if one.number is not None and other.number is not None:
        return one.number.matches(other.number)
    return matches(one.text, other.text)


def _convert_to_radians(angle: Quantity) -> str:
    in_degrees = angle.unit is not None and angle.unit.dimension == "angle"
    return rf"\frac{{({angle.text}) \pi}}{{180}}" if in_degrees else angle.text


def _scale_quantity(quantity: Quantity, size: Fraction) -> Number:
    assert quantity.number is not None
    return Number(quantity.number.value * size)

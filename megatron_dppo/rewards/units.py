"""Units of measurement by their names: what they measure, and how much of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

# A line is one dimension; each unit has its size in the first one and its names.
TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre", "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter centimetre",
        "1/10": "dm decimeter decimetre", "1000": "km kilometer kilometre", "0.0254": "in inch inche",
        "0.3048": "ft foot feet", "0.9144": "yd yard", "1609.344": "mi mile", "1/1000000000": "nm nanometer",
        "1/1000000": "um micrometer micron",
    },
    "time": {
        "1": "s sec second", "1/1000": "ms millisecond", "60": "min minute", "3600": "h hr hour", "86400": "day",
        "604800": "week",
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
    "power": {"1": "W watt", "1000": "kW kilowatt"},
    "force": {"1": "N newton"},
    "voltage": {"1": "V volt"},
    "temperature": {"1": "K kelvin"},
    "electronvolt": {"1": "eV"},
    "frequency": {"1": "Hz hertz"},
    "quantity": {"1": "mol mole"},
}  # fmt: skip
MULTIPLES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
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
    """A product of powers of dimensions. A word that is no unit, such as ``apples``, is a dimension of its own."""

    dimensions: frozenset[tuple[str, int]]
    size: Fraction

    @property
    def dimension(self) -> str | None:
        """The one dimension that it measures, where there is only one."""
        return next((name for name, power in self.dimensions if power == 1 and len(self.dimensions) == 1), None)


def unit_of(text: str) -> Unit | None:
    r"""The unit that ``text`` names (``cm^2``, ``\text{km}/\text{h}``, ``miles per hour``); None if it is none."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s*\^\s*\{?\s*(-?[1-9])\s*\}?", r"^\1", text.replace(r"\cdot", " ").replace(r"\mu ", "u"))
    text = re.sub(r"\bper\b", "/", text).strip(" .")
    text = re.sub(r"\b(square|sq\.?|cubic)\s+([a-zA-Z]+)", lambda m: f"{m[2]}^{3 if m[1] == 'cubic' else 2}", text)
    text = re.sub(r"\b([a-zA-Z]+)\s+(squared|cubed)\b", lambda m: f"{m[1]}^{3 if m[2] == 'cubed' else 2}", text)
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
            if (len(word) == 1 or re.search("[°%¢€£]", word)) and named[1] not in NAMES:
                return None  # a letter that is no unit is a factor
            dimension, of = _named(named[1])
            powers[dimension] += power
            size *= of**power
    if powers["share"] not in (0, 1):
        return None
    return Unit(frozenset((name, power) for name, power in powers.items() if power), size)


def is_named(word: str) -> bool:
    """Whether a bare word after a number is a unit of the table."""
    return word in MULTIPLES or any(word in NAMES or word.lower() in NAMES for word in (word, word.removesuffix("s")))


def multiple_of(text: str) -> tuple[int, str]:
    r"""How many of it are meant, and what: ``5 million people`` are 5,000,000."""
    many = 1
    while found := MULTIPLE.match(text):
        many *= MULTIPLES[found[2]]
        text = (found[1] or "") + text[found.end() :] if text[found.end() :].strip(" }") else ""
    return many, text


def _named(word: str) -> tuple[str, Fraction]:
    for spelling in (word, word.lower(), word.lower().removesuffix("s")) if len(word) > 1 else (word,):
        if spelling in NAMES:
            return NAMES[spelling]
    return word.lower().removesuffix("s"), Fraction(1)

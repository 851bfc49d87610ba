"""Right answers: labels in other spellings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

WHOLE = r"-?[1-9][0-9]*"
FRACTION = r"(-?)\\d?frac\{([0-9]+)\}\{([0-9]+)\}"


def respelled(label: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a spelling, and the label in that spelling."""
    for name, spell in SPELLINGS.items():
        answer = spell(label)
        if answer is not None and answer != label:
            yield name, answer


def _spaced(label: str) -> str | None:
    if r"\text" in label or r"\mbox" in label:
        return None
    return re.sub(r"(?<=[+=])(?![\s,!])", r" \\, ", label)


def _decimal(label: str) -> str | None:
    """Return the finite decimal of a fraction, if any."""
    found = re.fullmatch(FRACTION, label)
    if found is None or int(found[3]) == 0:
        return None
    value = Fraction(int(found[2]), int(found[3]))
    digits = next((n for n in range(30) if (value * 10**n).denominator == 1), None)
    if digits is None:
        return None
    whole = f"{int(value * 10**digits):0{digits + 1}d}"
    if not digits:
        return found[1] + whole
    return f"{found[1]}{whole[:-digits]}.{whole[-digits:]}"


def _enlarged(label: str) -> str | None:
    found = re.fullmatch(FRACTION, label)
    return found and rf"{found[1]}\frac{{{3 * int(found[2])}}}{{{3 * int(found[3])}}}"


def _slashed(label: str) -> str | None:
    found = re.fullmatch(r"(-?)\\d?frac\{([0-9a-z]+)\}\{([0-9a-z])\}", label)
    return found and f"{found[1]}({found[2]})/({found[3]})"


def _multiplied_root(label: str) -> str | None:
    found = re.fullmatch(r"([0-9]+)\\sqrt\{([0-9]+)\}", label)
    return found and rf"\sqrt{{{int(found[1]) ** 2 * int(found[2])}}}"


def _turned_sum(label: str) -> str | None:
    terms = re.fullmatch(r"[0-9a-z^{} ]+(?:\+[0-9a-z^{} ]+)+", label)
    return terms and "+".join(reversed(label.split("+")))


def _bracketed(label: str) -> str | None:
    plain = re.fullmatch(r"[0-9a-z+*/^{} -]{2,}", label) and re.search("[0-9]", label)
    return f"({label})" if plain and "  " not in label else None


def _sized(label: str) -> str | None:
    if r"\left" in label or not re.search(r"(?<![\\a-zA-Z])[()]", label):
        return None
    opened = re.sub(r"(?<!\\)\(", r"\\left( ", label)
    return re.sub(r"(?<!\\)\)", r" \\right)", opened)


def _turned_list(label: str) -> str | None:
    no_list = r"[=<>()\[\]$;]|\{,\}|[0-9],[0-9]{3}|\\(?:text|mbox|in|[,!{]|q?quad)|dots"
    if "," not in label or re.search(no_list, label):
        return None
    return ", ".join(part.strip() for part in reversed(label.split(",")))


def _turned_set(label: str) -> str | None:
    found = re.fullmatch(r"\\(?:left\\)?\{([^{}=:|]+)\\(?:right\\)?\}", label)
    if not found or "," not in found[1] or r"\mid" in label or "dots" in label:
        return None
    members = found[1].removesuffix("\\right").split(",")
    return r"\{" + ", ".join(reversed(members)) + r"\}"


SPELLINGS: dict[str, Callable[[str], str | None]] = {
    "spaces around": lambda label: f" {label} ",
    "dollars": lambda label: None if "$" in label else f"${label}$",
    "brackets of a formula": lambda label: None if "$" in label else rf"\( {label} \).",
    "display fraction": lambda label: label.replace(r"\frac", r"\dfrac"),
    "spaces": _spaced,
    "sizes": _sized,
    "decimal": _decimal,
    "slash": _slashed,
    "a fraction enlarged": _enlarged,
    "a multiplied root": _multiplied_root,
    "order of a list": _turned_list,
    "order of a set": _turned_set,
    "order of a sum": _turned_sum,
    "one more bracket": _bracketed,
    "a name": lambda label: f"x = {label}" if re.fullmatch(rf"{WHOLE}|{FRACTION}", label) else None,
    "a unit": lambda label: rf"{label} \text{{ units}}" if re.fullmatch(WHOLE, label) else None,
    "nought behind": lambda label: f"{label}.0" if re.fullmatch(WHOLE, label) else None,
}
"""Spellings by name. A spelling returns None if not applicable."""

"""Equality of two texts in value, by another method than the verifier's.

math-verify's parser reads both texts, and sympy evaluates them at random points. Benchmarks and
tests recognize a changed label of equal value, for example after a change of a sign in ``0 + 0``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from sympy import Basic, Eq, FiniteSet, Interval, Rational, Symbol, Tuple, Union
from sympy.core.relational import Relational

COMMANDS = re.compile(r"\\[a-zA-Z]+|\\[^a-zA-Z]")


def equivalent(label: str, answer: str) -> bool:
    """Return whether two texts have the same value for sympy; False if any part is unreadable."""
    one = _bare(label)
    other = _bare(answer)
    if one == other:
        return True
    try:
        return _same(_read(one), _read(other))
    # Parsers and sympy raise exceptions of all kinds.
    except Exception:
        return False


def _bare(text: str) -> str:
    text = text.replace("$", "")
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[,!;: ]|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\text\{\s*(?:and|or)\s*\}", ",", text)
    return re.sub(r"\s+", " ", text).strip(" .")


def _read(text: str) -> Basic:
    untrusted = r"\\(?:text|math|mbox|bar|hat|vec|not|pm|mp|in|approx)(?![a-z])|['≈$₈]|[0-9]_"
    if re.search(untrusted, text) or re.search("[a-zA-Z]{4}", re.sub(COMMANDS, " ", text)):
        raise ValueError(f"more than sympy is trusted with: {text}")
    config = NormalizationConfig(basic_latex=False, boxed="none")
    node = latex2sympy(text, normalization_config=config)
    letters = {letter for letter in re.sub(COMMANDS, " ", text) if letter.isalpha()} - {"e", "i"}
    if letters - set("".join(str(symbol) for symbol in node.free_symbols)):
        raise ValueError(f"a letter was passed over: {text}")
    return node


def _same(one: Basic, other: Basic) -> bool:
    if isinstance(one, Relational) or isinstance(other, Relational):
        if type(one) is not type(other):
            return False
        if _equal(one.lhs, other.lhs) and _equal(one.rhs, other.rhs):
            return True
        return isinstance(one, Eq) and _multiple(one.lhs - one.rhs, other.lhs - other.rhs)
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet):
        return _same_sets(one, other)
    if isinstance(one, Tuple) and isinstance(other, Tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (Interval, Union)) or isinstance(other, (Interval, Union)):
        return bool(one == other)
    return _equal(one, other)


def _same_sets(one: FiniteSet, other: FiniteSet) -> bool:
    first = all(_contains(other, member) for member in one.args)
    return first and all(_contains(one, member) for member in other.args)


def _contains(members: FiniteSet, wanted: Basic) -> bool:
    return any(_same(wanted, member) for member in members.args)


def _equal(one: Basic, other: Basic) -> bool:
    for values in _points(one, other):
        first = complex_value(one, values)
        second = complex_value(other, values)
        if abs(first - second) > abs(first) * Rational(1, 10**40):
            return False
    return True


def _multiple(one: Basic, other: Basic) -> bool:
    ratios = []
    for values in _points(one, other):
        first = complex_value(one, values)
        second = complex_value(other, values)
        if abs(second) < Rational(1, 10**60):
            return False
        ratios.append(first / second)
    tolerance = abs(ratios[0]) * Rational(1, 10**40)
    constant = all(abs(ratio - ratios[0]) <= tolerance for ratio in ratios)
    return constant and ratios[0] != 0


def _points(one: Basic, other: Basic) -> Iterator[dict[Symbol, Rational]]:
    rng = random.Random(7)
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    for _ in range(4 if names else 1):
        yield {name: Rational(rng.randint(1001, 9973), 3001) for name in names}


def complex_value(node: Basic, values: dict[Symbol, Rational]) -> Basic:
    """Evaluate to 60 digits."""
    found = node.subs(values).doit().evalf(60)
    if not found.is_number or found.has(Symbol):
        raise ValueError("no number")
    return found

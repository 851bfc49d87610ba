"""Whether two texts are worth the same, by another road than the verifier's.

math-verify's parser reads both, and sympy works out what they are worth at random points. A change
of a label may leave its value as it was (of ``0 + 0`` a sign), and this is how a test knows.
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
    """Whether sympy finds that two texts are worth the same; False where it cannot read the whole
    of both."""
    one, other = _bare(label), _bare(answer)
    if one == other:
        return True
    try:
        return _same(_read(one), _read(other))
    except Exception:  # parsers and sympy raise all there is
        return False


def _bare(text: str) -> str:
    text = re.sub(
        r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", "", text.replace("$", "")
    )
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\\[,!;: ]|~", " ", text))
    return re.sub(r"\s+", " ", re.sub(r"\\text\{\s*(?:and|or)\s*\}", ",", text)).strip(" .")


def _read(text: str) -> Basic:
    untrusted = r"\\(?:text|math|mbox|bar|hat|vec|not|pm|mp|in|approx)(?![a-z])|['≈$₈]|[0-9]_"
    if re.search(untrusted, text) or re.search("[a-zA-Z]{4}", re.sub(COMMANDS, " ", text)):
        raise ValueError(f"more than sympy is trusted with: {text}")
    node = latex2sympy(
        text, normalization_config=NormalizationConfig(basic_latex=False, boxed="none")
    )
    letters = {letter for letter in re.sub(COMMANDS, " ", text) if letter.isalpha()} - {"e", "i"}
    if letters - set("".join(str(symbol) for symbol in node.free_symbols)):
        raise ValueError(f"a letter was passed over: {text}")
    return node


def _same(one: Basic, other: Basic) -> bool:
    if isinstance(one, Relational) or isinstance(other, Relational):
        if type(one) is not type(other):
            return False
        sides = _equal(one.lhs, other.lhs) and _equal(one.rhs, other.rhs)
        return sides or (
            isinstance(one, Eq) and _multiple(one.lhs - one.rhs, other.lhs - other.rhs)
        )
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet):
        return all(any(_same(a, b) for b in other.args) for a in one.args) and all(
            any(_same(a, b) for a in one.args) for b in other.args
        )
    if isinstance(one, Tuple) and isinstance(other, Tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (Interval, Union)) or isinstance(other, (Interval, Union)):
        return bool(one == other)
    return _equal(one, other)


def _equal(one: Basic, other: Basic) -> bool:
    for values in _points(one, other):
        first, second = (complex_value(node, values) for node in (one, other))
        if abs(first - second) > abs(first) * Rational(1, 10**40):
            return False
    return True


def _multiple(one: Basic, other: Basic) -> bool:
    ratios = []
    for values in _points(one, other):
        first, second = (complex_value(node, values) for node in (one, other))
        if abs(second) < Rational(1, 10**60):
            return False
        ratios.append(first / second)
    return (
        all(abs(ratio - ratios[0]) <= abs(ratios[0]) * Rational(1, 10**40) for ratio in ratios)
        and ratios[0] != 0
    )


def _points(one: Basic, other: Basic) -> Iterator[dict[Symbol, Rational]]:
    rng = random.Random(7)
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    for _ in range(4 if names else 1):
        yield {name: Rational(rng.randint(1001, 9973), 3001) for name in names}


def complex_value(node: Basic, values: dict[Symbol, Rational]) -> Basic:
    """To 60 digits."""
    found = node.subs(values).doit().evalf(60)
    if not found.is_number or found.has(Symbol):
        raise ValueError("no number")
    return found

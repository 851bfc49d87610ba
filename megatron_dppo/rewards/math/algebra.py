"""Equality of expressions, equations and inequalities by values at sample points, never by truth
or solutions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from megatron_dppo.rewards.math.expressions import (
    MINUS_ONE,
    ExpressionParseError,
    Node,
    make_product,
    parse_expressions,
)
from megatron_dppo.rewards.math.notation import (
    OPEN_SET,
    UNION,
    parse_brackets,
    split,
    split_brackets,
    split_union,
    split_with_separators,
)
from megatron_dppo.rewards.math.quantities import Number, parse_number
from megatron_dppo.rewards.math.values import (
    DIGITS,
    MOST_DIGITS,
    SamplePoint,
    TooLargeError,
    UndefinedError,
    Value,
    find_symbols,
    iter_subexpressions,
)

CLOCK = re.compile(r"[0-9]{1,2}\s*:\s*[0-5][0-9]")
"""Time of day; algebra would read a quotient."""
RELATIONS = (
    r"<|>|=|\\(?:le|ge|ne|in|notin|equiv|subset|subseteq|supset|to|rightarrow|mapsto|implies|iff|mid|nmid|perp"
    r"|parallel|sim|cong|propto|Rightarrow|Leftrightarrow|leftrightarrow|ll|gg)(?![a-zA-Z])"
)
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
POINTS: tuple[tuple[int, Fraction | int], ...] = (
    *((1, 1), (-1, 1), (0, 1), (0, 1), (0, 9)),
    *((0, Fraction(1, 9)), (0, 1000), (0, 100), (1, Fraction(1, 9))),
)
"""Sign and size of the unknowns at each point; sign 0: a separate sign for each unknown."""
STEPPED = (("call", "floor"), ("call", "ceil"))
STEPS = tuple((sign, size) for size in (10, 100, 1000) for sign in (1, -1, 0) for _ in range(6))
"""Further points for expressions with values rounded to integers."""
MIN_POINTS = 2
"""Fewest points with values of both expressions."""
RATIONAL_POINTS = 4
"""Sufficient points if all values are rational."""
SPARE_BITS = 60
"""Difference in size between terms of a sum, in bits, before more digits are used."""
Pair = tuple[Value, Value, SamplePoint]
UNEQUAL = re.compile(r"([a-zA-Z])\s*\\ne(?![a-zA-Z])(.+)")
EQUAL_DIGITS = 30
"""Common digits of equal ends."""


class NarrowerDomainError(Exception):
    """The label has a value at a point, but the answer has no value."""


def match_algebra(label: str, answer: str) -> bool:
    """Return whether two whole normalized texts are the same expression, equation, inequality or
    ratio."""
    if any(CLOCK.fullmatch(text) for text in (label, answer)):
        return False
    try:
        expected = split_with_separators(label, RELATIONS)
        found = split_with_separators(answer, RELATIONS)
        if [sign for sign, _ in expected] == [sign for sign, _ in found] == [""]:
            return _match_ratio(label, answer)
        if len(expected) != len(found) or len(expected) == 1:
            return False
        sides = parse_expressions(*(text for _, text in (*expected, *found)))
        signs = [sign for sign, _ in expected[1:]]
        found_signs = [sign for sign, _ in found[1:]]
        count = len(expected)
        return _match_chain(signs, sides[:count], found_signs, sides[count:], label)
    except (ExpressionParseError, TooLargeError, NarrowerDomainError):
        return False


def strip_approximation(text: str) -> str:
    r"""Return the exact part of a text such as ``2\pi \approx 6.28``.

    If the decimal is not the rounded or cut-off exact value, the approximate equality becomes an
    equality.
    """
    exact, *others = split(text, r"\\approx(?![a-zA-Z])")
    number = parse_number(others[0]) if len(others) == 1 else None
    if number is not None and number.decimals is not None:
        value = evaluate_constant(split(exact, "=")[-1])
        unit = Fraction(1, 10**number.decimals)
        if value is not None and abs(_to_fraction(value) - number.value) < unit:
            return exact
    return re.sub(r"\\approx(?![a-zA-Z])", "=", text).strip(" =")


def evaluate_constant(text: str) -> Value | None:
    """Return the value of a real expression without unknowns; None for any other text."""
    try:
        (node,) = parse_expressions(text)
        if find_symbols(node):
            return None
        found = next(_evaluate_points(node, node, text), None)
    except (ExpressionParseError, TooLargeError):
        return None
    return None if found is None or not found[2].is_real(found[0]) else found[0]


def _match_ratio(label: str, answer: str) -> bool:
    """Compare expressions, or ratios such as ``2:3:4``."""
    # The terms of equal ratios differ by one common factor.
    terms = split(label, ":")
    others = split(answer, ":")
    if max(len(terms), len(others)) <= 2:
        return _match_expression(label, answer)
    return len(terms) == len(others) and all(
        _match_expression(f"({one})({others[-1]})", f"({other})({terms[-1]})")
        for one, other in zip(terms[:-1], others[:-1], strict=True)
    )


def _match_expression(label: str, answer: str) -> bool:
    one, other = parse_expressions(label, answer)
    if one == other:
        return True
    # A number and a single unknown differ; in longer expressions an unknown might cancel out.
    atoms = {one[0], other[0]} <= {"number", "symbol"}
    if atoms and bool(find_symbols(one)) != bool(find_symbols(other)):
        return False
    written = parse_number(label), parse_number(answer)
    for number, node in ((written[0], other), (written[1], one)):
        if number is not None and (number.decimals or 0) >= 6 and not find_symbols(node):
            value = evaluate_constant(answer if node is other else label)
            return value is not None and number.matches(Number(_to_fraction(value)))
    return _match_at_points(one, other, label, _is_equal)


def _match_chain(
    signs: list[str],
    sides: list[Node],
    found_signs: list[str],
    found: list[Node],
    seed: str,
) -> bool:
    turned = [TURNED.get(sign) for sign in reversed(found_signs)]
    closed = not find_symbols(("sum", *sides, *found))

    def matches(one: Node, other: Node) -> bool:
        # Compare closed statements by notation, because all true statements are equivalent.
        if closed:
            return _sort_operands(one) == _sort_operands(other)
        return _match_at_points(one, other, seed, _is_equal)

    if signs == found_signs and all(map(matches, sides, found)):
        return True
    if signs == turned and all(map(matches, sides, reversed(found))):
        return True
    if (
        closed
        or len(signs) != 1
        or signs[0] not in TURNED
        or found_signs[0] not in (signs[0], TURNED[signs[0]])
    ):
        return False
    # Equivalent relations have proportional differences of the sides.
    one, other = (("sum", left, make_product(MINUS_ONE, right)) for left, right in (sides, found))
    equation = signs[0] in ("=", r"\ne")
    candidates = [(one, other)]
    if equation:
        cleared = _clear_denominators(one), _clear_denominators(other)
        candidates += [(cleared[0], other), (one, cleared[1]), cleared]
    for first, second in dict.fromkeys(candidates):
        factor = _find_factor(first, second, seed)
        # A negative factor reverses an inequality.
        if factor and (equation or (factor > 0) == (signs == found_signs)):
            return True
    return False


def _sort_operands(node: Node) -> Node:
    """Sort the terms of sums and the factors of products, and evaluate quotients of numbers."""
    operands = []
    for part in node[1:]:
        operands.append(_sort_operands(part) if isinstance(part, tuple) else part)
    parts = tuple(operands)
    if node[0] in ("sum", "product"):
        inner: list[Node] = []
        for part in parts:
            inner += part[1:] if part[0] == node[0] else [part]
        numeric = node[0] == "product" and all(_is_number(part) for part in inner)
        # A product of two or more numbers stays as written.
        if numeric and sum(part[0] == "number" and part != MINUS_ONE for part in inner) <= 1:
            value = Fraction(1)
            for part in inner:
                value *= part[1] if part[0] == "number" else 1 / part[1][1]
            return ("number", value)
        return (node[0], *sorted(inner, key=repr))
    return (node[0], *parts)


def _is_number(node: Node) -> bool:
    inverse = (
        node[0] == "power" and node[2] == MINUS_ONE and node[1][0] == "number" and node[1][1] != 0
    )
    return node[0] == "number" or inverse


def _clear_denominators(node: Node) -> Node:
    """Multiply a difference by all denominators with unknowns; zeros of the difference remain."""
    below = dict.fromkeys(_find_denominators(node))
    return make_product(node, *below) if below else node


def _find_denominators(node: Node) -> Iterator[Node]:
    if node[0] == "power" and node[2][0] == "number" and node[2][1] < 0 and find_symbols(node[1]):
        yield ("power", node[1], ("number", -node[2][1]))
    elif node[0] in ("sum", "product"):
        for part in node[1:]:
            yield from _find_denominators(part)


def _find_factor(left: Node, right: Node, seed: str) -> Value | None:
    """Return the nonzero constant factor between ``left`` and ``right``, or None."""
    factors: list[Value] = []

    def match_factor(first: Value, second: Value, point: SamplePoint) -> bool:
        if first == 0 or second == 0:
            return first == second and bool(factors)
        both = isinstance(first, Fraction) and isinstance(second, Fraction)
        factor = first / second if both else point.to_mpmath(first) / point.to_mpmath(second)
        factors.append(factor)
        return point.is_real(factor) and _is_equal(factor, factors[0], point)

    return factors[0] if _match_at_points(left, right, seed, match_factor) and factors else None


def _match_at_points(
    left: Node,
    right: Node,
    seed: str,
    matches: Callable[[Value, Value, SamplePoint], bool],
) -> bool:
    """Return whether a comparison holds at all points.

    Complex roots and logarithms are used only if too few points have real values.
    """
    nodes = [*iter_subexpressions(left), *iter_subexpressions(right)]
    imaginary = ("symbol", "i") in nodes
    closed = not find_symbols(left) and not find_symbols(right)
    steps = any(node[:2] in STEPPED or node[:2] == ("call", "abs") for node in nodes)
    for complex_roots in (True,) if imaginary else (False, True):
        compared = 0
        rational = True
        for first, second, point in _evaluate_points(left, right, seed, imaginary=complex_roots):
            if not matches(first, second, point):
                return False
            compared += 1
            rational = rational and isinstance(first, Fraction) and isinstance(second, Fraction)
            if closed or (rational and compared == RATIONAL_POINTS and not steps):
                return True
        if compared >= MIN_POINTS:
            return True
    return False


def _evaluate_points(
    left: Node,
    right: Node,
    seed: str,
    *,
    imaginary: bool = False,
) -> Iterator[Pair]:
    """Yield the values of two expressions at all points with values of both."""
    closed = not find_symbols(left) and not find_symbols(right)
    stepped = any(
        node[:2] in STEPPED for node in (*iter_subexpressions(left), *iter_subexpressions(right))
    )
    points = (*POINTS, *STEPS) if stepped else POINTS
    for number, (sign, size) in enumerate(POINTS[:1] if closed else points):
        try:
            yield _evaluate_point(
                left,
                right,
                SamplePoint(f"{seed}{number}", sign, Fraction(size), imaginary=imaginary),
            )
        except UndefinedError:
            continue
        except NarrowerDomainError:
            # The point counts only if an unknown's sign matters to the label's logarithm.
            if _is_sign_dependent(left, right):
                raise
        except TooLargeError:
            # At further sizes, the size of the unknowns may be the reason.
            if size == 1:
                raise


def _is_sign_dependent(label: Node, answer: Node) -> bool:
    """Return whether an unknown's sign may matter to the label's logarithms: a logarithm of an
    absolute value, or logarithms of a single unknown."""
    in_label = _find_logarithms(label)
    in_answer = _find_logarithms(answer)
    if any(n[:2] == ("call", "abs") for log in in_label for n in iter_subexpressions(log)):
        return True
    # The unknowns in ln(a/b) are assumed positive, so that ln a − ln b is equal.
    return bool(in_label) and len(find_symbols(("sum", *in_label, *in_answer))) == 1


def _find_logarithms(expression: Node) -> list[Node]:
    kinds = (("call", "ln"), ("call", "log"))
    return [node for node in iter_subexpressions(expression) if node[:2] in kinds]


def _evaluate_point(left: Node, right: Node, point: SamplePoint) -> Pair:
    """Return the values at a point, with more digits if terms of different sizes lose too many."""
    try:
        values = _evaluate_pair(left, right, point)
        if point.unlike <= SPARE_BITS or all(isinstance(value, Fraction) for value in values):
            return (*values, point)
    except (UndefinedError, NarrowerDomainError):
        if point.unlike <= SPARE_BITS:
            raise
    digits = DIGITS + int(point.unlike * 0.302)
    if digits > MOST_DIGITS:
        raise TooLargeError
    finer = point.with_digits(digits)
    return (*_evaluate_pair(left, right, finer), finer)


def _evaluate_pair(label: Node, answer: Node, point: SamplePoint) -> tuple[Value, Value]:
    expected = point.evaluate(label)
    try:
        return expected, point.evaluate(answer)
    except UndefinedError as error:
        raise NarrowerDomainError from error


def _is_equal(left: Value, right: Value, point: SamplePoint) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    first = point.to_mpmath(left)
    second = point.to_mpmath(right)
    return bool(abs(first - second) <= max(abs(first), abs(second)) * point.rounding * 1000)


def _to_fraction(value: Value) -> Fraction:
    """Return the exact value of a binary number."""
    if isinstance(value, Fraction):
        return Fraction(value)
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** int(exponent)


End = Fraction | float
"""Number, or infinity."""
MAX_DENOMINATOR = 10**12
"""Largest denominator of a value treated as a fraction with rounding errors."""


class Interval(NamedTuple):
    """All real numbers between two ends; a single number if both ends are equal."""

    low: End
    with_low: bool
    high: End
    with_high: bool


def match_real_sets(label: str, answer: str) -> bool | None:
    """Return whether two texts are the same set of numbers; None if unsupported."""
    expected = _parse_intervals(label)
    found = _parse_intervals(answer)
    if expected is None or found is None:
        return None
    named = {unknown for _, unknown in (expected, found) if unknown}
    return len(named) <= 1 and _merge_intervals(expected[0]) == _merge_intervals(found[0])


def _parse_intervals(text: str) -> tuple[list[Interval], str | None] | None:
    """Parse the intervals of a set, and the name of the unknown."""
    intervals: list[Interval] = []
    unknowns: set[str] = set()
    members = split_union(text, UNION + "|,")
    unequal = [found for member in members if (found := UNEQUAL.fullmatch(member))]
    # x ≠ 1, x ≠ 2 excludes both numbers, and is not a union.
    if unequal and len(members) > 1:
        if len(unequal) != len(members) or len({found[1] for found in unequal}) != 1:
            return None
        excluded = ",".join(found[2] for found in unequal)
        return _parse_complement(unequal[0][1] + r"\ne " + excluded)
    for member in members:
        some = _parse_complement(member) or _parse_interval(member)
        if some is None:
            return None
        intervals += some[0]
        unknowns |= {some[1]} if some[1] else set()
    return (intervals, next(iter(unknowns), None)) if len(unknowns) <= 1 else None


def _parse_complement(text: str) -> tuple[list[Interval], str | None] | None:
    r"""Parse the real numbers without some points: ``\mathbb{R} \setminus \{0\}``, ``x \ne 0``."""
    unequal = UNEQUAL.fullmatch(text)
    sides = split(text, r"\\setminus(?![a-zA-Z])|-(?=\s*⦃)")
    if unequal is None and (len(sides) != 2 or re.sub(r"\s", "", sides[0]) != r"\mathbb{R}"):
        return None
    points = _parse_points("⦃" + unequal[2] + "⦄" if unequal else sides[1])
    if points is None:
        return None
    ends: list[End] = [-math.inf, *sorted(points), math.inf]
    intervals = [Interval(low, False, high, False) for low, high in pairwise(ends)]
    return intervals, unequal and unequal[1]


def _parse_interval(text: str) -> tuple[list[Interval], str | None] | None:
    """Parse an interval, or the points of a set as intervals of one number each."""
    points = _parse_points(text)
    if points is not None:
        return [Interval(point, True, point, True) for point in points], None
    found = parse_brackets(text)
    if found is None or len(found.elements) != 2:
        return None
    low, high = map(_parse_endpoint, found.elements)
    if low is None or high is None:
        return None
    return [Interval(low, found.opening == "[", high, found.closing == "]")], found.unknown


def _parse_points(text: str) -> list[Fraction] | None:
    whole = split_brackets(text.strip())
    if whole is None or whole[0] != OPEN_SET:
        return None
    ends = [_parse_endpoint(part) for part in split(whole[1], "[,;]")]
    points = [end for end in ends if isinstance(end, Fraction)]
    return points if len(points) == len(ends) else None


def _parse_endpoint(text: str) -> End | None:
    plain = re.sub(r"[\s+]", "", text)
    if plain in (r"\infty", r"-\infty"):
        return -math.inf if plain[0] == "-" else math.inf
    value = evaluate_constant(text)
    if value is None or isinstance(value, Fraction):
        return value
    exact = _to_fraction(value)
    near = exact.limit_denominator(MAX_DENOMINATOR)
    # A value within rounding of a fraction is the fraction, so that ends in different notations
    # compare as equal.
    close = abs(exact) / 10**EQUAL_DIGITS
    return near if abs(near - exact) <= close else Fraction(value.context.nstr(value, EQUAL_DIGITS))


def _merge_intervals(intervals: list[Interval]) -> list[Interval]:
    """Sort intervals, remove empty intervals, and merge touching intervals."""
    joined: list[Interval] = []
    for one in sorted(intervals, key=lambda one: (one.low, not one.with_low)):
        if one.low > one.high or (one.low == one.high and not (one.with_low and one.with_high)):
            continue
        before = joined[-1] if joined else None
        touch = before and (
            one.low < before.high or (one.low == before.high and (one.with_low or before.with_high))
        )
        if before and touch:
            high, with_high = max((before.high, before.with_high), (one.high, one.with_high))
            joined[-1] = before._replace(high=high, with_high=with_high)
        else:
            joined.append(one)
    return joined

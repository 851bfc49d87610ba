"""Values of an expression at a point: exact if rational, else to as many digits as its terms
need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from mpmath import MPContext  # type: ignore[import-untyped]

from megatron_dppo.rewards.math.expressions import NUMBERS, Node

Value = Any
"""A Fraction, or a real or complex number of ``mpmath``."""

MOST_BITS = 1_000_000
"""Size limit of numbers, in bits: no number that is larger, or nearer to zero, is worked out."""
EXACT_BITS = 40_000
"""Bits of a fraction that is kept exact."""
DIGITS = 50
"""Significant digits of what is not rational, with more for terms of unlike sizes."""
MOST_DIGITS = 1200
SMALL_BITS = 16
"""By which an argument may be smaller than 1 before more digits are taken."""
ROUNDED = 15
"""Digits at the end that rounding may spoil."""
LARGEST_FACTORIAL = 3000


class UndefinedError(Exception):
    """The expression has no value at this point: a quotient by zero, a root of a negative
    number."""


class TooLargeError(Exception):
    """The value is past all bounds that are worked out."""


def iter_subexpressions(node: Node) -> Iterator[Node]:
    """The expression itself and all within it."""
    yield node
    for part in node[1:]:
        if isinstance(part, tuple):
            yield from iter_subexpressions(part)


def find_symbols(expression: Node) -> set[str]:
    """The unknowns of an expression, and the functions in it that are not worked out."""
    known = {"symbol": NUMBERS, "call": WORKED_OUT}
    return {
        node[1]
        for node in iter_subexpressions(expression)
        if node[0] in known and node[1] not in known[node[0]]
    }


class SamplePoint:
    """Values for all unknowns, drawn by their names and a seed.

    Args:
        seed: of the draw.
        sign: 1, -1, or 0 for one that is drawn for each unknown.
        scale: of the unknowns.
        imaginary: whether roots and logarithms of negative numbers are complex ones, or undefined.
        digits: significant ones of what is not rational.
    """

    def __init__(
        self, seed: str, sign: int, scale: Fraction, *, imaginary: bool, digits: int = DIGITS
    ) -> None:
        self.seed = seed
        self.sign = sign
        self.scale = scale
        self.imaginary = imaginary
        self.digits = digits
        self.mp = _get_context(digits)
        self.rounding = self.mp.mpf(10) ** (ROUNDED - digits)
        """Relative size below which a result counts as zero: rounding alone is left of it."""
        self.unlike = 0.0
        """Bits by which terms of a sum differ in size, added up: as many are lost in what is not
        rational."""

    def with_digits(self, digits: int) -> SamplePoint:
        """The same point, with so many significant digits."""
        return SamplePoint(
            self.seed, self.sign, self.scale, imaginary=self.imaginary, digits=digits
        )

    def evaluate(self, node: Node) -> Value:
        """The value of an expression.

        Raises:
            UndefinedError: if it has none here.
            TooLargeError: if it is past all bounds.
        """
        found = self._clean(self._evaluate(node))
        if found != 0 and abs(self.size(found)) > MOST_BITS:
            raise TooLargeError
        return found

    def _evaluate(self, node: Node) -> Value:
        kind = node[0]
        if kind == "number":
            return node[1]
        if kind == "symbol":
            return self._evaluate_symbol(node[1])
        if kind == "sum":
            return self._compute_sum([self.evaluate(term) for term in node[1:]])
        if kind == "product":
            found: Value = Fraction(1)
            for part in node[1:]:
                found = self._clean(self._compute_product(found, self.evaluate(part)))
            return found
        if kind == "power":
            return self._compute_power(self.evaluate(node[1]), self.evaluate(node[2]))
        return self._call(node[1], [self.evaluate(argument) for argument in node[2:]])

    def _evaluate_symbol(self, name: str) -> Value:
        if name == r"\pi":
            return +self.mp.pi
        if name == "e":
            return +self.mp.e
        if name == "i":
            return self.mp.mpc(0, 1)
        return self._sample_value(name)

    def _sample_value(self, name: str) -> Fraction:
        draw = int.from_bytes(
            blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest(), "big"
        )
        sign = self.sign or 1 - 2 * (draw & 1)
        return sign * self.scale * Fraction(3001 + (draw >> 1) % 26993, 10007)

    def _compute_sum(self, terms: list[Value]) -> Value:
        sizes = [self.size(term) for term in terms if term != 0]
        if sizes:
            self.unlike += max(sizes) - min(sizes)
        if all(isinstance(term, Fraction) for term in terms):
            return sum(terms, Fraction(0))
        found = self.mp.fsum(self.to_mpmath(term) for term in terms)
        if (
            found == 0
            or abs(found) <= max(abs(self.to_mpmath(term)) for term in terms) * self.rounding
        ):
            return Fraction(0)
        self.unlike += max(0.0, max(sizes) - self.size(found))
        return found

    def _compute_product(self, one: Value, other: Value) -> Value:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one * other
        return self.to_mpmath(one) * self.to_mpmath(other)

    def _compute_power(self, base: Value, exponent: Value) -> Value:
        if isinstance(exponent, Fraction) and exponent == 0:
            if base == 0:
                raise UndefinedError
            return Fraction(1)
        if base == 0:
            if self.mp.re(self.to_mpmath(exponent)) <= 0:
                raise UndefinedError
            return Fraction(0)
        if abs(self.size(exponent)) > 64 and self.size(exponent) > 0:
            raise TooLargeError
        bits = abs(self.size(base)) + 1
        if bits * abs(float(self.mp.re(self.to_mpmath(exponent)))) > MOST_BITS:
            raise TooLargeError
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                length = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(
                    exponent.numerator
                )
                return (
                    base**exponent.numerator
                    if length <= EXACT_BITS
                    else self.to_mpmath(base) ** exponent.numerator
                )
            if (
                exponent.denominator <= 64
                and base > 0
                and (root := _find_exact_root(base, exponent.denominator))
            ):
                return self._compute_power(root, Fraction(exponent.numerator))
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return self.to_mpmath(base) ** int(exponent)
        self.unlike += max(0.0, -self.size(exponent) - SMALL_BITS)
        if not self.imaginary and (
            not self.is_real(base) or base < 0 or not self.is_real(exponent)
        ):
            raise UndefinedError
        return self.mp.power(self.to_mpmath(base), self.to_mpmath(exponent))

    def _call(self, name: str, arguments: list[Value]) -> Value:
        if name not in WORKED_OUT:
            told = " ".join(self.mp.nstr(self.to_mpmath(argument), 25) for argument in arguments)
            return self._sample_value(f"{name}({told})")
        first = arguments[0]
        if name == "abs":
            return abs(first)
        if name == "root":
            return self._compute_root(first, arguments[1])
        if name in ("floor", "ceil"):
            return self._round_value(name, first)
        if name in ("!", "binom"):
            return self._compute_combinatorial(name, arguments)
        if name in ("log", "ln"):
            return self._compute_logarithm(first, arguments[1] if name == "log" else None)
        argument = self.to_mpmath(first)
        if (
            argument != 0
        ):  # of a large one the digits behind the point count, of a small one its square beside 1
            self.unlike += max(0.0, self.size(argument), -2 * self.size(argument) - SMALL_BITS)
        if self.size(argument) > 200 and argument != 0:
            raise TooLargeError
        if name.endswith("h") and name[0] != "a" and abs(argument) > 1e5:
            raise TooLargeError
        try:
            found = getattr(self.mp, name)(argument)
        except (ZeroDivisionError, ValueError) as error:
            raise UndefinedError from error
        if self.mp.isnan(found) or self.mp.isinf(found):
            raise UndefinedError
        if not self.imaginary and not self.is_real(found):
            raise UndefinedError
        if (
            abs(found) * self.rounding > 1
        ):  # the tangent of a right angle is rounding's, and no value
            raise UndefinedError
        return Fraction(0) if abs(found) <= abs(argument) * self.rounding else found

    def _compute_root(self, base: Value, degree: Value) -> Value:
        if not isinstance(degree, Fraction) or degree == 0:
            if degree == 0:
                raise UndefinedError
            return self._compute_power(base, 1 / self.to_mpmath(degree))
        odd = degree.denominator == 1 and degree.numerator % 2 == 1
        if odd and self.is_real(base) and base < 0:
            return self._compute_product(Fraction(-1), self._compute_power(-base, 1 / degree))
        return self._compute_power(base, 1 / degree)

    def _round_value(self, name: str, value: Value) -> Value:
        if not self.is_real(value):
            raise UndefinedError
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        if abs(value - self.mp.nint(value)) <= self.rounding * (1 + abs(value)):
            return Fraction(int(self.mp.nint(value)))
        return Fraction(int(getattr(self.mp, name)(value)))

    def _compute_combinatorial(self, name: str, arguments: list[Value]) -> Value:
        """Factorials and binomial coefficients: of natural numbers exactly, of others by the gamma
        function."""
        whole = [a.numerator for a in arguments if isinstance(a, Fraction) and a.denominator == 1]
        if len(whole) == len(arguments) and all(
            0 <= number <= LARGEST_FACTORIAL for number in whole
        ):
            return Fraction(math.factorial(whole[0]) if name == "!" else math.comb(*whole))
        if any(self.size(argument) > 16 for argument in arguments if argument != 0):
            raise TooLargeError
        try:
            function = self.mp.factorial if name == "!" else self.mp.binomial
            return function(*(self.to_mpmath(argument) for argument in arguments))
        except (ZeroDivisionError, ValueError) as error:
            raise UndefinedError from error

    def _compute_logarithm(self, value: Value, base: Value | None) -> Value:
        parts = [value] if base is None else [value, base]
        if any(part == 0 for part in parts) or base == 1:
            raise UndefinedError
        if abs(self.to_mpmath(value) - 1) <= self.rounding and not isinstance(value, Fraction):
            return Fraction(0)
        if not self.imaginary and any(not self.is_real(part) or part < 0 for part in parts):
            raise UndefinedError
        if isinstance(value, Fraction) and isinstance(base, Fraction) and value > 0 and base > 0:
            power = round(float(self.size(value) / (self.size(base) or 1)))
            if abs(power) < EXACT_BITS // 64 and base**power == value:
                return Fraction(power)
        for part in parts:  # near one a logarithm is as small as the distance
            if part != 1:
                self.unlike += max(0.0, -self.size(part - 1))
        logarithms = [self.mp.log(self.to_mpmath(part)) for part in parts]
        return logarithms[0] if base is None else logarithms[0] / logarithms[1]

    def to_mpmath(self, value: Value) -> Value:
        """A number of ``mpmath``, for a fraction too."""
        return (
            self.mp.mpf(value.numerator) / value.denominator
            if isinstance(value, Fraction)
            else value
        )

    def size(self, value: Value) -> float:
        """The binary logarithm of a value other than zero, to the next integer."""
        if isinstance(value, Fraction):
            return value.numerator.bit_length() - value.denominator.bit_length()
        return float(self.mp.mag(value)) if value != 0 else 0.0

    def is_real(self, value: Value) -> bool:
        """Whether a value has no imaginary part."""
        return isinstance(value, Fraction) or not isinstance(value, self.mp.mpc) or value.imag == 0

    def _clean(self, value: Value) -> Value:
        """Without a part that only rounding left; and a long fraction as a number of some
        digits."""
        if isinstance(value, Fraction):
            long = value.numerator.bit_length() + value.denominator.bit_length() > EXACT_BITS
            return self.to_mpmath(value) if long else value
        if not self.mp.isfinite(value):
            raise UndefinedError
        if isinstance(value, self.mp.mpc):
            real = value.real
            imaginary = value.imag
            if abs(imaginary) <= abs(real) * self.rounding:
                return real
            return (
                self.mp.mpc(0, imaginary) if abs(real) <= abs(imaginary) * self.rounding else value
            )
        return value


WORKED_OUT = {
    *(
        prefix + name
        for prefix in ("", "a")
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh")
    ),
    *("tanh", "coth", "atanh", "acoth", "abs", "root", "floor", "ceil", "!", "binom", "log", "ln"),
}


@lru_cache(maxsize=16)
def _get_context(digits: int) -> MPContext:
    context = MPContext()
    context.dps = digits
    return context


def _find_exact_root(value: Fraction, degree: int) -> Fraction | None:
    parts = [_find_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return Fraction(parts[0], parts[1]) if parts[0] is not None and parts[1] is not None else None


def _find_integer_root(number: int, degree: int) -> int | None:
    context = _get_context(20 + number.bit_length() // 3 // degree)
    root = int(context.nint(context.root(number, degree)))
    return root if root**degree == number else None

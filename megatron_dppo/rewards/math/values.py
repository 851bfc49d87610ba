"""Values of an expression at a point: exact if rational, else with the precision that the terms
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
"""Fraction, or real or complex number of ``mpmath``."""

MOST_BITS = 1_000_000
"""Size limit in bits: larger numbers, and numbers closer to zero, are not evaluated."""
EXACT_BITS = 40_000
"""Most bits of an exact fraction."""
DIGITS = 50
"""Significant digits of irrational values; terms of different sizes need more."""
MOST_DIGITS = 1200
SMALL_BITS = 16
"""Bits below 1 of an argument before more digits are used."""
ROUNDED = 15
"""Last digits, possibly wrong by rounding."""
LARGEST_FACTORIAL = 3000


class UndefinedError(Exception):
    """The expression has no value at a point: a quotient by zero, a root of a negative number."""


class TooLargeError(Exception):
    """The value is outside the supported bounds."""


def iter_subexpressions(node: Node) -> Iterator[Node]:
    """Yield the expression and all nested expressions."""
    yield node
    for part in node[1:]:
        if isinstance(part, tuple):
            yield from iter_subexpressions(part)


def find_symbols(expression: Node) -> set[str]:
    """Return an expression's unknowns, and functions without evaluation."""
    known = {"symbol": NUMBERS, "call": WORKED_OUT}
    return {
        node[1]
        for node in iter_subexpressions(expression)
        if node[0] in known and node[1] not in known[node[0]]
    }


class SamplePoint:
    """Values for all unknowns, each determined by seed and name.

    Args:
        sign: sign of the unknowns, 1 or -1; 0: a separate random sign for each unknown.
        scale: scale of the unknowns.
        imaginary: permit complex roots and logarithms of negative numbers; otherwise undefined.
        digits: significant digits of irrational values.
    """

    def __init__(
        self,
        seed: str,
        sign: int,
        scale: Fraction,
        *,
        imaginary: bool,
        digits: int = DIGITS,
    ) -> None:
        self.seed = seed
        self.sign = sign
        self.scale = scale
        self.imaginary = imaginary
        self.digits = digits
        self.mp = _get_context(digits)
        self.rounding = self.mp.mpf(10) ** (ROUNDED - digits)
        """Relative size of rounding errors; smaller results count as zero."""
        self.unlike = 0.0
        """Sum of differences in size between terms, in bits: lost bits of irrational values."""

    def with_digits(self, digits: int) -> SamplePoint:
        """Return the same point with ``digits`` significant digits."""
        return SamplePoint(
            self.seed, self.sign, self.scale, imaginary=self.imaginary, digits=digits
        )

    def evaluate(self, node: Node) -> Value:
        """Return the value of an expression.

        Raises:
            UndefinedError: the expression has no value at this point.
            TooLargeError: the value is outside the supported bounds.
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
        if found == 0:
            return Fraction(0)
        # A sum much smaller than the largest term is zero except for rounding.
        if abs(found) <= max(abs(self.to_mpmath(term)) for term in terms) * self.rounding:
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
        # Before the computation, which could take very long.
        bits = abs(self.size(base)) + 1
        if bits * abs(float(self.mp.re(self.to_mpmath(exponent)))) > MOST_BITS:
            raise TooLargeError
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                power = exponent.numerator
                longest = max(base.numerator.bit_length(), base.denominator.bit_length())
                if longest * abs(power) <= EXACT_BITS:
                    return base**power
                return self.to_mpmath(base) ** power
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
            texts = " ".join(self.mp.nstr(self.to_mpmath(argument), 25) for argument in arguments)
            return self._sample_value(f"{name}({texts})")
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
        # A large argument loses digits, because only the fractional digits matter, and a small one,
        # because the function depends on its square next to 1.
        if argument != 0:
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
        # The tangent of a right angle is a rounding error.
        if abs(found) * self.rounding > 1:
            raise UndefinedError
        return Fraction(0) if abs(found) <= abs(argument) * self.rounding else found

    def _compute_root(self, base: Value, degree: Value) -> Value:
        if not isinstance(degree, Fraction) or degree == 0:
            if degree == 0:
                raise UndefinedError
            return self._compute_power(base, 1 / self.to_mpmath(degree))
        # An odd root of a negative number is real.
        odd = degree.denominator == 1 and degree.numerator % 2 == 1
        if odd and self.is_real(base) and base < 0:
            return self._compute_product(Fraction(-1), self._compute_power(-base, 1 / degree))
        return self._compute_power(base, 1 / degree)

    def _round_value(self, name: str, value: Value) -> Value:
        if not self.is_real(value):
            raise UndefinedError
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        # Round a value within rounding errors of an integer to this integer.
        if abs(value - self.mp.nint(value)) <= self.rounding * (1 + abs(value)):
            return Fraction(int(self.mp.nint(value)))
        return Fraction(int(getattr(self.mp, name)(value)))

    def _compute_combinatorial(self, name: str, arguments: list[Value]) -> Value:
        """Compute factorials and binomial coefficients: exactly for natural numbers, else by the
        gamma function."""
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
        # Near 1, the logarithm has the size of the distance from 1.
        for part in parts:
            if part != 1:
                self.unlike += max(0.0, -self.size(part - 1))
        logarithms = [self.mp.log(self.to_mpmath(part)) for part in parts]
        return logarithms[0] if base is None else logarithms[0] / logarithms[1]

    def to_mpmath(self, value: Value) -> Value:
        """Convert a fraction to a number of ``mpmath``; return other values unchanged."""
        if isinstance(value, Fraction):
            return self.mp.mpf(value.numerator) / value.denominator
        return value

    def size(self, value: Value) -> float:
        """Return the binary logarithm of a nonzero value, to the next integer."""
        if isinstance(value, Fraction):
            return value.numerator.bit_length() - value.denominator.bit_length()
        return float(self.mp.mag(value)) if value != 0 else 0.0

    def is_real(self, value: Value) -> bool:
        """Return whether a value has no imaginary part."""
        return isinstance(value, Fraction) or not isinstance(value, self.mp.mpc) or value.imag == 0

    def _clean(self, value: Value) -> Value:
        """Remove a real or imaginary part left by rounding. Convert a long fraction to a number of
        ``mpmath``."""
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
            if abs(real) <= abs(imaginary) * self.rounding:
                return self.mp.mpc(0, imaginary)
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

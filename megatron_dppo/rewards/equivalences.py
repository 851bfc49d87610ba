"""The declared equivalences: all that may differ between an answer and its label, and the answer still be right.

Each is the name that a verdict reports and a sentence of the documentation, with the two pairs that show where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equivalence:
    """One way in which two answers may differ and be the same."""

    says: str
    same: tuple[str, str]
    """A label and an answer that it makes equal."""
    differ: tuple[str, str]
    """The nearest label and answer that it does not."""


EQUIVALENCES = {
    "spelling": Equivalence(
        "LaTeX, Unicode and Markdown spell one thing in several ways: spaces, fonts, bracket sizes, forms of "
        "fractions, dollar signs, a final full stop.",
        (r"\frac12", r"$\dfrac{1}{2}$."),
        ("12", "1 2"),
    ),
    "choice": Equivalence(
        "Of a choice only the letter counts, with or without brackets and the text behind it. Several letters are a "
        "set. A label that is the letter E or I in brackets is a choice, too.",
        (r"\text{(C)}", "C. 12"),
        ("A", "(B)"),
    ),
    "words": Equivalence(
        "Words are compared without case, punctuation, articles and the s of the plural; no solution, none and the "
        "empty set are one.",
        (r"\text{Even}", "even."),
        (r"\text{even}", "odd"),
    ),
    "number": Equivalence(
        "Decimals, fractions, mixed numbers, powers of ten and thousands' separators are compared as exact rational "
        "numbers. A rounded decimal is another number, unless six or more decimals, and six digits behind the "
        "noughts, agree but for the last.",
        (r"3\frac{1}{2}", "3.50"),
        (r"\frac{1}{3}", "0.333"),
    ),
    "unit": Equivalence(
        "A unit, currency or noun may be missing on one side. Where both name one it must measure the same, and the "
        "value is converted. Degrees are a unit: 90° is 90, and π/2.",
        (r"5\text{ cm}", "5"),
        ("5 m", "5 cm"),
    ),
    "percent": Equivalence(
        "50% is the number 1/2. The sign may also be missing, but only from a number over 1: half is not 0.5%.",
        (r"50\%", "0.5"),
        ("0.5", "0.5%"),
    ),
    "base": Equivalence(
        "The base of a numeral may be missing from the answer. Where both name it, it must be the same.",
        ("52_8", "52_{8}"),
        ("52_8", "52_9"),
    ),
    "side": Equivalence(
        "The one name before the equals sign (or ∈) may be missing on one side; two names must be the same. What "
        "stands between several equals signs is of one value.",
        ("5", "x = 5"),
        ("x = 5", "y = 5"),
    ),
    "list": Equivalence(
        "Answers listed with commas, and, or, or a plus-minus sign have no order, and may stand in the braces of a "
        "set; only in braces may one be repeated. Each one counts, with its name; where several names are missing on "
        "one side, the order counts.",
        (r"\{1, 2\}", "2 and 1"),
        ("1, 2", "1, 2, 3"),
    ),
    "tuple": Equivalence(
        "What stands in brackets has an order. Brackets are part of the answer, and of two ends each tells whether it "
        "belongs to the interval.",
        (r"\left(1, \frac12\right)", "(1, 0.5)"),
        ("[0, 1]", "[0, 1)"),
    ),
    "interval": Equivalence(
        "An inequality in one unknown is the interval of its solutions; a union has no order.",
        (r"(3, \infty)", "x > 3"),
        (r"[3, \infty)", "x > 3"),
    ),
    "matrix": Equivalence(
        "Matrices are compared entry by entry, whatever their brackets.",
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ),
    "algebra": Equivalence(
        "Expressions are the same where they have one value. Equations and inequalities are the same where both sides "
        "are, or where the difference of the sides is a multiple of the other's, by a constant or by denominators "
        "that were cleared. Truths about numbers are the same only as they are written.",
        ("(x+1)^2", "x^2+2x+1"),
        ("(x+1)^2", "x^2+1"),
    ),
}

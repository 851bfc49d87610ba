"""The verifier for mathematics: two answers are the same if math-verify finds them equivalent."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of a missing time limit

MARKED = re.compile(r"^.*#[ \t]*([^#\n]+)$", re.MULTILINE)
"""What follows number signs on a line: ``#### 72`` as GSM8K has it, ``#72`` as the arithmetic generator has it."""
NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
BOXED = re.compile(r"\\f?boxed\s*\{")


def math_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    r"""1 if the answer equals the label as mathematics, else 0.

    The answer is what stands in the last ``\boxed{}``, else after the last ``####`` or ``#``, else what math-verify
    takes for the answer (what follows "the answer is", else the last number or expression). The label may be marked so
    too, or be the bare answer. There is no time limit in here: math-verify's own needs signals, and the process that
    this runs in is killed when its time is over.

    Raises:
        ValueError: if the label holds nothing that can be read as mathematics: a fault of the data, not of the answer.
    """
    gold, answer = stated_answer(ground_truth) or ground_truth, stated_answer(solution_str)
    if answer is not None:
        if answer.strip() == gold.strip():
            return 1.0
        numbers = plain_number(gold), plain_number(answer)
        if numbers[0] is not None and numbers[1] is not None:  # spares sympy the great majority of answers
            return float(numbers[0] == numbers[1])
    return float(_equivalent(gold, answer, solution_str))


def stated_answer(text: str) -> str | None:
    r"""The contents of the last ``\boxed{}``, else what follows the last number signs; None without either.

    A line with number signs that is neither the last one nor ends in a plain number is a Markdown heading.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    text = text.rstrip()
    for match in reversed(list(MARKED.finditer(text))):
        if match.end() == len(text) or plain_number(match[1]) is not None:
            return match[1].strip()
    return None


def plain_number(text: str) -> Fraction | None:
    """The value of text that is one decimal number (currency sign, thousands' commas, full stop allowed), else None."""
    text = text.strip().rstrip(".").strip()
    if not any(c.isdigit() for c in text) or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def _last_boxed(text: str) -> str | None:
    start = None
    for match in BOXED.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None  # cut off before it closed: no answer was given


def _equivalent(gold: str, answer: str | None, solution: str) -> bool:
    expected = parse(f"${gold}$", parsing_timeout=None) or parse(gold, parsing_timeout=None)
    if not expected:
        raise ValueError(f"the label {gold!r:.200} cannot be read as mathematics")
    if answer is None:
        found = parse(solution, parsing_timeout=None)
    else:
        found = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    return verify(expected, found, timeout_seconds=None)


# The first call builds grammars, which takes longer than many verdicts: not at the expense of the first completion.
_equivalent("1", r"\frac{2}{2}", "")

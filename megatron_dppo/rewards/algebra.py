"""Expressions and equations, which math-verify compares; and what it is not asked, for it would err or never end."""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify

from megatron_dppo.rewards.spelling import CLOSE_SET, OPEN_SET

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of a missing time limit

COSTLY = re.compile(
    r"\^\s*\{?\s*[-+(]?\s*[0-9]{5}"  # 2^{99999}
    r"|\^\s*(?:[0-9]+\s*[\^!]|[{(][^{}()a-zA-Z]*[\^!])"  # 9^{9^9}, 9^{9!}
    r"|\)\s*\^\s*\{?\s*[0-9]{3}"  # (9^{99})^{999}
    r"|[0-9]{4}\s*!|!\s*\)*\s*!|\*\*|__"
)
"""What sympy would work on without end, or what is no mathematics: its verdict is not asked for."""
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
"""A time of day, which algebra would take for a quotient."""
WORD = re.compile(r"\\text\{[^{}]*[a-zA-Z]{2}[^{}]*\}|(?<![a-zA-Z\\])[a-zA-Z]{4,}|(?<=[0-9])(?:st|nd|rd|th|am|pm)\b")
LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")


def same_algebra(label: str, answer: str) -> bool:
    """math-verify's verdict on two whole texts in ``spelled``'s spelling; it is not let choose a part of them."""
    if any(COSTLY.search(text) or CLOCK.fullmatch(text) for text in (label, answer)):
        return False
    if any("%" in text or "$" in text or text.count("{") != text.count("}") for text in (label, answer)):
        return False  # what stands behind would be passed over
    if _said(label) != _said(answer) or _case_differs(label, answer):  # math-verify passes over both
        return False
    expected, found = (
        parse(f"${_latex(text)}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (label, answer)
    )
    return bool(expected and found) and bool(
        verify(expected, found, timeout_seconds=None, allow_set_relation_comp=True, float_rounding=6)
    )


def _said(text: str) -> list[str]:
    """What stands in the text in words: ``5 or more`` is not 5."""
    return sorted(word for found in WORD.finditer(text) for word in re.findall(r"[a-zA-Z]+", found[0].lower()))


def _case_differs(label: str, answer: str) -> bool:
    """Whether an unknown of the one is in the other only as its capital or small letter."""
    one, other = (set(LETTER.findall(text)) for text in (label, answer))
    return any(letter.swapcase() in other - one for letter in one - other)


def _latex(text: str) -> str:
    for mark, latex in ((OPEN_SET, r"\{"), (CLOSE_SET, r"\}"), ("°", r"^\circ "), ("⟨", "("), ("⟩", ")")):
        text = text.replace(mark, latex)
    return text

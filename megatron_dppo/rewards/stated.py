"""What answer a text states: the last box, the last number signs, and in their absence the declared fallbacks."""

from __future__ import annotations

import re
from fractions import Fraction

MARKED = re.compile(r"^.*#[ \t]*+([^#\n]+)$", re.MULTILINE)
"""What follows number signs on a line: ``#### 72`` as GSM8K has it, ``#72`` as the arithmetic generator has it."""
NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
BOXED = re.compile(r"\\f?boxed\s*(?:\{|([^\s{}\\]))")
BRACE = re.compile(r"[{}]")
SAID = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|\.\s|,\s+(?=[a-z]{2})|\s+(?:because|since|as|which|so|by|when)\b")
"""A full stop before a space ends a sentence, a decimal point does not."""
FORMULA = re.compile(r"\$([^$\n]+)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LOOSE = re.compile(r"(?<![\w.,])[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+|\s?\\?%)?")
MOST_BOXES = 64
"""Boxes at the end of a text that are looked at."""
TAIL = 2000
"""Characters at the end of a text in which the fallbacks look for an answer."""


def stated_answer(text: str) -> str | None:
    r"""The contents of the last ``\boxed{}``, else what follows the last number signs; None without either.

    A line with number signs that is neither the last one nor ends in a plain number is a Markdown heading. A box that
    is cut off before it closes holds no answer: the empty string, and no earlier box counts in its place.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    text = text.rstrip()
    for match in reversed(list(MARKED.finditer(text))):
        if match.end() == len(text) or plain_number(match[1]) is not None:
            return match[1].strip()
    return None


def said_answer(text: str) -> str:
    """Where no answer is marked: the end of the last "answer is …", else the last formula, else the last number."""
    text = text[-TAIL:]
    said = list(SAID.finditer(text))
    if said:
        return SENTENCE_END.split(text[said[-1].end() :], maxsplit=1)[0].strip(" *")
    formulas = list(FORMULA.finditer(text))
    if formulas:
        return next(group for group in formulas[-1].groups() if group is not None).strip()
    numbers = LOOSE.findall(text)
    return numbers[-1].rstrip(",") if numbers else ""


def plain_number(text: str) -> Fraction | None:
    """The value of text that is one decimal number (currency sign, thousands' commas, full stop allowed), else None."""
    text = text.strip().rstrip(".").strip()
    if len(text) > 1000 or not any(c in "0123456789" for c in text) or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def _last_boxed(text: str) -> str | None:
    last, end = None, 0
    for match in list(BOXED.finditer(text))[-MOST_BOXES:]:
        if match.start() < end:  # a box within the box before
            continue
        if match[1] is not None:
            last, end = match[1], match.end()
            continue
        closing = _closing(text, match.end())
        last = text[match.end() : closing] if closing is not None else ""
        end = closing or match.end()
    return last


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None

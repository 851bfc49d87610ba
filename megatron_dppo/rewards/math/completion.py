"""Extraction of a completion's answer, after the thoughts: the last box, else the text after number
signs, else the declared fallbacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

THINKING_TAGS = ("<think>", "</think>")
"""Default of ``reward.thinking_tags``."""
MARKED = re.compile(r"^.*#[ \t]*+([^#\n]+)$", re.MULTILINE)
"""Text after number signs on a line: ``#### 72`` in GSM8K, ``#72`` in the arithmetic generator."""
NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
BOXED = re.compile(r"\\f?boxed\s*(?:\{|([^\s{}\\]))")
BRACE = re.compile(r"[{}]")
ANSWER_PHRASE = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*", re.IGNORECASE)
CLAUSE = re.compile(r"\s(?:because|since|as|which|so|when)\b")
SENTENCE_END = re.compile(rf"\n|\.\s|,\s+(?=[a-z]{{2}})|{CLAUSE.pattern}|\sby\b")
"""End of a sentence: a full stop before a space, not a decimal point."""
AMOUNT = r"[0-9][0-9,]*(?:\.[0-9]+)?"
PAID = rf"{AMOUNT}[.,;:)]?\s+\(?[a-z]{{2,}}\s(?:[^$\n]*\s)?\$"
"""Prose between two dollar signs; the first sign is a currency."""
FORMULA = re.compile(
    rf"(?<!\\)\$(?!{PAID})((?:\\.|[^$\\\n])+)\$(?![0-9])|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]"
    rf"|\${AMOUNT}(?!\w|\s*[\\^/+=<>{{}}$%-])",
    re.DOTALL,
)
"""Formula between delimiters, in a group; or an amount of dollars, without a group."""
LOOSE = re.compile(r"(?<![\w.,])[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+|\s?\\?%)?")
STATED_NUMBER = re.compile(rf"\s+(?:is|are|equals)\s+(?:exactly\s+)?({LOOSE.pattern})[.!]?\s*")
"""Number assigned to the preceding formula by a sentence: ``the largest $n$ is 34.``"""
BETWEEN = re.compile(
    r"(?:[\s$,;.*()]|\\[()\[\],; ]|\\q?quad|\\text\{|\}|\b[a-zA-Z](?:_(?:\w|\{[^{}]*\}))?\s*="
    r"|\b(?:and|or|else|either|also|even|maybe|perhaps|possibly|probably|alternatively|it|could|might|may|be)\b)*+",
    re.IGNORECASE,
)
"""Text between boxes of one answer: a second guess is not a correction."""
LONGEST_BETWEEN = 60
WORD = r"[a-zA-Z'-]+(?:\([^()\s]*\))?"
SUBJECT = re.compile(
    rf"{WORD}[ \t]+(?:(?:{WORD}|[0-9]+|\$[^$\n]+\$|\\\([^\n]+?\\\))[ \t]+){{0,19}}"
    r"(?:is|are|equals)\s+(?:exactly\s+)?",
    re.IGNORECASE,
)
"""Start of a sentence up to the answer: ``The volume is`` 120."""
MOST_BOXES = 64
"""Boxes examined, from the end of a text."""
NEGATED = re.compile(r"\b(?:not|never|neither|nor|no|if|unless|or|and)\b", re.IGNORECASE)
TAIL = 2000
"""Characters at the end of a text searched by the fallbacks."""


def strip_thinking(text: str, prompt: str = "", tags: Sequence[str] = THINKING_TAGS) -> str:
    """Return a completion's text after the last thoughts; empty if the thoughts have no end.

    Args:
        prompt: rendered prompt. A chat template may end the prompt with the opening tag.
        tags: ``reward.thinking_tags``.
    """
    if not tags:
        return text
    opening, closing = tags
    _, closed, answer = text.rpartition(closing)
    open_still = opening in answer or (not closed and prompt.rstrip().endswith(opening))
    return "" if open_still else answer


def extract_marked_answer(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{}``, else the text after the last number signs,
    else None.

    A box without a closing brace gives the empty string; earlier boxes do not count.
    """
    boxes = extract_boxes(text)
    if boxes:
        return ", ".join(boxes)
    text = text.rstrip()
    # An earlier line with number signs is a Markdown heading, unless it ends in a plain number.
    for match in reversed(list(MARKED.finditer(text))):
        if match.end() == len(text) or parse_plain_number(match[1]) is not None:
            return match[1].strip()
    return None


def extract_boxes(text: str) -> list[str]:
    r"""Return the contents of the last box, or of several different boxes at the end if separated
    only by commas, "and", "or" and names."""
    found: list[tuple[int, int, str]] = []
    for match in list(BOXED.finditer(text))[-MOST_BOXES:]:
        # Skip a box nested in the previous box.
        if found and match.start() < found[-1][1]:
            continue
        end = match.end()
        inside = match[1]
        if inside is None:
            closing = _find_closing_brace(text, end)
            end, inside = (end, "") if closing is None else (closing + 1, text[end:closing])
        found.append((match.start(), end, inside))
    boxes = [found[-1][2]] if found else []
    for one, other in zip(reversed(found[:-1]), reversed(found), strict=False):
        between = text[one[1] : other[0]]
        if len(between) > LONGEST_BETWEEN or not BETWEEN.fullmatch(between) or not all(boxes):
            break
        boxes.insert(0, one[2])
    return boxes if len(set(boxes)) > 1 else boxes[:1]


def extract_unmarked_answer(text: str) -> str:
    """Return the text after the last "answer is", else the last formula, else the last number."""
    text = text[-TAIL:]
    phrases = list(ANSWER_PHRASE.finditer(text))
    if phrases:
        start = phrases[-1].end()
        subject = SUBJECT.match(text, start)
        if subject and not NEGATED.search(subject[0]) and not CLAUSE.search(subject[0]):
            start = subject.end()
        return SENTENCE_END.split(text[start:], maxsplit=1)[0].strip(" *")
    formulas = list(FORMULA.finditer(text))
    last = formulas[-1] if formulas else None
    # An amount of money has no group: the answer is then a number in the prose.
    if last and last.lastindex:
        stated = STATED_NUMBER.fullmatch(text, last.end())
        return stated[1].rstrip(",") if stated else last[last.lastindex].strip()
    numbers = LOOSE.findall(text)
    return numbers[-1].rstrip(",") if numbers else ""


def parse_plain_number(text: str) -> Fraction | None:
    """Return the value of a decimal number, perhaps with currency sign, thousands separators and
    full stop; None for any other text."""
    text = text.strip().rstrip(".").strip()
    if len(text) > 1000 or not any(c in "0123456789" for c in text) or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def _find_closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None

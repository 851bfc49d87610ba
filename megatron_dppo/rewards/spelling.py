"""One spelling for what LaTeX, Unicode and Markdown write in several ways. No value changes here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∞": r"\infty ",
    "π": r"\pi ", "θ": r"\theta ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'",
}  # fmt: skip
FRACTIONS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8), "⅜": (3, 8)}
OPEN_SET, CLOSE_SET = "⦃", "⦄"
"""Braces of a set, told apart from LaTeX's grouping."""

REWRITINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r",\\!\s*", ","),
    (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])\.?", " "),
    (r"\\(?:lbrace(?![a-zA-Z])|\{)", OPEN_SET),
    (r"\\(?:rbrace(?![a-zA-Z])|\})", CLOSE_SET),
    (r"\\(?:mathrm|mathbf|textbf|textit|textrm|textsf|mbox|operatorname|mathit|mathsf|rm|bf)\s*\{", r"\\text{"),
    (r"\\vec\s*\{([a-zA-Z]+)\}|\\overline\s*\{([A-Z]{2})\}", lambda found: found[1] or found[2]),
    (r"\\f?boxed\s*\{([^{}]*)\}", r"\1"),
    (r"\\text\{([^{}]*[^{}\s~])[\s~]+\}", r"\\text{\1}"),
    (r"\\text\{[\s~\\,]*(?:and|or)\s*\}|(?<=[\s\d})\]⦄$])\b(?:and|or)\b(?=[\s\\$(])", ","),
    (r"(?<!\\)\\[!,;: ](?=\d{3}(?!\d))|\{,\}\s*", ","),
    (r"(?<!\\)\\[!,;: ]|~", " "),
    (r",\s*,", ","),
    (r"\{\s*\}\s*\^", "^"),
    (r"\s*\^\s*\{?\s*\\(?:circ|degree)(?![a-zA-Z])\s*\}?", "°"),
    (r"\\degree(?![a-zA-Z])|\s+degrees?\b|\\text\{\s*degrees?\}", "°"),
    (r"\\%|\bper ?cent\b|\\text\{\s*per ?cent\}", "%"),
    (r"\\leq(?![a-zA-Z])|<=", r"\\le "),
    (r"\\geq(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:approx|simeq)(?![a-zA-Z])|≈", "="),
    (r"\\neq(?![a-zA-Z])", r"\\ne "),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
    (r"(?i)(?<![a-zA-Z\\])(?:infinity|infty)(?![a-zA-Z])", r"\\infty "),
    (r"\+\s*\\infty", r"\\infty"),
    (r"\\[lr]angle(?![a-zA-Z])", lambda found: "⟨" if found[0][1] == "l" else "⟩"),
    (r"(?i)(?:\\text\{\s*)?\ball real(?: number)?s?\b\}?", r"\\mathbb{R}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}", r"\\frac{\1}{\2}"),
    (r"\s+", " "),
)  # fmt: skip
COMPILED = [(re.compile(pattern), into) for pattern, into in REWRITINGS]


def spelled(text: str) -> str:
    """The text in one spelling: typography, spacing, fraction forms, bracket sizes, fonts; no outer dollar signs."""
    for vulgar, (top, bottom) in FRACTIONS.items():
        text = text.replace(vulgar, f"\\frac{{{top}}}{{{bottom}}}")
    text = re.sub(r"[⁰¹²³⁴-⁹⁻⁺]+", lambda found: "^{" + found[0].translate(SUPERSCRIPTS) + "}", text)
    text = unicodedata.normalize("NFKC", text.replace("°", r"^\circ "))
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")  # marks of no width
    for sign, latex in SIGNS.items():
        text = text.replace(sign, latex)
    text = _without_delimiters(text)
    for pattern, into in COMPILED:
        text = pattern.sub(into, text)
    return _trimmed(text)


def unspaced(text: str) -> str:
    """What two spellings are compared by: LaTeX passes over spaces, but for those that part two numbers."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


def _without_delimiters(text: str) -> str:
    text = text.strip().strip("*`").strip()
    for start, end in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(start) and text.rstrip(".").endswith(end):
            text = text.rstrip(".")[2:-2]
    signs = len(re.findall(r"(?<!\\)\$", text))
    if signs == 1:
        return re.sub(r"(?<!\\)\$(?=\s*[0-9.])", r"\\$", text)
    return re.sub(r"(?<!\\)\$", "", text)


def _trimmed(text: str) -> str:
    previous = None
    while text != previous:
        previous, text = text, text.lstrip(" ,;:=").rstrip(" .,;:")
        text = re.sub(r"\\$", "", text)
        whole = re.fullmatch(r"\{([^{}]*)\}", text)
        text = whole[1] if whole else text
    return text

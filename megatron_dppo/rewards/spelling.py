"""One spelling for what LaTeX, Unicode and Markdown write in several ways. No value changes here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import groupby

SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∞": r"\infty ",
    "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
    "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "∠": r"\angle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "′": "'", "º": "°", "µm": "um", "μm": "um",
}  # fmt: skip
GREEK = re.compile(
    "GREEK (SMALL|CAPITAL) LETTER (ALPHA|BETA|GAMMA|DELTA|EPSILON|ZETA|ETA|THETA|IOTA|KAPPA|LAMDA|MU|NU|XI|PI|RHO"
    "|SIGMA|TAU|UPSILON|PHI|CHI|PSI|OMEGA)"
)
OPEN_SET, CLOSE_SET = "⦃", "⦄"
"""Braces of a set, told apart from LaTeX's grouping."""

REWRITINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=[0-9])(?:,\\!|\{,\}(?:\\!)?)\s*(?=[0-9]{3}(?![0-9]))", ""),
    (r",\\!\s*", ","),
    (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])\.?", " "),
    (r"\\(?:lbrace(?![a-zA-Z])|\{)", OPEN_SET),
    (r"\\(?:rbrace(?![a-zA-Z])|\})", CLOSE_SET),
    (r"\\(?:mathbf|boldsymbol|bm|pmb|textbf|mathit)\s*\{\s*(\\?[a-zA-Z]|\\[a-zA-Z]+)\s*\}", r"{\1}"),
    (r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|textbf|textit|textrm|textsf|texttt|textnormal|textup|mbox|hbox"
     r"|operatorname\*?|boldsymbol|bm|pmb|rm|bf)\s*\{", r"\\text{"),
    (r"\\text\{d\}(?=\s*[a-zA-Z^}])", "d"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"),
    (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus "),
    (r"\\(?:not\s*=)", r"\\ne "),
    (r"\\vec\s*\{([a-zA-Z]+)\}|\\overline\s*\{([A-Z]{2})\}", lambda found: found[1] or found[2]),
    (r"\\f?boxed\s*\{([^{}]*)\}", r"\1"),
    (r"\\text\{([^{}]*[^{}\s~])[\s~]+\}", r"\\text{\1}"),
    (r"\\text\{[\s~\\,]*(?:and|or)\s*\}|(?<=[\s\d})\]⦄$])\b(?:and|or)\b(?=[\s\\$(])", ","),
    (r"(?<!\\)\\[!,;: ](?=\d{3}(?!\d))|\{,\}\s*", ","),
    (r"(?<!\\)\\[!,;: ]|~", " "),
    (r",\s*,", ","),
    (r"\{\s*\}\s*\^", "^"),
    (r"\s*\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))", "°"),
    (r"\\degree(?![a-zA-Z])|\s+degrees?\b|\\text\{\s*degrees?\}", "°"),
    (r"\\%|\b(?:per ?cent|pct)\b|\\text\{\s*(?:per ?cent|pct)\}", "%"),
    (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
    (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
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
    if not text.isascii():
        text = _in_ascii(text)
    text = _without_delimiters(text)
    for pattern, into in COMPILED:
        text = pattern.sub(into, text)
    return _trimmed(text)


def _in_ascii(text: str) -> str:
    """LaTeX for Unicode's signs, Greek letters, fractions, and raised and lowered characters."""
    for sign, latex in SIGNS.items():
        text = text.replace(sign, latex)
    parts = []
    for kind, run in groupby(text, key=lambda character: unicodedata.decomposition(character).partition(" ")[0]):
        if kind in ("<super>", "<sub>"):
            parts.append(f"{'^' if kind == '<super>' else '_'}{{{unicodedata.normalize('NFKC', ''.join(run))}}}")
        else:
            parts += map(_latex, run)
    text = unicodedata.normalize("NFKC", "".join(parts).replace("°", r"^\circ "))
    return "".join(c for c in text if unicodedata.category(c) != "Cf").replace("−", "-")  # marks of no width


def _latex(character: str) -> str:
    kind, _, of = unicodedata.decomposition(character).partition(" ")
    if kind == "<fraction>" and len(of.split()) == 3:
        top, _, bottom = (chr(int(code, 16)) for code in of.split())
        return f"\\frac{{{top}}}{{{bottom}}}"
    named = GREEK.fullmatch(unicodedata.name(character, ""))
    if named is None:
        return character
    letter = named[2].lower().replace("lamda", "lambda")
    return f"\\{letter if named[1] == 'SMALL' else letter.capitalize()} "


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

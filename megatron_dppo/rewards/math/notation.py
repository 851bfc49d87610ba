"""Notation of answers: one spelling for LaTeX, Unicode and Markdown, and parsers of lists,
brackets, names and words in this spelling."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "÷": "/", "⁄": "/", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
    "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "∠": r"\angle ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "′": "'", "º": "°", "μm": "um", "≈": r"\approx ",
}  # fmt: skip
GREEK = re.compile(
    "GREEK (SMALL|CAPITAL) LETTER "
    "(ALPHA|BETA|GAMMA|DELTA|EPSILON|ZETA|ETA|THETA|IOTA|KAPPA|LAMDA|MU|NU|XI|PI|RHO"
    "|SIGMA|TAU|UPSILON|PHI|CHI|PSI|OMEGA)"
)
OPEN_SET = "⦃"
CLOSE_SET = "⦄"
"""Closing brace of a set; like ``OPEN_SET``, distinct from LaTeX's grouping."""
FINITE = r"⦃(?:(?!\\mid)[^⦃⦄|:<>])*⦄"
"""Set with listed members."""

COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac",
    "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ", "geqslant": r"\ge ",
    "lt": "<", "gt": ">", "neq": r"\ne ", "simeq": r"\approx ",
    "vert": "|", "lvert": "|", "rvert": "|", "langle": "⟨", "rangle": "⟩",
    "backslash": r"\setminus ", "smallsetminus": r"\setminus ", "varnothing": r"\emptyset ",
}  # fmt: skip
"""Commands with a simpler or shorter name."""
COMMAND = re.compile(r"\\([a-zA-Z]+)")

REWRITINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=[0-9])(?:,\\!|\{,\}(?:\\!)?)\s*(?=[0-9]{3}(?![0-9]))", ""),
    (r",\\!\s*", ","),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])\.?",
     " "),
    (r"\\(?:lbrace(?![a-zA-Z])|\{)", OPEN_SET),
    (r"\\(?:rbrace(?![a-zA-Z])|\})", CLOSE_SET),
    (r"\\(?:mathbf|boldsymbol|bm|pmb|textbf|mathit)\s*\{\s*(\\?[a-zA-Z]|\\[a-zA-Z]+)\s*\}",
     r"{\1}"),
    (r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|textbf|textit|textrm|textsf|texttt|textnormal|textup|mbox|hbox"
     r"|operatorname\*?|boldsymbol|bm|pmb|rm|bf)\s*\{", r"\\text{"),
    (r"\\text\{d\}(?=\s*[a-zA-Z^}])", "d"),
    (r"\\(?:not\s*=)", r"\\ne "),
    (r"\\vec\s*\{([a-zA-Z]+)\}|\\overline\s*\{([A-Z]{2})\}", lambda found: found[1] or found[2]),
    (r"\\f?boxed\s*\{([^{}]*)\}", r"\1"),
    (r"\\text\{([^{}]*[^{}\s~])[\s~]+\}", r"\\text{\1}"),
    (r"\\text\{[\s~\\,]*(?:and|or)\s*\}|(?<=[\s\d})\]⦄$])\b(?:and|or)\b(?=[\s\\$(])", ","),
    # A letter after a spacing command is a unit, because a factor has no space before.
    (r"^((?:[^a-zA-Z\\]|\\(?:frac|sqrt|pi)(?![a-zA-Z]))+?)\s*(?:\\[,;: ]|~)+\s*([msJNWK])"
     r"(?=(?:\^\{?-?[0-9]\}?)?[\s.]*$)", r"\1\\text{ \2}"),
    (r"(?<!\\)\\[!,;: ](?=\d{3}(?!\d))|\{,\}\s*", ","),
    (r"(?<!\\)\\[!,;: ]|~", " "),
    (r",\s*,", ","),
    (r"\{\s*\}\s*\^", "^"),
    (r"\s*\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))", "°"),
    (r"\\degree(?![a-zA-Z])|\s+degrees?\b|\\text\{\s*degrees?\}", "°"),
    (r"\\%|\b(?:per ?cent|pct)\b|\\text\{\s*(?:per ?cent|pct)\}", "%"),
    (r"(?<=\s)!=", r"\\ne "),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"(?i)(?<![a-zA-Z\\])(?:infinity|infty)(?![a-zA-Z])", r"\\infty "),
    (r"\+\s*\\infty", r"\\infty"),
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
    (rf"^(?:[^⦃⦄]*(?:=|\\in)\s*)?{FINITE}(?:\s*\\cup\s*{FINITE})+[\s.,]*$",
     lambda found: re.sub(r"⦄\s*\\cup\s*⦃", ",", found[0])),
    (r"\s+", " "),
)  # fmt: skip
"""Regular expression and replacement of each rewriting, in order."""
COMPILED = [(re.compile(pattern), into) for pattern, into in REWRITINGS]


def normalize_notation(text: str) -> str:
    """Normalize typography, spacing, fraction forms, bracket sizes and fonts; remove outer dollar
    signs."""
    if not text.isascii():
        text = _convert_to_ascii(text)
    text = COMMAND.sub(lambda found: COMMANDS.get(found[1], found[0]), _strip_delimiters(text))
    for pattern, into in COMPILED:
        text = pattern.sub(into, text)
    return _trim_ends(text)


def _convert_to_ascii(text: str) -> str:
    """Convert Unicode's signs, Greek letters, fractions, superscripts and subscripts to LaTeX."""
    # U+00B5 is a prefix of units, but Greek mu is a letter.
    text = re.sub("µ([a-zA-Z]+)", r"\\mu\\text{\1}", text)
    for sign, latex in SIGNS.items():
        text = text.replace(sign, latex)
    latex_parts = []
    for kind, run in groupby(
        text, key=lambda character: unicodedata.decomposition(character).partition(" ")[0]
    ):
        if kind in ("<super>", "<sub>"):
            sign = "^" if kind == "<super>" else "_"
            latex_parts.append(f"{sign}{{{unicodedata.normalize('NFKC', ''.join(run))}}}")
        else:
            latex_parts += map(_convert_to_latex, run)
    text = unicodedata.normalize("NFKC", "".join(latex_parts).replace("°", r"^\circ "))
    # Invisible characters, such as marks of zero width, have category Cf.
    visible = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return visible.replace("−", "-")


def _convert_to_latex(character: str) -> str:
    kind, _, parts = unicodedata.decomposition(character).partition(" ")
    if kind == "<fraction>" and len(parts.split()) == 3:
        top, _, bottom = (chr(int(code, 16)) for code in parts.split())
        return f"\\frac{{{top}}}{{{bottom}}}"
    named = GREEK.fullmatch(unicodedata.name(character, ""))
    if named is None:
        return character
    letter = named[2].lower().replace("lamda", "lambda")
    return f"\\{letter if named[1] == 'SMALL' else letter.capitalize()} "


def strip_spaces(text: str) -> str:
    """Remove spaces, ignored by LaTeX, except between two digits."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


def _strip_delimiters(text: str) -> str:
    text = text.strip().strip("*`").strip()
    for start, end in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(start) and text.rstrip(".").endswith(end):
            text = text.rstrip(".")[2:-2]
    # A single dollar sign is a currency; several delimit formulas.
    signs = len(re.findall(r"(?<!\\)\$", text))
    if signs == 1:
        return re.sub(r"(?<!\\)\$(?=\s*[0-9.])", r"\\$", text)
    return re.sub(r"(?<!\\)\$", "", text)


def _trim_ends(text: str) -> str:
    previous = None
    while text != previous:
        previous = text
        text = text.lstrip(" ,;:=").rstrip(" .,;:")
        text = re.sub(r"\\$", "", text)
        whole = re.fullmatch(r"\{([^{}]*)\}", text)
        text = whole[1] if whole else text
    return text


OPENING = "([{⟨" + OPEN_SET
CLOSING = ")]}⟩" + CLOSE_SET
SUBSCRIPT = r"(?:_(?:\w++|\{(?:[^{}]|\{[^{}]*\})*+\}))?"
NAME = (
    r"(?:(?:\\?P|\\?Pr)\([^()]*\)|\\text\{[^{}]*\}|\\(?!(?:in|log|ln|sqrt|lg|not)(?![a-zA-Z]))[a-zA-Z]++(?!\{)"
    rf"|[a-zA-Z]{SUBSCRIPT}'*+|\([a-zA-Z, \\]+\)|(?<=[a-zA-Z])\([^()=]*\)|\|[a-zA-Z]+\|"
    r"|(?<=[\w} ]):(?=\s*\\?[a-zA-Z])|\s)++"
)
ASSIGNMENT = r"(?:=|\\in(?![a-zA-Z]))"
SIDE = re.compile(rf"({NAME}){ASSIGNMENT}(.+)")
RELATION = re.compile(r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
UNKNOWN = re.compile(rf"\\?[a-zA-Z]+{SUBSCRIPT}'*(?:\([a-zA-Z]\))?")
BUILDER = re.compile(rf"{OPEN_SET}([^|:]*?)(?:\||:|\\mid)(.*){CLOSE_SET}")
UNION = r"\\cup(?![a-zA-Z])"
COMMA = r"(?:(?<![0-9]),|,(?!0[0-9]{2}(?![0-9]))|;)"
"""Separator of list members; not the comma in 12,000."""
MATRIX = re.compile(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}")


@dataclass(frozen=True, slots=True)
class BracketGroup:
    """Elements between two brackets; two elements and a square bracket make an interval."""

    opening: str
    elements: tuple[str, ...]
    closing: str
    unknown: str | None = None
    """Unknown of an inequality read as an interval."""

    def match_brackets(self, other: BracketGroup) -> bool:
        """Return whether both brackets are equivalent."""
        # The brackets of a longer vector have no meaning.
        if len(self.elements) != 2:
            return True
        opens = (self.opening in "[]") == (other.opening in "[]")
        closes = (self.closing in "[]") == (other.closing in "[]")
        return opens and closes


def split_with_separators(text: str, separator: str) -> list[tuple[str, str]]:
    """Split ``text`` at a regular expression outside brackets; return each part with the separator
    before the part."""
    found = []
    before = ""
    start = 0
    depth = 0
    for match in re.finditer(rf"(?P<separator>{separator})|[{re.escape(OPENING + CLOSING)}]", text):
        if match["separator"] is None:
            depth += 1 if match[0] in OPENING else -1
        elif depth == 0:
            found.append((before, text[start : match.start()].strip()))
            before = match[0]
            start = match.end()
    return [*found, (before, text[start:].strip())]


def split(text: str, separator: str) -> list[str]:
    """Split ``text`` as :func:`split_with_separators`; return the parts alone."""
    return [part for _, part in split_with_separators(text, separator)]


def split_brackets(text: str) -> tuple[str, str, str] | None:
    """Return opening bracket, contents and closing bracket if one pair encloses the whole text.
    Brackets of different kinds are a pair, as in ``(1, 2]``."""
    if len(text) < 2 or text[0] not in OPENING or text[-1] not in CLOSING:
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return (text[0], text[1:-1], text[-1]) if place == len(text) - 1 else None
    return None


def split_union(text: str, separator: str) -> list[str]:
    """Split a union at separators, and nested unions in round brackets as well."""
    found = []
    for part in split(text, separator):
        whole = split_brackets(part)
        inside = whole[1] if whole and whole[0] == "(" else ""
        found += split_union(inside, UNION) if len(split(inside, UNION)) > 1 else [part]
    return found


def split_assignment(text: str) -> tuple[str | None, str]:
    """Split an assignment into name and value; return None and the text unless exactly one name is
    assigned."""
    found = SIDE.fullmatch(text)
    if found is None or RELATION.search(text) or len(split(found[2], ASSIGNMENT)) > 1:
        return None, text
    return strip_spaces(found[1].strip()), found[2].strip()


def parse_members(text: str) -> tuple[list[tuple[str | None, str]], bool]:
    """Parse a list or set; return names and values of the members, and whether the text has braces.

    - A member with a plus-minus sign counts as two members.
    - A name applies to all members listed after the name: in ``n = 2, 3``, n is 2 and 3.
    """
    name, value = split_assignment(text)
    whole = split_brackets(value)
    if whole is not None and whole[0] == OPEN_SET:
        parts = [part for part in split(whole[1], COMMA) if part]
        return [(None, member) for part in parts for member in _expand_signs(part)], True
    found = []
    name = None
    for part in split(text, COMMA):
        own, value = split_assignment(part)
        name = own if own is not None or "=" in part else name
        found += [(name, member) for member in _expand_signs(value) if part]
    return found, False


def unpack_tuple(text: str) -> list[tuple[str | None, str]] | None:
    """Return the members of an assignment between tuples, ``(x, y) = (1, 2)``; None for any other
    text."""
    name, value = split_assignment(text)
    names = split_brackets(name or "")
    values = parse_brackets(value)
    if names is None or values is None or len(split(names[1], ",")) != len(values.elements):
        return None
    return list(zip(split(names[1], ","), values.elements, strict=True))


def with_tuples(text: str, other: str) -> str:
    """Return named solutions as tuples: ``(p,q)=(5,2),(p,q)=(7,2)`` for ``p=5,q=2;p=7,q=2``. Return
    other texts unchanged.

    - The elements have the alphabetical order of the names.
    - A single solution becomes a tuple only if ``other`` is a bare tuple.
    """
    listed, _ = parse_members(text)
    names = sorted({name for name, _ in listed if name})
    starts = range(0, len(listed), len(names) or 1)
    rows = [dict(listed[start : start + len(names)]) for start in starts]
    if len(names) < 2 or any(sorted(map(str, row)) != names for row in rows):
        return text
    whole = split_brackets(other)
    if len(rows) == 1 and not (whole and whole[0] in "(["):
        return text
    tuples = []
    for row in rows:
        values = ",".join(row[name] for name in names)
        tuples.append(f"({','.join(names)})=({values})")
    return ",".join(tuples)


def split_equation_chain(text: str) -> list[str]:
    """Return the sides of a chain of equations; the whole text without an equals sign, or with a
    different relation."""
    return [text] if RELATION.search(text) else split(text, "=")


def is_name(text: str) -> bool:
    """Return whether a value can be assigned to a text."""
    return SIDE.fullmatch(text + "=0") is not None


def parse_brackets(text: str) -> BracketGroup | None:
    """Parse a tuple, vector or interval. An inequality in one unknown is the interval of the
    solutions."""
    built = BUILDER.fullmatch(text)
    text = built[2].strip() if built else text
    if strip_spaces(text) == r"\mathbb{R}":
        return BracketGroup("(", (r"-\infty", r"\infty"), ")")
    whole = split_brackets(text)
    if whole is not None and whole[0] in "([⟨" and whole[2] in ")]⟩":
        inside = split(whole[1], "[,;]")
        return BracketGroup(whole[0], tuple(inside), whole[2]) if len(inside) > 1 else None
    return _parse_inequality(text)


def parse_matrix(text: str) -> list[list[str]] | None:
    """Return the entries of a matrix, row by row."""
    found = MATRIX.fullmatch(text) or MATRIX.fullmatch(
        (split_brackets(text) or ("", "", ""))[1].strip()
    )
    if found is None:
        return None
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    entries = []
    for row in rows:
        entries.append([cell.strip() for cell in row.split("&")])
    return entries


def _expand_signs(text: str) -> list[str]:
    if r"\pm" not in text and r"\mp" not in text:
        return [text]
    return [
        re.sub(r"^\s*\+", "", text.replace(r"\pm", up).replace(r"\mp", down).replace("=  +", "= "))
        for up, down in (("+", "-"), ("-", "+"))
    ]


def _parse_inequality(text: str) -> BracketGroup | None:
    sides = [part.strip() for part in RELATION.split(text)]
    relations = RELATION.findall(text)
    if not relations or len(relations) > 2 or not all(sides) or "=" in text:
        return None
    # The lower end comes first.
    if all(r in (">", r"\ge") for r in relations):
        sides = sides[::-1]
        relations = [{">": "<"}.get(r, r"\le") for r in reversed(relations)]
    elif not all(r in ("<", r"\le") for r in relations):
        return None
    opening = "(" if relations[0] == "<" else "["
    closing = ")" if relations[-1] == "<" else "]"
    if len(sides) == 3 and UNKNOWN.fullmatch(sides[1]):
        return BracketGroup(opening, (sides[0], sides[2]), closing, sides[1])
    if len(sides) == 2 and UNKNOWN.fullmatch(sides[0]):
        return BracketGroup("(", (r"-\infty", sides[1]), closing, sides[0])
    if len(sides) == 2 and UNKNOWN.fullmatch(sides[1]):
        return BracketGroup(opening, (sides[0], r"\infty"), ")", sides[1])
    return None


CHOICE_WITH_TEXT = re.compile(r"\\text\{\s*\(([A-J])\)\s*\}\s*(.+)|\(([A-J])\) ([0-9.,]+)")
"""Letter and text of a choice."""
BARE = re.compile(r"\(\s*([A-J])\s*\)|([A-J])\s*\)?")
CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J])(?:[.):]|$))(?:[\s:.)](?!\s*[,;]).*|$|[^\s+\-*/^=,;].*)",
    re.IGNORECASE,
)
OTHER_CHOICE = re.compile(r"\([A-J]\)|(?<![a-zA-Z])[A-J](?:[.):]|$)")
"""Second chosen letter after the first."""
SHORT = {
    "yes",
    "no",
    "odd",
    "one",
    "two",
    "six",
    "ten",
    "red",
    "all",
    "any",
    "dne",
    "mon",
    "tue",
    "sun",
    "max",
    "min",
}
EMPTY = {"no solution", "none", "empty set", "no such", r"\emptyset", "⦃⦄", "⦃ ⦄"}


def parse_choice_letters(text: str, *, bare: bool = False) -> frozenset[str] | None:
    """Return the letters of a multiple choice; None for any other text.

    Args:
        text: text in the notation of ``normalize_notation``.
        bare: require letters alone, without the text of a choice.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip(" .")
    whole = re.fullmatch(r"\(([^()]*)\)", text)
    listed = whole[1] if whole else text
    letters = [BARE.fullmatch(part.strip()) for part in listed.split(",")]
    if all(letters):
        return frozenset(letter[1] or letter[2] for letter in letters if letter)
    if bare:
        return None
    found = CHOSEN.fullmatch(text)
    # A text with a second choice has no single answer.
    if found and OTHER_CHOICE.search(text, found.end(1) if found[1] else found.end(2)):
        return None
    letter = found and (found[1] or found[2])
    return frozenset(letter) if letter and letter.isupper() else None


def parse_choice(text: str) -> tuple[str, str] | None:
    """Return letter and text of a choice such as ``\\text{(C)} 24``; None for any other text."""
    found = CHOICE_WITH_TEXT.fullmatch(text)
    return (found[1] or found[3], found[2] or found[4]) if found else None


def normalize_words(text: str) -> str | None:
    """Normalize the words of a text: no case, punctuation, articles and plural s. Return None for a
    formula."""
    if text in EMPTY:
        return "no solution"
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9 '\-.!?\"]*", plain):
        return None
    # Short words may be a product of letters.
    if plain == text and not re.search(r"[a-zA-Z]{4}", plain) and plain.lower() not in SHORT:
        return None
    if plain != text and not re.search(r"[a-zA-Z]{2}", plain):
        return None
    words = re.sub(r"[^a-zA-Z0-9 ]", " ", plain.replace("'", "")).split()
    lowered = []
    for word in words:
        # A single letter is a name with a case; "A" is the article.
        lowered.append(word.lower() if len(word) > 1 or word == "A" else word)
    phrase = " ".join(word.removesuffix("s") for word in lowered if word not in ("the", "a", "an"))
    return "no solution" if phrase in EMPTY else phrase

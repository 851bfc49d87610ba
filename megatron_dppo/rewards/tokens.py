"""The pieces that LaTeX expressions are made of: numbers, letters, commands, signs, and blocks that are kept whole."""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+(?:e-?|E[-+]?)|e|E[-+]?)[0-9]{1,4}(?![0-9.])|[0-9]+\.?[0-9]*|\.[0-9]+)"
    r"|(?P<derivative>\\frac\{\s*d\s*(?:\^\{?[0-9]\}?)?\s*(?:\\?[a-zA-Z]+(?:_\{?\w+\}?)?)?\s*\}"
    r"\{\s*d\s*(?:\\[a-zA-Z]+|[a-zA-Z])\s*(?:\^\{?[0-9]\}?)?\s*\}"
    r"|d(?:\^\{?[0-9]\}?)?[a-zA-Z]?\s*/\s*d[a-zA-Z](?:\^\{?[0-9]\}?)?(?![a-zA-Z]))"
    r"|(?P<text>\\text\{[^{}]*\})"
    r"|(?P<block>\\begin\{([a-z]+)\}.*?\\end\{\5\})"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<sign>\\?[^\s\\]))"
)
ROUND = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
INVERSES = {f"{arc}{name}": f"a{name}" for name in ROUND for arc in ("arc", "ar", "a")}
FUNCTIONS = {*ROUND, *INVERSES, "ln", "log", "lg", "exp", "sqrt"}
UNREAD = {
    "det",
    "gcd",
    "lcm",
    "max",
    "min",
    "deg",
    "dim",
    "ker",
    "arg",
    "Re",
    "Im",
    "sgn",
    "Arg",
    "mod",
    "pmod",
    "bmod",
}
"""Functions that are not worked out: equal where their arguments are."""
LARGE = {"sum", "prod", "int", "iint", "oint", "lim", "sup", "inf", "limsup", "liminf", "bigcup", "bigcap"}
"""Operators on the whole term behind them, not worked out either."""
ACCENTS = {
    "overline",
    "bar",
    "hat",
    "tilde",
    "vec",
    "dot",
    "ddot",
    "underline",
    "widehat",
    "widetilde",
    "overrightarrow",
}
ALPHABETS = {"mathbb", "mathcal", "mathfrak", "mathscr"}
LETTERS = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
        "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega varepsilon vartheta varphi varrho varsigma "
        "varpi ell hbar infty emptyset nabla aleph top bot complement star ast dagger",
    )
)
"""Commands that are symbols."""


class UnreadableError(Exception):
    """The text is no expression, or none that is read here."""


def tokens(text: str) -> list[tuple[str, str]]:
    """Kind and text of each piece.

    Raises:
        UnreadableError: for a character that begins none.
    """
    found_tokens: list[tuple[str, str]] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise UnreadableError(text[place:])
        kind = found.lastgroup or ""
        token = found[kind]
        if kind == "word" and len(token) < 4 and token not in FUNCTIONS:
            found_tokens += [("word", letter) for letter in token]  # a product
        else:
            found_tokens.append((kind, token))
        place = found.end()
    return found_tokens

r"""Parser of LaTeX expressions. An unsupported construct makes the whole text unreadable: no part
of a text is skipped.

A node is a tuple that begins with the kind: ``("number", Fraction)``, ``("symbol", name)``,
``("sum", *terms)``, ``("product", *factors)``, ``("power", base, exponent)`` or ``("call", name,
*arguments)``.

- Implicit products bind closer than a slash: ``1/2x`` is 1/(2x).
- An integer followed by a proper fraction is a mixed number. Followed by an improper fraction, the
  text is unreadable, because a product or a sum may be meant.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

Node = tuple[Any, ...]

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


def _split_names(names: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", names))


ROUND = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
INVERSES = {f"{arc}{name}": f"a{name}" for name in ROUND for arc in ("arc", "ar", "a")}
FUNCTIONS = {*ROUND, *INVERSES, "ln", "log", "lg", "exp", "sqrt"}
UNREAD = _split_names("det gcd lcm max min deg dim ker arg Re Im sgn Arg mod pmod bmod")
"""Functions without evaluation: equal arguments give equal values."""
LARGE = _split_names("sum prod int iint oint lim sup inf limsup liminf bigcup bigcap")
"""Operators on the whole term after the name, without evaluation."""
ACCENTS = _split_names(
    "overline bar hat tilde vec dot ddot underline widehat widetilde overrightarrow"
)
ALPHABETS = {"mathbb", "mathcal", "mathfrak", "mathscr"}
LETTERS = _split_names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega "
    "varepsilon vartheta varphi varrho varsigma varpi ell hbar infty emptyset nabla aleph top bot "
    "complement star ast dagger"
)
"""Commands read as symbols."""


class ExpressionParseError(Exception):
    """The text has no expression, or an unsupported one."""


def tokenize(text: str) -> list[tuple[str, str]]:
    """Split a text into tokens, each with kind and text.

    Raises:
        ExpressionParseError: no token begins at a character.
    """
    pieces: list[tuple[str, str]] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise ExpressionParseError(text[place:])
        kind = found.lastgroup or ""
        # A short word that names no function is a product of letters.
        if kind == "word" and len(found[kind]) < 4 and found[kind] not in FUNCTIONS:
            pieces += [("word", letter) for letter in found[kind]]
        else:
            pieces.append((kind, found[kind]))
        place = found.end()
    return pieces


DEEPEST = 60
"""Most nested constructs; a text with deeper nesting is unreadable."""
APPLIED = re.compile(r"(?:[fghpquvFGHPQT]|\\phi|\\psi|\\varphi|\\zeta|[a-zA-Z]'+)(?:_\w+)?'*")
"""Names of possible functions, if followed by a bracket."""
VALUE = re.compile(r"\([0-9.]+(?:,[0-9.]+)*\)(?!\^)")
NUMBERS = {"e", "i", r"\pi"}
"""Letters with a numeric value."""
PAIRS = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
    r"\lVert": r"\rVert",
}
WRAPS = {r"\lfloor": "floor", r"\lceil": "ceil", r"\lVert": "norm"}
TIMES = ("*", r"\cdot", r"\times", r"\ast")
OVER = ("/", ":", r"\div")
NO_FACTOR = {*TIMES, *OVER, *PAIRS.values(), r"\prime"}
PRIMES = (("'",), (r"\prime",), ("^", "'"), ("^", r"\prime"))
DEGREE: Node = ("product", ("symbol", r"\pi"), ("number", Fraction(1, 180)))
MINUS_ONE: Node = ("number", Fraction(-1))


def parse_expressions(*texts: str) -> list[Node]:
    """Parse whole normalized texts as expressions, without relations such as ``=``.

    A name is a function if a text has the name before brackets, and no text has the bare name.

    Raises:
        ExpressionParseError: a text is not a supported expression.
    """
    # Functions are known only after a first pass over all texts.
    readings = [_parse_expression(text, frozenset()) for text in texts]
    called = {name for _, names, _ in readings for name in names}
    bare = {name for _, _, names in readings for name in names}
    functions = frozenset(name for name in called - bare if APPLIED.fullmatch(name))
    return [_parse_expression(text, functions)[0] for text in texts]


@lru_cache(maxsize=512)
def _parse_expression(
    text: str, functions: frozenset[str]
) -> tuple[Node, frozenset[str], frozenset[str]]:
    parser = _Parser(text, functions)
    node = parser.parse_sum()
    if parser.peek():
        raise ExpressionParseError(text)
    return node, frozenset(parser.called), frozenset(parser.bare)


def make_product(*factors: Node) -> Node:
    return factors[0] if len(factors) == 1 else ("product", *factors)


def make_negation(node: Node) -> Node:
    return ("number", -node[1]) if node[0] == "number" else ("product", MINUS_ONE, node)


def make_quotient(top: Node, bottom: Node) -> Node:
    return ("product", top, ("power", bottom, MINUS_ONE))


class _Parser:
    """Recursive descent from sums to atoms; ``place`` is the index of the next token."""

    def __init__(self, text: str, functions: frozenset[str]) -> None:
        self.tokens = [*tokenize(text), ("", "")]
        self.functions = functions
        self.place = self.depth = self.bars = 0
        self.called: set[str] = set()
        self.bare: set[str] = set()

    def peek(self) -> str:
        return self.tokens[self.place][1]

    def get_kind(self) -> str:
        return self.tokens[self.place][0]

    def get_lookahead(self, count: int) -> tuple[str, ...]:
        return tuple(text for _, text in self.tokens[self.place : self.place + count])

    def take(self, expected: str | None = None) -> str:
        text = self.peek()
        if not text or (expected is not None and text != expected):
            raise ExpressionParseError(expected)
        self.place += 1
        return text

    def parse_sum(self) -> Node:
        terms = [self.parse_term()]
        while self.peek() in ("+", "-"):
            terms.append(self.parse_term())
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def parse_term(self) -> Node:
        """Parse signs, and factors separated by signs of multiplication and division."""
        negative = self.parse_signs()
        node = self.parse_factors()
        while (sign := self.peek()) in TIMES or sign in OVER:
            self.take()
            minus = self.parse_signs()
            right = make_negation(self.parse_factors()) if minus else self.parse_factors()
            node = make_quotient(node, right) if sign in OVER else make_product(node, right)
        return make_negation(node) if negative else node

    def parse_signs(self) -> bool:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        return negative

    def parse_factors(self, *, calls: bool = True) -> Node:
        """Parse an implicit product: factors without separating signs."""
        factors = [self.parse_factor()]
        while self.is_factor_start() and (calls or self.peek().removeprefix("\\") not in FUNCTIONS):
            start = self.place
            before = self.tokens[self.place - 1][0]
            # A number after a factor must have a power: 2x 3^x, but not 2 3^x.
            power = before != "number" and self.tokens[self.place + 1][1] == "^"
            if self.get_kind() == "number" and self.tokens[self.place - 1][1] != ")" and not power:
                raise ExpressionParseError("a number behind another factor")
            right = self.parse_factor()
            mixed = (
                factors[-1][0] == before == "number"
                and self.tokens[start][1] == r"\frac"
                and len(factors) == 1
            )
            if mixed:
                factors[-1] = _make_mixed_number(factors[-1], right)
            else:
                factors.append(right)
        return make_product(*factors)

    def is_factor_start(self) -> bool:
        token = self.peek()
        kind = self.get_kind()
        if kind in ("sign", ""):
            return token in ("(", "[", "{", "°") or (token == "|" and not self.bars)
        return token not in NO_FACTOR

    def parse_factor(self) -> Node:
        """Parse an atom with factorials, degree signs, primes and a power."""
        node = self.parse_atom()
        while self.peek() in ("!", "°", "'"):
            mark = self.take()
            if mark == "'":
                node = ("call", "'", node)
            elif mark == "°":
                node = make_product(node, DEGREE)
            elif node[0] == "call" and node[1] == "!":
                raise ExpressionParseError("a factorial of a factorial, or a double one")
            else:
                node = ("call", "!", node)
        if self.peek() == "^":
            self.take()
            node = ("power", node, self.parse_exponent())
            if self.peek() in ("^", "!"):
                raise ExpressionParseError("a power of what power?")
        return node

    def parse_exponent(self) -> Node:
        """Parse the exponent after a caret: a group, or one token with a sign."""
        negative = self.parse_signs()
        if self.get_kind() not in ("number", "word", "command") and self.peek() not in ("(", "{"):
            raise ExpressionParseError("no exponent")
        node = self.parse_atom()
        return make_negation(node) if negative else node

    def parse_enclosed(self, closing: str, comma: str | None = None) -> list[Node]:
        """Parse one sum, or several sums separated by ``comma``, and the closing bracket."""
        # Reset the bars, because a bar within brackets opens a new pair.
        bars = self.bars
        self.bars = 0
        found = [self.parse_sum()]
        while self.peek() == comma:
            self.take()
            found.append(self.parse_sum())
        self.bars = bars
        self.take(closing)
        return found

    def parse_argument(self) -> Node:
        r"""Parse the argument of a command: a group, or one digit, letter or command."""
        if self.get_kind() == "number" and len(self.peek()) > 1:
            raise ExpressionParseError("which digits?")
        return self.parse_atom()

    def take_raw(self) -> str:
        """Take the text of a group or token used as a name."""
        if self.peek() != "{":
            return self.take()
        parts = [self.take()]
        while parts.count("{") > parts.count("}"):
            parts.append(self.take())
        return "".join(parts[1:-1])

    def parse_atom(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ExpressionParseError("nested too deeply")
        node = self.parse_bare_atom()
        self.depth -= 1
        return node

    def parse_bare_atom(self) -> Node:
        kind = self.get_kind()
        token = self.take()
        if kind == "number":
            return ("number", Fraction(token.replace(",", "").rstrip(".")))
        if kind == "word":
            return self.parse_call(token) if token in FUNCTIONS else self.parse_symbol(token)
        if kind == "text":
            return self.parse_words(token[len(r"\text{") : -1])
        if kind == "block":
            return ("symbol", re.sub(r"\s", "", token))
        if kind == "derivative":
            return ("symbol", re.sub(r"\\frac|[\s{}/]", "", token))
        if token in PAIRS:
            (node,) = self.parse_enclosed(PAIRS[token])
            return ("call", WRAPS[token], node) if token in WRAPS else node
        if token == "|":
            self.bars += 1
            node = self.parse_sum()
            self.bars -= 1
            self.take("|")
            return ("call", "abs", node)
        if token == "°":
            return DEGREE
        if kind == "command":
            return self.parse_command(token[1:])
        raise ExpressionParseError(token)

    def parse_words(self, text: str) -> Node:
        text = " ".join(text.replace("~", " ").split())
        if text in FUNCTIONS:
            return self.parse_call(text)
        if re.fullmatch(r"[a-zA-Z]", text) or (text.startswith("\\") and text[1:] in LETTERS):
            return self.parse_symbol(text)
        if written := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)|\(\s*([0-9]+(?:\.[0-9]+)?)\s*\)", text):
            return ("number", Fraction(written[1] or written[2]))
        if not text or "\\" in text:
            raise ExpressionParseError("nothing in words, or what is none")
        # Ignore the case of words, but not of single letters.
        spelling = text.lower() if re.search("[a-zA-Z]{2}", text) else text
        return self.parse_symbol(f"\\text{{{spelling}}}")

    def parse_command(self, name: str) -> Node:
        if name in ("frac", "binom", "dbinom", "tbinom"):
            top = self.parse_argument()
            bottom = self.parse_argument()
            return make_quotient(top, bottom) if name == "frac" else ("call", "binom", top, bottom)
        if name == "sqrt" and self.peek() == "[":
            self.take()
            degree = self.parse_sum()
            self.take("]")
            return ("call", "root", self.parse_argument(), degree)
        if name in FUNCTIONS:
            return self.parse_call(name)
        if name in LARGE or name in UNREAD:
            named = "\\" + name
            while self.peek() in ("_", "^"):
                named += self.take() + "{" + self.take_raw() + "}"
            arguments = [self.parse_term()] if name in LARGE else self.parse_arguments()
            return ("call", named, *arguments)
        if name in ACCENTS or name in ALPHABETS:
            start = self.place
            letters = self.take_raw()
            if name in ALPHABETS or re.fullmatch(r"[a-zA-Z]+", letters):
                return self.parse_symbol(f"\\{name}{{{letters}}}")
            self.place = start
            return ("call", "\\" + name, self.parse_argument())
        if name in ("angle", "measuredangle", "triangle"):
            letters = ""
            while self.get_kind() == "word" and len(letters) < 3:
                letters += self.take()
            if not letters:
                raise ExpressionParseError(name)
            # ABC and CBA are the same angle or triangle.
            return ("symbol", f"\\{name} {min(letters, letters[::-1])}")
        if name in LETTERS:
            return self.parse_symbol("\\" + name)
        raise ExpressionParseError(name)

    def parse_arguments(self) -> list[Node]:
        """Parse arguments in brackets, separated by commas; without brackets, parse one term."""
        if self.peek() != "(":
            return [self.parse_term()]
        self.take()
        return self.parse_enclosed(")", ",")

    def parse_symbol(self, name: str) -> Node:
        """Parse a symbol with subscript and primes, or a function with arguments in brackets."""
        if self.peek() == "_":
            self.take()
            name += "_" + re.sub(r"\\text\{([^{}]*)\}", r"\1", self.take_raw())
        while prime := next(
            (prime for prime in PRIMES if self.get_lookahead(len(prime)) == prime), None
        ):
            name += "'"
            self.place += len(prime)
        if self.get_lookahead(4) == ("^", "{", r"\prime", "}"):
            name += "'"
            self.place += 4
        if self.peek() != "(":
            self.bare.add(name)
            return ("symbol", name)
        self.called.add(name)
        # A name before a number in brackets is a function, because I(0) is not a product by zero.
        of_a_number = VALUE.match("".join(self.get_lookahead(9))) and name not in NUMBERS
        if name in self.functions or of_a_number:
            return ("call", name, *self.parse_arguments())
        return ("symbol", name)

    def parse_call(self, name: str) -> Node:
        """Parse a named function, with the power and the base before the argument."""
        name = INVERSES.get(name, name)
        power = base = None
        for _ in range(2):
            if self.peek() == "^" and power is None:
                self.take()
                power = self.parse_exponent()
            elif self.peek() == "_" and base is None:
                self.take()
                base = self.parse_argument() if self.get_kind() != "number" else self.parse_atom()
        if self.peek() in ("(", "[", "{"):
            node = self.parse_atom()
        else:
            node = self.parse_factors(calls=False)
            # cos 2pi/3 is the cosine of 2pi/3. Reject ln 2/3, because the end of the argument is
            # ambiguous.
            if self.peek() == "/" and self.tokens[self.place + 1][0] == "number":
                if name not in ROUND:
                    raise ExpressionParseError("where does the argument end?")
                self.take()
                node = make_quotient(node, self.parse_atom())
        if name == "sqrt":
            found: Node = ("call", "root", node, ("number", Fraction(2)))
        elif name in ("log", "lg"):
            found = ("call", "log", node, base or ("number", Fraction(10)))
        elif base is not None:
            raise ExpressionParseError("a function with a base")
        elif name == "exp":
            found = ("power", ("symbol", "e"), node)
        elif power == MINUS_ONE and name in ROUND:
            return ("call", "a" + name, node)
        else:
            found = ("call", name, node)
        return found if power is None else ("power", found, power)


def _make_mixed_number(whole: Node, fraction: Node) -> Node:
    r"""Return the sum for numbers, as in ``2\frac{1}{2}``, else the product."""
    parts = fraction[1:] if fraction[0] == "product" else ()
    if (
        len(parts) != 2
        or parts[0][0] != "number"
        or parts[1][:1] != ("power",)
        or parts[1][1][0] != "number"
    ):
        return ("product", whole, fraction)
    top = parts[0][1]
    bottom = parts[1][1][1]
    are_integers = whole[1].denominator == top.denominator == bottom.denominator == 1
    if not (are_integers and 0 < top < bottom):
        raise ExpressionParseError("neither a mixed number nor a product")
    return ("number", whole[1] + top / bottom)

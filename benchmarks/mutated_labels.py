"""Wrong answers, made from labels by one change each."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

NAME = re.compile(r"(?<![a-zA-Z\\.])(?<![0-9][eE])[a-zA-Z](?![a-zA-Z.])(?![-0-9][0-9]*$)")
OPENING, CLOSING = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Label and answer."""

    label: str
    answer: str
    change: str
    """Name of the change."""


Change = Callable[[str, random.Random], str | None]
"""Return the changed label, or None if the change does not apply."""


def mutated(labels: list[str], count: int, seed: int = 0) -> Iterator[Pair]:
    """Yield at most ``count`` distinct wrong answers, by all changes in turn."""
    rng = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    barren = 0
    pools = {}
    for name, change in CHANGES.items():
        pools[name] = [label for label in labels if change(label, rng) is not None]
    while len(seen) < count and barren < 10_000:
        for name, pool in pools.items():
            label = rng.choice(pool or labels)
            answer = CHANGES[name](label, rng)
            barren += 1
            if answer is None or not answer.strip():
                continue
            if answer.split() == label.split() or (label, answer) in seen:
                continue
            barren = 0
            seen.add((label, answer))
            yield Pair(label, answer, name)
            if len(seen) == count:
                return


def _place(pattern: re.Pattern[str] | str, text: str, rng: random.Random) -> re.Match[str] | None:
    found = list(re.finditer(pattern, text))
    return rng.choice(found) if found else None


def _put(text: str, found: re.Match[str], into: str) -> str:
    return text[: found.start()] + into + text[found.end() :]


def one(
    pattern: re.Pattern[str] | str, into: str | Callable[[re.Match[str], random.Random], str]
) -> Change:
    """Build a change of one random match of ``pattern``.

    Args:
        into: replacement, or a function from the match to the replacement.
    """

    def change(label: str, rng: random.Random) -> str | None:
        found = _place(pattern, label, rng)
        if found is None:
            return None
        return _put(label, found, into if isinstance(into, str) else into(found, rng))

    return change


def longer(pattern: str, more: Sequence[str]) -> Change:
    """Build a change that appends a random ending from ``more`` to labels with ``pattern``."""
    return lambda label, rng: label + rng.choice(more) if re.search(pattern, label) else None


def _unused_letters(label: str) -> list[str]:
    return [letter for letter in "abcdkmnpqrstuvwxyzABKMNPR" if letter.lower() not in label.lower()]


def _digit_dropped(label: str, rng: random.Random) -> str | None:
    found = _place(r"(?<=[0-9])[0-9]|[1-9](?=[0-9])", label, rng)
    if found is None or (re.search(r"\.[0-9]*0*$", label[: found.start()]) and found[0] == "0"):
        return None
    return _put(label, found, "")


def _name_everywhere(label: str, rng: random.Random) -> str | None:
    found = _place(NAME, label, rng)
    everywhere = found and rf"(?<![a-zA-Z\\]){found[0]}(?![a-zA-Z])"
    return everywhere and re.sub(everywhere, rng.choice(_unused_letters(label)), label)


def pieces(label: str, separator: str) -> list[str]:
    """Split at separators outside brackets; all parts except the first begin with a separator."""
    depth = 0
    start = 0
    parts = []
    for found in re.finditer(rf"{separator}|[{re.escape(OPENING + CLOSING)}]", label):
        if found[0] in OPENING:
            depth += 1
        elif found[0] in CLOSING:
            depth -= 1
        elif depth == 0 and found.start() > start:
            parts.append(label[start : found.start()])
            start = found.start()
    return [*parts, label[start:]]


def _term_dropped(label: str, rng: random.Random) -> str | None:
    parts = pieces(label, "[+-]")
    if len(parts) < 2:
        return None
    del parts[rng.randrange(len(parts))]
    return _still_related("".join(parts), label)


def _only_a_term(label: str, rng: random.Random) -> str | None:
    parts = pieces(label, "[+-]")
    return _still_related(rng.choice(parts), label) if len(parts) > 1 else None


def _still_related(answer: str, label: str) -> str | None:
    """Return the answer, or None if an equals sign is lost: ``5`` is right for ``x = 5``."""
    return answer if answer.count("=") == label.count("=") else None


def _term_more(label: str, rng: random.Random) -> str | None:
    if not re.search(r"[0-9a-z]\s*$", label) or re.search(r"[_^]\{?\S$", label):
        return None
    return label + rng.choice(TERMS)


def _factor_more(label: str, rng: random.Random) -> str | None:
    if not re.search(r"(?:[0-9]|\b[a-z])\s*$", label) or re.search(r"[_^]\{?\S$|\b0\s*$", label):
        return None
    # 1! = 1 and 2! = 2.
    keeps_factorial = re.search(r"(?<![0-9])[12]\s*$", label)
    return label + rng.choice(FACTORS if keeps_factorial else (*FACTORS, "!"))


def _member_dropped(label: str, rng: random.Random) -> str | None:
    parts = pieces(label, ",|;|and|or")
    if len(parts) < 2 or not parts[-1].strip(" ,;"):
        return None
    del parts[rng.randrange(len(parts))]
    return re.sub(r"^\s*(?:,|;|and|or)", "", "".join(parts))


def _bracket(label: str, rng: random.Random) -> str | None:
    found = _place(r"(?<![{\\])[\[\]]|[()](?=[^()]*,)|(?<=,)(?:[^()\[\],]*)\)", label, rng)
    if found is None or label.count(",") > 1:
        return None
    turned = {"(": "[", ")": "]", "[": "(", "]": ")"}
    return _put(label, found, found[0][:-1] + turned[found[0][-1]])


def _brackets_dropped(label: str, rng: random.Random) -> str | None:
    plain = label.replace(r"\left", "").replace(r"\right", "")
    found = _place(r"(?<!\{)\(([^()]*[+,-][^()]*)\)(?!\})", plain, rng)
    return found and _put(plain, found, f" {found[1]} ")


def _a_bracket_dropped(label: str, rng: random.Random) -> str | None:
    found = _place(r"(?<!\\)[()\[\]{}|]", label, rng)
    if re.fullmatch(r"\(?\\text\{\(?[A-Z]\)?\}\)?,?", label):
        return None
    return found and _put(label, found, "")


def _equation(label: str, rng: random.Random) -> str | None:
    """Return another true equation, another equation, or one side alone."""
    sides = pieces(label, "=")
    if len(sides) < 2:
        return None
    first, last = sides[0], sides[-1].lstrip("=")
    if last.strip() == "0":
        last = "10"
    without_first = "".join(sides[1:]).lstrip("=")
    answers = (
        "0 = 0",
        "1 = 1",
        f"{last} = {last}",
        f"{first} = {first}",
        f"{first} = 19",
        f"{first} = {last} + 1",
        f"{first} = -({last})",
        f"{first} + 1 = {last}",
        f"Z = {last}",
        f"({first})^2 = ({last})^2",
        f"{first} = Q = {last}",
        f"{without_first} = 97",
        first,
    )
    return rng.choice(answers)


def _letters_of_a_word(label: str, rng: random.Random) -> str | None:
    found = _place(r"(?<=[a-zA-Z{ ])[a-rt-z](?=[a-zA-Z]*\}|[a-z]+$)", label, rng)
    within = r"\\(?:text|mbox|mathrm|textbf|mathbf)\{[^{}]*$"
    if found is None or not re.search(within, label[: found.start()]):
        return None
    letters = [letter for letter in "abdefgijklnpqrtuvwxyz" if letter != found[0]]
    return _put(label, found, rng.choice(letters))


def _neighbour(label: str, rng: random.Random) -> str | None:
    """Draw a small integer, a typical guess of a policy."""
    number = str(rng.randint(-2, 12))
    return None if re.search(rf"(?<![0-9.]){number}(?![0-9.])", label) else number


COMMANDS = {
    r"\sin": r"\cos",
    r"\cos": r"\sin",
    r"\ln": r"\sin",
    r"\log": r"\cos",
    r"\sqrt": r"\sqrt[3]",
    r"\tan": r"\cot",
    r"\frac": r"\binom",
    r"\lfloor": r"\lceil",
    r"\cup": r"\cap",
    r"\exp": r"\sin",
}
"""Replacement of a command."""
RELATIONS = {
    "=": (r"\ne ", "<"),
    "<": (">", r"\le "),
    ">": ("<", r"\ge "),
    r"\in": (r"\notin ",),
    r"\cup": (r"\cap ",),
    r"\le": ("<", r"\ge "),
    r"\leq": ("<", r"\ge "),
    r"\ge": (">", r"\le "),
    r"\geq": (">", r"\le "),
}
"""Candidate replacements of a relation; all other relations become an equals sign."""
TERMS = (
    " + 1",
    " - 1",
    " + 10^{-12}",
    " + x",
    r" + \frac{1}{2^{200}}",
    r" + \mathbf{q}",
    " + e^{-90}",
)
FACTORS = (
    r" \cdot 2",
    r" \cdot 1.0000001",
    r"\mathbf{q}",
    r" \cdot q",
    " q",
    r"\text{ or so}",
    "'",
)
MEMBERS = (", 17", r" \text{ or } 18", r" \text{ and } y = 3", ", x = 5", "; -4", r", \frac{1}{7}")
WORDS = (
    " dozen",
    " squared",
    " hundredths",
    " factorial",
    " halves",
    r"\text{ million}",
    r"\%\%",
    " or more",
    " i",
)
GREEK = r"\\(?:pi|theta|alpha|beta|omega|lambda|phi|sigma|gamma|rho)(?![a-zA-Z])"
FRACTION = r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}"
A_SIGN_FITS = (
    r"(?:(?<=^)|(?<=[\[,=])|(?<=\()(?<!cos\()(?<!cos \())\s*(?=[0-9a-zA-Z\\])"
    r"(?!0(?![.0-9])|\\(?:text|mbox|begin|left|right|[{}%,]))"
)
MIXED_NUMBER = r"(?<![0-9.^_{])([1-9][0-9]*)\s*(\\d?frac\s*\{?[0-9]+\}?\s*\{?[0-9]+\}?)"

CHANGES: dict[str, Change] = {
    "digit": one(
        "[0-9]", lambda found, rng: rng.choice([d for d in "0123456789" if d != found[0]])
    ),
    "digit dropped": _digit_dropped,
    "digit more": one(
        r"(?<![.0-9])[1-9](?![0-9]*\.)", lambda found, rng: found[0] + rng.choice("0123456789")
    ),
    "digits turned": one(r"([0-9])(?!\1)([0-9])", lambda found, rng: found[2] + found[1]),
    "point dropped": one(r"(?<=[0-9])\.(?=[0-9])", ""),
    "sign": one("[+-]", lambda found, rng: "-" if found[0] == "+" else "+"),
    "sign dropped": one(r"(?:(?<=^)|(?<=[({\[,=]))\s*-", ""),
    "sign more": one(A_SIGN_FITS, lambda found, rng: found[0] + "-"),
    "exponent": one(
        r"\^(?:\{(-?[0-9]+)\}|([0-9]))",
        lambda found, rng: f"^{{{int(found[1] or found[2]) + rng.choice((-1, 1, 2))}}}",
    ),
    "exponent dropped": one(r"\^(?:\{[^{}\\]+\}|[0-9a-z])", ""),
    "exponent more": one(
        r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z^_'(])", lambda found, rng: f"{found[0]}^2"
    ),
    "name": one(NAME, lambda found, rng: rng.choice(_unused_letters(found.string))),
    "name everywhere": _name_everywhere,
    "capital": one(NAME, lambda found, rng: found[0].swapcase()),
    "Greek letter": one(GREEK, lambda found, rng: r"\tau " if rng.random() < 0.5 else "3 "),
    "command dropped": one(
        r"\\(?:sqrt|sin|cos|tan|ln|log|pi|theta|infty|omega|hbar)(?![a-zA-Z])", " "
    ),
    "other command": one(
        r"\\(?:sin|cos|ln|log|sqrt(?!\[)|tan|frac|lfloor|cup|exp)(?![a-zA-Z])",
        lambda found, rng: COMMANDS[found[0]],
    ),
    "fraction turned": one(FRACTION, lambda found, rng: rf"\frac{{{found[2]}}}{{{found[1]}}}"),
    "half a fraction": one(FRACTION, lambda found, rng: f"{{{found[rng.choice((1, 2))]}}}"),
    "term dropped": _term_dropped,
    "one term": _only_a_term,
    "term more": _term_more,
    "factor more": _factor_more,
    "member dropped": _member_dropped,
    "member more": longer("", MEMBERS),
    "inner member dropped": one(r"(?<=[(\[{,])[^()\[\]{},]+,", ""),
    "order turned": one(
        r"(?<=[(\[])([^()\[\]{},]+),([^()\[\]{},]+)(?=[)\]])",
        lambda found, rng: f"{found[2]},{found[1]}",
    ),
    "bracket turned": _bracket,
    "brackets dropped": _brackets_dropped,
    "bracket dropped": _a_bracket_dropped,
    "relation": one(
        r"\\(?:leq?|geq?|ne|in|cup)(?![a-zA-Z])|[<>=]",
        lambda found, rng: rng.choice(RELATIONS.get(found[0], ("=",))),
    ),
    "equation": _equation,
    "prime": one(r"'+|\^\{?\\prime\s*\}?", lambda found, rng: rng.choice(("", found[0] + "'"))),
    "letter of a word": _letters_of_a_word,
    "other base": one(r"(?<=[0-9])_\{?([0-9]+)\}?", lambda found, rng: f"_{{{int(found[1]) + 1}}}"),
    "base more": longer("^[1-9][0-9]+$", ("_2", "_{7}", "₈")),
    "word more": longer("^-?[1-9][0-9]*$", WORDS),
    "mixed number": one(MIXED_NUMBER, lambda found, rng: rf"{found[1]} \cdot {found[2]}"),
    "guess": _neighbour,
}
"""Changes by name, in the order of trial. ``mixed number`` inserts a product sign between the
parts."""

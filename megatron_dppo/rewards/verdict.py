"""Whether an answer is the label, by the declared equivalences and by no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.rewards.algebra import same_algebra
from megatron_dppo.rewards.numerals import numeral_of
from megatron_dppo.rewards.quantity import same_amount, same_number, same_share
from megatron_dppo.rewards.spelling import OPEN_SET, spelled, unspaced
from megatron_dppo.rewards.structure import RELATION, Bracketed, bracketed, elements, enclosed, matrix, sides, split
from megatron_dppo.rewards.words import choice_of, words_of

LONGEST = 1000
"""Characters of an answer that is read at all; a longer one is right only if it is the label letter by letter."""
DEEPEST = 24
"""Brackets within brackets that are read."""
MOST_MEMBERS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right or wrong, and why."""

    right: bool
    by: tuple[str, ...] = ()
    """Names of the equivalences that were needed, outermost first."""


def judge(label: str, answer: str) -> Verdict:
    """Compare an answer with its label.

    Raises:
        ValueError: if the label is empty.
    """
    if not label.strip():
        raise ValueError(f"the label {label!r:.200} cannot be read as mathematics")
    if label.strip() == answer.strip():
        return Verdict(True)
    if len(answer) > LONGEST or not answer.strip() or _depth(answer) > DEEPEST:
        return Verdict(False)
    used: list[str] = []
    right = _same(spelled(label), spelled(answer), used)
    return Verdict(right, tuple(dict.fromkeys(used)) if right else ())


def _same(label: str, answer: str, used: list[str]) -> bool:
    if not answer or not label:
        return False
    if unspaced(label) == unspaced(answer):
        used.append("spelling")
        return True
    for name, rule in RULES:
        before = len(used)
        verdict = rule(label, answer, used)
        if verdict is not None:
            used[before:] = [name, *used[before:]] if verdict else []
            return verdict
    return False


def _choice(label: str, answer: str, used: list[str]) -> bool | None:
    expected = choice_of(label, bare=True)
    if expected is None:
        return None
    return expected == (choice_of(answer) or choice_of(sides(answer)[1]))


def _words(label: str, answer: str, used: list[str]) -> bool | None:
    expected, said = words_of(label), words_of(answer)
    if expected is None and said is None:
        return None
    return expected == (said or words_of(sides(answer)[1]))


def _base(label: str, answer: str, used: list[str]) -> bool | None:
    numerals = numeral_of(label), numeral_of(answer)
    if numerals == (None, None):
        return None
    digits = [
        numeral[0] if numeral else text.lstrip("0") for numeral, text in zip(numerals, (label, answer), strict=True)
    ]
    bases = {numeral[1] for numeral in numerals if numeral}
    return digits[0] == digits[1] and len(bases) == 1


def _number(label: str, answer: str, used: list[str]) -> bool | None:
    return same_number(label, answer)


def _percent(label: str, answer: str, used: list[str]) -> bool | None:
    return same_share(label, answer, lambda one, other: _same(one, other, used))


def _unit(label: str, answer: str, used: list[str]) -> bool | None:
    return same_amount(label, answer, lambda one, other: _same(one, other, used))


def _interval(label: str, answer: str, used: list[str]) -> bool | None:
    if r"\cup" in label or r"\cup" in answer:
        expected, found = (split(sides(text)[1], r"\\cup(?![a-zA-Z])|[,;]") for text in (label, answer))
        if len(expected) == len(found) == 1:  # the sign stands in a bracket, or beside nothing
            return same_algebra(label, answer)
        return _matched(expected, found, used) or same_algebra(label, answer)
    one, other = bracketed(sides(label)[1]), bracketed(sides(answer)[1])
    if one is None or other is None or not (one.unknown or other.unknown):
        return None
    if one.unknown and other.unknown and one.unknown != other.unknown:
        return False
    return _same_brackets(one, other, used)


def _list(label: str, answer: str, used: list[str]) -> bool | None:
    (expected, braces), (found, others) = elements(sides(label)[1]), elements(sides(answer)[1])
    if (len(expected) == len(found) == 1 and not (braces or others)) or (bracketed(label) and bracketed(answer)):
        return None
    if any(text.startswith(OPEN_SET) and re.search(r"\||:|\\mid", text) for text in (label, answer)):
        return None
    if not (braces or others):
        # Without braces each member keeps its own name: x = 1, y = 2.
        named, others_named = elements(label)[0], elements(answer)[0]
        return len(named) + len(others_named) > 2 and _matched(named, others_named, used)
    if max(len(expected), len(found)) > MOST_MEMBERS:
        return False
    covers = [(expected, found, False), (found, expected, True)]
    return all(
        any(_same(*((theirs, one) if turned else (one, theirs)), used) for theirs in some)
        for all_of, some, turned in covers
        for one in all_of
    )


def _side(label: str, answer: str, used: list[str]) -> bool | None:
    (name, value), (other, found) = sides(label), sides(answer)
    if name is not None and other is not None:
        return _same(value, found, used) if name == other else None
    if name is not None or other is not None:
        bare = answer if name is not None else label
        return None if "=" in bare else _same(value, found, used)
    if ("=" in label) == ("=" in answer):
        return None
    # An equation is no value, unless it is a sum worked out: 2 + 3 = 5.
    chain = split(label if "=" in label else answer, "=")
    if len(chain) == 1:  # the sign stands in a bracket
        return None
    if re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", "".join(chain)) or any(RELATION.search(part) for part in chain):
        return None if any(RELATION.search(part) for part in chain) else False
    return all(_same(label if "=" in answer else answer, part, used) for part in chain)


def _tuple(label: str, answer: str, used: list[str]) -> bool | None:
    expected, found = bracketed(label), bracketed(answer)
    if expected is not None and found is not None:
        return _same_brackets(expected, found, used)
    lone = expected or found
    if lone is not None:  # a tuple is never a number; of an inequality algebra has the word
        return None if lone.unknown else False
    alone = [enclosed(text) for text in (label, answer)]
    if not any(whole is not None and whole[0] in "([" for whole in alone):
        return None
    one, other = (whole[1].strip() if whole else text for whole, text in zip(alone, (label, answer), strict=True))
    return _same(one, other, used)


def _same_brackets(expected: Bracketed, found: Bracketed, used: list[str]) -> bool:
    return (
        len(expected.elements) == len(found.elements)
        and expected.same_brackets(found)
        and all(_same(one, other, used) for one, other in zip(expected.elements, found.elements, strict=True))
    )


def _matrix(label: str, answer: str, used: list[str]) -> bool | None:
    expected, found = matrix(label), matrix(answer)
    if expected is None and found is None:
        return None
    if expected is None or found is None or [len(row) for row in expected] != [len(row) for row in found]:
        return False
    return all(
        _same(one, other, used)
        for row, others in zip(expected, found, strict=True)
        for one, other in zip(row, others, strict=True)
    )


def _algebra(label: str, answer: str, used: list[str]) -> bool:
    return same_algebra(label, answer)


def _matched(expected: Sequence[str], found: Sequence[str], used: list[str]) -> bool:
    """Whether each member of one is just one of the other."""
    if len(expected) != len(found) or len(found) > MOST_MEMBERS:
        return False
    left = list(found)
    for one in expected:
        partner = next((i for i, other in enumerate(left) if _same(one, other, used)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


Rule = Callable[[str, str, list[str]], bool | None]
RULES: tuple[tuple[str, Rule], ...] = (
    ("choice", _choice),
    ("words", _words),
    ("base", _base),
    ("number", _number),
    ("percent", _percent),
    ("unit", _unit),
    ("interval", _interval),
    ("list", _list),
    ("side", _side),
    ("tuple", _tuple),
    ("matrix", _matrix),
    ("algebra", _algebra),
)
"""In the order in which they are asked: the first that knows both sides decides. None: it is not that rule's case."""

"""Comparison of an answer with a label, by the declared equivalences only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.rewards.math.algebra import match_algebra, match_real_sets, strip_approximation
from megatron_dppo.rewards.math.completion import (
    NEGATED,
    SUBJECT,
    THINKING_TAGS,
    extract_boxes,
    extract_marked_answer,
    extract_unmarked_answer,
    parse_plain_number,
    strip_thinking,
)
from megatron_dppo.rewards.math.notation import (
    OPEN_SET,
    BracketGroup,
    is_name,
    normalize_notation,
    normalize_words,
    parse_brackets,
    parse_choice,
    parse_choice_letters,
    parse_matrix,
    parse_members,
    split,
    split_assignment,
    split_brackets,
    split_equation_chain,
    split_union,
    strip_spaces,
    unpack_tuple,
    with_tuples,
)
from megatron_dppo.rewards.math.quantities import (
    match_number,
    match_percent,
    match_quantity,
    parse_numeral,
)

LONGEST = 1000
"""Most characters of a parsed answer; a longer answer must be identical to the label."""
DEEPEST = 24
"""Most nested brackets of a parsed answer."""
MOST_MEMBERS = 64
LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]")
PRODUCT = re.compile(r"(?:[a-z](?:_\{?\w+\}?)?){2,}")
"""Product of names: ``xy = 6`` is an equation."""
NAMED = re.compile(
    r"the (?!.*\b(?:negative|inverse|reciprocal|opposite|half|twice)\b)", re.IGNORECASE
)
"""Beginning of a sentence about the requested value: the largest n is 34."""
OPERATORS = r"\\(?:cup|cap|setminus)(?![a-zA-Z])"
SETS = rf"{OPERATORS}|\\ne(?![a-zA-Z])"
BUILT = re.compile(r":|\\mid(?![a-zA-Z])|^[^|]*(?:\|[^|]*\|[^|]*)*\|[^|]*$")
"""Set defined by a property: with a colon, or a bar outside an absolute value."""
Member = tuple[str | None, str]
"""Name and value."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison, with the reason."""

    right: bool
    by: tuple[str, ...] = ()
    """Names of the applied equivalences, outermost first."""


def grade_answer(label: str, answer: str) -> Verdict:
    """Compare an answer with a label.

    Raises:
        ValueError: the label is empty.
    """
    if not label.strip():
        raise ValueError(f"the label {label!r:.200} cannot be read as mathematics")
    if label.strip() == answer.strip():
        return Verdict(True)
    if len(answer) > LONGEST or not answer.strip() or _compute_depth(answer) > DEEPEST:
        return Verdict(False)
    expected, found = (strip_approximation(normalize_notation(text)) for text in (label, answer))
    # An answer with unbalanced braces is cut off, and has no value: compare the spelling only.
    if answer.count("{") != answer.count("}"):
        right = strip_spaces(expected) == strip_spaces(found)
        return Verdict(right, ("spelling",) if right else ())
    comparison = _Comparison()
    right = comparison.matches(expected, found)
    # An answer may have a subject such as "the largest n is".
    subject = SUBJECT.match(found)
    if not right and subject and NAMED.match(subject[0]) and not NEGATED.search(subject[0]):
        right = comparison.matches(expected, found[subject.end() :])
    return Verdict(right, tuple(dict.fromkeys(comparison.used)) if right else ())


class _Comparison:
    """Comparison of a label with an answer, and of their parts.

    Each method in ``RULES`` is a declared equivalence, and returns None if not applicable.
    """

    def __init__(self) -> None:
        self.used: list[str] = []
        """Names of the equivalences between equal texts, outermost first."""

    def matches(self, label: str, answer: str) -> bool:
        """Return whether two texts in the notation of ``normalize_notation`` are equal."""
        if not answer or not label:
            return False
        if strip_spaces(label) == strip_spaces(answer):
            self.used.append("spelling")
            return True
        for name, rule in RULES.items():
            before = len(self.used)
            verdict = rule(self, label, answer)
            # Insert the name before the names from nested comparisons, because the order is
            # outermost first. No equivalence applies to unequal texts.
            if verdict is not None:
                self.used[before:] = [name, *self.used[before:]] if verdict else []
                return verdict
        return False

    def match_choice(self, label: str, answer: str) -> bool | None:
        expected = parse_choice_letters(label, bare=True)
        if expected is None:
            return self.match_choice_text(label, answer)
        return expected == (
            parse_choice_letters(answer) or parse_choice_letters(split_assignment(answer)[1])
        )

    def match_choice_text(self, label: str, answer: str) -> bool | None:
        """Match a label that has the letter and the text of a choice.

        An answer with only the letter, or only the text, is sufficient. In an answer with both,
        both must match.
        """
        expected = parse_choice(label)
        found = parse_choice(answer)
        if expected is None:
            return None
        if found is not None:
            return expected[0] == found[0] and self.matches(expected[1], found[1])
        letters = parse_choice_letters(answer, bare=True)
        return (
            letters == {expected[0]} if letters is not None else self.matches(expected[1], answer)
        )

    def match_words(self, label: str, answer: str) -> bool | None:
        expected = normalize_words(label)
        words = normalize_words(answer)
        if expected is None and words is None:
            return None
        return expected == (words or normalize_words(split_assignment(answer)[1]))

    def match_base(self, label: str, answer: str) -> bool | None:
        expected = parse_numeral(label)
        found = parse_numeral(answer)
        if expected is None and found is None:
            return None
        # A label without a base is decimal.
        if expected is None:
            return found == (label.lstrip("0"), "10")
        return expected == (found or (answer.lstrip("0"), expected[1]))

    def match_interval(self, label: str, answer: str) -> bool | None:
        name, expected = split_assignment(label)
        other, found = split_assignment(answer)
        two_names = bool(name and other and name != other)
        both = label + "\n" + answer
        if re.search(SETS, both):
            if two_names:
                return False
            same = match_real_sets(expected, found)
            if same is None and re.search(OPERATORS, both):
                return self.match_sets(expected, found)
            return same
        one = parse_brackets(expected)
        two = parse_brackets(found)
        if one is None or two is None:
            return None
        # x in (1, 2) differs from y in (1, 2).
        if not (one.unknown or two.unknown):
            return False if two_names else None
        unknowns = {unknown for unknown in (name, other, one.unknown, two.unknown) if unknown}
        return len(unknowns) == 1 and self.match_brackets(one, two)

    def match_sets(self, expected: str, found: str) -> bool:
        """Match unions and intersections in any order, and differences in the same order."""
        for operator in ("setminus", "cup", "cap"):
            parted = split_union if operator == "cup" else split
            ones, others = (
                parted(text, rf"\\{operator}(?![a-zA-Z])") for text in (expected, found)
            )
            if max(len(ones), len(others)) > 1:
                if operator == "setminus":
                    return self.match_all(ones, others)
                return self.match_members(
                    [(None, one) for one in ones], [(None, other) for other in others]
                )
        return match_algebra(expected, found)

    def match_list(self, label: str, answer: str) -> bool | None:
        # Compare named solutions as tuples first.
        tuples = with_tuples(label, answer), with_tuples(answer, label)
        if tuples != (label, answer):
            return self.matches(*tuples)
        expected, braces = parse_members(label)
        found, others = parse_members(answer)
        if len(expected) == len(found) == 1 and not (braces or others):
            return None
        if parse_brackets(label) and parse_brackets(answer):
            return None
        if any(text.startswith(OPEN_SET) and BUILT.search(text) for text in (label, answer)):
            return None
        if max(len(expected), len(found)) > MOST_MEMBERS:
            return False
        counts = {len(expected), len(found)}
        if len(counts) == 2 and 1 in counts and not (braces or others):
            expected = unpack_tuple(label) or expected
            found = unpack_tuple(answer) or found
        if braces and others:
            owners = {split_assignment(text)[0] for text in (label, answer)}
            if None not in owners and len(owners) > 1:
                return False
        if not (braces or others):
            return self.match_members(expected, found)

        def is_found(one: Member) -> bool:
            return any(self.match_member(one, two) for two in found)

        def is_expected(two: Member) -> bool:
            return any(self.match_member(one, two) for one in expected)

        # In both directions, because repeated members count once.
        return all(map(is_found, expected)) and all(map(is_expected, found))

    def match_members(self, expected: Sequence[Member], found: Sequence[Member]) -> bool:
        """Return whether the members match one to one; in order if one side has several names and
        the opposite side lacks names."""
        if len(expected) != len(found) or len(found) > MOST_MEMBERS:
            return False
        ordered = (_has_several_names(expected) and _lacks_name(found)) or (
            _has_several_names(found) and _lacks_name(expected)
        )
        if ordered:
            return all(
                self.match_member(one, two) for one, two in zip(expected, found, strict=True)
            )
        left = list(found)
        for one in expected:
            partner = next((i for i, two in enumerate(left) if self.match_member(one, two)), None)
            if partner is None:
                return False
            del left[partner]
        return True

    def match_all(self, expected: Sequence[str], found: Sequence[str]) -> bool:
        """Return whether the texts match in order."""
        return len(expected) == len(found) and all(map(self.matches, expected, found))

    def match_member(self, one: Member, two: Member) -> bool:
        named = one[0] is None or two[0] is None or one[0] == two[0]
        return named and self.matches(one[1], two[1])

    def match_side(self, label: str, answer: str) -> bool | None:
        name, value = split_assignment(label)
        other, found = split_assignment(answer)
        if name is not None and other is not None:
            return self.matches(value, found) if name == other else None
        chains = split_equation_chain(label), split_equation_chain(answer)
        if max(map(len, chains)) > 2:
            return self.match_chain(*chains)
        if name is not None or other is not None:
            bare = answer if name is not None else label
            if "=" in bare or (name is not None and PRODUCT.fullmatch(name)):
                return None
            return self.matches(value, found)
        if len(chains[0]) == len(chains[1]):
            return None
        return self.match_chain(*chains)

    def match_chain(self, expected: list[str], found: list[str]) -> bool | None:
        """Match chains of equations.

        - Names precede values in each chain, else None is returned.
        - Both chains have the same names, or only one chain has names, a single name.
        - All values of both chains are equal.
        """
        names = []
        values = []
        for chain in (expected, found):
            named = [is_name(part) for part in chain]
            if sorted(named, reverse=True) != named:
                return None
            names.append({strip_spaces(part) for part in chain if is_name(part)})
            values.append([part for part in chain if not is_name(part)])
        few = sorted(map(len, names)) in ([0, 0], [0, 1])
        if not all(values) or not (names[0] == names[1] or few):
            return False
        # Without names, only a calculation without letters has a value: 2 + 3 = 5.
        if names == [set(), set()] and any(LETTER.search(part) for part in (*expected, *found)):
            return False
        return all(self.matches(values[0][0], value) for value in (*values[0][1:], *values[1]))

    def match_tuple(self, label: str, answer: str) -> bool | None:
        expected = parse_brackets(label)
        found = parse_brackets(answer)
        if expected is not None and found is not None:
            return self.match_brackets(expected, found)
        lone = expected or found
        # A tuple never equals a number. Leave an inequality to algebra.
        if lone is not None:
            return None if lone.unknown else False
        alone = [split_brackets(text) for text in (label, answer)]
        if not any(whole is not None and whole[0] in "([" for whole in alone):
            return None
        one = alone[0][1].strip() if alone[0] else label
        other = alone[1][1].strip() if alone[1] else answer
        return self.matches(one, other)

    def match_brackets(self, expected: BracketGroup, found: BracketGroup) -> bool:
        return expected.match_brackets(found) and self.match_all(expected.elements, found.elements)

    def match_matrix(self, label: str, answer: str) -> bool | None:
        expected = parse_matrix(label)
        found = parse_matrix(answer)
        if expected is None and found is None:
            return None
        if expected is None or found is None or len(expected) != len(found):
            return False
        return all(map(self.match_all, expected, found))


RULES: Mapping[str, Callable[[_Comparison, str, str], bool | None]] = {
    "choice": _Comparison.match_choice,
    "words": _Comparison.match_words,
    "base": _Comparison.match_base,
    "number": lambda _, label, answer: match_number(label, answer),
    "percent": lambda comparison, label, answer: match_percent(label, answer, comparison.matches),
    "unit": lambda comparison, label, answer: match_quantity(label, answer, comparison.matches),
    "interval": _Comparison.match_interval,
    "list": _Comparison.match_list,
    "side": _Comparison.match_side,
    "tuple": _Comparison.match_tuple,
    "matrix": _Comparison.match_matrix,
    "algebra": lambda _, label, answer: match_algebra(label, answer),
}
"""Equivalences in order: the first applicable equivalence decides."""


def _has_several_names(members: Sequence[Member]) -> bool:
    return len({name for name, _ in members if name}) > 1


def _lacks_name(members: Sequence[Member]) -> bool:
    return any(name is None for name, _ in members)


def _compute_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def math_verdict(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    prompt: str = "",
    thinking_tags: Sequence[str] = THINKING_TAGS,
) -> dict[str, Any]:
    r"""Score an answer in a completion against a label.

    The answer is searched after the thoughts (see
    :func:`~megatron_dppo.rewards.math.completion.strip_thinking`), in this order:

    - the last ``\boxed{}``, or the last boxes if several are listed,
    - the text after the last ``####`` or ``#``,
    - the result of :func:`~megatron_dppo.rewards.math.completion.extract_unmarked_answer`.

    The label may be marked in the same way, or be the bare answer. There is no time limit: if the
    comparison hangs, the caller must kill the process.

    Returns:
        ``score``: 1 if the answer equals the label as mathematics, else 0; ``pred``: the answer;
        ``by``: applied equivalences.

    Raises:
        ValueError: the label is empty, which is an error of the data.
    """
    label = extract_marked_answer(ground_truth) or ground_truth
    solution_str = strip_thinking(solution_str, prompt, thinking_tags)
    answer = extract_marked_answer(solution_str)
    if answer is None:
        answer = extract_unmarked_answer(solution_str)
    numbers = parse_plain_number(label), parse_plain_number(answer)
    if numbers[0] is not None and numbers[1] is not None and numbers[0] == numbers[1]:
        # Most answers are plain numbers.
        by = () if label.strip() == answer.strip() else ("number",)
        return {"score": 1.0, "pred": answer, "by": by}
    verdict = grade_answer(label, answer)
    boxes = extract_boxes(solution_str)
    # Several boxes may hold several forms of one answer.
    if not verdict.right and len(boxes) > 1:
        forms = [grade_answer(label, box) for box in boxes]
        verdict = forms[-1] if all(form.right for form in forms) else verdict
    return {"score": float(verdict.right), "pred": answer, "by": verdict.by}


# The first call is slow, and must not count against a completion.
grade_answer(r"\sqrt{4}", r"2^{1}")

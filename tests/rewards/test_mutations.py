"""Answers made from labels by one change are wrong, and labels in other spellings are right.

The labels here are made up, one of each kind; ``benchmarks/verdicts.py`` takes those of published problems.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.mutated_labels import Pair, mutated
from benchmarks.respelled_labels import SPELLINGS, respelled
from benchmarks.sympy_equivalence import equivalent
from megatron_dppo.rewards.math.verdict import judge

LABELS = [
    "7", "-12", "1234", "0.75", r"\frac{3}{8}", r"-\frac{17}{6}", r"2\frac{3}{4}", r"5\sqrt{3}",
    r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"3\pi", r"\frac{2\pi}{5}", "(4, -7)", r"\left(1, \frac{5}{2}, -3\right)", "[2, 5)",
    r"(-\infty, 3] \cup (7, 9)", "1, 4, 9", r"\{2, 3, 5\}", "x=3, y=-8", r"x=-4 \text{ or } x=6", "f(x)=x^2+1, g(x)=3x",
    "x^2-5x+6", "(a+2)(b-3)", "y=4x-9", "x^2+y^2=25", "3x-2y+z-8=0", "y''+4y=0", r"\frac{dy}{dt}=-3y", "x>12",
    r"2 \le n < 8", "6-5i", r"2e^{-3t}", r"\ln 5", r"\log_2 (x+1)", r"\sin^2 x - \cos 3x", r"\frac{x^2-1}{x+4}",
    r"45^\circ", r"30\text{ cm}^2", r"\$18.25", "64\\%", r"\text{(D)}", r"\text{parabola}", "2031_5",
    r"\frac{2}{3}\mathbf{a}+\frac{1}{3}\mathbf{b}", r"\frac{1}{2^{301}}", r"3-\frac{1}{3^{90}}",
    r"\begin{pmatrix} 2 & -1 \\ 0 & 7 \end{pmatrix}", r"\binom{n}{3}", r"\lfloor \frac{n+3}{2} \rfloor", "4:7",
    "2.45e6", r"|x-6|+1", r"n!\,(n+2)", r"\sqrt[3]{x+7}", r"m g \sin \theta", r"\angle BAC", r"f'(x)+x", "2^{40}+1",
    "x^3+2x+7", r"\{-4, 1\}",
]  # fmt: skip
PAIRS = 1500


@pytest.fixture(scope="module")
def wrong() -> list[Pair]:
    return list(mutated(LABELS, PAIRS))


def test_no_answer_with_one_change_is_right(wrong: list[Pair]) -> None:
    right = [pair for pair in wrong if judge(pair.label, pair.answer).right]
    assert not [pair for pair in right if not equivalent(pair.label, pair.answer)]


def test_every_other_spelling_is_right() -> None:
    pairs = [(label, name, answer) for label in LABELS for name, answer in respelled(label)]
    assert not [(label, answer) for label, _, answer in pairs if not judge(label, answer).right]
    assert {name for _, name, _ in pairs} == set(SPELLINGS)


@pytest.mark.parametrize(
    ("label", "answer", "same"),
    [
        ("x(x+1)", "x^2+x", True),
        ("x(x+1)", "x^2-x", False),
        (r"\frac{1}{2^{50}}", r"\frac{1}{2^{51}}", False),
        ("x^2=4", "2x^2=8", True),
        ("x^2=4", "0=0", False),
        (r"5\mathbf{a}", "5", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("(1, 2)", "(2, 1)", False),
    ],
)
def test_what_excuses_a_change_is_strict_itself(label: str, answer: str, same: bool) -> None:
    assert equivalent(label, answer) is same


TOKENS = [
    r"\frac{", "}{", "}", "{", "(", ")", "[", "]", "x", "n", "2", "99", "^", "^{", "_", "!", "+", "-", "=", "<",
    r"\le ", r"\pm ", r"\sqrt{", r"\sqrt[", r"\sin ", r"\log_", "|", r"\lfloor ", ",", ";", r"\cup ", r"\text{", "cm",
    " ", r"\pi ", "e", "i", r"\infty ", "°", r"\%", r"\$", r"\{", r"\}", ".", ":", "/", r"\sum_{k=1}^{", "f(", "'",
    r"\setminus ", r"\in ", "₂", "²", "½", "and ", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&", r"\angle ",
    r"\mathbf{", "dozen", r"\ne ", "10^{", "9999",
]  # fmt: skip


def test_no_text_is_an_error() -> None:
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(rng.choice(TOKENS) for _ in range(rng.choice((3, 8, 40))))
        label = rng.choice(LABELS)
        judge(label, text)
        judge(text + "5", label)
        judge(text + "5", text[: len(text) // 2])

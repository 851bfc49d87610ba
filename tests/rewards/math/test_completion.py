"""The answer in a completion: marked, boxed or told, after the thoughts."""

from __future__ import annotations

import pytest

from megatron_dppo.rewards.math.completion import (
    extract_marked_answer,
    extract_unmarked_answer,
    strip_thinking,
)
from megatron_dppo.rewards.math.verdict import math_verdict

GSM8K_LABEL = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 "
    "clips.\n#### 72"
)


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("24+48=72\n#### 72", GSM8K_LABEL, True),
        ("it is 72, no, 71.", GSM8K_LABEL, False),
        ("#### $1,072.00", "#### 1072", True),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}}", "0.5", True),
        (r"first \boxed{\frac{1}{2}}, then \boxed{3}", "0.5", False),
        (r"thus $\frac{2}{4}$", r"\boxed{\frac{1}{2}}", True),
        ("So the largest $n$ is exactly 34.", "34", True),
        ("The largest $n$ is not 34.", "34", False),
        (r"\boxed{1} and \boxed{2}", "2, 1", True),
        (r"\boxed{1} or \boxed{2}", "2", False),
        (r"$x = \boxed{1}$ and $y = \boxed{2}$", "x=1, y=2", True),
        (r"$x = \boxed{2}$ and $y = \boxed{1}$", "x=1, y=2", False),
        (r"it is $\boxed{15\frac{3}{4}}$ or $\boxed{\frac{63}{4}}$", r"\frac{63}{4}", True),
        ("Final Answer: The volume is 120.", "120", True),
        ("Final Answer: The volume is 120 or 130.", "120", False),
        (r"\boxed{1} or maybe \boxed{3}", "3", False),
        ("Final Answer: The number of integers in the domain of $f(x)$ is 19.", "19", True),
        ("The answer is the area enclosed by $C$ is 19.", "19", True),
        ("Ann has $300, Bob $955 and $x$ is $9,200. In total it is $10,455", "10455", True),
    ],
)
def test_completions_are_judged(answer: str, label: str, right: bool) -> None:
    assert math_verdict("", answer, label)["score"] == float(right)


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("#### 5\n#### 6", "6"),
        ("#### 6\nThat is all.", "6"),
        ("## Step 1\nwe add", None),
        (r"\boxed{a{b}c} # 7", "a{b}c"),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"\boxed{x = \boxed{2}, 3}", r"x = \boxed{2}, 3"),
        (r"\boxed 7", "7"),
        (r"\fbox \boxed{1} and \boxed{2", ""),
        (r"\boxed{never closed, \boxed{2}", "2"),
        ("#7\n\n", "7"),
        ("7", None),
    ],
)
def test_last_stated_answer_counts(text: str, stated: str | None) -> None:
    assert extract_marked_answer(text) == stated


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The answer is 3. I checked it twice.", "3"),
        ("The answer is 3.5.", "3.5."),
        ("**Answer:** 12", "12"),
        ("the answer is 2, no, the answer is $\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("the answer is 72, as she sold twice as many", "72"),
        ("the answer is 5 cm because it doubled", "5 cm"),
        ("so $x = 2$ and then $x = 3$ at 4 places", "x = 3"),
        ("it is 72, no, 71.", "71"),
        ("it is 1/2 of them", "1/2"),
        ("it is 1,234,567 in all", "1,234,567"),
        ("7 at first" + " and so on" * 1000, ""),
        ("", ""),
    ],
)
def test_without_a_mark_the_last_statement_counts(text: str, said: str) -> None:
    assert extract_unmarked_answer(text) == said


PLAIN, OPENED, CLOSED = (
    "user: ?\nassistant: ",
    "assistant: <think>\n",
    "assistant: <think>\n\n</think>\n\n",
)
"""Ends of prompts. A chat template may open the thoughts, or leave them empty."""
THOUGHTS = [
    (PLAIN, r"<think>\boxed{42}</think> The answer is 43.", "43"),
    (PLAIN, r"<think> so \boxed{42}", ""),
    (PLAIN, r"<think> so \boxed{42} </think>", ""),
    (PLAIN, r"so \boxed{43}", "43"),
    (OPENED, r"so \boxed{42}</think>\boxed{43}", "43"),
    (OPENED, r"so \boxed{42}", ""),
    (OPENED, r"<think>so \boxed{42}</think>\boxed{43}", "43"),
    (CLOSED, r"so \boxed{43}", "43"),
    (CLOSED, r"<think> so \boxed{42}", ""),
    ("What does <think> mean?\nassistant: ", r"\boxed{43}", "43"),
    (PLAIN, r"<think>\boxed{1}</think>\boxed{42}<think>no,</think> #### 43", "43"),
    (PLAIN, r"<think>\boxed{1}</think>\boxed{43}<think>or", ""),
]
"""Prompt, completion, and the answer after the thoughts."""


@pytest.mark.parametrize(("prompt", "completion", "answer"), THOUGHTS)
def test_thoughts_are_no_answer(prompt: str, completion: str, answer: str) -> None:
    for label in ("42", "43"):
        verdict = math_verdict("", completion, label, prompt=prompt)
        assert (verdict["score"], verdict["pred"].rstrip(".")) == (float(label == answer), answer)


def test_thinking_tags_are_a_setting() -> None:
    text = r"[T] \boxed{42} [/T] <think> \boxed{43}"
    assert strip_thinking(text) == ""
    assert strip_thinking(text, tags=()) == text
    assert strip_thinking(text, tags=("[T]", "[/T]")) == r" <think> \boxed{43}"
    assert strip_thinking(r"[T] \boxed{43}", tags=("[T]", "[/T]")) == ""

"""Which answers are right, for the label's forms and the answer's forms that data sets and policies use."""

from __future__ import annotations

import pytest

from megatron_dppo.rewards.functions import exact_score
from megatron_dppo.rewards.math.completion import said_answer, stated_answer
from megatron_dppo.rewards.math.verdict import math_verdict

GSM8K_LABEL = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("24+48=72\n#### 72", GSM8K_LABEL, True),
        ("24+48=71\n#### 71", GSM8K_LABEL, False),
        ("the answer is 72.", GSM8K_LABEL, True),
        ("it is 72, no, 71.", GSM8K_LABEL, False),
        (r"So \boxed{72}.", GSM8K_LABEL, True),
        ("72 it was?\n#### 7", GSM8K_LABEL, False),
        ("#### $1,072.00", "#### 1072", True),
        ("12+7=19\n#19", "19", True),
        ("12+7=19\n#18", "19", False),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}}", "0.5", True),
        (r"first \boxed{\frac{1}{2}}, then \boxed{3}", "0.5", False),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", True),
        (r"\boxed{x^2 + 2x}", r"(x+1)^2", False),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        (r"thus $\frac{2}{4}$", r"\boxed{\frac{1}{2}}", True),
        ("### Step 2: add 5\nThe answer is 34.", "34", True),
        (r"it is \boxed{34", "34", False),
        ("The largest $n$ is 34.", "34", True),
        ("So the largest $n$ is exactly 34.", "34", True),
        ("The largest $n$ is 35.", "34", False),
        ("The largest $n$ is not 34.", "34", False),
        ("The largest $n$ is 34, or 35.", "34", False),
        (r"\boxed{1} and \boxed{2}", "2, 1", True),
        (r"\boxed{1} or \boxed{2}", "2", False),
        (r"$x = \boxed{1}$ and $y = \boxed{2}$", "x=1, y=2", True),
        (r"$x = \boxed{2}$ and $y = \boxed{1}$", "x=1, y=2", False),
        (r"it is $\boxed{15\frac{3}{4}}$ or $\boxed{\frac{63}{4}}$", r"\frac{63}{4}", True),
        (r"so $d = \boxed{\textbf{(073) }}$.", "073", True),
        ("Final Answer: The volume is 120.", "120", True),
        ("Final Answer: The volume is not 120.", "120", False),
        ("Final Answer: The volume is 120 or 130.", "120", False),
        ("", "34", False),
        ("no number at all", "34", False),
    ],
)
def test_answer_is_judged_as_mathematics(answer: str, label: str, right: bool) -> None:
    assert math_verdict("", answer, label)["score"] == float(right)


def test_label_that_is_no_mathematics_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math_verdict("", "#### 5", "")


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
def test_the_last_stated_answer_counts(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


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
def test_without_a_mark_the_last_thing_said_is_the_answer(text: str, said: str) -> None:
    assert said_answer(text) == said


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("1+1=2\n#2", "2", True),
        (" B ", "B", True),
        ("#2 ", "#### 2", True),
        ("#02", "2", False),
        ("#2\n#3", "2", False),
    ],
)
def test_exact_compares_what_follows_the_last_sign(answer: str, label: str, right: bool) -> None:
    assert exact_score("", answer, label) == float(right)

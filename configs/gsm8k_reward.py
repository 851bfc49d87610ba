"""Reward for policies that seldom solve a problem: 1 for the right answer, partial credit for form
and closeness.

Set ``reward.function=configs/gsm8k_reward.py:compute_score``. Without partial credit, a weak
policy's groups have wrong answers only, and equal rewards give no gradient.
"""

import re

FORM = 0.1
"""Credit for GSM8K's ending: ``#### 72``."""
CLOSENESS = 0.4
"""Credit for a close number: full at the right value, half at an error of 100%."""

ANSWER = re.compile(r"#### *\$?(-?[\d,]*\.?\d+)")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of a decoded response, and whether the answer is correct (``acc``); verl's
    signature.

    Args:
        solution_str: decoded response
        ground_truth: label
    """
    gold = last_answer(ground_truth)
    if gold is None:
        gold = float(ground_truth.replace(",", ""))
    answer = last_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": False}
    if answer == gold:
        return {"score": 1.0, "acc": True}
    distance = abs(answer - gold) / max(abs(gold), 1.0)
    return {"score": FORM + CLOSENESS / (1.0 + distance), "acc": False}


def last_answer(text):
    """Return the number after the last ``####``, or None."""
    found = ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None

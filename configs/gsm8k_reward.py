"""A reward for policies that seldom solve a problem: 1 for the right answer, a part for its form
and for coming close.

Use it with ``reward.function=configs/gsm8k_reward.py:compute_score``. Without partial credit a weak
policy's groups are all wrong alike, and where all rewards are equal there is nothing to learn from.
"""

import re

FORM = 0.1
"""For ending as GSM8K's answers do: ``#### 72``."""
CLOSENESS = 0.4
"""For the size of the number: all of it at the right value, half of it when off by as much as the
answer itself."""

ANSWER = re.compile(r"#### *\$?(-?[\d,]*\.?\d+)")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: the decoded response and the label in, a score and whether it is correct
    (``acc``) out."""
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
    """The number after the last ``####``, or None."""
    found = ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None

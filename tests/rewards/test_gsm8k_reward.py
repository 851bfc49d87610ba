"""The example reward: 1 only for the right answer, and more for an answer that is closer."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import resolve, to_score

score = resolve(f"{Path(__file__).parents[2] / 'configs' / 'gsm8k_reward.py'}:compute_score")
LABEL = "48/2 = <<48/2=24>>24\n#### 1,072"


def test_only_the_right_answer_is_correct_and_worth_one() -> None:
    assert to_score(score(ScoreItem("", "so\n#### 1072", LABEL))) == (1.0, True)
    assert to_score(score(ScoreItem("", "so\n#### 1,072.0", LABEL))) == (1.0, True)
    assert to_score(score(ScoreItem("", "#### 1072\n#### 7", LABEL)))[1] is False
    assert to_score(score(ScoreItem("", "#### 72", "72"))) == (1.0, True)


def test_closer_is_worth_more_and_never_as_much_as_right() -> None:
    answers = ["1072.001", "1071", "1000", "500", "0", "-9", "99999999"]
    values = [to_score(score(ScoreItem("", f"#### {answer}", LABEL)))[0] for answer in answers]
    assert values == sorted(values, reverse=True) and len(set(values)) == len(values)
    assert values[-1] > 0.1 and values[0] <= 0.5


def test_answer_without_the_form_is_worth_nothing() -> None:
    assert to_score(score(ScoreItem("", "it is 1072", LABEL))) == (0.0, False)
    assert to_score(score(ScoreItem("", "", LABEL))) == (0.0, False)

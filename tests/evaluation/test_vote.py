"""The most frequent answer wins, ties are shared, and the verifier says which answers are one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.evaluation.evaluator import Pair, vote, votes


@given(st.integers(0, 5), st.lists(st.sampled_from("abc"), max_size=8))
def test_a_vote_is_what_drawing_among_the_most_frequent_gives_on_average(right: int, wrong: list[str]) -> None:
    counts = Counter({"RIGHT": right, **Counter(wrong)})
    most = max(counts.values())
    leaders = [answer for answer, count in counts.items() if count == most]
    expected = leaders.count("RIGHT") / len(leaders) if right else 0.0
    assert vote(right, wrong) == pytest.approx(expected)


def test_a_tie_is_shared_evenly() -> None:
    assert vote(2, ["7", "7", "8"]) == 0.5
    assert vote(1, ["7", "8"]) == pytest.approx(1 / 3)


def test_who_states_nothing_has_no_vote() -> None:
    assert vote(1, ["", "", ""]) == 1.0
    assert vote(0, ["", ""]) == 0.0


def test_wrong_answers_that_the_verifier_takes_for_one_another_vote_together() -> None:
    assert vote(2, ["1/2", "0.5", "3"]) == 1.0
    assert vote(2, ["1/2", "0.5", "3"], {("1/2", "0.5")}) == 0.5
    assert vote(2, ["1/2", "0.5", "0.5"], {("1/2", "0.5")}) == 0.0


def numbers(pairs: Sequence[Pair]) -> list[bool]:
    return [float(one) == float(other) for one, other in pairs]


def test_the_verifier_is_asked_once_and_only_where_its_word_matters() -> None:
    asked: list[Sequence[Pair]] = []

    def same(pairs: Sequence[Pair]) -> list[bool]:
        asked.append(pairs)
        return numbers(pairs)

    problems = [
        (0, ["1", "1.0", "2"]),  # none is right
        (5, ["1", "1.0", "2"]),  # all the others together are fewer
        (1, ["1", "1", "2"]),  # outvoted already
        (2, ["1", "1.0", "2"]),
        (2, ["2", "1", "1.0", "1.00"]),
    ]
    assert votes(problems, same) == [0.0, 1.0, 0.0, 0.5, 0.0]
    (pairs,) = asked
    assert len(pairs) == 3 + 6


def test_what_is_not_asked_changes_no_vote() -> None:
    draw = random.Random(3)
    for _ in range(300):
        right = draw.randint(0, 4)
        wrong = [draw.choice(["1", "1.0", "1.00", "2", "2.0", ""]) for _ in range(draw.randint(0, 7))]
        by_value = [str(float(text)) if text else "" for text in wrong]
        assert votes([(right, wrong)], numbers) == [vote(right, by_value)]

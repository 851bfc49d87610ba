"""Scores are those of brute force, their intervals hold the truth, and comparisons are of shared problems."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.scores import (
    Estimate,
    by_benchmark,
    compare,
    difference,
    estimates,
    mean,
    pass_at,
    per_problem_mean,
    powers_up_to,
    score,
    share_bounds,
    table,
)

Rows = list[dict[str, Any]]


def answers(name: str, problems: list[list[bool | None]], majority: float | None = 1.0) -> Rows:
    """Rows of ``answers.jsonl``: the i-th answer has i + 1 tokens, and every third is cut off."""
    return [
        {
            "benchmark": name,
            "problem": number,
            "sample": sample,
            "label": str(number),
            "correct": correct,
            "reward": None if correct is None else 2.0 * correct - 1.0,
            "tokens": sample + 1,
            "finish": "length" if sample == 2 else "stop",
            "majority": majority,
        }
        for number, samples in enumerate(problems)
        for sample, correct in enumerate(samples)
    ]


def test_scores_are_counted_by_hand() -> None:
    rows = answers("aime24", [[True, False, False, None], [True] * 4, [False] * 4])
    found = score(by_benchmark(rows)["aime24"])
    assert (found["problems"], found["unscored"]) == (3, 1)
    assert found["avg@k"]["value"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert list(found["pass@k"]) == ["1", "2", "4"]
    assert found["pass@k"]["1"] == found["avg@k"]
    assert found["pass@k"]["2"]["value"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["pass@k"]["4"]["value"] == 0.5, "of the two problems with four scored answers"
    assert found["majority"]["value"] == 1.0
    assert found["mean_reward"]["value"] == pytest.approx((-1 / 3 + 1 - 1) / 3), "of what was scored, and no share"
    assert found["mean_length"] == {"value": 2.5, "low": 2.5, "high": 2.5}
    assert found["truncated"]["value"] == 0.25
    one_token_each = score(by_benchmark(answers("own", [[True]] * 5))["own"])
    assert one_token_each["mean_length"] == {"value": 1.0, "low": 1.0, "high": 1.0}, "a length is no share"
    for figure in (found["avg@k"], *found["pass@k"].values()):
        assert figure["low"] <= figure["value"] <= figure["high"]


def test_nothing_scored_is_null_in_json_and_a_dash_for_people() -> None:
    found = score(by_benchmark(answers("own", [[None], [None]], majority=None))["own"])
    assert found["avg@k"] == found["majority"] == {"value": None, "low": None, "high": None}
    assert "NaN" not in json.dumps(found)
    (_, line, _) = table({"own": found}, 1)
    assert "-% [-, -]" in line and "2 unscored" in line


def test_a_comparison_pairs_problems_and_says_how_sure_it_is() -> None:
    before = answers("gsm8k", [[i % 3 == 0] * 2 for i in range(90)])
    after = answers("gsm8k", [[i % 3 == 0, i % 3 < 2] for i in range(80)])
    head, line = compare(after, before, against="before")
    assert "paired by problem" in head and "95% interval" in head
    assert "80 problems" in line and "+16.9 [" in line and line.endswith("differs")
    (_, same) = compare(before, before, against="before")
    assert "+0.0 [+0.0, +0.0]  no difference shown" in same
    (_, few) = compare(answers("gsm8k", [[True]]), answers("gsm8k", [[False]]), against="before")
    assert few.endswith("too few problems to say")
    (_, lost) = compare(answers("gsm8k", [[None]] * 20), answers("gsm8k", [[False]] * 20), against="before")
    assert lost.endswith("no difference shown")


def test_only_what_both_have_is_compared_and_other_labels_are_an_error() -> None:
    mine, theirs = answers("gsm8k", [[True]] * 5), answers("math500", [[True]] * 5)
    with pytest.raises(UserError, match="shares no problem"):
        compare(mine, theirs, against="theirs")
    assert len(compare([*mine, *theirs], theirs, against="theirs")) == 2
    for row in theirs:
        row["label"] = "other"
    with pytest.raises(UserError, match="Compare evaluations on the same files"):
        compare(answers("math500", [[True]]), theirs, against=str(Path("theirs")))


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(answers: list[bool], k: int) -> None:
    chosen = list(combinations(answers, k))
    expected = np.mean([any(some) for some in chosen]) if chosen else np.nan
    np.testing.assert_allclose(pass_at(np.array([answers], float), k), [expected], atol=1e-12)


def test_a_thousand_answers_overflow_nothing() -> None:
    answers = np.zeros((1, 2000))
    answers[0, :1000] = 1
    assert pass_at(answers, 1)[0] == 0.5
    assert 0.999 < pass_at(answers, 700)[0] <= 1.0


def test_an_answer_that_could_not_be_scored_is_neither_right_nor_wrong() -> None:
    correct = np.array([[1, 0, np.nan, np.nan], [np.nan] * 4, [1, 1, 0, 0]])
    np.testing.assert_array_equal(per_problem_mean(correct), [0.5, np.nan, 0.5])
    np.testing.assert_array_equal(pass_at(correct, 1), [0.5, np.nan, 0.5])
    np.testing.assert_allclose(pass_at(correct, 2), [1.0, np.nan, 5 / 6])
    np.testing.assert_array_equal(pass_at(correct, 4), [np.nan, np.nan, 1.0])
    assert mean(pass_at(correct, 4)) == 1.0


@pytest.mark.parametrize(("samples", "powers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_ks_are_powers_of_two_and_all_answers(samples: int, powers: list[int]) -> None:
    assert powers_up_to(samples) == powers


def covered(problems: int, draw: object, truth: float, worlds: int = 400) -> float:
    """How often the interval holds the truth, over made-up benchmarks."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(worlds):
        found = estimates({"it": draw(rng, problems)})["it"]
        held += found.low <= truth <= found.high
    return held / worlds


def answered(rng: np.random.Generator, problems: int) -> np.ndarray:
    """avg@4 of problems whose difficulty differs: answers to one problem are alike."""
    chances = rng.beta(0.5, 0.8, problems)
    return rng.binomial(4, chances) / 4


def test_ninety_five_percent_intervals_hold_the_truth_about_so_often() -> None:
    """The percentile bootstrap is a little narrow for few problems: 30 are as many as AIME has."""
    truth = 0.5 / 1.3
    assert 0.92 <= covered(200, answered, truth) <= 0.98
    assert 0.89 <= covered(30, answered, truth) <= 0.98


def test_the_interval_is_that_of_the_normal_law_where_that_holds() -> None:
    values = np.random.default_rng(3).normal(10.0, 2.0, 1000)
    found = estimates({"it": values})["it"]
    error = values.std() / np.sqrt(1000)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=0.02)


def test_the_same_answers_have_the_same_interval_and_problems_without_a_value_do_not_count() -> None:
    values = np.random.default_rng(3).random(40)
    with_gaps = np.concatenate([values, [np.nan] * 5])
    one, other = (estimates({"it": each})["it"] for each in (values, values.copy()))
    assert one == other
    found = estimates({"it": with_gaps})["it"]
    assert found.value == pytest.approx(values.mean()) and found.low < found.value < found.high
    empty = estimates({"it": np.full(3, np.nan)})["it"]
    assert np.isnan([empty.value, empty.low, empty.high]).all()


def test_problems_that_all_agree_still_leave_a_doubt() -> None:
    """Thirty wrong of thirty: a policy right more often than in 11.6% would have shown it 39 times in 40."""
    none, every = (share_bounds(estimates({"it": np.full(30, v)})["it"], 30) for v in (0.0, 1.0))
    assert (none.value, none.low) == (0.0, 0.0) and none.high == pytest.approx(1 - 0.025 ** (1 / 30))
    assert (every.value, every.high) == (1.0, 1.0) and every.low == pytest.approx(1 - none.high)
    assert (1 - none.high) ** 30 == pytest.approx(0.025)
    assert share_bounds(Estimate(0.5, 0.4, 0.6), 30) == Estimate(0.5, 0.4, 0.6)


def test_a_paired_difference_is_much_surer_than_two_intervals() -> None:
    rng = np.random.default_rng(5)
    before = rng.beta(0.5, 0.5, 200)
    after = np.clip(before + rng.normal(0.03, 0.05, 200), 0.0, 1.0)
    found = difference(after, before)
    alone = estimates({"before": before, "after": after})
    assert 0.0 < found.low < found.value < found.high
    assert alone["before"].high > alone["after"].low, "apart they overlap"
    assert found.value == pytest.approx(alone["after"].value - alone["before"].value)

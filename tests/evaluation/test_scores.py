"""Scores are those of brute force, their intervals hold the truth, and comparisons are of shared
problems."""

import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.scores import (
    FEWEST,
    Estimate,
    bound_fraction,
    compare,
    compute_pass_at_k,
    describe_correctness,
    estimate_means,
    format_table,
    group_by_benchmark,
    list_powers,
    score,
)
from megatron_dppo.rl.score import Score

Rows = list[dict[str, Any]]


def answers(name: str, problems: list[list[bool | None]], majority: float | None = 1.0) -> Rows:
    """Return rows of ``answers.jsonl``: the i-th answer has i + 1 tokens, and every third is cut
    off."""
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


def estimate(values: np.ndarray) -> Estimate:
    return estimate_means({"only": values})["only"]


def test_scores_are_counted_by_hand() -> None:
    rows = answers("aime24", [[True, False, False, None], [True] * 4, [False] * 4])
    found = score(group_by_benchmark(rows)["aime24"])
    assert (found["problems"], found["unscored"]) == (3, 1)
    assert list(found["pass@k"]) == ["1", "2", "4"] and list_powers(6) == [1, 2, 4, 6]
    assert found["pass@k"]["1"] == found["avg@k"]
    figures = {
        name: found[name] for name in ("avg@k", "majority", "mean_reward", "truncated")
    } | found["pass@k"]
    assert {name: figure["value"] for name, figure in figures.items()} == {
        "avg@k": pytest.approx((1 / 3 + 1 + 0) / 3),
        "majority": 1.0,
        "mean_reward": pytest.approx((-1 / 3 + 1 - 1) / 3),  # of scored answers, and not a share
        "truncated": 0.25,
        "1": pytest.approx((1 / 3 + 1 + 0) / 3),
        "2": pytest.approx((2 / 3 + 1 + 0) / 3),
        "4": 0.5,  # of the two problems with four scored answers
    }
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in figures.values())
    assert found["mean_length"] == {"value": 2.5, "low": 2.5, "high": 2.5}
    one_token_each = score(group_by_benchmark(answers("own", [[True]] * 5))["own"])
    assert one_token_each["mean_length"] == {"value": 1.0, "low": 1.0, "high": 1.0}, (
        "a length is no share"
    )
    assert one_token_each["avg@k"]["low"] == pytest.approx(0.025**0.2), "all right, not certain"


def test_nothing_scored_is_null_in_json_and_a_dash_in_the_table() -> None:
    found = score(group_by_benchmark(answers("own", [[None], [None]], majority=None))["own"])
    assert found["avg@k"] == found["majority"] == {"value": None, "low": None, "high": None}
    assert "NaN" not in json.dumps(found)
    _, line, _ = format_table({"own": found}, 1)
    assert "-% [-, -]" in line and "2 unscored" in line


def test_a_comparison_is_paired_by_problem() -> None:
    before = answers("gsm8k", [[i % 3 == 0] * 2 for i in range(90)])
    after = answers("gsm8k", [[i % 3 == 0, i % 3 < 2] for i in range(80)])
    _, line, rewards = compare(after, before, baseline_name="before")
    assert "80 problems" in line and "avg@k   +16.9 [" in line and line.endswith("differs")
    # Rewards are ±1, so that they differ by twice as much.
    assert "80 problems" in rewards and "reward  +0.338 [" in rewards
    (_, same) = compare(before, before, baseline_name="before")
    assert "+0.0 [+0.0, +0.0]  no difference shown" in same
    (_, few, _) = compare(
        answers("gsm8k", [[True]]), answers("gsm8k", [[False]]), baseline_name="before"
    )
    assert few.endswith("too few problems to say")
    right, wrong = (answers("gsm8k", [[correct]] * FEWEST) for correct in (True, False))
    assert compare(right, wrong, baseline_name="before")[1].endswith("differs")
    for row in before:
        row["reward"] = float(row["correct"]) / 2
    partial = [row | {"reward": row["reward"] + 0.25} for row in before]
    _, accuracy, rewards = compare(partial, before, baseline_name="before")
    assert accuracy.endswith("no difference shown")
    assert "+0.250 [+0.250, +0.250]  differs" in rewards
    (_, lost) = compare(
        answers("gsm8k", [[None]] * 20), answers("gsm8k", [[False]] * 20), baseline_name="before"
    )
    assert lost.endswith("no difference shown")


def test_a_note_says_what_correct_means_for_partial_rewards() -> None:
    partial, right = Score(0.4, False), Score(1.0, True)
    assert "correct means a score of 1" in describe_correctness([partial, right])[0]
    assert describe_correctness([Score(0.0, False), right]) == []
    assert describe_correctness([Score(0.4, True), right]) == []  # its acc says so


def test_only_shared_problems_with_equal_labels_are_compared() -> None:
    mine, theirs = answers("gsm8k", [[True]] * 5), answers("math500", [[True]] * 5)
    with pytest.raises(UserError, match="shares no problem"):
        compare(mine, theirs, baseline_name="theirs")
    assert len(compare([*mine, *theirs], theirs, baseline_name="theirs")) == 2  # equal rewards
    for row in theirs:
        row["label"] = "other"
    with pytest.raises(UserError, match="Compare evaluations on the same files"):
        compare(answers("math500", [[True]]), theirs, baseline_name="theirs")


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(answers: list[bool], k: int) -> None:
    chosen = list(combinations(answers, k))
    expected = np.mean([any(some) for some in chosen]) if chosen else np.nan
    np.testing.assert_allclose(
        compute_pass_at_k(np.array([answers], float), k), [expected], atol=1e-12
    )


def test_pass_at_k_of_many_answers_does_not_overflow() -> None:
    half_right = (np.arange(2000)[None] < 1000).astype(float)
    assert compute_pass_at_k(half_right, 1)[0] == 0.5
    assert 0.999 < compute_pass_at_k(half_right, 700)[0] <= 1.0


def test_intervals_hold_the_truth_in_95_of_100_worlds() -> None:
    """Answers to one problem are alike. The percentile bootstrap is narrow for 30 problems, as many
    as AIME has."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(400):
        found = estimate(rng.binomial(4, rng.beta(0.5, 0.8, 30)) / 4)
        held += found.low <= 0.5 / 1.3 <= found.high
    assert 0.89 <= held / 400 <= 0.98


def test_unanimous_problems_leave_an_interval() -> None:
    """A policy right more often than in 11.6% fails thirty of thirty in one world of 40."""
    none, every = (bound_fraction(estimate(np.full(30, v)), 30) for v in (0.0, 1.0))
    assert (none.value, none.low) == (0.0, 0.0) and none.high == pytest.approx(
        1 - 0.025 ** (1 / 30)
    )
    assert (every.value, every.high) == (1.0, 1.0) and every.low == pytest.approx(1 - none.high)
    assert bound_fraction(Estimate(0.5, 0.4, 0.6), 30) == Estimate(0.5, 0.4, 0.6)

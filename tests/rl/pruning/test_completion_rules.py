import sys

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.pruning.completion_rules import (
    COMPLETION_RULES,
    CompletionCandidates,
    compute_completion_inclusion,
    compute_completion_weights,
    draw_completions,
    register,
)

MIXED = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
UNBIASED = ["none", "threshold", "neyman"]


def candidates(rewards, *, floor: float = 0.2, needs_all: bool = False) -> CompletionCandidates:
    advantage = compute_group_advantages(np.asarray(rewards, dtype=float), normalise=True)
    return CompletionCandidates(
        advantage=advantage,
        score=np.abs(advantage),
        cost=np.full(advantage.shape, 100.0),
        floor=np.full(advantage.shape, floor),
        zero_advantage=(advantage == 0.0) & (not needs_all),
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (MIXED, [[1, 0.4, 0.4, 0.4], [0.4, 0.4, 0.4, 1], [0.4] * 4]),
        # |A| of 3, 1, 2, 2: the mean itself is kept.
        ([[0, 2, 5, 5]], [[1, 0.4, 1, 1]]),
        # Every |A| is the same number, but not in floating point.
        ([[0.1, 0.7, 0.1, 0.7]], [[0.4] * 4]),
    ],
    ids=["majority", "mean", "rounding"],
)
def test_threshold_prunes_the_majority_outcome_of_each_group(rewards, expected):
    np.testing.assert_array_equal(
        compute_completion_inclusion("threshold", candidates(rewards), 0.4), expected
    )


@pytest.mark.parametrize(("keep", "expected"), [(0.3, 0.3 * 16), (0.8, 12)])
def test_neyman_budget_is_a_share_of_all_rolled_out_tokens(keep, expected):
    assert compute_completion_inclusion(
        "neyman", candidates([*MIXED, [1] * 4]), keep
    ).sum() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "keep", "rewards", "expected"),
    [
        # Of the three prunable completions floor(0.6·3) = 1 goes, in the order of sampling. Others
        # weigh 1/0.4.
        (
            "threshold_deterministic",
            0.4,
            [[1, 0, 0, 0], [1, 1, 0, 0]],
            [[1, 0, 2.5, 2.5], [0, 0, 2.5, 2.5]],
        ),
        ("threshold_deterministic", 0.5, [[0.1, 0.2, 0.3, 5.0]], [[2, 2, 0, 1]]),
        (
            "top_k",
            0.5,
            [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]],
            [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]],
        ),
        # Ties are spread over prompts.
        (
            "top_k",
            0.75,
            [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]],
            [[1, 1, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]],
        ),
        (
            "extremes",
            0.6,
            [[0.1, 0.9, 0.4, 0.3, 0.2, 0.8], [1, 0, 0, 0, 0, 0]],
            [[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1]],
        ),
        ("extremes", 0.1, [[0.1, 0.9, 0.4, 0.3, 0.2, 0.8]], [[1, 1, 0, 0, 0, 0]]),
    ],
)
def test_biased_rule_keeps_and_weighs(rule, keep, rewards, expected):
    given = candidates(rewards)
    inclusion = compute_completion_inclusion(rule, given, keep)
    np.testing.assert_array_equal(inclusion, np.sign(expected))
    np.testing.assert_array_equal(
        compute_completion_weights(rule, given, inclusion, keep), expected
    )


@pytest.mark.parametrize("rule", COMPLETION_RULES)
def test_every_rule_drops_completions_without_advantage(rule):
    given = candidates([[1, 1, 1, 1], [1, 0, 0, 0]])
    inclusion = compute_completion_inclusion(rule, given, 0.9)
    assert (inclusion[0] == 0.0).all()
    assert (inclusion[1] > 0.0).any()
    np.full(inclusion.shape, np.nan)  # Freed memory, which no weight may show.
    weights = compute_completion_weights(rule, given, inclusion, 0.9)
    assert (weights[inclusion == 0.0] == 0.0).all()
    for seed in range(5):
        assert not draw_completions(rule, given, inclusion, np.random.default_rng(seed))[0].any()


@pytest.mark.parametrize("rule", UNBIASED)
def test_floor_holds_also_without_advantage_under_a_kl_term(rule):
    given = candidates([*MIXED, [1, 1, 1, 1]], floor=0.6, needs_all=True)
    assert (compute_completion_inclusion(rule, given, 0.1) >= 0.6).all()


@pytest.mark.parametrize(("keep", "kept"), [(0.5, [1, 1]), (0.25, [1, 0])])
def test_systematic_draw_is_spread_over_prompts_and_outcomes(keep, kept):
    given = candidates([[1, 0, 1, 0]] * 8)
    inclusion = compute_completion_inclusion("neyman", given, keep)
    for seed in range(20):
        drawn = draw_completions("neyman", given, inclusion, np.random.default_rng(seed))
        good = (drawn & (given.advantage > 0)).sum(axis=1)
        bad = drawn.sum(axis=1) - good
        np.testing.assert_array_equal(np.sort([good, bad], axis=0)[::-1].T, [kept] * 8)


def test_draw_setting_replaces_the_draw_of_the_rule():
    """The number of kept completions is the budget's under the rule's own draw, and varies under
    independent ones."""
    given = candidates(MIXED * 10)
    inclusion = compute_completion_inclusion("neyman", given, 0.4)

    def counts(draw: str | None) -> set[int]:
        rngs = [np.random.default_rng(seed) for seed in range(20)]
        return {
            int(draw_completions("neyman", given, inclusion, rng, draw=draw).sum()) for rng in rngs
        }

    assert len(counts(None)) <= 2
    assert counts(None) == counts("systematic")
    assert len(counts("bernoulli")) > 4


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            lambda given, keep: np.full(len(given.advantage), keep),
            r"for candidates of shape \(3, 4\)",
        ),
        (lambda given, keep: np.full_like(given.advantage, 3 * keep), r"returned array\(\[\[1\.5"),
        (lambda given, keep: given.advantage * np.nan, "returned array"),
        (lambda given, keep: given.advantages, "AttributeError"),
        (lambda given, keep: sys.exit(0), "SystemExit: 0"),
    ],
    ids=["shape", "above 1", "NaN", "fails", "exits"],
)
def test_result_of_a_users_rule_is_refused(function, problem):
    register("own.py:rule", function)
    with pytest.raises(UserError, match=problem) as refused:
        compute_completion_inclusion("own.py:rule", candidates(MIXED), 0.5)
    assert (refused.value.setting, refused.value.value) == (
        "pruning.completions.function",
        "own.py:rule",
    )

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.pruning.completion_rules import (
    CompletionCandidates,
    adopt,
    completion_inclusion,
    completion_weight,
    draw_completions,
)


def candidates(rewards: np.ndarray, *, floor: float = 0.2, needs_all: bool = False) -> CompletionCandidates:
    advantage = group_advantages(np.asarray(rewards, dtype=float), normalise=True)
    return CompletionCandidates(
        advantage=advantage,
        score=np.abs(advantage),
        cost=np.full(advantage.shape, 100.0),
        floor=np.full(advantage.shape, floor),
        zero_advantage=(advantage == 0.0) & (not needs_all),
    )


MIXED = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
RULES = ["none", "threshold", "neyman"]
BIASED = ["threshold_deterministic", "top_k", "extremes"]


def test_the_papers_threshold_prunes_the_majority_outcome_of_each_group():
    inclusion = completion_inclusion("threshold", candidates(MIXED), 0.4)
    np.testing.assert_array_equal(inclusion, [[1, 0.4, 0.4, 0.4], [0.4, 0.4, 0.4, 1], [0.4] * 4])


def test_the_papers_threshold_is_not_fooled_by_rounding():
    """Two rewards, half of the group each: |A| are equal, though not in floating point."""
    unequal = candidates([[0.1, 0.7, 0.1, 0.7]])
    assert len(set(np.abs(unequal.advantage).ravel())) > 1, "the case is meant to be one with a rounding error"
    np.testing.assert_array_equal(completion_inclusion("threshold", unequal, 0.4), [[0.4] * 4])


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.8])
def test_neyman_meets_its_budget_of_all_rolled_out_tokens(keep: float):
    given = candidates([*MIXED, [1, 1, 1, 1]])
    inclusion = completion_inclusion("neyman", given, keep)
    assert (inclusion * given.cost).sum() == pytest.approx(min(keep * given.cost.sum(), 12 * 100.0))


def test_the_papers_appendix_drops_by_rank_and_weighs_as_its_draw_would():
    """Of the three prunable ones floor(0.6·3) = 1 goes, in the order of sampling, and the others weigh 1/0.4."""
    given = candidates([[1, 0, 0, 0], [1, 1, 0, 0]])
    inclusion = completion_inclusion("threshold_deterministic", given, 0.4)
    np.testing.assert_array_equal(inclusion, [[1, 0, 1, 1], [0, 0, 1, 1]])
    weight = completion_weight("threshold_deterministic", given, inclusion, 0.4)
    np.testing.assert_array_equal(weight, [[1, 0, 2.5, 2.5], [0, 0, 2.5, 2.5]])


def test_the_papers_appendix_drops_the_lowest_first():
    given = candidates([[0.1, 0.2, 0.3, 5.0]])
    inclusion = completion_inclusion("threshold_deterministic", given, 0.5)
    magnitude = np.abs(given.advantage[0])
    assert inclusion[0].sum() == 3 and magnitude[inclusion[0] == 0].item() == magnitude.min()


def test_top_k_keeps_the_largest_advantages_and_spreads_ties_over_prompts():
    given = candidates([[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]])
    kept = completion_inclusion("top_k", given, 0.5)
    np.testing.assert_array_equal(kept, [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(completion_inclusion("top_k", given, 0.75).sum(axis=1), [2, 3, 4])
    np.testing.assert_array_equal(completion_weight("top_k", given, kept, 0.5), kept)


def test_extremes_keep_the_best_and_as_many_of_the_worst():
    given = candidates([[0.1, 0.9, 0.4, 0.3, 0.2, 0.8], [1, 0, 0, 0, 0, 0]])
    kept = completion_inclusion("extremes", given, 0.6)
    np.testing.assert_array_equal(kept, [[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(completion_weight("extremes", given, kept, 0.6), kept)
    np.testing.assert_array_equal(completion_inclusion("extremes", given, 0.1).sum(axis=1), [2, 2])


def test_another_draw_keeps_each_by_itself():
    """The number kept is the budget's under the rule's own draw, and varies under independent ones."""
    given = candidates(MIXED * 10)
    inclusion = completion_inclusion("neyman", given, 0.4)

    def counts(draw: str | None) -> set[int]:
        rngs = [np.random.default_rng(seed) for seed in range(20)]
        return {int(draw_completions("neyman", given, inclusion, rng, draw=draw).sum()) for rng in rngs}

    assert len(counts(None)) <= 2 and counts(None) == counts("systematic")
    assert len(counts("bernoulli")) > 4


@pytest.mark.parametrize("rule", RULES + BIASED)
def test_completions_that_teach_nothing_are_dropped_under_every_rule(rule: str):
    given = candidates([[1, 1, 1, 1], [1, 0, 0, 0]])
    inclusion = completion_inclusion(rule, given, 0.9)
    assert (inclusion[0] == 0.0).all() and (inclusion[1] > 0.0).any()
    for seed in range(20):
        assert not draw_completions(rule, given, inclusion, np.random.default_rng(seed))[0].any()


@pytest.mark.parametrize("rule", RULES)
def test_with_a_kl_term_no_completion_has_probability_zero(rule: str):
    assert (completion_inclusion(rule, candidates([[1, 1, 1, 1], [1, 0, 0, 0]], needs_all=True), 0.3) >= 0.2).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_floor_holds_under_every_rule(rule: str):
    assert (completion_inclusion(rule, candidates(MIXED, floor=0.6), 0.1) >= 0.6).all()


def test_a_systematic_draw_is_spread_over_prompts_and_over_outcomes():
    """Eight groups of four: at probability a half, one good and one bad of each; at a quarter, one of each."""
    given = candidates([[1, 0, 1, 0]] * 8)
    half, quarter = (completion_inclusion("neyman", given, keep) for keep in (0.5, 0.25))
    for seed in range(20):
        kept = draw_completions("neyman", given, half, np.random.default_rng(seed))
        assert (kept.sum(axis=1) == 2).all()
        assert ((kept & (given.advantage > 0)).sum(axis=1) == 1).all()
        kept = draw_completions("neyman", given, quarter, np.random.default_rng(seed))
        assert (kept.sum(axis=1) == 1).all()


OWN = {
    "good": lambda candidates, keep: np.where(candidates.advantage > 0, 1.0, keep),
    "too few": lambda candidates, keep: np.full(len(candidates.advantage), keep),
    "too many": lambda candidates, keep: np.full_like(candidates.advantage, 3 * keep),
    "none": lambda candidates, keep: candidates.advantage * np.nan,
    "mistaken": lambda candidates, keep: candidates.advantages,
}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("too few", r"for candidates of shape \(3, 4\)"),
        ("too many", r"returned array\(\[\[1\.5"),
        ("none", "returned array"),
        ("mistaken", "failed .AttributeError: 'CompletionCandidates' object has no attribute 'advantages'"),
    ],
)
def test_what_a_rule_must_not_return_is_refused(name: str, problem: str):
    adopt(f"own.py:{name}", OWN[name])
    with pytest.raises(UserError, match=problem) as refused:
        completion_inclusion(f"own.py:{name}", candidates(MIXED), 0.5)
    assert (refused.value.setting, refused.value.value) == ("pruning.completions.function", f"own.py:{name}")

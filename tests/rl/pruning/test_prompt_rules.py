import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.config import PromptPruningConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.numbers import find_equal_groups
from megatron_dppo.rl.pruning.forecast import PromptForecast
from megatron_dppo.rl.pruning.prompt_rules import (
    PROMPT_RULES,
    PromptCandidates,
    find_prompt_rule,
    register,
    select,
)
from megatron_dppo.rl.seeds import Purpose, make_generator
from megatron_dppo.rl.types import Floats, Selection
from tests.rl.plans import Foretold

KEEP, WINDOW = 0.7, np.random.default_rng(3).permutation(200)[:64]


def inclusion(rule: str, keep: float, square, *, floor: float = 0.2, **known) -> Floats:
    count = len(square)
    candidates = PromptCandidates(
        last_magnitude=np.array(known.get("magnitude", [np.nan] * count)),
        expected_square=np.array(square),
        expected_tokens=np.array(known.get("tokens", [1.0] * count)),
        equal_visits=np.array(known.get("equal_visits", [0] * count)),
        explore=np.array(known.get("explore", [0.5] * count)),
        floor=floor,
    )
    return find_prompt_rule(rule).inclusion(candidates, keep)


@pytest.mark.parametrize(
    ("magnitude", "expected"),
    [
        ([0.0, 1.0, np.nan, 0.4], [0.3, 1, 1, 0.3]),
        ([np.nan] * 3, [1, 1, 1]),
        # The mean of three tenths is above a tenth in floating point.
        ([0.1] * 3, [1, 1, 1]),
        ([0.0] * 3, [1, 1, 1]),
    ],
)
def test_threshold_prunes_seen_prompts_below_the_mean(magnitude, expected):
    np.testing.assert_array_equal(
        inclusion("threshold", 0.3, [1.0] * len(magnitude), magnitude=magnitude), expected
    )


@given(st.lists(st.floats(0.0, 8.0), min_size=1, max_size=100), st.floats(0.25, 1.0))
def test_neyman_probabilities_add_up_to_whole_prompts(square, keep):
    probabilities = inclusion("neyman", keep, square)
    count = max(1, round(keep * len(square)))
    assert probabilities.sum() == pytest.approx(max(count, 0.2 * len(square)), rel=1e-12)
    assert (probabilities >= 0.2).all()


def test_neyman_spends_its_token_budget_by_square_over_tokens():
    square, tokens = (
        np.array([4.0, 4.0, 1.0, 1.0, 9.0, 2.0]),
        np.array([10.0, 40.0, 10.0, 40.0, 90.0, 20.0]),
    )
    pi = inclusion("neyman", 1 / 3, square, tokens=tokens, floor=0.01)
    assert (pi < 1.0).all()
    np.testing.assert_allclose(pi / pi[0], np.sqrt(square / tokens) / np.sqrt(0.4))
    assert pi @ tokens == pytest.approx(tokens.sum() / 3)


def test_greso_skips_more_after_more_visits_of_equal_reward():
    known = {"equal_visits": [0, 1, 2, 3, 9], "explore": [0.5, 0.5, 0.5, 0.4, 0.5]}
    np.testing.assert_allclose(
        inclusion("greso", 0.7, [1.0] * 5, **known), [1.0, 0.5, 0.25, 0.064, 0.01]
    )


def test_appendix_a_drops_the_lowest_scores_that_threshold_may_drop():
    magnitude = [0.3, 0.1, np.nan, 2.0, 0.2, 1.9, 0.4]  # four lie below the mean of the seen
    known = {"magnitude": magnitude}
    np.testing.assert_array_equal(
        inclusion("threshold_deterministic", 0.5, [1.0] * 7, **known), [1, 0, 1, 1, 0, 1, 1]
    )
    np.testing.assert_array_equal(
        inclusion("threshold_deterministic", 0.7, [1.0] * 7, **known), [1, 0, 1, 1, 1, 1, 1]
    )
    unseen = {"magnitude": [np.nan] * 7}
    assert inclusion("threshold_deterministic", 0.5, [1.0] * 7, **unseen).all()


@pytest.mark.parametrize("rule", PROMPT_RULES)
def test_share_of_one_keeps_all_prompts(rule):
    np.testing.assert_array_equal(
        inclusion(rule, 1.0, [0.0, 1.0, 2.0], magnitude=[0.0, 1.0, np.nan]), 1.0
    )


def draw(rule: str, history: PromptForecast) -> Selection:
    rng = make_generator(1, 3, Purpose.PROMPTS)
    return select(WINDOW, history, PromptPruningConfig(rule=rule), group_size=8, keep=KEEP, rng=rng)


@pytest.mark.parametrize("rule", ["none", "threshold"])
def test_selected_prompts_keep_their_order_and_probability(rule):
    rng, history = np.random.default_rng(0), Foretold(np.ones(200), np.ones(200))
    rewards = (rng.random((200, 8)) < rng.random((200, 1))).astype(float)
    history.update(
        np.arange(200),
        rewards,
        compute_group_advantages(rewards, normalise=True),
        find_equal_groups(rewards),
    )
    magnitude = history.get_last_magnitude(WINDOW)
    expected = np.where((rule == "threshold") & (magnitude < magnitude.mean()), KEEP, 1.0)
    selection = draw(rule, history)
    kept = np.isin(WINDOW, selection.prompt_ids)
    np.testing.assert_array_equal(selection.prompt_ids, WINDOW[kept])
    np.testing.assert_array_equal(selection.inclusion, expected[kept])
    assert kept.all() == (rule == "none")
    assert selection.window == 64


def test_prompts_of_a_biased_rule_have_no_weight():
    history, rewards = Foretold(np.ones(200), np.ones(200)), np.ones((200, 8))
    for _ in range(3):
        history.update(
            np.arange(200),
            rewards,
            compute_group_advantages(rewards, normalise=True),
            find_equal_groups(rewards),
        )
    selection = draw("greso", history)
    assert 0 < len(selection.prompt_ids) < 40, "prompts with right answers alone are skipped"
    np.testing.assert_array_equal(selection.inclusion, 1.0)


def test_steps_and_purposes_have_their_own_random_numbers():
    places = [(5, Purpose.PROMPTS), (6, Purpose.PROMPTS), (5, Purpose.COMPLETIONS)]
    assert len({make_generator(1, *place).random() for place in places}) == 3


def test_users_rule_has_the_floor_and_a_checked_shape():
    register(
        "own.py:rule", lambda candidates, keep: np.where(candidates.equal_visits > 1, 0.0, keep)
    )
    found = inclusion("own.py:rule", 0.7, [1.0] * 3, equal_visits=[0, 1, 2])
    np.testing.assert_array_equal(found, [0.7, 0.7, 0.2])
    register("own.py:one", lambda candidates, keep: keep)
    with pytest.raises(UserError, match=r"for candidates of shape \(3,\)") as refused:
        inclusion("own.py:one", 0.7, [1.0] * 3)
    assert (refused.value.setting, refused.value.value) == (
        "pruning.prompts.function",
        "own.py:one",
    )

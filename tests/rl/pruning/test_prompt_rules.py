import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.config import PromptPruningConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES, PromptCandidates, adopt, prompt_rule, select
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Selection


def inclusion(
    rule: str,
    keep: float,
    *,
    magnitude=None,
    square=None,
    tokens=None,
    equal_visits=None,
    explore=None,
    floor: float = 0.2,
) -> np.ndarray:
    given = magnitude if magnitude is not None else square
    candidates = PromptCandidates(
        last_magnitude=np.array(magnitude if magnitude is not None else np.full(len(given), np.nan)),
        expected_square=np.array(square if square is not None else np.ones(len(given))),
        expected_tokens=np.ones(len(given)) if tokens is None else np.array(tokens),
        equal_visits=np.array([0] * len(given) if equal_visits is None else equal_visits),
        explore=np.array([0.5] * len(given) if explore is None else explore),
        floor=floor,
    )
    return prompt_rule(rule).inclusion(candidates, keep)


def test_the_papers_threshold_prunes_below_the_mean_and_never_what_is_unseen():
    np.testing.assert_array_equal(inclusion("threshold", 0.3, magnitude=[0.0, 1.0, np.nan, 0.4]), [0.3, 1, 1, 0.3])


@pytest.mark.parametrize("magnitude", [[np.nan] * 3, [0.1] * 3, [0.0] * 3])
def test_the_papers_threshold_keeps_a_window_without_differences(magnitude):
    """Three tenths have a mean above a tenth, in floating point."""
    np.testing.assert_array_equal(inclusion("threshold", 0.3, magnitude=magnitude), 1.0)


@given(st.lists(st.floats(0.0, 8.0), min_size=1, max_size=100), st.floats(0.25, 1.0))
def test_neyman_probabilities_add_up_to_a_whole_number_of_prompts(square, keep):
    probabilities = inclusion("neyman", keep, square=square)
    count = max(1, round(keep * len(square)))
    assert probabilities.sum() == pytest.approx(max(count, 0.2 * len(square)), rel=1e-12)
    assert (probabilities >= 0.2).all()


def test_greso_skips_the_more_the_longer_a_prompt_has_given_equal_rewards():
    given = {"square": [1.0] * 5, "equal_visits": [0, 1, 2, 3, 9], "explore": [0.5, 0.5, 0.5, 0.4, 0.5]}
    np.testing.assert_allclose(inclusion("greso", 0.7, **given), [1.0, 0.5, 0.25, 0.064, 0.01])


@pytest.mark.parametrize("rule", sorted(PROMPT_RULES))
def test_a_share_of_one_keeps_all(rule: str):
    np.testing.assert_array_equal(inclusion(rule, 1.0, magnitude=[0.0, 1.0, np.nan], square=[0.0, 1.0, 2.0]), 1.0)


def seen_history(prompts: int, seed: int = 0) -> PromptHistory:
    rng = np.random.default_rng(seed)
    rewards = (rng.random((prompts, 8)) < rng.random((prompts, 1))).astype(float)
    history = PromptHistory(0.9)
    history.update(np.arange(prompts), rewards, group_advantages(rewards, normalise=True))
    return history


def draw(rule: str, history: PromptHistory, step: int, keep: float = 0.7) -> tuple[np.ndarray, Selection]:
    window = np.random.default_rng(step).permutation(200)[:64]
    selection = select(
        window,
        history,
        PromptPruningConfig(rule=rule),
        group_size=8,
        normalised=True,
        keep=keep,
        rng=generator(1, step, Purpose.PROMPTS),
    )
    return window, selection


def test_neyman_spends_a_budget_of_tokens_where_they_buy_most():
    """π is proportional to √(E[Σ h²]/E[tokens]), and Σ π·tokens is the share of the window's."""
    square, tokens = np.array([4.0, 4.0, 1.0, 1.0, 9.0, 2.0]), np.array([10.0, 40.0, 10.0, 40.0, 90.0, 20.0])
    pi = inclusion("neyman", 1 / 3, square=square, tokens=tokens, floor=0.01)
    assert (pi < 1.0).all()
    np.testing.assert_allclose(pi / pi[0], np.sqrt(square / tokens) / np.sqrt(0.4))
    assert pi @ tokens == pytest.approx(tokens.sum() / 3)


@pytest.mark.parametrize("rule", ["none", "threshold", "neyman"])
def test_prompts_stay_in_the_order_of_the_window_each_with_its_probability(rule: str):
    window, selection = draw(rule, seen_history(200), step=3)
    place = {prompt: k for k, prompt in enumerate(window.tolist())}
    assert np.all(np.diff([place[prompt] for prompt in selection.prompt_ids.tolist()]) > 0)
    assert selection.window == 64
    assert len(selection.inclusion) == len(selection.prompt_ids)
    assert ((selection.inclusion >= 0.2) & (selection.inclusion <= 1.0)).all()


def test_what_a_biased_rule_keeps_stands_for_itself_alone():
    rewards = np.ones((200, 8))
    history = PromptHistory(0.9)
    for _ in range(3):
        history.update(np.arange(200), rewards, group_advantages(rewards, normalise=True))
    _, selection = draw("greso", history, step=0)
    assert 0 < len(selection.prompt_ids) < 40, "prompts that are always right are skipped"
    np.testing.assert_array_equal(selection.inclusion, 1.0)


def test_no_rule_keeps_the_whole_window():
    window, selection = draw("none", seen_history(200), step=3)
    np.testing.assert_array_equal(selection.prompt_ids, window)
    np.testing.assert_array_equal(selection.inclusion, 1.0)


def test_the_same_seed_and_step_select_the_same_prompts_and_another_step_others():
    history = seen_history(200)
    one, again = draw("neyman", history, 5)[1], draw("neyman", history, 5)[1]
    np.testing.assert_array_equal(one.prompt_ids, again.prompt_ids)
    assert generator(1, 5, Purpose.PROMPTS).random() != generator(1, 6, Purpose.PROMPTS).random()
    assert generator(1, 5, Purpose.PROMPTS).random() != generator(1, 5, Purpose.COMPLETIONS).random()


def test_a_rule_of_ones_own_has_the_floor_and_returns_probabilities():
    adopt("own.py:fresh", lambda candidates, keep: np.where(candidates.equal_visits > 1, 0.0, keep))
    found = inclusion("own.py:fresh", 0.7, square=[1.0] * 3, equal_visits=[0, 1, 2])
    np.testing.assert_array_equal(found, [0.7, 0.7, 0.2])
    adopt("own.py:one", lambda candidates, keep: keep)
    with pytest.raises(UserError, match=r"for candidates of shape \(3,\)") as refused:
        inclusion("own.py:one", 0.7, square=[1.0] * 3)
    assert (refused.value.setting, refused.value.value) == ("pruning.prompts.function", "own.py:one")
    adopt("own.py:exits", lambda candidates, keep: sys.exit(0))
    with pytest.raises(UserError, match=r"own.py:exits: failed \(SystemExit: 0\)"):
        inclusion("own.py:exits", 0.7, square=[1.0] * 3)

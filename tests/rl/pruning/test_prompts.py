import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.prompts import PROMPT_RULES, PromptCandidates


def inclusion(
    rule: str, keep: float, *, magnitude=None, square=None, equal_visits=None, explore=None, floor: float = 0.2
) -> np.ndarray:
    given = magnitude if magnitude is not None else square
    candidates = PromptCandidates(
        last_magnitude=np.array(magnitude if magnitude is not None else np.full(len(given), np.nan)),
        expected_square=np.array(square if square is not None else np.ones(len(given))),
        equal_visits=np.array([0] * len(given) if equal_visits is None else equal_visits),
        explore=np.array([0.5] * len(given) if explore is None else explore),
        floor=floor,
    )
    return PROMPT_RULES[rule].inclusion(candidates, keep)


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


def test_neyman_goes_by_the_root_of_the_expected_square():
    probabilities = inclusion("neyman", 0.5, square=[1.0, 4.0, 1.0, 4.0], floor=0.0)
    np.testing.assert_allclose(probabilities, [1 / 3, 2 / 3, 1 / 3, 2 / 3])


def test_greso_skips_the_more_the_longer_a_prompt_has_given_equal_rewards():
    given = {"square": [1.0] * 5, "equal_visits": [0, 1, 2, 3, 9], "explore": [0.5, 0.5, 0.5, 0.4, 0.5]}
    np.testing.assert_allclose(inclusion("greso", 0.7, **given), [1.0, 0.5, 0.25, 0.064, 0.01])


@pytest.mark.parametrize("rule", sorted(PROMPT_RULES))
def test_a_share_of_one_keeps_all(rule: str):
    np.testing.assert_array_equal(inclusion(rule, 1.0, magnitude=[0.0, 1.0, np.nan], square=[0.0, 1.0, 2.0]), 1.0)

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.pruning.history import PromptHistory, PromptTable
from megatron_dppo.rl.types import Floats

SOLVED, FAILED = [1, 1, 1, 1], [0, 0, 0, 0]


def visited(*visits: tuple[int, list[float]], normalise: bool = True, baseline: str = "group") -> PromptHistory:
    history = PromptHistory(0.5, baseline)
    for prompt_id, rewards in visits:
        group = np.array([rewards], dtype=float)
        history.update(np.array([prompt_id]), group, group_advantages(group, normalise=normalise))
    return history


def expected(history: PromptHistory, *prompt_ids: int, normalised: bool = True) -> Floats:
    return history.expected_square(np.array(prompt_ids), group_size=4, normalised=normalised)


def test_expected_square_is_that_of_the_beta_posterior():
    """Around the pool's mean 1/2 the first prompt has Beta(5, 1), whose next group is mixed with the chance 55/126."""
    history = visited((1, SOLVED), (2, FAILED))
    np.testing.assert_allclose(expected(history, 1, 2), 4 * 55 / 126)
    np.testing.assert_allclose(expected(history, 1, 2, normalised=False), 4 * 5 / 42)


def test_expected_square_against_the_minibatch_counts_equal_groups():
    """Around the pool's mean 0.7 the prompts are right with the chances 0.9 and 17/30."""
    history = visited((1, SOLVED), (2, [1, 1, 0, 0]), normalise=False, baseline="batch")
    squares = [4 * (0.9 * 0.09 + 0.1 * 0.49), 4 * (17 * 0.09 + 13 * 0.49) / 30]
    np.testing.assert_allclose(expected(history, 1, 2, normalised=False), squares)


def test_record_is_the_decayed_sum_of_its_visits():
    history = visited((7, [1, 1, 1, 0]), (7, [1, 0, 0, 0]))
    right, wrong, visits, square, magnitude, *_ = history.state_dict()["records"]["7"]
    assert (right, wrong, visits) == (0.5 * 3 + 1, 0.5 * 1 + 3, 0.5 + 1)
    assert (square, magnitude) == (pytest.approx(0.5 * 4 + 4), pytest.approx(3**0.5 / 2))
    np.testing.assert_allclose(history.last_magnitude(np.array([7, 8])), [3**0.5 / 2, np.nan])


def test_graded_rewards_have_a_decayed_mean_of_squares():
    history = visited((1, [0.0, 2.0]), (1, [0.0, 4.0]), (2, [0.5, 0.5]), normalise=False)
    pool = (0.5 * 2.0 + 8.0) / 2.5
    np.testing.assert_allclose(expected(history, 1, 2, 3), [(0.5 * 2.0 + 8.0) / 1.5, 0.0, pool])


def test_equal_visits_are_counted_until_rewards_differ():
    history = visited((7, [1, 1, 1, 0]), (7, SOLVED), (7, FAILED), (8, SOLVED), (8, [1, 0, 1, 1]))
    np.testing.assert_array_equal(history.equal_visits(np.array([7, 8, 9])), [2, 0, 0])


def test_exploration_of_easy_prompts_falls_with_easy_visits():
    (easy, other), (hard, unseen) = (visited((7, rewards)).explore(np.array([7, 9])) for rewards in (SOLVED, FAILED))
    assert easy < other
    assert hard == unseen


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.1, 0.7, 1.0)])
def test_history_resumes_bit_for_bit(rewards):
    rng, history, restored = np.random.default_rng(0), PromptHistory(0.9), PromptHistory(0.9)
    for _ in range(5):
        group = rng.choice(rewards, (20, 8))
        history.update(rng.permutation(50)[:20], group, group_advantages(group, normalise=True))
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for known in (history, restored):
        known.update(np.array([3, 99]), np.eye(2), group_advantages(np.eye(2), normalise=True))
    ids = np.arange(50)
    assert expected(history, *ids).tobytes() == expected(restored, *ids).tobytes()
    assert json.dumps(history.state_dict()) == json.dumps(restored.state_dict())


UNSEEN = {"one": 0.5, "other": math.nan}
IDS = st.lists(st.integers(0, 60), max_size=12, unique=True)


@settings(max_examples=60)
@given(st.lists(IDS, max_size=8), IDS)
def test_table_has_the_rows_put_last(puts, asked):
    table, rows = PromptTable(UNSEEN), {}
    for number, ids in enumerate(puts):
        one = np.arange(len(ids)) / 3 + number
        table.put(np.array(ids, np.int64), one=one, other=-one)
        rows.update(zip(ids, one.tolist(), strict=True))
    found = table.of(np.array(asked, np.int64))
    assert found["one"].tolist() == [rows.get(prompt, 0.5) for prompt in asked]
    np.testing.assert_array_equal(found["other"], [-rows.get(prompt, math.nan) for prompt in asked])
    assert len(table) == len(rows)
    assert math.fsum(table.seen["one"]) == math.fsum(rows.values())

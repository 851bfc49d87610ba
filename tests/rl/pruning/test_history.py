import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.numbers import find_equal_groups
from megatron_dppo.rl.pruning.history import DECAY, PromptHistory, PromptTable

SOLVED, FAILED = [1, 1, 1, 1], [0, 0, 0, 0]


def visited(*visits: tuple[int, list[float]], normalise: bool = True) -> PromptHistory:
    history = PromptHistory()
    for prompt_id, rewards in visits:
        group = np.array([rewards], dtype=float)
        history.update(
            np.array([prompt_id]),
            group,
            compute_group_advantages(group, normalise=normalise),
            find_equal_groups(group),
        )
    return history


def test_record_is_the_decayed_sum_of_its_visits():
    history = visited((7, [1, 1, 1, 0]), (7, [1, 0, 0, 0]))
    right, wrong, visits, square, magnitude, *_ = history.state_dict()["records"]["7"]
    assert (right, wrong, visits) == (DECAY * 3 + 1, DECAY * 1 + 3, DECAY + 1)
    assert (square, magnitude) == (pytest.approx(DECAY * 4 + 4), pytest.approx(3**0.5 / 2))
    np.testing.assert_allclose(history.get_last_magnitude(np.array([7, 8])), [3**0.5 / 2, np.nan])


def test_graded_rewards_have_a_decayed_mean_of_squares():
    history = visited((1, [0.0, 2.0]), (1, [0.0, 4.0]), (2, [0.5, 0.5]), normalise=False)
    first, visits = DECAY * 2.0 + 8.0, DECAY + 1.0
    found = history.compute_mean_square(np.array([1, 2, 3]))
    np.testing.assert_allclose(found, [first / visits, 0.0, first / (visits + 1.0)])


def test_equal_visits_are_counted_until_rewards_differ():
    history = visited((7, [1, 1, 1, 0]), (7, SOLVED), (7, FAILED), (8, SOLVED), (8, [1, 0, 1, 1]))
    np.testing.assert_array_equal(history.count_equal_visits(np.array([7, 8, 9])), [2, 0, 0])


def test_exploration_of_easy_prompts_falls_with_easy_visits():
    (easy, other), (hard, unseen) = (
        visited((7, rewards)).get_exploration(np.array([7, 9])) for rewards in (SOLVED, FAILED)
    )
    assert easy < other
    assert hard == unseen


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.1, 0.7, 1.0)])
def test_history_resumes_bit_for_bit(rewards):
    rng, history, restored = np.random.default_rng(0), PromptHistory(), PromptHistory()
    for _ in range(5):
        group = rng.choice(rewards, (20, 8))
        history.update(
            rng.permutation(50)[:20],
            group,
            compute_group_advantages(group, normalise=True),
            find_equal_groups(group),
        )
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for known in (history, restored):
        known.update(
            np.array([3, 99]),
            np.eye(2),
            compute_group_advantages(np.eye(2), normalise=True),
            np.zeros(2, bool),
        )
    ids = np.arange(50)
    assert history.compute_mean_square(ids).tobytes() == restored.compute_mean_square(ids).tobytes()
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
    found = table.get(np.array(asked, np.int64))
    assert found["one"].tolist() == [rows.get(prompt, 0.5) for prompt in asked]
    np.testing.assert_array_equal(found["other"], [-rows.get(prompt, math.nan) for prompt in asked])
    assert len(table) == len(rows)
    assert math.fsum(table.seen["one"]) == math.fsum(rows.values())

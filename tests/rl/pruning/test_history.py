import json
from math import comb

import numpy as np
import pytest

from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.pruning.history import PromptHistory


def visited(*visits: tuple[int, list[float]], decay: float = 0.5, normalise: bool = True) -> PromptHistory:
    history = PromptHistory(decay)
    for prompt_id, rewards in visits:
        group = np.array([rewards], dtype=float)
        history.update(np.array([prompt_id]), group, group_advantages(group, normalise=normalise))
    return history


def expected(history: PromptHistory, *prompt_ids: int, normalised: bool = True, group_size: int = 4) -> np.ndarray:
    return history.expected_square(np.array(prompt_ids), group_size=group_size, normalised=normalised)


def test_the_probability_of_a_mixed_group_is_that_of_its_posterior():
    """Against numerical integration of the Beta density: 3 right and 1 wrong around a pool mean of 4/6."""
    p = (np.arange(200_000) + 0.5) / 200_000
    alpha, beta = 3 + 2 * 4 / 6, 1 + 2 * 2 / 6
    density = p ** (alpha - 1) * (1 - p) ** (beta - 1)
    density /= density.sum()
    history = visited((1, [1, 1, 1, 0]))
    assert expected(history, 1)[0] == pytest.approx(4 * (density * (1 - p**4 - (1 - p) ** 4)).sum(), rel=1e-6)
    assert expected(history, 1, normalised=False)[0] == pytest.approx(4 * (density * p * (1 - p)).sum(), rel=1e-6)


def test_held_against_the_minibatch_groups_of_equal_reward_promise_as_much_as_they_are_off_its_mean():
    """By summing over all numbers of right answers of the next group, with chances of a Beta posterior."""
    history = PromptHistory(0.5, "batch")
    for prompt_id, rewards in ((1, [1, 1, 1, 1]), (2, [1, 1, 1, 0]), (3, [1, 1, 0, 1])):
        group = np.array([rewards], dtype=float)
        history.update(np.array([prompt_id]), group, group_advantages(group, normalise=False))
    mean, right = history.pool_mean, np.arange(5)
    assert mean == pytest.approx(11 / 14)
    for prompt_id, (alpha, beta) in {1: (4 + 2 * mean, 2 * (1 - mean)), 2: (3 + 2 * mean, 1 + 2 * (1 - mean))}.items():
        chances = np.array([comb(4, k) * rising(alpha, k) * rising(beta, 4 - k) for k in right])
        chances /= chances.sum()
        squares = right * (1 - mean) ** 2 + (4 - right) * mean**2
        assert expected(history, prompt_id, normalised=False)[0] == pytest.approx((chances * squares).sum(), rel=1e-12)
    solved, mixed = expected(history, 1, 2, normalised=False)
    assert 0.0 < solved < mixed


def rising(start: float, length: int) -> float:
    return float(np.prod(start + np.arange(length)))


def test_a_record_is_the_decayed_sum_of_its_visits():
    state = visited((7, [1, 1, 1, 0]), (7, [1, 0, 0, 0])).state_dict()
    right, wrong, visits, square, magnitude, *_ = state["records"]["7"]
    assert (right, wrong, visits) == (0.5 * 3 + 1, 0.5 * 1 + 3, 0.5 + 1)
    assert (square, magnitude) == (pytest.approx(0.5 * 4 + 4), pytest.approx(3**0.5 / 2))


def test_other_rewards_are_judged_by_a_decayed_mean_of_squares():
    history = visited((1, [0.0, 2.0]), (1, [0.0, 4.0]), (2, [0.5, 0.5]), normalise=False)
    pool = (0.5 * 2.0 + 8.0) / 2.5
    np.testing.assert_allclose(expected(history, 1, 2, 3), [(0.5 * 2.0 + 8.0) / 1.5, 0.0, pool])


def test_an_empty_history_treats_all_alike():
    assert len(set(expected(PromptHistory(0.9), 5, 6, 7).tolist())) == 1
    assert np.isnan(PromptHistory(0.9).last_magnitude(np.array([5]))).all()


def test_the_last_visit_alone_gives_the_magnitude():
    history = visited((1, [1, 1, 1, 1]), (1, [1, 0, 0, 0]))
    assert history.last_magnitude(np.array([1])) == pytest.approx((3**0.5 + 3 * 3**-0.5) / 4)


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.1, 0.7, 1.0)])
def test_a_round_trip_through_json_changes_no_bit(rewards: tuple[float, ...]):
    rng = np.random.default_rng(0)
    history = PromptHistory(0.9)
    for _ in range(5):
        ids = rng.permutation(50)[:20]
        group = rng.choice(rewards, (20, 8))
        history.update(ids, group, group_advantages(group, normalise=True))
    restored = PromptHistory(0.9)
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    ids = np.arange(50)
    for one, other in ((history, restored), (restored, history)):
        assert expected(one, *ids).tobytes() == expected(other, *ids).tobytes()
        assert one.last_magnitude(ids).tobytes() == other.last_magnitude(ids).tobytes()
    group = np.eye(2)
    for one in (history, restored):
        one.update(np.array([3, 99]), group, group_advantages(group, normalise=True))
    assert json.dumps(history.state_dict()) == json.dumps(restored.state_dict())


def test_equal_visits_are_counted_until_rewards_differ():
    history = visited((7, [1, 1, 1, 0]), (7, [1, 1, 1, 1]), (7, [0, 0, 0, 0]), (8, [1, 1, 1, 1]), (8, [1, 0, 1, 1]))
    np.testing.assert_array_equal(history.equal_visits(np.array([7, 8, 9])), [2, 0, 0])
    easy, hard = visited((7, [1, 1, 1, 1])), visited((7, [0, 0, 0, 0]))
    assert easy.explore(np.array([7]))[0] < easy.explore(np.array([9]))[0], "easy prompts have come too often"
    assert hard.explore(np.array([7]))[0] == hard.explore(np.array([9]))[0]

"""Features are read off prompts alone; groups are predicted before the models learn of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.numbers import find_equal_groups
from megatron_dppo.rl.pruning.forecast import (
    WIDEST,
    Outcomes,
    PromptFeatures,
    PromptForecast,
)
from megatron_dppo.rl.types import Floats, Ints, Prompt
from tests.rl.plans import made_up_pool

WINDOW, GROUP = 32, 8
IDS = np.arange(12 * WINDOW)
RNG = np.random.default_rng(0)
TERMS = [RNG.integers(1, 10, RNG.integers(2, 7)) for _ in IDS]
COUNTS, TOTALS = (np.array([f(terms) for terms in TERMS]) for f in (len, sum))
ACCURACY = 1.0 / (1.0 + np.exp((TOTALS - 22.0) / 4.0))
"""The larger a sum, the more seldom the answer is right."""


def prompt(row: int, text: str, **fields: str) -> Prompt:
    return Prompt(
        id=row, token_ids=np.frombuffer(text.encode(), np.uint8), text=text, label="", **fields
    )


SUMS = [prompt(row, "+".join(map(str, terms))) for row, terms in enumerate(TERMS)]
LENGTHS = np.array([len(sum_.text) for sum_ in SUMS], float)


def read(pool: list[Prompt]) -> Floats:
    return PromptFeatures(pool).get(np.arange(len(pool)))


def test_features_have_one_scale_over_the_pool():
    features = read(SUMS)
    assert features.shape == (len(SUMS), PromptFeatures.size)
    np.testing.assert_array_equal(features[:, 0], 1.0)
    np.testing.assert_allclose(features[:, 1:].mean(axis=0), 0.0, atol=0.05)
    np.testing.assert_allclose(features[:, 1:10].std(axis=0), 1.0, atol=0.1)
    assert np.abs(features[:, 1:]).max() <= WIDEST**2


def test_equal_prompts_differ_in_their_data_source_alone():
    np.testing.assert_array_equal(read([prompt(row, "3+4=") for row in range(5)])[:, 1:], 0.0)
    features = read([prompt(row, "x", data_source=("gsm8k", "math")[row % 2]) for row in range(6)])
    assert (features[::2] == features[0]).all()
    assert (features[1] != features[0]).any()


def test_features_of_endless_numbers_are_finite():
    assert np.isfinite(read([*SUMS[:20], prompt(20, "9" * 5000 + " ²")])).all()


def show_features() -> None:
    print(read(made_up_pool(40)).tobytes().hex())


def test_features_are_the_same_in_another_process(capsys):
    """Python's hash of a text differs from process to process."""
    code = f"from {__name__} import show_features; show_features()"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    show_features()
    assert other == capsys.readouterr().out


ROLLED_OUT = (RNG.random((len(IDS), GROUP)) < ACCURACY[:, None]).astype(float)
"""[prompts, GROUP], rewards."""
RIGHT = np.ones((len(IDS), GROUP))


def visits(ids: Ints, rewards: Floats = ROLLED_OUT, **fields: Floats) -> Outcomes:
    """Return the outcomes of prompts, from tables of rewards and further fields of all prompts."""
    rewards = rewards[ids]
    advantages = compute_group_advantages(rewards, normalise=True)
    squares, tokens = (advantages**2).sum(axis=1), np.full(len(ids), 20.0)
    found = Outcomes(ids, rewards, advantages, squares, tokens, find_equal_groups(rewards))
    return replace(found, **{name: table[ids] for name, table in fields.items()})


def forecast(**options: bool) -> PromptForecast:
    return PromptForecast(PromptFeatures(SUMS), **options)


def expected(known: PromptForecast, ids: Ints) -> Floats:
    return known.expected_square(ids, group_size=GROUP)


def learn(
    known: PromptForecast, ids: Ints = IDS, *tables: Floats, **fields: Floats
) -> list[dict[str, float]]:
    """Learn from windows of prompts, one after the other."""
    return [
        known.evaluate_and_update(visits(window, *tables, **fields))
        for window in ids.reshape(-1, WINDOW)
    ]


SEEN, UNSEEN = IDS[:-WINDOW], IDS[-WINDOW:]


def test_model_predicts_prompts_at_their_first_visit():
    found = learn(forecast(), np.random.default_rng(0).permutation(IDS))
    model, pool = (
        np.mean([each[f"prune/brier_{name}"] for each in found[3:]]) for name in ("model", "pool")
    )
    assert model < 0.6 * pool


def test_groups_of_equal_reward_count_under_a_teacher():
    """All answers are right. The longer the prompt, the larger the gradients of a group."""
    known, squares = forecast(has_teacher=True), LENGTHS**2
    learn(known, SEEN, RIGHT, squares=squares)
    found = expected(known, UNSEEN)
    assert np.corrcoef(np.log(found), np.log(squares[UNSEEN]))[0, 1] > 0.9
    assert found.mean() == pytest.approx(squares[UNSEEN].mean(), rel=0.3)


def test_groups_of_equal_reward_are_worth_an_entropy_bonus():
    """All answers are right. The longer the prompt, the larger the gradients of a group."""
    known = forecast(entropy_coef=0.5)
    squares = 0.25 * LENGTHS**2
    learn(known, SEEN, RIGHT, squares=squares)
    found = expected(known, UNSEEN)
    assert np.corrcoef(np.log(found), np.log(squares[UNSEEN]))[0, 1] > 0.9
    assert found.mean() == pytest.approx(squares[UNSEEN].mean(), rel=0.3)


def test_step_is_predicted_before_the_models_learn():
    """All answers are right; when nothing is known, one half is predicted."""
    known, step = forecast(), visits(UNSEEN, RIGHT)
    first, again = (known.evaluate_and_update(step) for _ in range(2))
    assert first == {
        "prune/brier_model": pytest.approx(0.25),
        "prune/brier_pool": pytest.approx(0.25),
    }
    assert again["prune/brier_model"] < 0.05


def test_expected_square_is_the_square_of_mixed_groups_times_their_chance():
    """Sums of many terms are always wrong. Those of two terms have 16 times the square of those of
    three."""
    known, rng = forecast(), np.random.default_rng(1)
    squares = np.where(COUNTS == 2, 16.0, 1.0) * rng.lognormal(0.0, 0.3, len(IDS))
    learn(known, IDS, (rng.random(RIGHT.shape) < 0.5) * (COUNTS <= 3.0)[:, None], squares=squares)
    square = expected(known, IDS)
    assert 8.0 < square[COUNTS == 2].mean() / square[COUNTS == 3].mean() < 32.0
    assert square[COUNTS >= 5].mean() < 0.2 * square[COUNTS == 3].mean()


def test_tokens_of_unseen_prompts_are_predicted():
    known, tokens = forecast(), 4.0 + 2.0 * LENGTHS
    np.testing.assert_array_equal(known.expected_tokens(UNSEEN), 1.0)
    learn(known, SEEN, tokens=tokens)
    np.testing.assert_allclose(known.expected_tokens(UNSEEN), tokens[UNSEEN], rtol=0.1)


@pytest.mark.parametrize("scale", [1.0, 0.5], ids=["binary", "graded"])
def test_prompts_far_from_the_mean_of_the_minibatch_have_large_squares(scale):
    """A quarter of the prompts is never right, the others always."""
    known, never = PromptForecast(PromptFeatures(SUMS), "reinforce_pp"), IDS % 4 == 0
    rewards = scale * RIGHT * ~never[:, None]
    advantages = rewards - 0.75 * scale
    learn(known, SEEN, rewards, advantages=advantages, squares=(advantages**2).sum(axis=1))
    square = expected(known, SEEN)
    assert square[never[SEEN]].min() > square[~never[SEEN]].max()


def test_graded_rewards_are_predicted_to_differ_or_not():
    hard, known = ACCURACY < 0.5, forecast()
    *_, last = learn(
        known, IDS, np.where(hard[:, None], 0.3, np.random.default_rng(0).random(RIGHT.shape))
    )
    assert not known.binary
    assert last["prune/brier_model"] < 0.6 * last["prune/brier_pool"]
    square = expected(known, IDS)
    assert square[hard].mean() < 0.4 * square[~hard].mean()


def test_step_without_groups_changes_nothing():
    known = forecast()
    before = json.dumps(known.state_dict())
    assert not known.evaluate_and_update(visits(IDS[:0]))
    assert json.dumps(known.state_dict()) == before


@pytest.mark.parametrize("scale", [1.0, 0.5], ids=["binary", "graded"])
def test_forecast_resumes_bit_for_bit(scale):
    known, restored = forecast(), forecast()
    learn(known, SEEN, scale * ROLLED_OUT)
    restored.load_state_dict(json.loads(json.dumps(known.state_dict())))
    for one in (known, restored):
        learn(one, UNSEEN, scale * ROLLED_OUT)
    assert expected(known, IDS).tobytes() == expected(restored, IDS).tobytes()
    assert known.expected_tokens(IDS).tobytes() == restored.expected_tokens(IDS).tobytes()
    assert json.dumps(known.state_dict()) == json.dumps(restored.state_dict())

"""Features are read off prompts alone; record and model predict before they learn, and the better one is used."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.census import PruningStats
from megatron_dppo.rl.pruning.forecast import (
    WIDEST,
    Outcomes,
    PredictorMetrics,
    PromptFeatures,
    PromptForecast,
    beta_log_likelihood,
)
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.types import Floats, Ints, Prompt, StepPlan
from tests.rl.plans import made_up_pool

WINDOW, GROUP = 32, 8
IDS = np.arange(12 * WINDOW)
RNG = np.random.default_rng(0)
TERMS = [RNG.integers(1, 10, RNG.integers(2, 7)) for _ in IDS]
COUNTS, TOTALS = (np.array([f(terms) for terms in TERMS]) for f in (len, sum))
ACCURACY = 1.0 / (1.0 + np.exp((TOTALS - 22.0) / 4.0))
"""The larger a sum, the more seldom the answer is right."""


def prompt(row: int, text: str, **fields: str) -> Prompt:
    return Prompt(id=row, token_ids=np.frombuffer(text.encode(), np.uint8), text=text, label="", **fields)


SUMS = [prompt(row, "+".join(map(str, terms))) for row, terms in enumerate(TERMS)]
METRICS = ("log_loss_model", "log_loss_record", "brier_model", "brier_record", "brier_pool")
LENGTHS = np.array([len(sum_.text) for sum_ in SUMS], float)


def read(pool: list[Prompt]) -> Floats:
    return PromptFeatures(pool).of(np.arange(len(pool)))


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
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    show_features()
    assert other == capsys.readouterr().out


ROLLED_OUT = (RNG.random((len(IDS), GROUP)) < ACCURACY[:, None]).astype(float)
"""[prompts, GROUP], rewards."""
RIGHT = np.ones((len(IDS), GROUP))


def visits(ids: Ints, rewards: Floats = ROLLED_OUT, **fields: Floats) -> Outcomes:
    """Return the outcomes of prompts, from tables of rewards and further fields of all prompts."""
    rewards = rewards[ids]
    advantages = group_advantages(rewards, normalise=True)
    found = Outcomes(ids, rewards, advantages, (advantages**2).sum(axis=1), np.full(len(ids), 20.0))
    return replace(found, **{name: table[ids] for name, table in fields.items()})


def forecast(predictor: str = "auto", pool: list[Prompt] = SUMS, **options: bool) -> PromptForecast:
    return PromptForecast(0.9, PromptFeatures(pool), predictor, **options)


def expected(known: PromptHistory, ids: Ints) -> Floats:
    return known.expected_square(ids, group_size=GROUP, normalised=True)


def learn(known: PromptForecast, ids: Ints = IDS, *tables: Floats, **fields: Floats) -> list[PredictorMetrics]:
    """Learn from windows of prompts, one after the other."""
    return [known.judge_and_learn(visits(window, *tables, **fields)) for window in ids.reshape(-1, WINDOW)]


SEEN, UNSEEN = IDS[:-WINDOW], IDS[-WINDOW:]


def test_model_predicts_prompts_at_their_first_visit():
    """A record knows the mean of the pool alone. A change of the predictor is noted."""
    known = forecast()
    found = learn(known, np.random.default_rng(0).permutation(IDS))
    used = [*(each.metrics["prune/predicted_by_model"] for each in found), 1.0]
    for each, change in zip(found, np.diff(used), strict=True):
        assert ["prompts from now on" in note for note in each.notes] == [True] * bool(change)
    mean = {name: np.mean([each.metrics[f"prune/{name}"] for each in found[3:]]) for name in METRICS}
    assert known.used == "model"
    assert mean["log_loss_model"] < 0.9 * mean["log_loss_record"]
    assert mean["brier_model"] < 0.6 * min(mean["brier_record"], mean["brier_pool"])


def test_record_predicts_where_prompts_say_nothing():
    """Half of the prompts are always right, half always wrong, whatever their text."""
    known, ids = forecast(pool=made_up_pool(64)), np.arange(64)
    right = np.random.default_rng(5).permutation(ids) < 32
    for _ in range(6):
        learn(known, ids, RIGHT[:64] * right[:, None])
    assert known.used == "record"
    by_record = PromptHistory.expected_square(known, ids, group_size=GROUP, normalised=True)
    np.testing.assert_array_equal(expected(known, ids), by_record)


@pytest.mark.parametrize("predictor", ["record", "model"])
def test_predictor_of_the_settings_is_not_replaced(predictor):
    known = forecast(predictor)
    assert {each.metrics["prune/predicted_by_model"] for each in learn(known)} == {float(predictor == "model")}
    assert known.used == predictor


def test_groups_of_equal_reward_count_under_a_teacher():
    """All answers are right. The longer the prompt, the larger the gradients of a group."""
    known, squares = forecast(taught=True), LENGTHS**2
    learn(known, SEEN, RIGHT, squares=squares)
    found = expected(known, UNSEEN)
    assert np.corrcoef(np.log(found), np.log(squares[UNSEEN]))[0, 1] > 0.9
    assert found.mean() == pytest.approx(squares[UNSEEN].mean(), rel=0.3)


def test_step_is_predicted_before_the_models_learn():
    """All answers are right; when nothing is known, every predictor gives one half."""
    known, step = forecast(), visits(UNSEEN, RIGHT)
    first, again = (known.judge_and_learn(step).metrics for _ in range(2))
    for name in ("model", "record", "pool"):
        assert first[f"prune/brier_{name}"] == pytest.approx(0.25)
    assert again["prune/brier_model"] < 0.05
    assert again["prune/brier_record"] < 0.05


def test_expected_square_is_the_square_of_mixed_groups_times_their_chance():
    """Sums of many terms are always wrong. Those of two terms have 16 times the square of those of three."""
    known, rng = forecast("model"), np.random.default_rng(1)
    squares = np.where(COUNTS == 2, 16.0, 1.0) * rng.lognormal(0.0, 0.3, len(IDS))
    learn(known, IDS, (rng.random(RIGHT.shape) < 0.5) * (COUNTS <= 3.0)[:, None], squares=squares)
    square = expected(known, IDS)
    assert 8.0 < square[COUNTS == 2].mean() / square[COUNTS == 3].mean() < 32.0
    assert square[COUNTS >= 5].mean() < 0.2 * square[COUNTS == 3].mean()


@pytest.mark.parametrize("predictor", ["auto", "record"])
def test_tokens_are_predicted_by_the_model_alone(predictor):
    known, tokens = forecast(predictor), 4.0 + 2.0 * LENGTHS
    np.testing.assert_array_equal(known.expected_tokens(UNSEEN), 1.0)
    learn(known, SEEN, tokens=tokens)
    found = np.ones(WINDOW) if predictor == "record" else tokens[UNSEEN]
    np.testing.assert_allclose(known.expected_tokens(UNSEEN), found, rtol=0.1)


def test_graded_rewards_are_predicted_to_differ_or_not():
    hard, known = ACCURACY < 0.5, forecast()
    *_, last = learn(known, IDS, np.where(hard[:, None], 0.3, np.random.default_rng(0).random(RIGHT.shape)))
    assert not known.binary
    assert known.used == "model"
    assert last.metrics["prune/brier_model"] < 0.6 * last.metrics["prune/brier_pool"]
    square = expected(known, IDS)
    assert square[hard].mean() < 0.4 * square[~hard].mean()


def test_groups_are_counted_by_their_predicted_chance():
    [found] = learn(forecast(), UNSEEN)
    for name in ("model", "record"):
        mine = [row for row in found.reliability if row[0] == name]
        assert sum(count for _, _, count, _, _ in mine) == WINDOW
        assert sum(seen for *_, seen in mine) == pytest.approx(ROLLED_OUT[UNSEEN].mean(axis=1).sum(), abs=1e-4)
        for _, tenth, count, predicted, _ in mine:
            assert tenth / 10 - 1e-6 <= predicted / count <= (tenth + 1) / 10 + 1e-6


def test_predictor_metrics_are_in_the_log_and_the_census_of_a_step():
    counts = PruningStats((1, 5), (0, 0), (0, 0), binary=True, by_group=(), by_reward=(), by_cause=())
    plan = StepPlan((), {"pack/fill": 1.0}, notes=("first",), census=counts)
    rows = (("model", 3, 2, 0.7, 0.5),)
    judged = PredictorMetrics({"prune/brier_model": 0.1}, ("second",), rows).added_to(plan)
    assert judged.metrics == {"pack/fill": 1.0, "prune/brier_model": 0.1}
    assert judged.notes == ("first", "second")
    assert judged.census == replace(counts, by_prediction=rows)


def test_step_without_groups_changes_nothing():
    known = forecast()
    before = json.dumps(known.state_dict())
    assert not known.judge_and_learn(visits(IDS[:0])).metrics
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


def test_checkpoint_without_models_is_loaded():
    """Records had seven fields before there were models."""
    records = {"3": [4.0, 4.0, 1.0, 8.0, 1.0, 0.0, 0.0], "5": [8.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]}
    known = forecast()
    known.load_state_dict({"binary": True, "exploration": [0.47, 0.53], "records": records})
    assert known.used == "record"
    mixed, solved = expected(known, np.array([3, 5]))
    assert mixed > solved
    learn(known)


def test_likelihood_of_a_record_is_that_of_a_beta_distribution():
    """Three right and two wrong, with a chance that is Beta(1.5, 2.5)."""
    value = beta_log_likelihood(np.array([3.0]), np.array([5.0]), np.array([1.5]), np.array([2.5]))[0]
    assert np.exp(value) == pytest.approx((1.5 * 2.5 * 3.5) * (2.5 * 3.5) / (4 * 5 * 6 * 7 * 8))

"""Record and model predict before they learn; who predicted better sets the probabilities, and that is told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.census import PruningStats
from megatron_dppo.rl.pruning.forecast import (
    Outcomes,
    PredictorMetrics,
    PromptFeatures,
    PromptForecast,
    beta_log_likelihood,
)
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.types import Floats, Ints, Prompt, StepPlan
from tests.rl.plans import made_up_pool

POOL, WINDOW, GROUP = 384, 32, 8


def sums_pool() -> list[Prompt]:
    rng = np.random.default_rng(0)
    texts = ["+".join(map(str, rng.integers(1, 10, rng.integers(2, 7)))) for _ in range(POOL)]
    return [
        Prompt(id=i, token_ids=np.frombuffer(text.encode(), np.uint8), text=text, label="")
        for i, text in enumerate(texts)
    ]


def visits(ids: Ints, rewards: Floats, *, squares: Floats | None = None, tokens: Floats | None = None) -> Outcomes:
    values = group_advantages(rewards, normalise=True)
    return Outcomes(
        prompt_ids=ids,
        rewards=rewards,
        advantages=values,
        squares=(values**2).sum(axis=1) if squares is None else squares,
        tokens=np.full(len(ids), 20.0) if tokens is None else tokens,
    )


def rolled_out(ids: Ints, accuracy: Floats, rng: np.random.Generator) -> Floats:
    return (rng.random((len(ids), GROUP)) < accuracy[ids][:, None]).astype(float)


def forecast(pool: list[Prompt], predictor: str = "auto") -> PromptForecast:
    return PromptForecast(0.9, PromptFeatures(pool), predictor)


def expected(known: PromptHistory, ids: Ints) -> Floats:
    return known.expected_square(ids, group_size=GROUP, normalised=True)


def run_epochs(known: PromptForecast, accuracy: Floats, epochs: int, *, seed: int = 0) -> list[dict[str, float]]:
    """Every prompt once an epoch, in another order; the metrics of each step."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(epochs):
        for ids in rng.permutation(len(accuracy)).reshape(-1, WINDOW):
            rows.append(dict(known.judge_and_learn(visits(ids, rolled_out(ids, accuracy, rng))).metrics))
    return rows


def accuracy_by_sum(pool: list[Prompt]) -> Floats:
    """What the quickstart's policy is like: the larger the sum, the more carries it can forget."""
    totals = np.array([sum(map(int, prompt.text.split("+"))) for prompt in pool])
    chance: Floats = 1.0 / (1.0 + np.exp((totals - 22.0) / 4.0))
    return chance


def test_difficulty_that_can_be_read_off_prompts_is_known_at_the_first_visit() -> None:
    """No prompt comes twice, so that a record knows the pool's mean and nothing else."""
    pool = sums_pool()
    known = forecast(pool)
    rows = run_epochs(known, accuracy_by_sum(pool), 1)[3:]
    mean = {name.removeprefix("prune/"): np.mean([row[name] for row in rows]) for name in rows[0]}
    assert known.used == "model"
    assert mean["log_loss_model"] < 0.9 * mean["log_loss_record"]
    assert mean["brier_model"] < 0.6 * min(mean["brier_record"], mean["brier_pool"])


def test_where_prompts_say_nothing_the_record_is_left_in_charge() -> None:
    """Half of the prompts are always right, half always wrong, in no relation to their text: two answers tell all, and
    a model that expects like prompts to be alike says so less firmly."""
    known = forecast(made_up_pool(64))
    run_epochs(known, np.random.default_rng(5).permutation(np.repeat([0.0, 1.0], 32)), 6)
    assert known.used == "record"
    ids = np.arange(64)
    by_record = PromptHistory.expected_square(known, ids, group_size=GROUP, normalised=True)
    np.testing.assert_array_equal(expected(known, ids), by_record)


@pytest.mark.parametrize("predictor", ["record", "model"])
def test_a_predictor_that_was_asked_for_stays(predictor: str) -> None:
    pool = sums_pool()
    known = forecast(pool, predictor)
    rows = run_epochs(known, accuracy_by_sum(pool), 1)
    assert known.used == predictor
    assert {row["prune/predicted_by_model"] for row in rows} == {float(predictor == "model")}


def test_with_a_teacher_prompts_whose_rewards_never_differ_count_by_their_gradients() -> None:
    """All answers are right. The longer the prompt, the larger its groups' gradients: a record could not tell."""
    pool = sums_pool()
    known = PromptForecast(0.9, PromptFeatures(pool), "auto", taught=True)
    length = np.array([len(prompt.text) for prompt in pool], float)
    for ids in np.arange(POOL).reshape(-1, WINDOW)[:-1]:
        known.judge_and_learn(visits(ids, np.ones((WINDOW, GROUP)), squares=length[ids] ** 2))
    last = np.arange(POOL)[-WINDOW:]
    said = expected(known, last)
    assert np.corrcoef(np.log(said), np.log(length[last]))[0, 1] > 0.9
    assert said.mean() == pytest.approx((length[last] ** 2).mean(), rel=0.3)


def test_a_step_is_predicted_before_it_is_learned() -> None:
    """Of prompts that are all right, when nothing was known: every predictor said one half."""
    ids, rewards = np.arange(WINDOW), np.ones((WINDOW, GROUP))
    known = forecast(made_up_pool(64))
    judgement = known.judge_and_learn(visits(ids, rewards))
    for name in ("model", "record", "pool"):
        assert judgement.metrics[f"prune/brier_{name}"] == pytest.approx(0.25)
    again = known.judge_and_learn(visits(ids, rewards)).metrics
    assert again["prune/brier_model"] < 0.05 and again["prune/brier_record"] < 0.05


def test_the_square_is_that_of_a_group_whose_rewards_differ_times_their_chance() -> None:
    """Sums of many terms are always wrong, of few they are right half of the time; those of two have gradients with 16
    times the square of those of three."""
    pool = sums_pool()
    terms = np.array([prompt.text.count("+") + 1 for prompt in pool])
    accuracy = np.where(terms <= 3, 0.5, 0.0)
    known, rng = forecast(pool, "model"), np.random.default_rng(1)
    for ids in np.arange(POOL).reshape(-1, WINDOW):
        squares = np.where(terms[ids] == 2, 16.0, 1.0) * rng.lognormal(0.0, 0.3, WINDOW)
        known.judge_and_learn(visits(ids, rolled_out(ids, accuracy, rng), squares=squares))
    square = expected(known, np.arange(POOL))
    ratio = square[terms == 2].mean() / square[terms == 3].mean()
    assert 8.0 < ratio < 32.0
    assert square[terms >= 5].mean() < 0.2 * square[terms == 3].mean()


@pytest.mark.parametrize("predictor", ["auto", "model", "record"])
def test_the_tokens_of_a_completion_are_predicted_by_the_prompt(predictor: str) -> None:
    """By the model, also where records predict rewards better; records alone say nothing."""
    pool = sums_pool()
    tokens = 4.0 + 2.0 * np.array([len(prompt.token_ids) for prompt in pool])
    known = forecast(pool, predictor)
    unseen, rng = np.arange(320, POOL), np.random.default_rng(0)
    np.testing.assert_array_equal(known.expected_tokens(unseen), 1.0)
    for ids in np.arange(320).reshape(-1, WINDOW):
        rewards = rolled_out(ids, np.full(POOL, 0.5), rng)
        known.judge_and_learn(visits(ids, rewards, tokens=tokens[ids]))
    expected_tokens = np.ones(len(unseen)) if predictor == "record" else tokens[unseen]
    np.testing.assert_allclose(known.expected_tokens(unseen), expected_tokens, rtol=0.1)


def test_where_rewards_are_graded_it_is_predicted_whether_they_differ() -> None:
    pool = sums_pool()
    hard = accuracy_by_sum(pool) < 0.5
    known, rng, rows = forecast(pool), np.random.default_rng(0), []
    for ids in np.arange(POOL).reshape(-1, WINDOW):
        rewards = np.where(hard[ids][:, None], 0.3, rng.random((WINDOW, GROUP)))
        rows.append(known.judge_and_learn(visits(ids, rewards)))
    assert not known.binary and known.used == "model"
    assert rows[-1].metrics["prune/brier_model"] < 0.6 * rows[-1].metrics["prune/brier_pool"]
    square = expected(known, np.arange(POOL))
    assert square[hard].mean() < 0.4 * square[~hard].mean()


def test_groups_are_counted_by_the_chance_they_were_given() -> None:
    known, pool = forecast(sums_pool()), sums_pool()
    rng = np.random.default_rng(0)
    ids = np.arange(WINDOW)
    rewards = rolled_out(ids, accuracy_by_sum(pool), rng)
    rows = known.judge_and_learn(visits(ids, rewards)).reliability
    for name in ("model", "record"):
        mine = [row for row in rows if row[0] == name]
        assert sum(count for _, _, count, _, _ in mine) == WINDOW
        assert sum(seen for *_, seen in mine) == pytest.approx(rewards.mean(axis=1).sum(), abs=1e-4)
        for _, tenth, count, said, _ in mine:
            assert tenth / 10 - 1e-6 <= said / count <= (tenth + 1) / 10 + 1e-6


def test_what_was_foreseen_is_in_the_steps_log_and_census() -> None:
    counts = PruningStats((1, 5), (0, 0), (0, 0), binary=True, by_group=(), by_reward=(), by_cause=())
    plan = StepPlan((), {"pack/fill": 1.0}, notes=("first",), census=counts)
    rows = (("model", 3, 2, 0.7, 0.5),)
    judged = PredictorMetrics({"prune/brier_model": 0.1}, ("second",), rows).added_to(plan)
    assert judged.metrics == {"pack/fill": 1.0, "prune/brier_model": 0.1}
    assert judged.notes == ("first", "second")
    assert judged.census is not None and judged.census.by_prediction == rows


def test_a_step_without_groups_teaches_nothing() -> None:
    known = forecast(made_up_pool(4))
    before = json.dumps(known.state_dict())
    judgement = known.judge_and_learn(visits(np.array([], np.int64), np.zeros((0, GROUP))))
    assert not judgement.metrics and json.dumps(known.state_dict()) == before


@pytest.mark.parametrize("graded", [False, True])
def test_a_round_trip_through_json_changes_no_bit(graded: bool) -> None:
    pool, accuracy = sums_pool(), accuracy_by_sum(sums_pool())
    known, rng = forecast(pool), np.random.default_rng(0)
    scale = np.where(graded, 0.5, 1.0)
    for _ in range(5):
        ids = rng.permutation(POOL)[:WINDOW]
        known.judge_and_learn(visits(ids, scale * rolled_out(ids, accuracy, rng)))
    restored = forecast(pool)
    restored.load_state_dict(json.loads(json.dumps(known.state_dict())))
    ids = np.arange(POOL)
    rewards = scale * rolled_out(ids[:WINDOW], accuracy, rng)
    for one in (known, restored):
        one.judge_and_learn(visits(ids[:WINDOW], rewards))
    assert expected(known, ids).tobytes() == expected(restored, ids).tobytes()
    assert known.expected_tokens(ids).tobytes() == restored.expected_tokens(ids).tobytes()
    assert json.dumps(known.state_dict()) == json.dumps(restored.state_dict())


def test_checkpoints_from_before_there_was_a_model_still_load() -> None:
    """Their records had seven fields, and there was nothing but records."""
    state = {
        "binary": True,
        "exploration": [0.47, 0.53],
        "records": {"3": [4.0, 4.0, 1.0, 8.0, 1.0, 0.0, 0.0], "5": [8.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]},
    }
    known = forecast(made_up_pool(64))
    known.load_state_dict(state)
    assert known.used == "record"
    mixed, solved = expected(known, np.array([3, 5]))
    assert mixed > solved
    known.judge_and_learn(visits(np.arange(8), np.eye(8)))


def test_the_records_likelihood_is_that_of_a_beta_distribution() -> None:
    """Against numerical integration: three right and two wrong, of a chance that is Beta(1.5, 2.5)."""
    p = (np.arange(200_000) + 0.5) / 200_000
    density = p**0.5 * (1 - p) ** 1.5
    value = beta_log_likelihood(np.array([3.0]), np.array([5.0]), np.array([1.5]), np.array([2.5]))[0]
    assert value == pytest.approx(np.log((density * p**3 * (1 - p) ** 2).sum() / density.sum()), rel=1e-6)

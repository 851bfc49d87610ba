"""Seconds of a step by phase, and those that pruning saved by the step's own timers."""

from __future__ import annotations

import time

import pytest

from megatron_dppo.observe.timers import PhaseTimers, breakdown, saved_seconds

STEP = {
    "prune/saved_tokens_prompts": 300.0,
    "prune/saved_tokens_completions": 500.0,
    "prune/zero_advantage_tokens": 100.0,
    "train/tokens": 400.0,
    "perf/rollout_time": 1.5,
    "perf/score_norms_time": 0.5,
    "perf/deliver_time": 0.5,
    "perf/log_probs_time": 1.0,
    "perf/actor_train_time": 2.5,
    "perf/update_weights_time": 7.0,
}
"""A step that rolled out 1,000 tokens at 2 ms each, and trained on 400 of the 900 with a gradient at 10 ms each."""


def test_each_level_saved_what_its_tokens_would_have_cost() -> None:
    saved = saved_seconds(STEP)
    assert saved == {
        "perf/saved_prompts_time": pytest.approx(300 * 0.002 + 300 * 0.4 * 0.010),
        "perf/saved_completions_time": pytest.approx(500 * 0.010),
    }


def test_where_seconds_go_by_tokens_a_level_switched_off_takes_as_long_as_was_said() -> None:
    """The same step with all of its prompts rolled out, or with all that it rolled out and can train on trained on."""

    def seconds(rolled_out: float, trained: float) -> float:
        return 0.002 * rolled_out + 0.010 * trained

    saved, now = saved_seconds(STEP), seconds(1000, 400)
    assert now + saved["perf/saved_prompts_time"] == pytest.approx(seconds(1300, 0.4 * 1300))
    assert now + saved["perf/saved_completions_time"] == pytest.approx(seconds(1000, 900))


def test_pruning_is_worth_what_it_saves_over_the_noise_that_it_adds() -> None:
    """13 s, and without pruning 2.6 s and 11.7 s of tokens and the 7 s of a sync."""
    step = STEP | {"perf/step_time": 13.0, "prune/variance_inflation": 1.5}
    assert saved_seconds(step)["perf/pruning_efficiency"] == pytest.approx((2.6 + 11.7 + 7.0) / 13.0 / 1.5)
    assert "perf/pruning_efficiency" not in saved_seconds(step | {"prune/variance_inflation": 0.0})


def test_a_step_that_trained_on_nothing_has_no_seconds_per_trained_token() -> None:
    step = STEP | {"perf/deliver_time": 0.0, "perf/log_probs_time": 0.0, "perf/actor_train_time": 0.0}
    del step["train/tokens"]
    assert saved_seconds(step) == {"perf/saved_prompts_time": pytest.approx(2.0 * 300 / 600)}


def test_a_row_without_pruning_gains_nothing() -> None:
    assert saved_seconds({"train/loss": 1.0, "perf/actor_train_time": 1.0}) == {}


def test_a_phase_is_timed_and_what_is_left_is_other() -> None:
    timers = PhaseTimers()
    with timers("step"):
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.01)
        with pytest.raises(ValueError), timers("actor_train"):
            raise ValueError
    metrics = timers.take()
    assert set(metrics) == {"perf/step_time", "perf/rollout_time", "perf/actor_train_time"}
    assert metrics["perf/step_time"] >= metrics["perf/rollout_time"] >= 0.02
    assert sum(breakdown(metrics).values()) == pytest.approx(metrics["perf/step_time"])
    assert timers.take() == {}

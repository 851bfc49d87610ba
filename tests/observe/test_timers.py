"""Seconds of a step by phase, seconds saved by pruning, and use of the machines."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.observe.timers import PhaseTimers, Usage, compute_breakdown, saved_seconds
from tests.rollout.scripted import as_ranks

STEP = {
    "prune/saved_tokens_prompts": 300.0,
    "prune/saved_tokens_completions": 500.0,
    "prune/zero_advantage_tokens": 100.0,
    "train/tokens": 400.0,
    "perf/rollout_time": 2.0,
    "perf/deliver_time": 0.5,
    "perf/log_probs_time": 1.0,
    "perf/actor_train_time": 2.5,
    "perf/update_weights_time": 7.0,
}
"""A step that rolled out 1,000 tokens at 2 ms each, and trained on 400 of the 900 with a gradient
at 10 ms each."""


def test_each_level_saves_the_seconds_of_its_tokens() -> None:
    saved = saved_seconds(STEP)
    assert saved == {
        "perf/saved_prompts_time": pytest.approx(300 * 0.002 + 300 * 0.4 * 0.010),
        "perf/saved_completions_time": pytest.approx(500 * 0.010),
    }


def test_efficiency_is_saved_seconds_over_added_noise() -> None:
    """13 s, and without pruning 2.6 s and 11.7 s of tokens and the 7 s of a sync."""
    step = STEP | {"perf/step_time": 13.0, "prune/variance_inflation": 1.5}
    assert saved_seconds(step)["perf/pruning_efficiency"] == pytest.approx(
        (2.6 + 11.7 + 7.0) / 13.0 / 1.5
    )
    assert "perf/pruning_efficiency" not in saved_seconds(step | {"prune/variance_inflation": 0.0})


def test_savings_of_a_step_without_training() -> None:
    step = STEP | {
        "perf/deliver_time": 0.0,
        "perf/log_probs_time": 0.0,
        "perf/actor_train_time": 0.0,
    }
    del step["train/tokens"]
    assert saved_seconds(step) == {"perf/saved_prompts_time": pytest.approx(2.0 * 300 / 600)}


def test_phases_are_timed_and_the_rest_is_other() -> None:
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
    assert sum(compute_breakdown(metrics).values()) == pytest.approx(metrics["perf/step_time"])
    assert timers.take() == {}


SHAPE = PUBLISHED["qwen3-0.6b"]


def test_rate_and_waiting_follow_plan_and_timers() -> None:
    minibatch = SimpleNamespace(
        lengths=np.array([128, 256]),
        shared_length=np.array([0, 100]),
        response_length=np.array([28, 56]),
    )
    plan = SimpleNamespace(minibatches=[minibatch])
    seconds = {
        "perf/step_time": 8.0,
        "perf/rollout_time": 4.0,
        "perf/log_probs_time": 1.0,
        "perf/actor_train_time": 2.0,
    }
    used, other = as_ranks(
        2, lambda world: Usage(world, SHAPE, 10**7, 10**6, 1e12).measure(plan, seconds)
    )
    assert used == pytest.approx(other, rel=0.1)
    # Two seconds on two ranks for three times 5.680e9 (284 tokens), 0.168e9 (84 tokens of the head)
    # and 8.248e9 (28 layers of 16 heads of 128, squares of lengths).
    assert used["perf/actor_train_tflops"] == pytest.approx(0.0105723, rel=1e-5)
    assert used["perf/wait_time_ratio"] == pytest.approx(1 - 3 / 8)
    assert used["perf/host_memory_gib"] > 0.05
    assert "perf/gpu_memory_gib" not in used and "perf/actor_train_peak_share" not in used


def test_step_without_training_has_no_rate() -> None:
    def measured(world: object) -> dict[str, float]:
        return Usage(world, SHAPE, 1, 1, 1e12).measure(
            SimpleNamespace(minibatches=[]), {"perf/step_time": 2.0}
        )

    (used,) = as_ranks(1, measured)
    assert used.keys() == {"perf/host_memory_gib", "perf/wait_time_ratio"}
    assert used["perf/wait_time_ratio"] == 1.0

"""What a step is said to have used of the machines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dppo.estimate.memory import parameters_of
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.observe.timers import Usage
from tests.rollout.scripted import as_ranks

SHAPE = PUBLISHED["qwen3-0.6b"]


def test_the_rate_and_the_waiting_are_those_of_the_plan_and_the_timers() -> None:
    rows = SimpleNamespace(
        lengths=np.array([128, 256]), shared_length=np.array([0, 100]), response_length=np.array([28, 56])
    )
    plan = SimpleNamespace(minibatches=[SimpleNamespace(samples=rows)])
    seconds = {
        "perf/step_time": 8.0,
        "perf/rollout_time": 4.0,
        "perf/log_probs_time": 1.0,
        "perf/actor_train_time": 2.0,
    }
    weights = parameters_of(SHAPE)
    found = as_ranks(2, lambda world: Usage(world, SHAPE, weights.matrices, weights.head, 1e12).measure(plan, seconds))
    assert found[0] == pytest.approx(found[1], rel=0.1)
    used = found[0]
    attention = 2 * SHAPE.num_layers * SHAPE.heads * SHAPE.head_dim * (128**2 + 256**2 - 100**2)
    flops = 3 * (2 * weights.matrices * (384 - 100) + 2 * weights.head * 84 + attention)
    assert used["perf/actor_train_tflops"] == pytest.approx(flops / 2.0 / 2 / 1e12)  # two seconds on two ranks
    assert used["perf/wait_time_ratio"] == pytest.approx(1 - 3 / 8)
    assert used["perf/host_memory_gib"] > 0.05
    assert "perf/gpu_memory_gib" not in used and "perf/actor_train_peak_share" not in used


def test_a_step_that_trained_on_nothing_has_no_rate() -> None:
    def measured(world: object) -> dict[str, float]:
        return Usage(world, SHAPE, 1, 1, 1e12).measure(SimpleNamespace(minibatches=[]), {"perf/step_time": 2.0})

    (used,) = as_ranks(1, measured)
    assert used.keys() == {"perf/host_memory_gib", "perf/wait_time_ratio"}
    assert used["perf/wait_time_ratio"] == 1.0

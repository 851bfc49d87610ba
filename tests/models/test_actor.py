"""Settings of the actor that must change no bit: overlapped sums, released memory, a reference on
the host."""

import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models import actor
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

POLICY = partial(write_policy, tied=True)
LOSS = LossConfig(kl_coef=0.1, updates_per_rollout=2)
Learned = tuple[dict[str, float], Weights, list[int]]


def configure(path: Path, layout: LayoutConfig, dtype: str = "fp32", **optimizer: bool) -> Config:
    config = config_for(path, layout, LOSS, 32, distributed=True)
    model = replace(config.model, dtype=dtype)
    return replace(config, model=model, optimizer=replace(config.optimizer, lr=1e-3, **optimizer))


def learned(rank: int, size: int, config: Config, releases: bool = False) -> Learned:
    """Take three steps of two updates, of several packs and of one, with small gradient buckets.

    Returns:
        Metrics of the last step; the weights; bytes of gradients before and after each release.
    """
    small = partial(DistributedDataParallelConfig, bucket_size=2000)
    with mock.patch.object(actor, "DistributedDataParallelConfig", small):
        world, learner, policy = build(config)
    held = []

    def release() -> None:
        for memory_is_released in (False, True):
            if memory_is_released:
                policy.actor.release_memory()
            buffers = [buffer for ddp in policy.actor.modules for buffer in ddp.buffers]
            held.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers))
        parameters = [
            parameter
            for group in policy.actor.optimizer.param_groups
            for parameter in group["params"]
        ]
        assert all(parameter.grad is None for parameter in parameters)

    metadata, groups = step_of_groups(size)
    for step, tokens in enumerate((32, 64, 32)):
        if releases:
            release()
        plan = plan_for(
            world, replace(config, pack=replace(config.pack, max_tokens=tokens)), metadata
        )
        metrics = learner.train(plan, held_by(rank, metadata, groups), step=step + 1, version=0)
    if releases:
        release()
        policy.actor.release_memory()  # a second release changes nothing
    return metrics, weights_of(policy, world), held


def assert_same_bits(ours: Weights, expected: Weights) -> None:
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


@pytest.mark.parametrize(("distributed", "dtype"), [(False, "fp32"), (True, "bf16")])
def test_released_gradients_change_no_bit(
    distributed: bool, dtype: str, ranks: RankPool, policy: Path
) -> None:
    config = configure(
        policy, LayoutConfig(dp=2), dtype, distributed=distributed, overlap=distributed
    )
    expected, results = ranks.in_turn(2, (learned, config), (learned, config, True))
    for (metrics, weights, _), (our_metrics, ours, held) in zip(expected, results, strict=True):
        assert our_metrics == metrics
        assert_same_bits(ours, weights)
        assert min(held[::2]) > 0
        assert not any(held[1::2])


def come_late(rank: int, size: int, config: Config, done: Path) -> str:
    """Let rank 1 begin its passes when rank 0 has given up; return the error."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    accumulate = policy.actor.accumulate

    def late(*arguments: object) -> object:
        while rank and not done.exists():
            time.sleep(0.01)
        return accumulate(*arguments)

    with (
        mock.patch.object(policy.actor, "accumulate", late),
        pytest.raises((UserError, RuntimeError)) as error,
    ):
        learner.train(plan, held_by(rank, metadata, groups), step=1, version=0)
    done.touch()
    return str(error.value)


def test_training_collective_ends_after_the_timeout(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    config = replace(configure(policy, LayoutConfig(tp=2, dp=1, timeout_s=1.0)), loss=LossConfig())
    first, _ = ranks.run(2, come_late, config, tmp_path / "done", timeout=60.0)
    assert first.startswith(
        "layout.timeout_s = 1: another rank did not take part in forward and backward passes"
    )

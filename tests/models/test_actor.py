"""What the actor's settings may not change: overlapping the sums of gradients, a reference that waits on the host."""

from __future__ import annotations

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
from megatron_dppo.trainer.assemble import PolicyParts
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

LOSS = LossConfig(kl_coef=0.1, updates_per_rollout=2)
BUCKET = 2000
"""Parameters of a gradient bucket, so that a small policy has several."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), tied=True)


def configure(path: Path, layout: LayoutConfig, **optimizer: bool) -> Config:
    config = config_for(path, layout, LOSS, 32, distributed=True)
    return replace(config, optimizer=replace(config.optimizer, lr=1e-3, **optimizer))


def learned(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, int]:
    """Metrics after steps of two updates each, of several packs and of one, the weights then, and how many buckets
    gradients were summed in."""
    small = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    with mock.patch.object(actor, "DistributedDataParallelConfig", small):
        world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    for step, tokens in enumerate((32, 64, 32)):
        plan = plan_for(world, replace(config, pack=replace(config.pack, max_tokens=tokens)), metadata)
        metrics = learner.learn(plan, held_by(rank, metadata, groups), step=step + 1, version=0)
    buckets = sum(len(group.buckets) for ddp in policy.actor.modules for group in ddp.bucket_groups)
    return metrics, weights_of(policy, world), buckets


LAYOUTS = {
    "cp2": LayoutConfig(cp=2, dp=1),
    "dp2 pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=2),
    "dp2 tp2 sp": LayoutConfig(tp=2, dp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_that_overlap_the_backward_pass_are_the_same_bit_by_bit(ranks: RankPool, path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    size = layout.tp * layout.pp * layout.cp * layout.dp
    calls = [(learned, configure(path, layout, overlap=overlap)) for overlap in (False, True)]
    ((expected, weights, whole), *_), results = ranks.in_turn(size, *calls)
    norm = expected.pop("train/grad_norm")
    assert max(buckets for *_, buckets in results) > whole, "on the first stage, whose backward pass ends the update"
    for metrics, ours, _ in results:
        assert metrics.pop("train/grad_norm") == pytest.approx(norm, rel=1e-6), "summed in the order of the buckets"
        assert metrics == expected
        assert [tensor for tensor in weights if not torch.equal(ours[tensor], weights[tensor])] == []


def learned_between_servers(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, list[int]]:
    """As ``learned``, with the memory given back before the first step and after each; bytes of gradients meanwhile."""
    buckets = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    held: list[int] = []

    def release(policy: PolicyParts) -> None:
        (ddp,) = policy.actor.modules
        held.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in ddp.buffers))
        policy.actor.release_memory()
        held.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in ddp.buffers))
        gradients = [p.grad for group in policy.actor.optimizer.param_groups for p in group["params"]]
        assert not [gradient for gradient in gradients if gradient is not None]

    with mock.patch.object(actor, "DistributedDataParallelConfig", buckets):
        world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    release(policy)
    for step, tokens in enumerate((32, 64, 32)):
        plan = plan_for(world, replace(config, pack=replace(config.pack, max_tokens=tokens)), metadata)
        metrics = learner.learn(plan, held_by(rank, metadata, groups), step=step + 1, version=0)
        release(policy)
        policy.actor.release_memory()  # once more makes no difference
    return metrics, weights_of(policy, world), held


@pytest.mark.parametrize(
    ("distributed", "overlap", "dtype"),
    [(False, False, "bf16"), (False, True, "fp32"), (True, False, "fp32"), (True, True, "bf16")],
)
def test_a_step_whose_gradients_were_given_back_before_it_is_the_same_bit_by_bit(
    ranks: RankPool, path: Path, distributed: bool, overlap: bool, dtype: str
) -> None:
    config = configure(path, LayoutConfig(dp=2), distributed=distributed, overlap=overlap)
    config = replace(config, model=replace(config.model, dtype=dtype))
    expected, results = ranks.in_turn(2, (learned, config), (learned_between_servers, config))
    for (metrics, weights, _), (ours, our_weights, held) in zip(expected, results, strict=True):
        assert ours == metrics
        assert [tensor for tensor in weights if not torch.equal(our_weights[tensor], weights[tensor])] == []
        before, after = held[::2], held[1::2]
        assert min(before) > 0 and not any(after), "no byte of them stays"


def learned_with_reference(rank: int, size: int, config: Config) -> tuple[dict[str, float], bool]:
    """Metrics of a step, and whether the reference's weights wait elsewhere than where its pass has them."""
    world, learner, _ = build(config)
    places = [parameter.data_ptr() for parameter in learner.reference.parameters()]
    seen: list[int] = []
    decoder = learner.reference.chunks[0].decoder
    decoder.register_forward_pre_hook(lambda *_: seen.extend(p.data_ptr() for p in decoder.parameters()))
    metadata, groups = step_of_groups(size)
    with mock.patch.object(torch.Tensor, "to", lambda self, *_, **__: self.clone()):
        plan = plan_for(world, config, metadata)
        metrics = learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = [parameter.data_ptr() for parameter in learner.reference.parameters()]
    assert after == places
    return metrics, not set(seen) & set(places)


def test_a_reference_waits_on_the_host_and_scores_as_before(ranks: RankPool, path: Path) -> None:
    config = configure(path, LayoutConfig(dp=1))
    waiting = replace(config, model=replace(config.model, reference_on_host=True))
    [(expected, elsewhere)], results = ranks.in_turn(
        1, (learned_with_reference, config), (learned_with_reference, waiting)
    )
    assert not elsewhere
    assert results == [(expected, True)]


def come_late(rank: int, size: int, config: Config) -> str:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    accumulate = policy.actor.accumulate

    def late(*arguments: object) -> object:
        time.sleep(3.0 * rank)
        return accumulate(*arguments)

    with mock.patch.object(policy.actor, "accumulate", late), pytest.raises((UserError, RuntimeError)) as error:
        learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    return str(error.value)


def test_a_collective_of_training_does_not_outlast_a_users_patience(ranks: RankPool, path: Path) -> None:
    layout = LayoutConfig(tp=2, dp=1, timeout_s=1.0)
    loss = replace(LOSS, kl_coef=0.0, updates_per_rollout=1)
    first, _ = ranks.run(2, come_late, replace(configure(path, layout), loss=loss), timeout=60.0)
    assert first.startswith(
        "layout.timeout_s = 1: another rank did not take part in forward and backward passes in time"
    )

"""Where the gradient of the output layer goes: into the fp32 buffer of Megatron's DDP, whatever the weights' type."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.models import policy as policy_module
from megatron_dppo.models.actor import Microbatch, Responses, Sums
from megatron_dppo.models.policy import build_policy
from megatron_dppo.models.policy_head import score_responses
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Untied and tied."""
    folder = tmp_path_factory.mktemp("policies")
    return {tied: write_policy(folder / f"tied-{tied}", tied=tied) for tied in (False, True)}


def configure(path: Path, dtype: str, *, overlap: bool = False) -> Config:
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 32, distributed=True)
    return replace(
        config, model=replace(config.model, dtype=dtype), optimizer=replace(config.optimizer, overlap=overlap)
    )


def microbatches(world: Any, learner: Any, config: Config) -> list[Microbatch]:
    metadata, groups = step_of_groups(1)
    (minibatch,) = plan_for(world, config, metadata).minibatches
    packs = learner._packs(minibatch, held_by(0, metadata, groups))
    assert len(packs) > 5
    return [Microbatch(pack) for pack in packs]


def loss(responses: Responses) -> tuple[torch.Tensor, Sums]:
    return -(responses.logprobs * responses.arrays.advantage * responses.arrays.scale).sum(), {}


def accumulated(rank: int, size: int, config: Config) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """DDP's gradient of the output weight after several packs, and the gradient of each by autograd, all in fp64."""
    world, learner, parts = build(config)
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def score(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **settings: Any) -> Any:
        scores = score_responses(hidden, weight, targets, **settings)
        scores.logprobs.register_hook(lambda grad: seen.append((hidden.detach(), targets, grad)))
        return scores

    with mock.patch.object(policy_module, "score_responses", score):
        parts.actor.accumulate(microbatches(world, learner, config), loss)
    weight = parts.actor.chunks[0].output_layer.weight
    return weight.main_grad.double().clone(), [by_autograd(weight, *pack) for pack in seen]


def by_autograd(weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    exact = weight.detach().double().requires_grad_()
    logits = hidden.double() @ exact[:131].t() / 0.8
    chosen = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    (chosen * grad).sum().backward()
    assert exact.grad is not None
    return exact.grad


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def test_packs_of_a_policy_in_bf16_are_summed_in_fp32(ranks: RankPool, paths: dict[bool, Path]) -> None:
    [(sums, packs)] = ranks.run(1, accumulated, configure(paths[False], "bf16"))
    exact = torch.stack(packs).sum(dim=0)
    rounded = torch.stack([pack.bfloat16().double() for pack in packs]).sum(dim=0)
    assert distance(rounded, exact) > 5e-4, "the comparison can fail"
    assert distance(sums, exact) < 5e-6


def of_all_parameters(rank: int, size: int, config: Config) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """DDP's gradient of each parameter, and what autograd leaves in a copy of it that no DDP knows of."""
    world, learner, parts = build(config)
    actor, batches = parts.actor, microbatches(world, learner, config)
    for _ in range(2):  # an update leaves nothing behind for the next one
        actor.accumulate(batches, loss)
    (twin,) = build_policy(parts.shape, config.model, config.layout, temperature=config.rollout.temperature)
    with torch.no_grad():
        for copy, parameter in zip(twin.parameters(), actor.parameters(), strict=True):
            copy.copy_(parameter)
    with mock.patch.object(actor, "modules", [twin]):
        actor._run(batches, loss, forward_only=False)
    pairs = zip(actor.parameters(), twin.parameters(), strict=True)
    return [(parameter.main_grad, copy.grad) for parameter, copy in pairs]


def test_every_gradient_is_that_of_autograd(ranks: RankPool, paths: dict[bool, Path]) -> None:
    configs = [configure(paths[tied], "fp32", overlap=overlap) for tied in (False, True) for overlap in (False, True)]
    for [gradients] in ranks.in_turn(1, *((of_all_parameters, config) for config in configs)):
        assert max(distance(ours, expected) for ours, expected in gradients) < 1e-5

"""Law 2 on a real policy: every estimate is Σ_i scale_i g_i, with g_i the gradient of completion i
by itself.

``test_unbiasedness.py`` integrates such sums over the draws of every rule.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from benchmarks.real_gradients import gradient, gradients, planned, single_packs
from megatron_dppo.config import Config, LayoutConfig, LossConfig
from megatron_dppo.rl.advantages import estimate_advantages, read_columns
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.types import Pack
from megatron_dppo.trainer.learner import PolicyLoss
from tests.ranks import RankPool
from tests.steps import SAMPLES, build, config_for, plan_for, step_of_groups

LOSSES = (
    LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0, updates_per_rollout=2),
    LossConfig(name="dapo"),
    LossConfig(name="dr_grpo"),
    LossConfig(name="gspo", updates_per_rollout=2),
)


def measure_errors(rank: int, size: int, config: Config) -> list[float]:
    """Return ‖packed gradient − Σ scale_i g_i‖ / ‖packed gradient‖ of each minibatch."""
    world, learner, policy = build(config)
    actor, loss = policy.actor, config.loss
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata, groups)
    objective = resolve_objective(loss)
    advantage = estimate_advantages(objective.advantage, metadata.rewards, read_columns(metadata))[
        ..., 0
    ]

    def score(packs: list[Pack]) -> list[Pack]:
        reference = (
            learner.reference.log_probabilities(packs) if learner.reference else [None] * len(packs)
        )
        old = actor.log_probabilities(packs)
        return [
            dataclasses.replace(pack, old_logprobs=before, reference_logprobs=base)
            for pack, before, base in zip(packs, old, reference, strict=True)
        ]

    singles = score(single_packs(groups, advantage, policy.pad_id))
    packed = []
    for minibatch in plan.minibatches:
        batches = planned(minibatch, dict(enumerate(groups)), world, policy.pad_id)
        packed.append(score(batches))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.02)  # away from the old policy, so that some ratios are clipped
    policy_loss = PolicyLoss(objective, kl_coef=loss.kl_coef, tis_cap=loss.tis_cap, version=0)
    rows = gradients(actor, singles, policy_loss).double()
    errors = []
    for minibatch, batches in zip(plan.minibatches, packed, strict=True):
        samples = minibatch
        summed = (
            torch.from_numpy(samples.scale) @ rows[samples.group * SAMPLES + samples.completion]
        )
        found = gradient(actor, batches, policy_loss).double()
        errors.append(float((found - summed).norm() / found.norm()))
    return errors


def test_packed_gradient_is_the_sum_of_its_rows(ranks: RankPool, policy: Path) -> None:
    """Tie the algebra to the system: prompts of unequal probability, shared prefixes, several
    packs, two updates."""
    configs = [
        config_for(policy, LayoutConfig(dp=1), loss, 64, distributed=False) for loss in LOSSES
    ]
    for loss, [errors] in zip(
        LOSSES, ranks.in_turn(1, *((measure_errors, config) for config in configs)), strict=True
    ):
        assert len(errors) == loss.updates_per_rollout
        assert max(errors) < 1e-5, loss

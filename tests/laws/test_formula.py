"""A real run's update is the update of the written-out objective, by autograd on transformers' own
model.

Split invariance holds for a wrong loss too. Here the right loss is known: algorithm and aggregation
as formulas, weights and normaliser by hand, and one step of Adam with eps = 1 and rate 1, which
moves a weight by −g / (|g| + 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_dppo.config import Config, EntropyConfig, LayoutConfig, LossConfig
from megatron_dppo.rl.types import Completion, Group, StepMetadata, StepPlan
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import (
    SAMPLES,
    Weights,
    build,
    config_for,
    held_by,
    plan_for,
    step_of_groups,
    weights_of,
)

POLICY = partial(write_policy, tied=True)
TEMPERATURE, TIS_CAP, KL_COEF, ENTROPY_COEF = 0.8, 2.0, 0.1, 0.3
Step = tuple[StepMetadata, list[Group]]
Terms = Callable[[int, int, torch.Tensor], tuple[Any, torch.Tensor]]
"""From a row, a sample and the policy's distributions to the advantage and the penalty of each
token."""


def update(
    rank: int,
    size: int,
    config: Config,
    reference_scale: float,
    step: Callable[[int], Step] = step_of_groups,
) -> tuple[dict[str, float], Weights, StepPlan]:
    """Make one update, against a reference (if there is one) of the policy's weights times
    ``reference_scale``.

    Returns:
        Metrics; how far each weight moved; the plan.
    """
    world, learner, policy = build(config)
    metadata, groups = step(size)
    if learner.reference is not None:
        with torch.no_grad():
            for parameter in learner.reference.parameters():
                parameter.mul_(reference_scale)
    before = weights_of(policy, world)
    plan = plan_for(world, config, metadata)
    metrics = learner.train(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = weights_of(policy, world)
    return metrics, {name: after[name] - before[name] for name in before}, plan


def log_distributions(model: Qwen3ForCausalLM, group: Group, sample: int) -> torch.Tensor:
    """Return [tokens of the response, vocabulary]."""
    prompt = group.prompt.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, group.completions[sample].token_ids])).long()
    return torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)


def chosen(distributions: torch.Tensor, completion: Completion) -> torch.Tensor:
    return distributions.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]


def objective(
    plan: StepPlan,
    metadata: StepMetadata,
    groups: list[Group],
    model: Qwen3ForCausalLM,
    terms: Terms,
) -> torch.Tensor:
    """Return GRPO's −Ĵ of the kept rows, with Z of the whole window."""
    (minibatch,) = plan.minibatches
    kept, total = minibatch, torch.zeros(())
    assert 0 < len(kept.group) < metadata.rewards.size
    for row, sample, weight in zip(kept.group, kept.completion, kept.weight, strict=True):
        completion, own = (
            groups[row].completions[sample],
            log_distributions(model, groups[row], sample),
        )
        logprobs = chosen(own, completion)
        ratio = (logprobs - logprobs.detach()).exp()
        correction = (
            (logprobs.detach() - torch.from_numpy(completion.logprobs)).exp().clamp(max=TIS_CAP)
        )
        advantage, penalty = terms(row, sample, own)
        term = correction * ratio * advantage - penalty
        total = total - weight * term[torch.from_numpy(completion.loss_mask)].mean()
    return total / (metadata.window * SAMPLES)


def assert_moved(moved: Weights, model: Qwen3ForCausalLM) -> None:
    """Compare how far weights moved with the gradients of a model."""
    for name, parameter in model.named_parameters():
        expected = -parameter.grad / (parameter.grad.abs() + 1)
        difference = (moved[name] - expected).norm()
        assert difference <= 1e-4 * expected.norm() + 2e-7 * parameter.norm(), name


def test_update_equals_the_formula(ranks: RankPool, policy: Path) -> None:
    """Of GRPO with a KL term and an entropy bonus; ``rl/test_objectives.py`` has the formulas of
    all objectives."""
    bonus = EntropyConfig(coef=ENTROPY_COEF)
    loss = LossConfig(name="grpo", kl_coef=KL_COEF, tis_cap=TIS_CAP, entropy=bonus)
    config = config_for(policy, LayoutConfig(tp=2, dp=1), loss, 64, distributed=True)
    metrics, moved, plan = ranks.run(2, update, config, 0.97)[0]

    model, other = (Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.97)
    metadata, groups = step_of_groups(2)
    deviations = metadata.rewards - metadata.rewards.mean(1, keepdims=True)
    advantages = deviations / metadata.rewards.std(1, keepdims=True)

    def terms(row: int, sample: int, own: torch.Tensor) -> tuple[float, torch.Tensor]:
        reference = log_distributions(other, groups[row], sample).detach()
        difference = chosen(reference - own, groups[row].completions[sample])
        divergence = difference.exp() - difference - 1
        entropy = -(own.exp() * own).sum(dim=-1)
        return advantages[row, sample], KL_COEF * divergence - ENTROPY_COEF * entropy

    expected = objective(plan, metadata, groups, model, terms)
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    norm = (
        sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
        ** 0.5
    )
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_moved(moved, model)

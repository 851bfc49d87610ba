"""A real run's update is the update of the written-out objective, by autograd on transformers' own model.

Split invariance holds for a wrong loss too. Here the right loss is known: algorithm and aggregation as formulas,
weights and normaliser by hand, and one step of Adam with eps = 1 and rate 1, which moves a weight by −g / (|g| + 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.rl.types import Group, StepMetadata, StepPlan
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import SAMPLES, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

POLICY = partial(write_policy, tied=True)
TEMPERATURE, TIS_CAP, LIMIT = 0.8, 2.0, 24
Step = tuple[StepMetadata, list[Group]]


def update(
    rank: int, size: int, config: Config, reference_scale: float, step: Callable[[int], Step] = step_of_groups
) -> tuple[dict[str, float], Weights, StepPlan]:
    """Make one update, against a reference (if there is one) of the policy's weights times ``reference_scale``.

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
    metrics = learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = weights_of(policy, world)
    return metrics, {name: after[name] - before[name] for name in before}, plan


def response_logprobs(model: Qwen3ForCausalLM, group: Group, sample: int) -> torch.Tensor:
    prompt, response = group.prompt.token_ids, group.completions[sample].token_ids
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    logits = model(ids[None]).logits[0] / TEMPERATURE
    return torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]


def objective(
    name: str,
    plan: StepPlan,
    metadata: StepMetadata,
    groups: list[Group],
    model: Qwen3ForCausalLM,
    other: Qwen3ForCausalLM | None,
) -> torch.Tensor:
    """Return −Ĵ of the kept rows, with advantages of whole groups and Z of the whole window."""
    rewards, lengths, pi = metadata.rewards, metadata.sampled_lengths, metadata.prompt_inclusion
    deviation = rewards - rewards.mean(1, keepdims=True)
    advantages = deviation / rewards.std(1, keepdims=True)
    if name == "rloo":  # against the mean of the other completions
        advantages = deviation * SAMPLES / (SAMPLES - 1)
    z = {
        "grpo": metadata.window * SAMPLES,
        "dapo": float((lengths.sum(1) / pi).sum()),
        "rloo": metadata.window * SAMPLES * LIMIT,
    }[name]
    (minibatch,) = plan.minibatches
    kept, total = minibatch.samples, torch.zeros(())
    for row, sample, weight in zip(kept.group, kept.completion, kept.weight, strict=True):
        logprobs = response_logprobs(model, groups[row], sample)
        engine = torch.from_numpy(groups[row].completions[sample].logprobs)
        ratio = (logprobs - logprobs.detach()).exp()
        correction = (logprobs.detach() - engine).exp().clamp(max=TIS_CAP)
        term = correction * ratio * advantages[row, sample]
        if other is not None:
            with torch.no_grad():
                reference = response_logprobs(other, groups[row], sample)
            difference = reference - logprobs
            term = term - 0.1 * (difference.exp() - difference - 1)
        c = 1 / lengths[row, sample] if name == "grpo" else 1.0
        sampled = torch.from_numpy(groups[row].completions[sample].loss_mask)
        total = total - weight * c / z * term[sampled].sum()
    return total


def assert_moved(moved: Weights, model: Qwen3ForCausalLM) -> None:
    """Compare how far weights moved with the gradients of a model."""
    for name, parameter in model.named_parameters():
        expected = -parameter.grad / (parameter.grad.abs() + 1)
        difference = (moved[name] - expected).norm()
        assert difference <= 1e-4 * expected.norm() + 2e-7 * parameter.norm(), name


@pytest.mark.parametrize(("name", "kl"), [("grpo", 0.1), ("dapo", 0.0), ("rloo", 0.0)])
def test_update_equals_the_formula(name: str, kl: float, ranks: RankPool, policy: Path) -> None:
    loss = LossConfig(name=name, kl_coef=kl, tis_cap=TIS_CAP)
    config = config_for(policy, LayoutConfig(tp=2, dp=1), loss, 64, distributed=True)
    config = replace(config, rollout=replace(config.rollout, temperature=TEMPERATURE, max_response_tokens=LIMIT))
    metrics, moved, plan = ranks.run(2, update, config, 0.97)[0]

    model, other = (Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.97)
    metadata, groups = step_of_groups(2)
    expected = objective(name, plan, metadata, groups, model, other if kl else None)
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    norm = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters()) ** 0.5
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_moved(moved, model)


def test_weight_decay_shrinks_matrices_and_no_norms(ranks: RankPool, policy: Path) -> None:
    before = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32).state_dict()
    config = config_for(policy, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    decays = [replace(config.optimizer, lr=0.1, weight_decay=decay) for decay in (0.5, 0.0)]
    results = ranks.in_turn(1, *((update, replace(config, optimizer=each), 1.0) for each in decays))
    [(_, shrunk, _)], [(_, moved, _)] = results
    for name, by in shrunk.items():
        expected = moved[name] - (0.1 * 0.5 * before[name] if before[name].dim() > 1 else 0.0)
        torch.testing.assert_close(by, expected, rtol=0.0, atol=1e-6, msg=name)

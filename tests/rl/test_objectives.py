"""Every objective is its paper's formula, written out by sequences and differentiated by the
tokens' log-probabilities.

Plan and losses are the project's. The policy before the step and the engine differ from the policy,
so that some tokens are clipped, truncated or masked and some are not.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.config import EntropyConfig, LossConfig
from megatron_dppo.rl.losses import compute_token_losses
from megatron_dppo.rl.objectives import (
    OBJECTIVES,
    Aggregation,
    EntropyBonus,
    compute_kept_fraction,
    compute_overlong_penalty,
    resolve_objective,
)
from megatron_dppo.rl.types import Floats, StepMetadata
from tests.rl.plans import plan, step_config, step_metadata

SAMPLES, LIMIT = 4, 200
"""Completions of a group; the longest response of ``step_config``."""


def test_weight_of_the_entropy_follows_its_target() -> None:
    """Up by delta after a step with at most the target, and down after one with more, where the
    bonus is off; never beyond its bounds."""
    settings = EntropyConfig(coef=0.1, target=0.5, delta=0.04, min_coef=0.05, max_coef=0.2)
    bonus, weights = EntropyBonus(settings), []
    for entropy in (0.9, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.6):
        weights.append(bonus.weight)
        bonus.update(entropy)
        restored = EntropyBonus(settings)
        restored.load_state_dict(json.loads(json.dumps(bonus.state_dict())))
        assert restored.weight == bonus.weight
        bonus = restored
    assert weights == pytest.approx([0.0, 0.0, 0.0, 0.09, 0.13, 0.17, 0.2, 0.2])
    assert bonus.weight == 0.0
    bonus.update(0.5)
    assert bonus.weight == pytest.approx(0.2)


def test_constant_weight_of_the_entropy_stays() -> None:
    bonus = EntropyBonus(EntropyConfig(coef=0.1))
    bonus.update(9.0)
    assert bonus.weight == 0.1


def ppo(ratio: Tensor, a: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def gmpo(log_ratio: Tensor, a: float) -> Tensor:
    """Clip in the advantage's own direction, as the paper's code does."""
    sign = 1.0 if a > 0 else -1.0
    least = sign * torch.minimum(sign * log_ratio, (sign * log_ratio).clamp(-0.4, 0.4))
    return a * least.mean().exp()


def sapo(ratio: Tensor, a: float) -> Tensor:
    temperature = 1.0 if a > 0 else 1.05
    return (a * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))).mean()


def sequence_value(name: str, new: Tensor, old: Tensor, a: float) -> Tensor:
    """Return what a sequence with the advantage a adds to an objective before the division by Z."""
    ratio = (new - old).exp()
    match name:
        case "grpo" | "reinforce_pp" | "reinforce_pp_baseline":
            return ppo(ratio, a).mean()
        case "dr_grpo":
            return ppo(ratio, a).sum()
        case "dapo":
            return ppo(ratio, a, high=0.28).sum()
        case "gspo":
            return ppo((new - old).mean().exp(), a, 3e-4, 4e-4)
        case "cispo":
            return (ratio.detach().clamp(max=1.28) * a * new).sum()
        case "rloo":
            return (ratio * a).sum()
        case "gmpo":
            return gmpo(new - old, a)
        case "sapo":
            return sapo(ratio, a)
    raise KeyError(name)


def trust_region(loss: LossConfig, new: Tensor, engine: Tensor, a: float) -> Tensor:
    """Return M · p/q · A of each token."""
    p, q = new.detach().exp(), engine.exp()
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    bound = loss.clip_high if a > 0 else loss.clip_low
    outside = ((q - p).abs() if loss.trust_region == "tv" else kl) > bound
    away = (p > q) if a > 0 else (p < q)
    return torch.where(outside & away, 0.0, 1.0) * (new - engine).exp() * a


def engine_weight(loss: LossConfig, old: Tensor, engine: Tensor) -> Tensor:
    """Return w of each token."""
    ratio = (old - engine).exp()
    if loss.tis_level == "sequence":
        ratio = ratio.prod().expand(len(old))
    elif loss.tis_level == "prefix":
        ratio = ratio.cumprod(0)
    kept = (ratio >= (loss.mask_below or 0.0)) & (ratio <= (loss.mask_above or np.inf))
    return torch.where(kept, ratio.clamp(max=loss.tis_cap or np.inf), 0.0)


def write_advantages(name: str, metadata: StepMetadata) -> Floats:
    """Return advantages [Q, G] by the words of each paper."""
    rewards, pi = metadata.rewards, metadata.prompt_inclusion
    group = rewards.mean(axis=1, keepdims=True)
    if name == "rloo":
        return rewards - np.array(
            [[np.delete(row, i).mean() for i in range(SAMPLES)] for row in rewards]
        )
    if name.startswith("reinforce_pp"):
        counts = np.repeat(1 / pi, SAMPLES)  # a prompt that was kept with chance 1/2 stands for two
        mean = np.average(rewards.ravel(), weights=counts)
        values = rewards - (mean if name == "reinforce_pp" else group)
        return values / np.sqrt(np.average(values.ravel() ** 2, weights=counts))
    return (rewards - group) / (1.0 if name == "dr_grpo" else rewards.std(axis=1, keepdims=True))


def write_normaliser(name: str, metadata: StepMetadata) -> float:
    if name in ("dapo", "cispo"):
        return float((metadata.sampled_lengths.sum(1) / metadata.prompt_inclusion).sum())
    return metadata.window * SAMPLES * (LIMIT if name in ("dr_grpo", "rloo") else 1.0)


LOSSES = {
    **{name: LossConfig(name=name) for name in OBJECTIVES},
    "truncated by sequence": LossConfig(name="rloo", tis_cap=1.5, tis_level="sequence"),
    "truncated by prefix": LossConfig(name="grpo", tis_cap=1.2, tis_level="prefix"),
    "masked by sequence": LossConfig(
        name="grpo", mask_below=0.5, mask_above=3.0, tis_level="sequence"
    ),
    "masked below": LossConfig(name="grpo", mask_below=0.6),
    "masked and truncated": LossConfig(name="dapo", mask_below=0.6, tis_cap=1.2),
    "total variation": LossConfig(
        name="dr_grpo", trust_region="tv", clip_low=0.003, clip_high=0.002
    ),
    "binary KL": LossConfig(name="reinforce_pp", trust_region="kl", clip_low=5e-4, clip_high=4e-4),
}


@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(case: str) -> None:
    loss, inclusion = LOSSES[case], np.array([1.0, 0.5, 0.8, 1.0, 0.4, 0.9])
    rng = np.random.default_rng(0)
    lengths, rewards = rng.integers(1, 12, (6, SAMPLES)), rng.normal(size=(6, SAMPLES))
    given = {
        "prompt_inclusion": inclusion,
        "window": 9.0,
        "response_lengths": lengths,
        "rewards": rewards,
    }
    metadata = step_metadata(6, SAMPLES, **given)
    (minibatch,) = plan(metadata, step_config(keep=0.6, **loss.model_dump())).minibatches
    samples, advantage = minibatch, write_advantages(loss.name, metadata)
    assert 4 < len(samples.group) < metadata.rewards.size

    sizes = samples.response_length
    policy = np.log(rng.uniform(0.05, 0.95, sizes.sum()))
    old, engine = (
        torch.from_numpy(np.minimum(policy + 0.5 * rng.normal(size=len(policy)), -1e-3))
        for _ in range(2)
    )
    new = torch.from_numpy(policy).requires_grad_()
    owner = np.repeat(np.arange(len(sizes)), sizes)
    losses, sums = compute_token_losses(
        resolve_objective(loss),
        logprobs=new,
        old_logprobs=old,
        engine_logprobs=engine,
        reference_logprobs=None,
        advantage=torch.from_numpy(samples.advantage[owner, 0]),
        kl_coef=0.0,
        tis_cap=loss.tis_cap,
        sample=torch.from_numpy(owner),
    )
    total = (losses * torch.from_numpy(samples.scale[owner])).sum()

    written = torch.zeros((), dtype=torch.float64)
    rows = (each.split(sizes.tolist()) for each in (new, old, engine))
    for q, i, weight, *row in zip(
        samples.group, samples.completion, samples.weight, *rows, strict=True
    ):
        (p, p_old, p_engine), a = row, float(advantage[q, i])
        if loss.trust_region != "none":
            tokens = trust_region(loss, p, p_engine, a)
            value = tokens.mean() if loss.name == "reinforce_pp" else tokens.sum()
        elif loss == LossConfig(name=loss.name):
            value = sequence_value(loss.name, p, p_old, a)
        else:  # a weight for each token's own term
            weights = engine_weight(loss, p_old, p_engine)
            terms = [
                w * sequence_value(loss.name, *each, a)
                for w, *each in zip(weights, p, p_old, strict=True)
            ]
            value = sum(terms) / (len(p) if loss.name == "grpo" else 1.0)
        written = written - float(weight) * value / write_normaliser(loss.name, metadata)
    assert total.item() == pytest.approx(written.item(), rel=1e-9)
    found, expected = (torch.autograd.grad(x, new)[0] for x in (total, written))
    assert (found - expected).norm() <= 1e-9 * expected.norm() > 0.0
    limited = sums["train/pg_clipfrac"] + sums["train/tis_clipfrac"]
    assert limited > 0 or case in ("rloo", "sapo"), "nothing was clipped or masked"


def test_clips_of_zero_are_settings() -> None:
    objective = resolve_objective(LossConfig(name="dapo", clip_low=0.0, clip_high=0.5))
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (
        0.0,
        0.5,
        "token_mean",
    )
    bounds = {
        kind: resolve_objective(LossConfig(trust_region=kind)).clip_low for kind in ("tv", "kl")
    }
    assert bounds == {"tv": 0.15, "kl": 0.05}


def test_overlong_penalty_falls_linearly_over_the_buffer() -> None:
    lengths, penalties = [1, 80, 85, 90, 100, 101], [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert compute_overlong_penalty(lengths, limit=100, buffer=20).tolist() == penalties
    assert not compute_overlong_penalty(lengths, limit=100, buffer=0).any()


@pytest.mark.parametrize(
    ("aggregation", "share"), [("seq_mean", 22 / 24), ("token_mean", 154 / 162)]
)
def test_kept_share_of_the_divisor_counts_unseen_prompts(
    aggregation: Aggregation, share: float
) -> None:
    known = {
        "sampled_lengths": np.array([[2, 4], [5, 10]]),
        "prompt_inclusion": np.array([0.5, 0.1]),
    }
    kept = np.array([[True, False], [True, True]])
    assert compute_kept_fraction(aggregation, **known, kept=kept) == pytest.approx(share)
    assert compute_kept_fraction(aggregation, **known, kept=~kept & kept) == 1.0, "nothing kept"

"""Every objective is its paper's formula, written out by sequences and differentiated on transformers' own model.

Plan, packs and losses are the project's. The policy before the step and the engine differ from the policy, so that some
tokens are clipped, truncated or masked and some are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config import LossConfig, PackConfig
from megatron_dppo.rl.losses import token_losses
from megatron_dppo.rl.objectives import (
    OBJECTIVES,
    Aggregation,
    coefficient,
    kept_share,
    normaliser,
    objective_for,
    soft_overlong_penalty,
)
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.types import Floats, Group, StepMetadata
from tests.rl.plans import plan, step_config, training_sample
from tests.steps import SAMPLES, VOCAB, step_of_groups

LIMIT = 200
"""Of ``step_config``: the longest response."""
Rows = list[list[Tensor]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A step with the log-probabilities of its sampled tokens, by group and completion."""

    metadata: StepMetadata
    groups: list[Group]
    parameters: list[Tensor]
    policy: Rows
    """With the gradient of transformers' model."""
    old: Rows
    engine: Rows


@pytest.fixture(scope="module")
def scored() -> Scored:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.3)).double()
    metadata, groups = step_of_groups(1)

    def logprobs(group: Group, sample: int) -> Tensor:
        completion = group.completions[sample]
        ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids])).long()
        first = len(group.prompt.token_ids)
        scores = torch.log_softmax(model(ids[None]).logits[0], dim=-1)[first - 1 : -1]
        return scores.gather(1, ids[first:, None])[:, 0][torch.from_numpy(completion.loss_mask)]

    policy = [[logprobs(group, sample) for sample in range(SAMPLES)] for group in groups]

    def disturb(rows: Rows) -> Rows:
        return [[(x.detach() + 0.5 * torch.randn_like(x)).clamp(max=-1e-3) for x in row] for row in rows]

    return Scored(metadata, groups, list(model.parameters()), policy, disturb(policy), disturb(policy))


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
    kept = (ratio >= (loss.mask_below or 0.0)) & (ratio <= (loss.mask_above or np.inf))
    return torch.where(kept, ratio.clamp(max=loss.tis_cap or np.inf), 0.0)


def write_advantages(name: str, metadata: StepMetadata) -> Floats:
    """Return advantages [Q, G] by the words of each paper."""
    rewards, pi = metadata.rewards, metadata.prompt_inclusion
    group = rewards.mean(axis=1, keepdims=True)
    if name == "rloo":
        return rewards - np.array([[np.delete(row, i).mean() for i in range(SAMPLES)] for row in rewards])
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
    "masked by sequence": LossConfig(name="grpo", mask_below=0.5, mask_above=3.0, tis_level="sequence"),
    "masked and truncated": LossConfig(name="dapo", mask_below=0.6, tis_cap=1.2),
    "total variation": LossConfig(name="dr_grpo", trust_region="tv", clip_low=0.003, clip_high=0.002),
    "binary KL": LossConfig(name="reinforce_pp", trust_region="kl", clip_low=5e-4, clip_high=4e-4),
}


@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(case: str, scored: Scored) -> None:
    loss, metadata = LOSSES[case], scored.metadata
    config = step_config(keep=0.6, pack=PackConfig(max_tokens=64), **loss.model_dump())
    (minibatch,) = plan(metadata, config).minibatches
    samples, advantage = minibatch.samples, write_advantages(loss.name, metadata)
    assert 4 < len(samples.group) < metadata.rewards.size and len(minibatch.packs[0]) > 1

    packed = torch.zeros((), dtype=torch.float64)
    cut = 0.0
    for members in minibatch.packs[0]:
        rows = []
        for k in members:
            group = scored.groups[samples.group[k]]
            completion = group.completions[samples.completion[k]]
            known = {"engine_logprobs": completion.logprobs, "loss_mask": completion.loss_mask}
            rows.append(training_sample(samples, k, group.prompt.token_ids, completion.token_ids, **known))
        pack = build_pack(rows, minibatch.capacity, pad_id=0, align=1)
        new, old, engine = (
            torch.cat([table[samples.group[k]][samples.completion[k]] for k in members])
            for table in (scored.policy, scored.old, scored.engine)
        )
        losses = token_losses(
            objective_for(loss),
            logprobs=new,
            old_logprobs=old,
            engine_logprobs=engine,
            reference_logprobs=None,
            advantage=torch.from_numpy(pack.advantage),
            kl_coef=0.0,
            tis_cap=loss.tis_cap,
            sample=torch.from_numpy(pack.sample),
        )
        packed = packed + (losses.loss * torch.from_numpy(pack.scale)).sum()
        cut += float(losses.sums["train/pg_clipfrac"] + losses.sums["train/tis_clipfrac"])

    written = torch.zeros((), dtype=torch.float64)
    for q, i, weight in zip(samples.group, samples.completion, samples.weight, strict=True):
        new, old, engine = scored.policy[q][i], scored.old[q][i], scored.engine[q][i]
        a = float(advantage[q, i])
        if loss.trust_region != "none":
            tokens = trust_region(loss, new, engine, a)
            value = tokens.mean() if loss.name == "reinforce_pp" else tokens.sum()
        elif loss == LossConfig(name=loss.name):
            value = sequence_value(loss.name, new, old, a)
        else:  # a weight for each token's own term
            weights = engine_weight(loss, old, engine)
            terms = [w * sequence_value(loss.name, *each, a) for w, *each in zip(weights, new, old, strict=True)]
            value = sum(terms) / (len(new) if loss.name == "grpo" else 1.0)
        written = written - float(weight) * value / write_normaliser(loss.name, metadata)
    assert packed.item() == pytest.approx(written.item(), rel=1e-9)
    ours, theirs = (torch.autograd.grad(x, scored.parameters, retain_graph=True) for x in (packed, written))
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).norm() <= 1e-9 * expected.norm()
    assert cut > 0 or case in ("rloo", "sapo"), "nothing was clipped or masked"


def test_clips_of_zero_are_settings() -> None:
    objective = objective_for(LossConfig(name="dapo", clip_low=0.0, clip_high=0.5))
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (0.0, 0.5, "token_mean")


def test_overlong_penalty_falls_linearly_over_the_buffer() -> None:
    lengths, penalties = [1, 80, 85, 90, 100, 101], [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert soft_overlong_penalty(lengths, limit=100, buffer=20).tolist() == penalties
    assert not soft_overlong_penalty(lengths, limit=100, buffer=0).any()


LENGTHS = np.array([[2, 4], [5, 10]])
KEPT = np.array([[True, False], [True, True]])


@pytest.mark.parametrize(
    ("aggregation", "c", "z", "pruned_z", "kept"),
    [
        ("seq_mean", [[0.5, 0.25], [0.2, 0.1]], 4.0, 20.0, (2 + 20) / (4 + 20)),
        ("token_mean", [[1, 1], [1, 1]], 21.0, 6 / 0.5 + 15 / 0.1, (4 + 150) / (12 + 150)),
        ("constant", [[1, 1], [1, 1]], 4.0 * 16, 320.0, (2 + 20) / (4 + 20)),
    ],
)
def test_coefficients_and_normalisers_are_the_table(
    aggregation: Aggregation, c: list[list[float]], z: float, pruned_z: float, kept: float
) -> None:
    """Of two prompts, and of ten prompts two of which were rolled out, with probabilities 0.5 and 0.1."""
    np.testing.assert_array_equal(coefficient(aggregation, LENGTHS), c)
    for expected, prompts, inclusion in ((z, 2, [1.0, 1.0]), (pruned_z, 10, [0.5, 0.1])):
        known = {"sampled_lengths": LENGTHS, "prompt_inclusion": np.array(inclusion)}
        found = normaliser(aggregation, **known, prompts=prompts, max_response_tokens=16)
        assert found == pytest.approx(expected, rel=1e-15)
    assert kept_share(aggregation, **known, kept=KEPT) == pytest.approx(kept)

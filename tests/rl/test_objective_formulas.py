"""Every objective is its paper's formula, written out by sequences and differentiated on transformers' own model.

Plan, packs and losses are the project's. The policy before the step and the engine differ from the policy, so that some
tokens are clipped, truncated or masked and some are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config import LossConfig, PackConfig
from megatron_dppo.rl.losses import token_losses
from megatron_dppo.rl.objectives import OBJECTIVES, objective_for
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Floats, Group, StepMetadata
from tests.rl.plans import step_config
from tests.steps import SAMPLES, VOCAB, step_of_groups

LIMIT = 200
"""Of ``step_config``: the longest response."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A step with the log-probabilities of its sampled tokens, by group and completion."""

    metadata: StepMetadata
    groups: list[Group]
    parameters: list[Tensor]
    policy: list[list[Tensor]]
    """With the gradient of transformers' model."""
    old: list[list[Tensor]]
    engine: list[list[Tensor]]


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

    def near(each: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[(x.detach() + 0.5 * torch.randn_like(x)).clamp(max=-1e-3) for x in row] for row in each]

    return Scored(metadata, groups, list(model.parameters()), policy, near(policy), near(policy))


def ppo(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def gmpo(log_ratio: Tensor, a: float) -> Tensor:
    """As the paper's code has it: in the advantage's own direction."""
    sign = 1.0 if a > 0 else -1.0
    least = sign * torch.minimum(sign * log_ratio, (sign * log_ratio).clamp(-0.4, 0.4))
    return a * least.mean().exp()


def sapo(ratio: Tensor, a: float) -> Tensor:
    temperature = 1.0 if a > 0 else 1.05
    return (a * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))).mean()


OF_A_SEQUENCE: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "grpo": lambda new, old, a: ppo((new - old).exp(), a, 0.2, 0.2).mean(),
    "dr_grpo": lambda new, old, a: ppo((new - old).exp(), a, 0.2, 0.2).sum(),
    "dapo": lambda new, old, a: ppo((new - old).exp(), a, 0.2, 0.28).sum(),
    "gspo": lambda new, old, a: ppo((new - old).mean().exp(), a, 3e-4, 4e-4),
    "cispo": lambda new, old, a: ((new - old).exp().detach().clamp(max=1.28) * a * new).sum(),
    "rloo": lambda new, old, a: ((new - old).exp() * a).sum(),
    "reinforce_pp": lambda new, old, a: ppo((new - old).exp(), a, 0.2, 0.2).mean(),
    "reinforce_pp_baseline": lambda new, old, a: ppo((new - old).exp(), a, 0.2, 0.2).mean(),
    "gmpo": lambda new, old, a: gmpo(new - old, a),
    "sapo": lambda new, old, a: sapo((new - old).exp(), a),
}
"""What a sequence adds to the objective before it is divided by Z, with its advantage a."""


def trust_region(loss: LossConfig, new: Tensor, engine: Tensor, a: float) -> Tensor:
    """[L], M · p/q · A."""
    p, q = new.detach().exp(), engine.exp()
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    bound = loss.clip_high if a > 0 else loss.clip_low
    outside = ((q - p).abs() if loss.trust_region == "tv" else kl) > bound
    away = (p > q) if a > 0 else (p < q)
    return torch.where(outside & away, 0.0, 1.0) * (new - engine).exp() * a


def engine_weight(loss: LossConfig, old: Tensor, engine: Tensor) -> Tensor:
    """[L], w."""
    ratio = (old - engine).exp()
    if loss.tis_level == "sequence":
        ratio = ratio.prod().expand(len(old))
    low, high = loss.mask_below or 0.0, loss.mask_above or np.inf
    kept = (ratio >= low) & (ratio <= high)
    return torch.where(kept, ratio.clamp(max=loss.tis_cap or np.inf), 0.0)


def advantages_of(name: str, metadata: StepMetadata) -> Floats:
    """[Q, G], by the words of each paper."""
    rewards, pi = metadata.rewards, metadata.prompt_inclusion
    group = rewards.mean(axis=1, keepdims=True)
    if name == "rloo":
        others = [[np.delete(row, i).mean() for i in range(SAMPLES)] for row in rewards]
        return rewards - np.array(others)
    if name.startswith("reinforce_pp"):
        counts = np.repeat(1 / pi, SAMPLES)  # a prompt that was kept with chance 1/2 stands for two
        mean = np.average(rewards.ravel(), weights=counts)
        values = rewards - (mean if name == "reinforce_pp" else group)
        return values / np.sqrt(np.average(values.ravel() ** 2, weights=counts))
    return (rewards - group) / (1.0 if name == "dr_grpo" else rewards.std(axis=1, keepdims=True))


def normaliser_of(name: str, metadata: StepMetadata) -> float:
    if name in ("dapo", "cispo"):
        return float((metadata.sampled_lengths.sum(1) / metadata.prompt_inclusion).sum())
    return metadata.window * SAMPLES * (LIMIT if name in ("dr_grpo", "rloo") else 1.0)


LOSSES = {
    **{name: LossConfig(name=name) for name in OF_A_SEQUENCE},
    "truncated": LossConfig(name="dr_grpo", tis_cap=1.5),
    "truncated by sequence": LossConfig(name="rloo", tis_cap=1.5, tis_level="sequence"),
    "masked": LossConfig(name="cispo", mask_below=0.6, mask_above=1.6),
    "masked by sequence": LossConfig(name="grpo", mask_below=0.5, mask_above=3.0, tis_level="sequence"),
    "masked and truncated": LossConfig(name="dapo", mask_below=0.6, tis_cap=1.2),
    "total variation": LossConfig(name="dr_grpo", trust_region="tv", clip_low=0.003, clip_high=0.002),
    "binary KL": LossConfig(name="reinforce_pp", trust_region="kl", clip_low=5e-4, clip_high=4e-4),
}


def test_every_objective_has_its_formula_here() -> None:
    assert set(OF_A_SEQUENCE) == set(OBJECTIVES)


@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(case: str, scored: Scored) -> None:
    loss, metadata = LOSSES[case], scored.metadata
    objective = objective_for(loss)
    config = step_config(keep=0.6, pack=PackConfig(max_tokens=64), **loss.model_dump())
    plan = plan_step(metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)
    (minibatch,) = plan.minibatches
    samples, advantage = minibatch.samples, advantages_of(loss.name, metadata)
    assert 4 < len(samples.group) < metadata.rewards.size and len(minibatch.packs[0]) > 1

    packed = torch.zeros((), dtype=torch.float64)
    cut = 0.0
    for members in minibatch.packs[0]:
        chosen = [(samples.group[k], samples.completion[k], k) for k in members]
        pack = build_pack(
            [
                TrainingSample(
                    scored.groups[q].prompt.token_ids,
                    scored.groups[q].completions[i].token_ids,
                    scored.groups[q].completions[i].logprobs,
                    scored.groups[q].completions[i].loss_mask,
                    advantage=float(samples.advantage[k, 0]),
                    scale=float(samples.scale[k]),
                    version=0,
                    shared=int(samples.shared_length[k]),
                )
                for q, i, k in chosen
            ],
            minibatch.capacity,
            pad_id=0,
            align=1,
        )
        losses = token_losses(
            objective,
            logprobs=torch.cat([scored.policy[q][i] for q, i, _ in chosen]),
            old_logprobs=torch.cat([scored.old[q][i] for q, i, _ in chosen]),
            engine_logprobs=torch.cat([scored.engine[q][i] for q, i, _ in chosen]),
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
            value = OF_A_SEQUENCE[loss.name](new, old, a)
        else:  # a weight for each token's own term
            value = sum(
                w * OF_A_SEQUENCE[loss.name](new[t : t + 1], old[t : t + 1], a)
                for t, w in enumerate(engine_weight(loss, old, engine))
            ) / (len(new) if loss.name == "grpo" else 1.0)
        written = written - float(weight) * value / normaliser_of(loss.name, metadata)
    assert packed.item() == pytest.approx(written.item(), rel=1e-9)
    ours, theirs = (torch.autograd.grad(x, scored.parameters, retain_graph=True) for x in (packed, written))
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).norm() <= 1e-9 * expected.norm()
    assert cut > 0 or case in ("rloo", "sapo"), "nothing was clipped or masked"

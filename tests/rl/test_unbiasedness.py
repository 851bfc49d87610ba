"""Law 2: the expectation of the pruned gradient of a real model is the full gradient, integrated and never sampled.

The whole way is walked: prompts are selected, the step is planned, packs are built, a torch model scores them, and the
loss is differentiated. All that is put in is the uniform number of each draw, and that is integrated over. Each classic
mistake, made on purpose on the same way, is seen to be biased.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config, DistillationConfig, PackConfig, PromptPruningConfig, replace
from megatron_dppo.config.types import Keep
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.losses import token_losses
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.pack import TrainingSample, build_pack, prompts_shared
from megatron_dppo.rl.pruning import draw, prompt_rules
from megatron_dppo.rl.pruning.completion_rules import adopt
from megatron_dppo.rl.pruning.draw import prune_minibatch
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import PromptCandidates, prompt_rule, select
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import MinibatchPlan, Selection, StepMetadata, TrainingSamples, no_segments
from tests.rl.integration import FixedMask, FixedOffset, outcomes
from tests.rl.plans import Foretold, step_config

VOCABULARY, PROMPTS, SAMPLES = 7, 5, 4
ALONE = DistillationConfig(teacher="T", use_task_rewards=False)
SETTINGS = {"replicas": 2, "align": 2, "capacity_multiple": 1, "step": 0, "pipeline": 1}


class Policy(torch.nn.Module):
    """Next-token logits from the token and its position: packed wrongly, it would score wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, 6)
        self.position = torch.nn.Embedding(16, 6)
        self.head = torch.nn.Linear(6, VOCABULARY)

    def forward(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.token(token_ids) + self.position(position_ids))
        return torch.log_softmax(self.head(hidden), dim=-1)


@dataclass
class World:
    """Prompts with all the completions that their rollout would give, and the policies that score them."""

    policy: Policy
    old: Policy
    reference: Policy
    prompts: list[np.ndarray]
    responses: list[list[np.ndarray]]
    engine_logprobs: list[list[np.ndarray]]
    rewards: np.ndarray
    history: PromptHistory = field(default_factory=lambda: PromptHistory(0.9))
    taught: np.ndarray = field(default_factory=lambda: np.zeros(PROMPTS, bool))
    """Prompts to which the reference is a teacher."""
    serves: bool = False
    """Whether it tells of sampled tokens alone, as a server does."""
    truncated: np.ndarray = field(default_factory=lambda: np.zeros((PROMPTS, SAMPLES), bool))

    def log_ratio(self, prompt: int, sample: int) -> tuple[float, float]:
        """Mean and deviation over a completion's tokens, as the planner knows them."""
        if not self.taught[prompt] or not self.serves:
            return 0.0, float(self.taught[prompt])
        tokens = torch.from_numpy(np.concatenate([self.prompts[prompt], response := self.responses[prompt][sample]]))
        with torch.no_grad():
            said = self.reference(tokens[:-1], torch.arange(len(tokens) - 1))[-len(response) :]
        own = self.engine_logprobs[prompt][sample].astype(np.float64)
        ratio, weight = said[range(len(response)), response].numpy() - own, np.expm1(own) ** 2
        mean = np.average(ratio, weights=weight)
        return mean, np.sqrt(np.average((ratio - mean) ** 2, weights=weight))

    def metadata(self, selection: Selection) -> StepMetadata:
        ids = selection.prompt_ids
        logprobs = [[self.engine_logprobs[q][i] for i in range(SAMPLES)] for q in ids]
        return StepMetadata(
            prompt_ids=ids,
            prompt_inclusion=selection.inclusion,
            prompt_lengths=np.array([len(self.prompts[q]) for q in ids]),
            response_lengths=np.array([[len(r) for r in self.responses[q]] for q in ids]),
            shared_lengths=prompts_shared(np.array([len(self.prompts[q]) for q in ids]), SAMPLES),
            sampled_lengths=np.array([[len(r) for r in self.responses[q]] for q in ids]),
            further_lengths=no_further((len(ids), SAMPLES)),
            rewards=self.rewards[ids],
            score_norms=np.array([[np.sqrt(((1 - np.exp(lp)) ** 2).sum()) for lp in group] for group in logprobs]),
            log_ratios=np.array([[self.log_ratio(q, i) for i in range(SAMPLES)] for q in ids]).reshape(-1, SAMPLES, 2),
            teacher=np.full(len(ids), -1),
            segments=no_segments((len(ids), SAMPLES)),
            versions=np.zeros((len(ids), SAMPLES), dtype=np.int64),
            truncated=self.truncated[ids],
            owners=np.zeros(len(ids), dtype=np.int64),
            window=float(selection.window),
        )


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policies = [Policy().double() for _ in range(3)]
    with torch.no_grad():  # the old policy is near the new one, so that some ratios are clipped and some are not
        for new, old in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
            old.copy_(new + 0.2 * torch.randn_like(new))
    responses = [[rng.integers(0, VOCABULARY, rng.integers(1, 6)) for _ in range(SAMPLES)] for _ in range(PROMPTS)]
    world = World(
        *policies,
        prompts=[rng.integers(0, VOCABULARY, rng.integers(1, 4)) for _ in range(PROMPTS)],
        responses=responses,
        engine_logprobs=[[np.log(rng.uniform(0.05, 0.9, len(r))).astype(np.float32) for r in g] for g in responses],
        rewards=np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]], dtype=float),
    )
    earlier = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=float)
    world.history.update(np.arange(4), earlier, group_advantages(earlier, normalise=True))
    return world


def gradient(
    world: World, config: Config, metadata: StepMetadata, minibatch: MinibatchPlan, mistake: str = ""
) -> torch.Tensor:
    """The gradient of one minibatch, as a trainer computes it; [parameters]."""
    world.policy.zero_grad()
    samples = minibatch.samples if mistake != "advantages of what was kept" else recomputed(metadata, minibatch.samples)
    total = torch.zeros((), dtype=torch.float64)
    for members in itertools.chain.from_iterable(minibatch.packs):
        packed = [
            TrainingSample(
                prompt_ids=world.prompts[metadata.prompt_ids[samples.group[k]]],
                response_ids=world.responses[metadata.prompt_ids[samples.group[k]]][samples.completion[k]],
                engine_logprobs=world.engine_logprobs[metadata.prompt_ids[samples.group[k]]][samples.completion[k]],
                loss_mask=np.ones(samples.response_length[k], bool),
                advantage=float(samples.advantage[k, 0]),
                scale=float(samples.scale[k]),
                version=0,
                shared=int(samples.shared_length[k]),
            )
            for k in members
        ]
        pack = build_pack(packed, minibatch.capacity, pad_id=0, align=SETTINGS["align"])

        def distributions(policy: Policy, pack=pack) -> torch.Tensor:
            return policy(torch.from_numpy(pack.token_ids), torch.from_numpy(pack.position_ids))[pack.predictors]

        def score(policy: Policy, pack=pack) -> torch.Tensor:
            return distributions(policy, pack)[np.arange(len(pack.targets)), pack.targets]

        with torch.no_grad():
            old, reference, teacher = score(world.old), score(world.reference), distributions(world.reference)
        weight = torch.from_numpy(samples.weight[np.array(members, dtype=int)][pack.sample])
        taught = torch.from_numpy(world.taught[metadata.prompt_ids[samples.group[np.array(members, int)[pack.sample]]]])
        coef, own = config.loss.distillation_coef * taught, distributions(world.policy)
        pull = (reference - score(world.policy).detach()) * world.serves
        inside = mistake == "weight inside the clip"
        losses = token_losses(
            objective_for(config.loss),
            logprobs=score(world.policy) + (weight.log() if inside else 0.0),
            old_logprobs=old,
            engine_logprobs=torch.from_numpy(pack.engine_logprobs),
            reference_logprobs=reference if config.loss.kl_coef else None,
            advantage=torch.from_numpy(pack.advantage) + coef * pull,
            kl_coef=config.loss.kl_coef,
            tis_cap=config.loss.tis_cap,
            sample=torch.from_numpy(pack.sample),
        )
        divergence = (own.exp() * (own - teacher)).sum(dim=1) * (not world.serves)
        token_loss = losses.loss + coef * divergence
        total = total + (token_loss * torch.from_numpy(pack.scale) / (weight if inside else 1.0)).sum()
    if mistake == "divided by what was kept" and len(samples.group):
        total = total * minibatch.normaliser / len(samples.group)
    if total.requires_grad:
        total.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in world.policy.parameters()])


def recomputed(metadata: StepMetadata, samples: TrainingSamples) -> TrainingSamples:
    """TrainingSamples whose advantages come from what is left of their groups."""
    result = np.zeros(len(samples.group))
    for group in np.unique(samples.group):
        left = samples.group == group
        result[left] = group_advantages(metadata.rewards[group, samples.completion[left]][None], normalise=True)[0]
    return dataclasses.replace(samples, advantage=result[:, None])


def selections(world: World, config: PromptPruningConfig) -> Iterator[tuple[Selection, float]]:
    """Every selection of prompts that the rule can draw, with its probability."""
    window = np.arange(PROMPTS)
    inclusion = prompt_rule(config.named).inclusion(
        PromptCandidates(
            world.history.last_magnitude(window),
            world.history.expected_square(window, group_size=SAMPLES, normalised=True),
            world.history.expected_tokens(window),
            world.history.equal_visits(window),
            world.history.explore(window),
            config.floor,
        ),
        config.keep,
    )
    for offset, length in outcomes(inclusion):
        yield (
            select(
                window,
                world.history,
                config,
                group_size=SAMPLES,
                normalised=True,
                keep=config.keep,
                rng=FixedOffset(offset),
            ),
            length,
        )


def draws(metadata: StepMetadata, config: Config) -> Iterator[tuple[FixedOffset | FixedMask, float]]:
    """Every outcome of the draw of completions, as the generator that brings it about, with its probability."""
    rule = config.pruning.completions
    known = prune_minibatch(metadata, config, objective_for(config.loss), keep=rule.keep, rng=np.random.default_rng())
    groups, _ = np.indices(known.kept.shape)
    order = np.lexsort((known.advantage.ravel(), groups.ravel()))
    inclusion = known.inclusion.ravel()[order]
    if rule.rule != "threshold":
        yield from ((FixedOffset(offset), length) for offset, length in outcomes(inclusion))
        return
    uncertain = (inclusion > 0.0) & (inclusion < 1.0)
    for mask in itertools.product([False, True], repeat=int(uncertain.sum())):
        probability = np.where(mask, inclusion[uncertain], 1.0 - inclusion[uncertain]).prod()
        yield FixedMask(mask, uncertain), float(probability)


def expectation(world: World, config: Config, monkeypatch: pytest.MonkeyPatch, mistake: str = "") -> torch.Tensor:
    """E[∇Ĵ] over both draws."""
    total, probability = torch.zeros(()), 0.0
    for selection, chosen in selections(world, config.pruning.prompts):
        metadata = world.metadata(selection)
        for rng, drawn in draws(metadata, config):
            monkeypatch.setattr(planning, "generator", lambda *_, rng=rng: rng)
            step = planning.plan_step(metadata, config, **SETTINGS)
            total = total + chosen * drawn * gradient(world, config, metadata, step.minibatches[0], mistake)
            probability += chosen * drawn
    assert probability == pytest.approx(1.0, abs=1e-12)
    return total


def full_gradient(
    world: World, config: Config, monkeypatch: pytest.MonkeyPatch, *, but_truncated: bool = False
) -> torch.Tensor:
    """∇J, of every completion of every prompt; or the terms of those that are not truncated."""
    everything = Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS)
    pruning = replace(config.pruning, completions=replace(config.pruning.completions, rule="none", function=None))
    monkeypatch.setattr(planning, "generator", lambda *_: FixedOffset(0.0))
    metadata = world.metadata(everything)
    (whole,) = planning.plan_step(metadata, replace(config, pruning=pruning), **SETTINGS).minibatches
    if but_truncated:
        left = np.where(world.truncated[whole.samples.group, whole.samples.completion], 0.0, whole.samples.scale)
        whole = dataclasses.replace(whole, samples=dataclasses.replace(whole.samples, scale=left))
    return gradient(world, config, metadata, whole)


def relative_error(world: World, config: Config, monkeypatch: pytest.MonkeyPatch, mistake: str = "") -> float:
    full = full_gradient(world, config, monkeypatch)
    return float((expectation(world, config, monkeypatch, mistake) - full).norm() / full.norm())


def settings(prompts: str, completions: str, keep: Keep = 0.5, **loss) -> Config:
    config = step_config(rule=completions, keep=keep, pack=PackConfig(max_tokens=16), **loss)
    rule = PromptPruningConfig(rule=prompts, keep=0.6)
    return replace(config, pruning=replace(config.pruning, prompts=rule))


@pytest.mark.parametrize(
    ("prompts", "completions", "loss"),
    [
        ("neyman", "neyman", {"name": "grpo"}),
        ("neyman", "neyman", {"name": "grpo", "kl_coef": 0.1, "tis_cap": 2.0}),
        ("none", "neyman", {"name": "dapo", "tis_cap": 2.0}),
        ("neyman", "neyman", {"name": "rloo", "mask_below": 0.2, "mask_above": 3.0}),
        ("neyman", "neyman", {"name": "dr_grpo", "trust_region": "tv"}),
        ("none", "neyman", {"name": "cispo", "tis_cap": 2.0, "tis_level": "sequence"}),
        ("neyman", "neyman", {"name": "gmpo"}),
        ("neyman", "neyman", {"name": "sapo"}),
    ],
)
def test_the_expected_pruned_gradient_is_the_full_gradient(world, monkeypatch, prompts, completions, loss):
    assert relative_error(world, settings(prompts, completions, **loss), monkeypatch) < 1e-6


def test_so_it_is_where_the_share_is_the_most_efficient_one(world, monkeypatch):
    config = settings("neyman", "neyman", keep="auto", name="grpo")
    everything = world.metadata(Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS))
    pruned = prune_minibatch(everything, config, objective_for(config.loss), keep="auto", rng=np.random.default_rng(0))
    assert 0.0 < pruned.inclusion[~pruned.zero_advantage].min() < 1.0
    assert relative_error(world, config, monkeypatch) < 1e-6


@pytest.mark.parametrize(("chosen", "biased"), [("before the draw", False), ("by what was drawn", True)])
def test_a_share_that_knows_the_draw_is_biased(world, monkeypatch, chosen, biased):
    """E[M/π] of every completion that has a gradient is 1, integrated over the draw's one number."""
    config = settings("none", "neyman", keep="auto", name="grpo")
    everything = world.metadata(Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS))
    offsets, total = (np.arange(200) + 0.5) / 200, 0.0
    for offset in offsets:
        if biased:
            monkeypatch.setattr(draw, "efficient_keep", lambda *_, offset=offset, **__: 0.3 if offset < 0.5 else 0.6)
        given = {"keep": "auto", "rng": FixedOffset(offset)}
        pruned = prune_minibatch(everything, config, objective_for(config.loss), **given)
        total = total + np.where(pruned.kept, pruned.weight, 0.0) / len(offsets)
    assert (np.abs(total[~pruned.zero_advantage] - 1.0).max() > 0.02) == biased


@pytest.mark.parametrize(
    ("taught", "serves"),
    [([True] * PROMPTS, False), ([True, False, False, True, True], False), ([True, False, False, True, True], True)],
    ids=["all", "some", "some by a server"],
)
@pytest.mark.parametrize(
    ("prompts", "loss"),
    [
        ("neyman", {"name": "grpo", "distillation": DistillationConfig(teacher="T", coef=0.5)}),
        ("neyman", {"name": "dr_grpo", "distillation": ALONE}),
        ("none", {"name": "dapo", "distillation": ALONE}),
    ],
)
def test_so_it_is_with_a_teacher_of_all_prompts_or_of_some(world, monkeypatch, prompts, loss, taught, serves):
    given = dataclasses.replace(world, taught=np.array(taught), serves=serves)
    assert relative_error(given, settings(prompts, "neyman", **loss), monkeypatch) < 1e-6


@pytest.mark.parametrize(
    ("prompts", "loss"),
    [
        ("neyman", {"name": "grpo"}),
        ("none", {"name": "dapo"}),
        ("none", {"name": "reinforce_pp"}),
        ("none", {"name": "grpo", "distillation": ALONE}),
    ],
)
def test_masked_completions_are_never_kept_and_count_in_baselines_and_divisor(world, monkeypatch, prompts, loss):
    """The expected pruned gradient is the unmasked full one without the terms of the truncated completions."""
    truncated = np.array([[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    taught = np.full(PROMPTS, "distillation" in loss)
    given = dataclasses.replace(world, truncated=truncated, taught=taught)
    without = full_gradient(given, settings(prompts, "neyman", **loss), monkeypatch, but_truncated=True)
    masked = settings(prompts, "neyman", mask_truncated=True, **loss)
    assert float((expectation(given, masked, monkeypatch) - without).norm() / without.norm()) < 1e-6
    everything = Selection(np.arange(PROMPTS), np.ones(PROMPTS), window=PROMPTS)
    (minibatch,) = planning.plan_step(given.metadata(everything), masked, **SETTINGS).minibatches
    assert not truncated[minibatch.samples.group, minibatch.samples.completion].any()


@pytest.mark.parametrize(("good", "bad"), [(0.0, 0.0), (0.1, 0.9)])
def test_a_rule_of_the_users_is_unbiased_whatever_it_returns(world, monkeypatch, good, bad):
    """It has the floor, and completions weigh by what it says."""
    adopt("own.py:rule", lambda candidates, keep: np.where(candidates.advantage > 0.0, good, bad))
    config = settings("neyman", "none", name="dr_grpo")
    own = replace(config.pruning.completions, rule="neyman", function="own.py:rule")
    config = replace(config, pruning=replace(config.pruning, completions=own))
    assert relative_error(world, config, monkeypatch) < 1e-6


def test_so_is_one_for_prompts(world, monkeypatch):
    prompt_rules.adopt("own.py:rule", lambda candidates, keep: np.arange(PROMPTS) % 2 * keep)
    config = settings("none", "none", name="dr_grpo")
    own = PromptPruningConfig(function="own.py:rule", keep=0.6)
    config = replace(config, pruning=replace(config.pruning, prompts=own))
    assert relative_error(world, config, monkeypatch) < 1e-6


@pytest.mark.parametrize("said", ["the same of all", "the inverse of the truth", "random numbers", "nothing of some"])
@pytest.mark.parametrize("lengths", ["alike", "random"])
def test_no_predictor_however_bad_biases_the_gradient(world, monkeypatch, said, lengths):
    """Probabilities that know nothing of a step's rollouts cost variance at worst."""
    rng = np.random.default_rng(1)
    truth = (group_advantages(world.rewards, normalise=True) ** 2).sum(axis=1) + 0.1
    squares = {
        "the same of all": np.ones(PROMPTS),
        "the inverse of the truth": 1.0 / truth**2,
        "random numbers": rng.lognormal(0.0, 2.0, PROMPTS),
        "nothing of some": np.array([0.0, 0.0, 1.0, 1.0, 0.0]),
    }[said]
    tokens = np.ones(PROMPTS) if lengths == "alike" else rng.lognormal(0.0, 1.0, PROMPTS)
    foretold = dataclasses.replace(world, history=Foretold(squares, tokens))
    assert relative_error(foretold, settings("neyman", "neyman", name="grpo"), monkeypatch) < 1e-6


def test_the_papers_rule_is_unbiased_over_all_of_its_masks(world, monkeypatch):
    small = dataclasses.replace(world, rewards=np.where(np.arange(PROMPTS)[:, None] < 2, world.rewards, 0.0))
    assert relative_error(small, settings("none", "threshold", name="dapo"), monkeypatch) < 1e-6


@pytest.mark.parametrize(
    "mistake", ["divided by what was kept", "weight inside the clip", "advantages of what was kept"]
)
def test_each_classic_mistake_is_biased(world, monkeypatch, mistake):
    assert relative_error(world, settings("neyman", "neyman", name="grpo"), monkeypatch, mistake) > 0.02


def test_clipping_is_in_force_where_unbiasedness_was_shown(world):
    """Else the tests above could not tell a weight inside the clip from one outside."""
    rng = np.random.default_rng(0)
    tokens, positions = torch.from_numpy(rng.integers(0, VOCABULARY, 200)), torch.from_numpy(rng.integers(0, 8, 200))
    with torch.no_grad():
        ratio = (world.policy(tokens, positions) - world.old(tokens, positions)).exp()
    assert 0.05 < ((ratio - 1).abs() > 0.2).double().mean() < 0.95


def test_the_second_draw_knows_of_the_first(world):
    """Two groups alike in everything but π_prompt: the heavier one's completions are kept more, as 1/π_prompt."""
    alike = Selection(np.array([0, 0]), np.array([0.25, 1.0]), window=5)
    config = step_config(keep=0.15, max_weight=1e9, name="grpo")
    pruned = prune_minibatch(
        world.metadata(alike), config, objective_for(config.loss), keep=0.15, rng=np.random.default_rng(0)
    )
    assert pruned.inclusion.max() < 1.0
    np.testing.assert_allclose(pruned.inclusion[0], 4 * pruned.inclusion[1], rtol=1e-12)

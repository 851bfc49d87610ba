"""Law 2: the expected pruned gradient of a real model is the full gradient, integrated over the
draws, never sampled.

Prompts are selected, the step is planned, packs are built, a torch model scores them, and the loss
is differentiated. Only the uniform number of each draw is put in, and integrated over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from megatron_dppo import config as cfg
from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    DistillationConfig,
    EntropyConfig,
    PackConfig,
    PromptPruningConfig,
)
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.losses import compute_token_losses
from megatron_dppo.rl.numbers import find_equal_groups
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.pruning import completion_rules, prompt_rules
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.draw import prune_minibatch
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptFeatures, PromptForecast
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES, find_prompt_rule, select
from megatron_dppo.rl.pruning.sampling import DRAWS
from megatron_dppo.rl.types import Bools, Floats, MinibatchPlan, Selection, StepMetadata
from tests.rl.integration import (
    FixedOffset,
    FixedUniforms,
    all_plans,
    generators,
    just_above,
    just_below,
    recorded_draws,
)
from tests.rl.plans import Foretold, made_up_pool, plan, step_config, step_metadata, training_sample

VOCABULARY, PROMPTS, SAMPLES = 7, 5, 4
WINDOW = np.arange(PROMPTS)
EVERYTHING = Selection(WINDOW, np.ones(PROMPTS), window=PROMPTS)
TEACHER = DistillationConfig(teacher="T", coef=0.5)
ALONE = DistillationConfig(teacher="T", use_task_rewards=False)
BONUS = EntropyConfig(coef=0.5)
GDPO = {"advantage": "gdpo", "reward_weights": {"right": 1.0, "short": -0.5}}
LAYOUT = {"replicas": 2, "align": 2}
RATIOS = [0.3, 1.0]
"""Mean and deviation of a teacher's log-ratios, as a planner may guess them: no guess makes a
gradient biased."""


class Policy(torch.nn.Module):
    """Next-token log-probabilities from the token and its position: packed wrongly, the policy
    would score wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, 6)
        self.position = torch.nn.Embedding(16, 6)
        self.head = torch.nn.Linear(6, VOCABULARY)

    def forward(self, token_ids: np.ndarray, position_ids: np.ndarray) -> torch.Tensor:
        hidden = self.token(torch.from_numpy(token_ids)) + self.position(
            torch.from_numpy(position_ids)
        )
        return torch.log_softmax(self.head(torch.tanh(hidden)), dim=-1)


@dataclass
class World:
    """Prompts with the completions of their rollouts, and the policies that score them."""

    policy: Policy
    old: Policy
    reference: Policy
    prompts: list[np.ndarray]
    responses: list[list[np.ndarray]]
    engine_logprobs: list[list[np.ndarray]]
    rewards: Floats
    history: PromptForecast = field(
        default_factory=lambda: PromptForecast(PromptFeatures(made_up_pool(PROMPTS)))
    )
    taught: Bools = field(default_factory=lambda: np.zeros(PROMPTS, bool))
    """Prompts to which the reference is a teacher."""
    truncated: Bools = field(default_factory=lambda: np.zeros((PROMPTS, SAMPLES), bool))
    short: Floats = field(default_factory=lambda: np.eye(PROMPTS, SAMPLES, 1))
    """A second reward."""

    def metadata(self, selection: Selection) -> StepMetadata:
        ids = selection.prompt_ids
        norms = [
            [np.linalg.norm(np.expm1(self.engine_logprobs[q][i])) for i in range(SAMPLES)]
            for q in ids
        ]
        return step_metadata(
            len(ids),
            SAMPLES,
            window=float(selection.window),
            prompt_ids=ids,
            prompt_inclusion=selection.inclusion,
            prompt_lengths=np.array([len(self.prompts[q]) for q in ids]),
            response_lengths=np.array(
                [[len(response) for response in self.responses[q]] for q in ids]
            ),
            rewards=self.rewards[ids],
            score_norms=np.array(norms),
            log_ratios=np.tile(self.taught[ids, None, None] * RATIOS, (SAMPLES, 1)),
            truncated=self.truncated[ids],
            parts={"reward/right": self.rewards[ids], "reward/short": self.short[ids]},
        )


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policies = [Policy().double() for _ in range(3)]
    with (
        torch.no_grad()
    ):  # the old policy is near the new one, so that some ratios are clipped and some are not
        for new, old in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
            old.copy_(new + 0.2 * torch.randn_like(new))
    responses = [
        [rng.integers(0, VOCABULARY, rng.integers(1, 6)) for _ in range(SAMPLES)]
        for _ in range(PROMPTS)
    ]
    world = World(
        *policies,
        prompts=[rng.integers(0, VOCABULARY, rng.integers(1, 4)) for _ in range(PROMPTS)],
        responses=responses,
        engine_logprobs=[
            [np.log(rng.uniform(0.05, 0.9, len(r))).astype(np.float32) for r in g]
            for g in responses
        ],
        rewards=np.array(
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]], dtype=float
        ),
    )
    earlier = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]], dtype=float)
    advantages = compute_group_advantages(earlier, normalise=True)
    squares, tokens = (advantages**2).sum(axis=1), np.array([2.0, 3.0, 4.0, 5.0])
    equal = find_equal_groups(earlier)
    world.history.evaluate_and_update(
        Outcomes(np.arange(4), earlier, advantages, squares, tokens, equal)
    )
    return world


def gradient(
    world: World, config: Config, metadata: StepMetadata, minibatch: MinibatchPlan
) -> torch.Tensor:
    """Return the gradient of one minibatch, as a trainer computes it; [parameters]."""
    world.policy.zero_grad()
    samples = minibatch
    prompt = metadata.prompt_ids[samples.group]
    total = torch.zeros((), dtype=torch.float64)
    for members in itertools.chain.from_iterable(minibatch.packs):
        packed = [
            training_sample(
                samples,
                k,
                world.prompts[prompt[k]],
                world.responses[prompt[k]][samples.completion[k]],
                engine_logprobs=world.engine_logprobs[prompt[k]][samples.completion[k]],
            )
            for k in members
        ]
        pack = build_pack(packed, minibatch.capacity, pad_id=0, align=LAYOUT["align"])
        own, before, teacher = (
            policy(pack.token_ids, pack.position_ids)[pack.predictors]
            for policy in (world.policy, world.old, world.reference)
        )
        logprobs, old, reference = (
            each[np.arange(len(pack.targets)), pack.targets]
            for each in (own, before.detach(), teacher.detach())
        )
        rows = np.array(members, dtype=int)[pack.sample]
        losses, _ = compute_token_losses(
            resolve_objective(config.loss),
            logprobs=logprobs,
            old_logprobs=old,
            engine_logprobs=torch.from_numpy(pack.engine_logprobs),
            reference_logprobs=reference if config.loss.kl_coef else None,
            advantage=torch.from_numpy(pack.advantage),
            kl_coef=config.loss.kl_coef,
            tis_cap=config.loss.tis_cap,
            sample=torch.from_numpy(pack.sample),
        )
        coef = config.loss.distillation_coef * torch.from_numpy(world.taught[prompt[rows]])
        divergence = (own.exp() * (own - teacher.detach())).sum(dim=1)
        entropy = -(own.exp() * own).sum(dim=1)
        losses = losses - config.loss.entropy.coef * entropy
        total = total + ((losses + coef * divergence) * torch.from_numpy(pack.scale)).sum()
    if total.requires_grad:
        total.backward()
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in world.policy.parameters()
        ]
    )


def select_from(world: World, config: PromptPruningConfig, rng: object) -> Selection:
    return select(WINDOW, world.history, config, group_size=SAMPLES, keep=config.keep, rng=rng)


def selections(world: World, config: PromptPruningConfig) -> Iterator[tuple[Selection, float]]:
    """Yield every selection of prompts that the rule can draw, with its probability."""
    rule = find_prompt_rule(config.named)
    with recorded_draws(PROMPT_RULES, config.named, rule) as drawn:
        select_from(world, config, np.random.default_rng(0))
    for rng, probability in generators(rule, drawn[0][0]):
        yield select_from(world, config, rng), probability


def expected_gradient(world: World, config: Config) -> torch.Tensor:
    """Integrate the gradient over both draws."""
    total, probability = torch.zeros(()), 0.0
    for selection, chosen in selections(world, config.pruning.prompts):
        metadata = world.metadata(selection)
        for step, drawn in all_plans(metadata, config, **LAYOUT):
            total = total + chosen * drawn * gradient(world, config, metadata, step.minibatches[0])
            probability += chosen * drawn
    assert probability == pytest.approx(1.0, abs=1e-12)
    return total


def full_gradient(world: World, config: Config) -> torch.Tensor:
    """Return the gradient of every completion of every prompt, without the terms of truncated
    completions."""
    metadata = world.metadata(EVERYTHING)
    nothing = {
        "prompts": PromptPruningConfig(rule="none"),
        "completions": CompletionPruningConfig(rule="none"),
    }
    unpruned = cfg.replace(
        with_rules(config, **nothing), loss=cfg.replace(config.loss, updates_per_rollout=1)
    )
    (whole,) = plan(metadata, unpruned, **LAYOUT).minibatches
    assert_complete(whole, config, PROMPTS)
    left = np.where(world.truncated[whole.group, whole.completion], 0.0, whole.scale)
    return gradient(world, config, metadata, replace(whole, scale=left))


def assert_complete(whole: MinibatchPlan, config: Config, prompts: int) -> None:
    """With a KL term or an entropy bonus, completions without an advantage have a gradient."""
    if config.loss.kl_coef or config.loss.entropy.coef:
        assert len(whole.group) == prompts * SAMPLES


def relative_error(world: World, config: Config) -> float:
    full = full_gradient(world, config)
    return float((expected_gradient(world, config) - full).norm() / full.norm())


def settings(prompts: str, completions: str, keep: Keep = 0.5, **loss) -> Config:
    config = step_config(rule=completions, keep=keep, pack=PackConfig(max_tokens=16), **loss)
    return with_rules(config, prompts=PromptPruningConfig(rule=prompts, keep=0.5))


def with_rules(config: Config, **rules: object) -> Config:
    return cfg.replace(config, pruning=cfg.replace(config.pruning, **rules))


@pytest.mark.parametrize(
    ("prompts", "completions", "loss"),
    [
        ("neyman", "neyman", {"name": "grpo", "kl_coef": 0.1, "tis_cap": 2.0}),
        ("none", "neyman", {"name": "dapo", "tis_cap": 2.0}),
        ("neyman", "neyman", {"name": "rloo", "mask_below": 0.2, "mask_above": 3.0}),
        ("neyman", "neyman", {"name": "dr_grpo", "trust_region": "tv"}),
        ("none", "neyman", {"name": "reinforce_pp"}),
        ("none", "neyman", {"name": "dr_grpo", **GDPO}),
        ("none", "neyman", {"name": "cispo", "tis_cap": 2.0, "tis_level": "sequence"}),
        ("neyman", "neyman", {"name": "dr_grpo", "tis_cap": 2.0, "tis_level": "prefix"}),
        ("neyman", "neyman", {"name": "gmpo"}),
        ("threshold", "neyman", {"name": "gspo"}),
        ("neyman", "neyman", {"name": "grpo", "keep": "auto"}),
        ("neyman", "neyman", {"name": "grpo", "entropy": BONUS}),
        ("none", "neyman", {"name": "dapo", "entropy": BONUS}),
    ],
)
def test_expected_pruned_gradient_is_the_full_gradient(world, prompts, completions, loss):
    assert relative_error(world, settings(prompts, completions, **loss)) < 1e-6


@pytest.mark.parametrize(
    "loss", [{"name": "grpo", "distillation": TEACHER}, {"name": "dr_grpo", "distillation": ALONE}]
)
def test_gradient_with_a_teacher_of_some_prompts_is_unbiased(world, loss):
    given = replace(world, taught=np.array([True, False, True, True, False]))
    assert relative_error(given, settings("neyman", "neyman", **loss)) < 1e-6


@pytest.mark.parametrize(
    ("prompts", "loss"),
    [
        ("neyman", {"name": "grpo"}),
        ("none", {"name": "dapo"}),
        ("none", {"name": "reinforce_pp"}),
        ("none", {"name": "grpo", "distillation": ALONE}),
    ],
)
def test_masked_completions_count_in_baselines_and_divisor_alone(world, prompts, loss):
    """The expected pruned gradient is the unmasked full one without the terms of the truncated
    completions."""
    truncated = np.array(
        [[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool
    )
    given = replace(world, truncated=truncated, taught=np.full(PROMPTS, "distillation" in loss))
    without = full_gradient(given, settings(prompts, "neyman", **loss))
    masked = settings(prompts, "neyman", mask_truncated=True, **loss)
    assert float((expected_gradient(given, masked) - without).norm() / without.norm()) < 1e-6


@pytest.mark.parametrize(("good", "bad"), [(0.0, 0.0), (0.1, 0.9)])
def test_completion_rule_of_a_user_is_unbiased(world, good, bad):
    """The floor applies to the rule, and completions weigh by its probabilities."""
    completion_rules.register(
        "own.py:rule", lambda candidates, keep: np.where(candidates.advantage > 0.0, good, bad)
    )
    config = settings("neyman", "none", name="dr_grpo")
    own = cfg.replace(config.pruning.completions, rule="neyman", function="own.py:rule")
    assert relative_error(world, with_rules(config, completions=own)) < 1e-6


def test_prompt_rule_of_a_user_is_unbiased(world):
    prompt_rules.register("own.py:rule", lambda candidates, keep: WINDOW % 2 * keep)
    config = settings("none", "none", name="dr_grpo")
    own = PromptPruningConfig(function="own.py:rule", keep=0.6)
    assert relative_error(world, with_rules(config, prompts=own)) < 1e-6


@pytest.mark.parametrize(
    "squares", [[1e4, 1e-2, 0.3, 5.0, 2.0], [0.0, 0.0, 1.0, 1.0, 0.0]], ids=["wrong", "silent"]
)
def test_bad_predictor_does_not_bias_the_gradient(world, squares):
    tokens = np.random.default_rng(1).lognormal(0.0, 1.0, PROMPTS)
    foretold = replace(world, history=Foretold(np.array(squares), tokens))
    assert relative_error(foretold, settings("neyman", "neyman", name="grpo")) < 1e-6


@pytest.mark.parametrize("loss", [{}, {"entropy": BONUS}])
def test_paper_rule_is_unbiased_over_all_of_its_masks(world, loss):
    """With a bonus also in groups of equal rewards, here of two prompts instead of five."""
    rewards = np.where(WINDOW[:, None] < 2, world.rewards, 0.0)
    rows = np.array([0, 3]) if loss else WINDOW
    small = replace(world, rewards=rewards)
    everything = replace(
        EVERYTHING, prompt_ids=rows, inclusion=np.ones(len(rows)), window=len(rows)
    )
    config = settings("none", "threshold", name="dapo", **loss)
    metadata = small.metadata(everything)
    expected = sum(
        drawn * gradient(small, config, metadata, step.minibatches[0])
        for step, drawn in all_plans(metadata, config, **LAYOUT)
    )
    unpruned = with_rules(config, completions=CompletionPruningConfig(rule="none"))
    (whole,) = plan(metadata, unpruned, **LAYOUT).minibatches
    assert_complete(whole, config, len(rows))
    full = gradient(small, config, metadata, whole)
    assert float((expected - full).norm() / full.norm()) < 1e-6


BIASED = [
    *(("none", rule) for rule in ("threshold_deterministic", "top_k", "extremes")),
    *((rule, "none") for rule in ("threshold_deterministic", "greso", "dynamic_sampling")),
]


def test_biased_rules_are_named():
    rules = [
        *(("none", rule) for rule in COMPLETION_RULES),
        *((rule, "none") for rule in PROMPT_RULES),
    ]
    named = [
        pair for pair in rules if PROMPT_RULES[pair[0]].biased or COMPLETION_RULES[pair[1]].biased
    ]
    assert sorted(named) == sorted(BIASED)


@pytest.mark.parametrize(
    ("prompts", "completions", "normaliser"),
    [*((*pair, "full") for pair in BIASED), ("none", "top_k", "kept")],
)
def test_rule_named_biased_is_biased(world, prompts, completions, normaliser):
    config = settings(prompts, completions, name="grpo")
    biased = cfg.replace(config.pruning.completions, normaliser=normaliser)
    assert relative_error(world, with_rules(config, completions=biased)) > 0.02


def test_draw_of_completions_depends_on_the_draw_of_prompts(world):
    """Of two groups that differ in π_prompt alone, the heavier one's completions are kept more, as
    1/π_prompt."""
    twins = world.metadata(Selection(np.array([0, 0]), np.array([0.25, 1.0]), window=5))
    config = step_config(keep=0.15, max_weight=1e9, name="grpo")
    pruned = prune_minibatch(
        twins, config, resolve_objective(config.loss), keep=0.15, rng=FixedOffset(0.5)
    )
    assert pruned.inclusion.max() < 1.0
    np.testing.assert_allclose(pruned.inclusion[0], 4 * pruned.inclusion[1], rtol=1e-12)


def draw_for_plan(world: World, rule: str, rng: object) -> Floats:
    """Draw completions as a plan does. Returns the weights of what is kept, given the prompts."""
    config, inclusion = step_config(rule=rule), np.array([1.0, 0.5, 1.0, 0.25, 1.0])
    metadata = world.metadata(Selection(WINDOW, inclusion, window=PROMPTS))
    pruned = prune_minibatch(metadata, config, resolve_objective(config.loss), keep=0.5, rng=rng)
    return (pruned.weight * inclusion[:, None])[pruned.kept]


def draw_prompts(world: World, rule: str, rng: object) -> Floats:
    return 1.0 / select_from(world, PromptPruningConfig(rule=rule, keep=0.6), rng).inclusion


UNITS = [
    *((draw_for_plan, COMPLETION_RULES, rule) for rule in COMPLETION_RULES),
    *((draw_prompts, PROMPT_RULES, rule) for rule in PROMPT_RULES),
]
GRAIN = 1e-11
"""More than the rounding of a systematic draw's bounds."""


@pytest.mark.parametrize("way", DRAWS)
@pytest.mark.parametrize(("draw_units", "rules", "name"), UNITS)
def test_units_are_kept_with_the_probability_of_their_weight(world, draw_units, rules, name, way):
    """Numbers next to the bounds of each inclusion probability keep and drop the unit, whose weight
    is 1/π exactly."""
    rule = replace(rules[name], draw=DRAWS[way])

    def draw_with(rng: object) -> tuple[Floats, Bools]:
        with recorded_draws(rules, name, rule) as drawn:
            weights = draw_units(world, name, rng)
        [(inclusion, kept)] = drawn
        if not rule.biased:
            np.testing.assert_array_equal(np.sort(weights), np.sort(1.0 / inclusion[kept]))
        return inclusion, kept

    inclusion, _ = draw_with(np.random.default_rng(0))
    if way == "bernoulli":
        np.testing.assert_array_equal(
            draw_with(FixedUniforms(just_below(inclusion)))[1], inclusion > 0.0
        )
        np.testing.assert_array_equal(
            draw_with(FixedUniforms(just_above(inclusion)))[1], inclusion == 1.0
        )
        return
    ends = np.cumsum(inclusion)
    for unit in np.flatnonzero((inclusion > 0.0) & (inclusion < 1.0)):
        for bound, inward in ((ends[unit] - inclusion[unit], GRAIN), (ends[unit], -GRAIN)):
            assert draw_with(FixedOffset((bound + inward) % 1.0))[1][unit]
            assert not draw_with(FixedOffset((bound - inward) % 1.0))[1][unit]

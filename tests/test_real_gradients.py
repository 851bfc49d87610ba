"""Law 2 on the real gradients of a real policy: warmed up by ``sft``, rolled out, trained, and measured row by row.

Every estimate is Σ_i scale_i g_i, and the g_i are known here by their inner products. A systematic draw is integrated
over its offset, draws of single units are sampled, and the expectation is held against the full batch's scale c/Z,
written out by hand. Each rule that calls itself biased, and each classic mistake, fails by the same measure.
``tests/rl/test_unbiasedness.py`` has the mistakes that change a gradient itself: a weight inside the clip, advantages
of what was kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

from benchmarks.real_gradients import norm
from megatron_dppo.config import CompletionPruningConfig, Config, PromptPruningConfig, PruningConfig, replace
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.objectives import normaliser, objective_for
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.draw import PruningDraw, prune_minibatch
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES, select
from megatron_dppo.rl.pruning.sampling import draw_bernoulli
from megatron_dppo.rl.types import Floats, Selection, StepMetadata
from tests.ranks import RankPool
from tests.real_windows import (
    LIMIT,
    LOSSES,
    PROMPTS,
    SAMPLES,
    WINDOW,
    Measured,
    Measurements,
    measure,
    offsets,
    remember,
    selected,
    warm_up,
)
from tests.rl.integration import FixedOffset, outcomes
from tests.rl.steps import Foretold

Windows = dict[tuple[str, str], Measured]
CASES = [*((stage, objective) for stage in ("warm", "half-way") for objective in LOSSES), ("graded", "grpo")]
DRAWS = 1000


@pytest.fixture(scope="module")
def measurements(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    folder = tmp_path_factory.mktemp("real")
    ranks.run(1, warm_up, folder)
    return ranks.run(1, measure, folder)[0]


@pytest.fixture(scope="module")
def windows(measurements: Measurements) -> Windows:
    return measurements.windows


def settings(window: Measured, prompts: str, completions: str, draw: str | None = None, **more: object) -> Config:
    """``more`` is of the rule for completions; ``draw`` of both, in place of their own."""
    return Config(
        loss=window.loss,
        rollout=replace(Config().rollout, max_response_tokens=LIMIT),
        pruning=PruningConfig(
            prompts=PromptPruningConfig(rule=prompts, keep=0.6, draw=draw),
            completions=CompletionPruningConfig(rule=completions, **({"keep": 0.5, "draw": draw} | more)),
        ),
    )


def choose(window: Measured, config: Config, rng: object) -> Selection:
    return select(
        WINDOW.prompt_ids,
        window.history,
        config.pruning.prompts,
        group_size=SAMPLES,
        normalised=objective_for(config.loss).normalise,
        keep=config.pruning.prompts.keep,
        rng=rng,
    )


def prune(part: StepMetadata, config: Config, rng: object) -> PruningDraw:
    return prune_minibatch(part, config, objective_for(config.loss), keep=config.pruning.completions.keep, rng=rng)


def scales(part: StepMetadata, pruned: PruningDraw) -> Floats:
    """[n], what each completion of the whole window is multiplied by; 0 for what was pruned at either level."""
    result = np.zeros((PROMPTS, SAMPLES))
    result[part.prompt_ids] = np.where(pruned.kept, pruned.weight * pruned.coefficient / pruned.normaliser, 0.0)
    return result.ravel()


def full_scales(window: Measured) -> Floats:
    """[n], c/Z of the unpruned window, from the table of the objectives."""
    lengths = window.metadata.response_lengths.astype(float)
    count = PROMPTS * SAMPLES
    by_host = {
        "grpo": 1.0 / (lengths * count),
        "gspo": 1.0 / (lengths * count),
        "dapo": np.full_like(lengths, 1.0 / lengths.sum()),
        "dr_grpo": np.full_like(lengths, 1.0 / (count * LIMIT)),
    }
    return by_host[window.loss.name].ravel()


def relative_error(window: Measured, expected: Floats) -> float:
    """‖E[∇Ĵ] − ∇J‖ / ‖∇J‖."""
    full = full_scales(window)
    return float(norm(window.gram, expected - full) / norm(window.gram, full))


@dataclass(frozen=True, slots=True)
class Way:
    """What is drawn and how it is weighted; as it stands, the way that a run goes. Mistakes replace a part of it."""

    prompts: str
    completions: str
    reselect: Callable[[Measured, Selection], Selection] = lambda window, selection: selection
    """What becomes of the selection between its draw and the rollouts."""
    rescale: Callable[[StepMetadata, PruningDraw, Floats], Floats] = lambda part, pruned, scale: scale
    """What becomes of the scales of what was kept, [n]."""
    draw: Literal["systematic", "bernoulli"] | None = "systematic"
    """None: the rules' own."""
    more: dict[str, object] = field(default_factory=dict)
    """Further settings of the rule for completions."""

    def part(self, window: Measured, selection: Selection) -> StepMetadata:
        """What is rolled out, after the draw of prompts."""
        return selected(window.metadata, self.reselect(window, selection))


class AllKept:
    """Stands in for a generator of independent draws: whatever can be kept is."""

    def random(self, shape: tuple[int, ...]) -> Floats:
        return np.zeros(shape)


def inclusion_of(window: Measured, rule: PromptPruningConfig) -> Floats:
    """[PROMPTS], the probabilities of a rule for prompts."""
    config = settings(window, "none", "none")
    config = replace(config, pruning=replace(config.pruning, prompts=replace(rule, draw="bernoulli")))
    kept = choose(window, config, AllKept())
    return kept.inclusion[np.argsort(kept.prompt_ids)]  # in the window's order, in which prompts are drawn


def selections(window: Measured, config: Config) -> Iterator[tuple[Selection, float]]:
    """Every outcome of a systematic draw of prompts, with its probability."""
    for offset, length in outcomes(inclusion_of(window, config.pruning.prompts)):
        yield choose(window, config, FixedOffset(offset)), length


def all_outcomes(window: Measured, way: Way, config: Config) -> tuple[Floats, Floats]:
    """[k, n] and [k]: the scales of every outcome, and its probability."""
    found = [
        (way.rescale(part, pruned, scales(part, pruned)), chosen * drawn)
        for selection, chosen in selections(window, config)
        for part in [way.part(window, selection)]
        for pruned, drawn in offsets(part, config)
    ]
    probability = np.array([probability for _, probability in found])
    assert probability.sum() == pytest.approx(1.0, abs=1e-12)
    return np.array([scale for scale, _ in found]), probability


def bias(window: Measured, way: Way) -> tuple[float, float]:
    """‖E[∇Ĵ] − ∇J‖ / ‖∇J‖, and what of it may be rounding (1e-6) or, where draws are sampled, four standard errors."""
    config, full = settings(window, way.prompts, way.completions, way.draw, **way.more), full_scales(window)
    length = norm(window.gram, full)
    if way.draw == "systematic":
        drawn, probability = all_outcomes(window, way, config)
        return float(norm(window.gram, probability @ drawn - full) / length), 1e-6
    rng = np.random.default_rng(0)
    parts = [way.part(window, choose(window, config, rng)) for _ in range(DRAWS)]
    drawn = np.array([way.rescale(part, p, scales(part, p)) for part in parts for p in [prune(part, config, rng)]])
    spread = norm(window.gram, drawn - drawn.mean(axis=0))
    return (
        float(norm(window.gram, drawn.mean(axis=0) - full) / length),
        float(4.0 * np.sqrt(np.mean(spread**2) / DRAWS) / length),
    )


def test_gradients_of_real_plans_are_sums_of_those_of_their_rows(windows):
    """What ties the algebra below to the system: plans of both levels, two updates, several packs, one actor."""
    errors = [window.packed_error for window in windows.values()]
    assert len(errors) == len(CASES) and min(map(len, errors)) >= 2, "a minibatch of which all is pruned has none"
    assert max(map(max, errors)) < 1e-5


def test_the_half_way_window_has_ratios_past_the_clip(measurements):
    """Else no clip would be in force, and the objectives' gradients alike, as they are on-policy."""

    def apart(stage: str) -> float:
        token, sequence = (measurements.windows[stage, objective].gram for objective in ("grpo", "gspo"))
        return float(np.abs(token - sequence).max() / token.max())

    assert measurements.clipped > 0.02
    assert apart("warm") < 1e-5
    assert apart("half-way") > 0.1


@pytest.mark.parametrize("said", ["the inverse of the truth", "random numbers"])
def test_no_predictor_however_bad_biases_the_gradient(windows, said):
    """Neither what it says of the gradients nor what it says of the tokens: probabilities cost variance at worst."""
    window, rng = windows["warm", "grpo"], np.random.default_rng(0)
    truth = (group_advantages(window.metadata.rewards, normalise=True) ** 2).sum(axis=1) + 0.1
    squares = 1.0 / truth if said == "the inverse of the truth" else rng.lognormal(0.0, 2.0, PROMPTS)
    foretold = dataclasses.replace(window, history=Foretold(squares, rng.lognormal(0.0, 1.0, PROMPTS)))
    assert len(set(inclusion_of(foretold, PromptPruningConfig(rule="neyman", keep=0.6)))) > 3
    error, allowed = bias(foretold, Way("neyman", "neyman"))
    assert error <= allowed == 1e-6


def unbiased(cases: list[tuple[str, str]], levels: list[tuple[str, str]]) -> list[tuple[str, str, str, str]]:
    """(stage, objective, prompts, completions). token_mean with pruned prompts is left out: a ratio, see below."""
    return [(*case, *level) for case in cases for level in levels if case[1] != "dapo" or level[0] == "none"]


RULES = ("none", "threshold", "neyman")


WINDOWS = [*(("warm", objective) for objective in LOSSES), ("half-way", "grpo"), ("graded", "grpo")]
"""Every objective once, and every window: of a window an objective makes c/Z, whatever the gradients are."""


@pytest.mark.parametrize(
    ("stage", "objective", "prompts", "completions"), unbiased(WINDOWS, list(itertools.product(RULES, RULES)))
)
def test_the_expected_pruned_gradient_is_the_full_one(windows, stage, objective, prompts, completions):
    error, allowed = bias(windows[stage, objective], Way(prompts, completions))
    assert allowed == 1e-6
    assert error <= allowed


@pytest.mark.parametrize(
    ("stage", "objective", "prompts", "completions"),
    unbiased(
        [("half-way", objective) for objective in LOSSES],
        [level for level in itertools.product(RULES, RULES) if "threshold" in level],
    ),
)
def test_so_it_is_where_units_are_drawn_by_themselves(windows, stage, objective, prompts, completions):
    """The draw that the paper's rule has in a run, sampled."""
    error, allowed = bias(windows[stage, objective], Way(prompts, completions, draw=None))
    assert 1e-6 < allowed < 0.25
    assert error <= allowed


@pytest.mark.parametrize(
    "way",
    [
        Way("none", "threshold_deterministic"),
        Way("none", "top_k", more={"keep": 0.25}),
        Way("none", "top_k", more={"keep": 0.25, "normaliser": "kept"}),
        Way("none", "extremes", more={"keep": 0.5}),
        Way("greso", "none", draw=None),
    ],
    ids=lambda way: "-".join(filter(None, [way.prompts, way.completions, *map(str, way.more.values())])),
)
def test_a_rule_that_calls_itself_biased_is(windows, way):
    rule = COMPLETION_RULES[way.completions] if way.prompts == "none" else PROMPT_RULES[way.prompts]
    error, allowed = bias(windows["warm", "grpo"], way)
    assert rule.biased
    assert error > max(allowed, 0.02)


def test_dynamic_sampling_is_biased(windows):
    """Through the plan, which leaves groups of equal reward out and divides by the others."""
    window = windows["warm", "grpo"]
    config = settings(window, "dynamic_sampling", "none")
    plan = plan_step(window.metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)
    (samples,) = (minibatch.samples for minibatch in plan.minibatches)
    drawn = np.zeros((PROMPTS, SAMPLES))
    drawn[samples.group, samples.completion] = samples.scale
    assert PROMPT_RULES["dynamic_sampling"].biased
    assert relative_error(window, drawn.ravel()) > 0.02


def test_no_other_rule_calls_itself_biased():
    """Those of the law are all the rules there are: a new one has to be put on one side or the other."""
    biased = {name for rules in (PROMPT_RULES, COMPLETION_RULES) for name, rule in rules.items() if rule.biased}
    assert biased == {"threshold_deterministic", "top_k", "extremes", "greso", "dynamic_sampling"}
    assert {*PROMPT_RULES, *COMPLETION_RULES} - biased == {"none", "threshold", "neyman"}


def divided_by_kept_tokens(part: StepMetadata, pruned: PruningDraw, scale: Floats) -> Floats:
    return scale * pruned.normaliser / part.response_lengths[pruned.kept].sum()


def divided_by_what_was_rolled_out(part: StepMetadata, pruned: PruningDraw, scale: Floats) -> Floats:
    """token_mean's Z without 1/π_prompt."""
    return scale * pruned.normaliser / part.response_lengths.sum()


def cut_off(part: StepMetadata, pruned: PruningDraw, scale: Floats) -> Floats:
    """No weight above 2."""
    weight = np.zeros((PROMPTS, SAMPLES))
    weight[part.prompt_ids] = pruned.weight
    return scale * np.minimum(1.0, np.divide(2.0, weight, out=np.ones_like(weight), where=weight > 0.0)).ravel()


def refilled(window: Measured, selection: Selection) -> Selection:
    """Whoever was not drawn fills the batch up to its size, with the weight that a draw would have given; those first
    whose answers differ, without which nothing would be seen of a policy that is nearly always right or wrong."""
    others = np.setdiff1d(WINDOW.prompt_ids, selection.prompt_ids)
    others = others[np.argsort(-np.ptp(window.metadata.rewards[others], axis=1), kind="stable")]
    ids = np.sort([*selection.prompt_ids, *others[: max(round(0.8 * PROMPTS) - len(selection.prompt_ids), 0)]])
    return dataclasses.replace(
        selection, prompt_ids=ids, inclusion=inclusion_of(window, PromptPruningConfig(rule="threshold", keep=0.6))[ids]
    )


def weighted_by_later_history(window: Measured, selection: Selection) -> Selection:
    """π as the rule has it once the history has learned of this very step."""
    later = deepcopy(window.history)
    remember(later, selected(window.metadata, selection))
    now = inclusion_of(dataclasses.replace(window, history=later), PromptPruningConfig(rule="neyman", keep=0.6))
    return dataclasses.replace(selection, inclusion=now[selection.prompt_ids])


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        ("dapo", Way("none", "neyman", rescale=divided_by_kept_tokens)),
        ("dapo", Way("neyman", "none", rescale=divided_by_what_was_rolled_out)),
        ("grpo", Way("neyman", "neyman", rescale=cut_off)),
        ("grpo", Way("threshold", "none", reselect=refilled, draw=None)),
        ("grpo", Way("neyman", "none", reselect=weighted_by_later_history)),
    ],
    ids=["kept tokens", "rolled-out tokens", "weights cut off", "refilled", "later history"],
)
def test_each_classic_mistake_is_biased(windows, objective, way):
    error, allowed = bias(windows["warm", objective], way)
    assert error > max(allowed, 0.02)


def test_means_over_unequal_microbatches_are_biased(windows):
    """Nothing is pruned here: a mean of the means of fives is another objective, whatever is done to the rows."""
    window = windows["warm", "dapo"]
    lengths = window.metadata.response_lengths.ravel()
    means = np.zeros(PROMPTS * SAMPLES)
    fives = np.array_split(np.argsort(lengths, kind="stable"), PROMPTS * SAMPLES // 5)  # as packs of like rows are
    for members in fives:
        means[members] = 1.0 / (len(fives) * lengths[members].sum())
    assert relative_error(window, means) > 0.02


def test_one_mask_for_two_updates_is_biased(measurements):
    """The second gradient is taken where the first one led, with the same mask or with one that is drawn again."""
    once, again = measurements.second_update
    assert again < 1e-6
    assert once > 0.02


def mean_squared_error(window: Measured, way: Way, config: Config) -> float:
    """E‖∇Ĵ − ∇J‖² / ‖∇J‖²."""
    drawn, probability = all_outcomes(window, way, config)
    full = full_scales(window)
    return float(probability @ norm(window.gram, drawn - full) ** 2 / norm(window.gram, full) ** 2)


def test_second_stage_scores_that_forget_the_first_stage_cost_variance(windows):
    """No bias: what is heavy for its prompt's sake is kept too seldom. Told the norms themselves, ``neyman`` has the
    least variance of independent draws; told scores without 1/π_prompt it has more."""
    window = windows["graded", "grpo"]
    advantage = np.abs(group_advantages(window.metadata.rewards, normalise=True))
    squares = np.diag(window.gram).reshape(advantage.shape)
    norms = np.divide(np.sqrt(squares), advantage, out=np.zeros_like(advantage), where=advantage > 0.0)
    known = dataclasses.replace(window, metadata=dataclasses.replace(window.metadata, score_norms=norms))
    config = settings(window, "neyman", "neyman", keep=0.4)
    few = replace(config.pruning.prompts, keep=0.5)
    config = replace(config, pruning=replace(config.pruning, prompts=few, max_weight=100.0))
    right = wrong = 0.0
    for selection, chosen in selections(known, config):
        part = selected(known.metadata, selection)
        forgetful = dataclasses.replace(part, score_norms=part.score_norms * part.prompt_inclusion[:, None])
        terms = squares[selection.prompt_ids] / (part.response_lengths * part.prompt_inclusion[:, None]) ** 2
        for told in (part, forgetful):
            inclusion = prune(told, config, FixedOffset(0.5)).inclusion
            variance = (terms * (np.divide(1.0, inclusion, out=np.ones_like(terms), where=inclusion > 0.0) - 1.0)).sum()
            if told is part:
                right += chosen * variance
            else:
                wrong += chosen * variance
    assert wrong > 1.05 * right


def test_completions_without_advantage_waste_the_budget_they_are_kept_for(windows):
    """A KL term as good as none makes the planner keep them. The expectation is the same, and the error is worse."""
    window = windows["warm", "grpo"]
    config = settings(window, "none", "neyman")
    careful = replace(config, loss=replace(config.loss, kl_coef=1e-300))
    way = Way("none", "neyman")
    drawn, probability = all_outcomes(window, way, careful)
    assert relative_error(window, probability @ drawn) < 1e-6
    assert (prune(window.metadata, careful, FixedOffset(0.5)).inclusion > 0.0).all()
    assert mean_squared_error(window, way, careful) > 1.2 * mean_squared_error(window, way, config)


def test_floors_of_each_level_alone_multiply(windows):
    """Told that every prompt was certain, the second level's floor lets weights of 1/(floor · floor) through."""
    window = windows["warm", "grpo"]
    config = settings(window, "neyman", "neyman")
    config = replace(config, pruning=replace(config.pruning, completions=replace(config.pruning.completions, keep=0.2)))
    heaviest = alone = 0.0
    for selection, _ in selections(window, config):
        part = selected(window.metadata, selection)
        certain = prune(
            dataclasses.replace(part, prompt_inclusion=np.ones(len(part.prompt_ids))), config, FixedOffset(0.5)
        )
        heaviest = max(heaviest, prune(part, config, FixedOffset(0.5)).weight.max())
        alone = max(alone, (certain.weight / part.prompt_inclusion[:, None]).max())
    assert heaviest <= config.pruning.max_weight * (1 + 1e-9) < alone


def test_equal_rewards_asked_of_rounded_advantages_train_on_noise(measurements):
    """The mean of equal numbers need not equal them: groups that say nothing get advantages of size one."""
    window, gram = measurements.windows["warm", "grpo"], measurements.unit_gram
    three = np.arange(3)  # the mean of four equal numbers is exact, that of three tenths is not
    rewards = window.metadata.rewards[:, three]
    rewards = np.where(np.ptp(rewards, axis=1, keepdims=True) > 0.0, rewards, 0.1)
    deviation = rewards - rewards.mean(axis=1, keepdims=True)
    rounded = deviation / np.maximum(np.sqrt((deviation**2).mean(axis=1, keepdims=True)), 1e-300)
    noise, full = np.zeros((2, PROMPTS, SAMPLES))
    full[:, three] = group_advantages(rewards, normalise=True)
    noise[:, three] = rounded - full[:, three]
    scale = full_scales(window)
    assert norm(gram, scale * noise.ravel()) > 0.1 * norm(gram, scale * full.ravel())


def test_the_bias_of_token_means_with_pruned_prompts_shrinks_as_one_over_their_number(windows):
    """A ratio X/Y of two unbiased estimates; the window is repeated, its prompts drawn by themselves. To first order
    it is X/Z − E[X](Y − Z)/Z², Z the true normaliser, which has no bias: without that, little noise is left."""
    window = windows["warm", "dapo"]
    lengths, inclusion = window.metadata.response_lengths, inclusion_of(window, PromptPruningConfig(keep=0.6))
    biases, rng = [], np.random.default_rng(0)
    for copies in (1, 2, 4):
        true, left = copies * lengths.sum(), []
        for _ in range(3 * DRAWS):
            rows = np.flatnonzero(draw_bernoulli(np.tile(inclusion, copies), rng)) % PROMPTS
            estimated = normaliser(
                "token_mean",
                sampled_lengths=lengths[rows],
                prompt_inclusion=inclusion[rows],
                prompts=PROMPTS * copies,
                max_response_tokens=LIMIT,
            )
            if len(rows):  # a step that rolls nothing out is not counted
                weight = np.bincount(rows, 1.0 / inclusion[rows], minlength=PROMPTS)
                first_order = weight / true - copies * (estimated - true) / true**2
                left.append(np.repeat(weight / estimated - first_order, SAMPLES))
        biases.append(norm(window.gram, np.mean(left, axis=0)) / norm(window.gram, full_scales(window)))
    assert biases[0] > 0.005
    assert np.diff(np.log2(biases)) == pytest.approx([-1.0, -1.0], abs=0.3)

"""Law 2 for groups of unequal size: a prompt's expected gradient does not depend on how many completions it is given.

Nothing is sampled. A policy whose answers are few is written out, and every outcome of a group of every size is a group
of one and the same step: it is planned, and the expected gradient is the sum over the outcomes of a size, each with its
probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config import AllocationConfig, Config
from megatron_dppo.config import replace as replace_settings
from megatron_dppo.rl.group_sizes import group_advantages, many_rewards, two_rewards
from megatron_dppo.rl.objectives import advantages
from megatron_dppo.rl.plan import gather_metadata, plan_step, take_groups
from megatron_dppo.rl.pruning.schedule import mixed
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import Floats, Ints, StepMetadata, no_forks, no_roles
from megatron_dppo.rollout.metadata import staleness
from tests.rl.steps import step_config, step_metadata

SIZES = (3, 4, 5, 6)
LEAST, MEAN = 3, 4
TWO = np.array([0.0, 1.0])
THREE = np.array([0.0, 0.3, 1.0])
"""Rewards of the answers that there are."""
LENGTHS = np.array([5, 2, 3])
"""Their tokens: right answers are shorter than wrong ones."""


def unequal(config: Config, *, least: int = LEAST, most: int = SIZES[-1]) -> Config:
    allocation = AllocationConfig(rule="neyman", least=least, most=most)
    return replace_settings(
        config, rollout=replace_settings(config.rollout, samples_per_prompt=MEAN, allocation=allocation)
    )


def outcomes(answers: int, samples: int) -> Ints:
    """[outcomes, samples], the answers of every group of this size that there can be."""
    return np.array(list(itertools.product(range(answers), repeat=samples)))


def expected_gradients(rewards: Floats, chances: Floats, config: Config) -> dict[int, Floats]:
    """By group size the expected gradient by the answers' logits, of the real plan of a step of all outcomes."""
    each = {size: outcomes(len(rewards), size) for size in SIZES}
    answers = np.concatenate([np.pad(a, ((0, 0), (0, SIZES[-1] - size))) for size, a in each.items()])
    samples = np.concatenate([np.full(len(a), size) for size, a in each.items()])
    present = np.arange(SIZES[-1]) < samples[:, None]
    lengths = np.where(present, LENGTHS[answers], 0)
    count = len(answers)
    metadata = step_metadata(
        count,
        SIZES[-1],
        prompt_ids=np.arange(count),
        response_lengths=lengths,
        rewards=np.where(present, rewards[answers], 0.0),
        window=1.0,  # each outcome counts as if it were the only prompt
    )
    metadata = replace(metadata, samples=samples)
    step = plan_step(metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)
    (kept,) = (minibatch.samples for minibatch in step.minibatches)
    answer = answers[kept.group, kept.completion]
    scores = np.eye(len(rewards))[answer] - chances  # of a softmax
    terms = (kept.scale * kept.advantage)[:, None] * scores  # the scores of a completion's tokens sum to its own
    gradients = np.zeros((count, len(rewards)))
    np.add.at(gradients, kept.group, terms)
    probability = np.where(present, chances[answers], 1.0).prod(axis=1)
    return {size: (probability[:, None] * gradients)[samples == size].sum(axis=0) for size in SIZES}


def expected_of_groups(
    rewards: Floats, chances: Floats, size: int, *, normalise: bool, weight: Floats | None = None
) -> Floats:
    """The same for groups of one size straight from the formula; ``weight`` is what an answer counts in the mean."""
    answers = outcomes(len(rewards), size)
    scores = np.eye(len(rewards))[answers] - chances
    values = advantages(rewards[answers], normalise=normalise)
    if weight is not None:
        values = values * weight[answers]
    return np.asarray((chances[answers].prod(axis=1)[:, None] * (values[..., None] * scores).mean(axis=1)).sum(axis=0))


CHANCES = {2: np.array([0.7, 0.3]), 3: np.array([0.5, 0.3, 0.2])}


@pytest.mark.parametrize("rewards", [TWO, THREE], ids=["right or wrong", "three rewards"])
@pytest.mark.parametrize(("loss", "as_of"), [("grpo", LEAST), ("dr_grpo", MEAN)])
def test_the_expected_gradient_of_a_prompt_is_that_of_groups_of_one_size(
    rewards: Floats, loss: str, as_of: int
) -> None:
    chances = CHANCES[len(rewards)]
    config = unequal(step_config(rule="none", name=loss))
    weight = 1.0 / LENGTHS if loss == "grpo" else np.full(3, 1.0 / 200)
    expected = expected_of_groups(rewards, chances, as_of, normalise=loss == "grpo", weight=weight)
    for size, found in expected_gradients(rewards, chances, config).items():
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15, err_msg=f"groups of {size}")


@pytest.mark.parametrize("rewards", [TWO, THREE], ids=["right or wrong", "three rewards"])
def test_held_against_the_others_groups_of_every_size_have_the_gradient_of_the_expected_reward(rewards: Floats) -> None:
    """Weighted by 1/L_max; a completion's own reward is in no baseline."""
    chances = CHANCES[len(rewards)]
    gradient = chances * (rewards - chances @ rewards) / 200  # of Σ chance · reward, by the logits of a softmax
    for size, found in expected_gradients(rewards, chances, unequal(step_config(rule="none", name="rloo"))).items():
        np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-15, err_msg=f"groups of {size}")


@pytest.mark.parametrize(
    ("normalise", "chances"), [(True, CHANCES[2]), (False, CHANCES[2]), (True, np.array([0.95, 0.05]))]
)
def test_advantages_as_they_are_would_make_the_gradient_depend_on_the_size(normalise: bool, chances: Floats) -> None:
    found = [expected_of_groups(TWO, chances, size, normalise=normalise) for size in SIZES]
    assert np.linalg.norm(found[-1] - found[0]) > 0.2 * np.linalg.norm(found[0])


def test_groups_of_the_size_that_they_are_held_against_have_grpos_advantages() -> None:
    rewards = np.random.default_rng(0).random((9, 5)).round(1)
    for normalise in (True, False):
        plain = advantages(rewards, normalise=normalise)
        for as_of in (None, 5):
            found = group_advantages(rewards, np.full(9, 5), normalise=normalise, as_of=as_of)
            np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("rewards", [[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0.2, 0.2, 0.7, 0.7, 0.7, 0.7]])
def test_two_rewards_have_the_mean_over_all_sub_groups(rewards: Sequence[float]) -> None:
    given = np.array(rewards, float)
    for m in (2, 3, 4, 5):
        total, count = np.zeros(6), np.zeros(6)
        for members in map(list, itertools.combinations(range(6), m)):
            total[members] += advantages(given[None, members], normalise=True)[0]
            count[members] += 1
        found = group_advantages(given[None], np.array([6]), normalise=True, as_of=m)[0]
        np.testing.assert_allclose(found, total / count, rtol=1e-12)


def test_windows_hold_every_completion_equally_often() -> None:
    """Else some completions would count more than others by their place alone."""
    found = many_rewards(np.array([0.0, 1.0] * 4), 4)
    low, high = two_rewards(8, 4)
    assert found[0::2].mean() == pytest.approx(low[4], abs=0.05)
    assert found[1::2].mean() == pytest.approx(high[4], abs=0.05)
    assert found.sum() == pytest.approx(0.0, abs=1e-12)
    constant = many_rewards(np.array([0.0, 0.5, 1.0]), 3)
    np.testing.assert_allclose(constant, advantages(np.array([[0.0, 0.5, 1.0]]), normalise=True)[0], rtol=1e-12)


def test_equal_rewards_have_no_advantage_at_any_size() -> None:
    rewards = np.full((3, 7), 0.1)
    for normalise in (True, False):
        assert not group_advantages(rewards, np.array([3, 5, 7]), normalise=normalise, as_of=3).any()


def test_a_group_that_is_too_small_for_its_sub_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="no sub-groups of 4"):
        group_advantages(np.eye(3), np.full(3, 3), normalise=True, as_of=4)


def of_sizes(samples: Ints, width: int, seed: int = 0, *, graded: bool = False) -> StepMetadata:
    """A made-up step with groups of these sizes, in arrays of this width."""
    most = int(samples.max())
    made = step_metadata(len(samples), most, seed=seed, prompt_inclusion=np.linspace(0.3, 1.0, len(samples)))
    if graded:
        made = replace(made, rewards=np.random.default_rng(seed).random(made.rewards.shape).round(1))
    made = replace(made, samples=samples)

    def padded(values: np.ndarray) -> np.ndarray:
        if values.ndim != 2:
            return values
        return np.pad(np.where(made.present, values, 0), ((0, 0), (0, width - most)))

    known = {f.name: getattr(made, f.name) for f in fields(StepMetadata)}
    arrays = {name: padded(value) if isinstance(value, np.ndarray) else value for name, value in known.items()}
    shape = (len(samples), width)
    more = {"forks": no_forks(shape), "roles": no_roles(shape), "log_ratios": np.zeros((*shape, 2))}
    more["further_lengths"] = no_further(shape)
    return StepMetadata(**arrays | more)


def everything_of(metadata: StepMetadata, config: Config) -> list[object]:
    step = plan_step(metadata, config, replicas=2, align=2, capacity_multiple=4, step=3, pipeline=1)
    arrays = [
        getattr(minibatch.samples, f.name).tolist()
        for minibatch in step.minibatches
        for f in fields(type(minibatch.samples))
    ]
    numbers = [(m.normaliser, m.capacity, m.packs) for m in step.minibatches]
    return [arrays, numbers, sorted(step.metrics.items()), step.notes, step.census]


@pytest.mark.parametrize("rule", ["none", "threshold", "neyman", "threshold_deterministic", "top_k", "extremes"])
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "grpo"},
        {"name": "dapo", "kl_coef": 0.1},
        {"name": "dr_grpo", "updates_per_rollout": 3},
        {"name": "reinforce_pp"},
    ],
)
def test_padding_changes_nothing_of_a_plan(rule: str, loss: dict[str, object]) -> None:
    """Bit for bit: what is trained on, packs, normaliser, metrics and the census."""
    samples = np.random.default_rng(1).integers(3, 7, 20)
    for graded in (False, True):
        config = unequal(step_config(rule=rule, **loss))
        narrow, wide = (of_sizes(samples, width, graded=graded) for width in (6, 13))
        assert everything_of(narrow, config) == everything_of(wide, config)


@pytest.mark.parametrize("rule", ["none", "threshold", "neyman", "threshold_deterministic", "top_k", "extremes"])
def test_groups_of_one_size_are_planned_as_they_are_without_padding(rule: str) -> None:
    """Also where more completions were allowed for, and all prompts were given as many."""
    for loss in ("grpo", "dapo", "dr_grpo"):
        equal = step_config(rule=rule, name=loss)
        bare, wide = (of_sizes(np.full(12, MEAN), width) for width in (MEAN, 9))
        assert everything_of(bare, equal) == everything_of(wide, equal)
        assert everything_of(bare, equal) == everything_of(wide, unequal(equal, least=MEAN))


def test_every_rule_keeps_completions_and_no_padding() -> None:
    samples = np.array([3, 6, 4, 5])
    for rule in ("none", "threshold", "neyman", "threshold_deterministic", "top_k", "extremes"):
        for kl_coef in (0.0, 0.1):
            config = unequal(step_config(rule=rule, keep=0.9, name="grpo", kl_coef=kl_coef))
            step = plan_step(of_sizes(samples, 9), config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)
            kept = step.minibatches[0].samples
            assert len(kept.group) and (kept.completion < samples[kept.group]).all()
            assert step.census is not None
            total = step.census.kept[0] + step.census.pruned[0] + step.census.zero_advantage[0]
            assert total == samples.sum()


def test_the_normaliser_counts_every_prompt_alike() -> None:
    """N·G, whatever was rolled out; token_mean's tokens are those of groups of G at the lengths that were seen."""
    metadata = of_sizes(np.array([3, 6]), 8)
    for loss, expected in (("grpo", metadata.window * MEAN), ("dr_grpo", metadata.window * MEAN * 200)):
        step = plan_step(
            metadata, unequal(step_config(name=loss)), replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1
        )
        assert step.minibatches[0].normaliser == pytest.approx(expected, rel=1e-12)
    step = plan_step(
        metadata, unequal(step_config(name="dapo")), replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1
    )
    tokens = [row[:n].mean() * MEAN for row, n in zip(metadata.sampled_lengths, (3, 6), strict=True)]
    assert step.minibatches[0].normaliser == pytest.approx((tokens / metadata.prompt_inclusion).sum(), rel=1e-12)


def test_what_is_told_of_a_step_does_not_count_padding() -> None:
    metadata = of_sizes(np.array([3, 5]), 9)
    same = replace(metadata, rewards=np.where(metadata.present, 1.0, 0.0), versions=metadata.present * 1)
    assert len(mixed(same)) == 0
    assert same.tokens.sum() == (metadata.prompt_lengths * metadata.samples).sum() + metadata.response_lengths.sum()
    assert staleness(same, 2, bound=1) == {
        "rollout/stale_tokens": 1.0,
        "staleness/max": 1.0,
        "staleness/mean": 1.0,
        "staleness/bound": 1.0,
    }


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_unequal_groups_of_several_ranks_are_gathered_as_one_rank_has_them(seed: int) -> None:
    metadata = of_sizes(np.random.default_rng(seed).integers(3, 7, 9), 6, seed)
    ranks = [take_groups(metadata, np.arange(rank, 9, 2)) for rank in range(2)]
    back = gather_metadata(ranks, window=metadata.window)
    for f in fields(StepMetadata):
        np.testing.assert_array_equal(getattr(back, f.name), getattr(metadata, f.name))

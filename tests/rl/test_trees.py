"""Law 2 for trees: over all trees of a small policy, the expected estimate is the gradient of the expected reward."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from megatron_dppo.config import Config, RolloutConfig, replace
from megatron_dppo.rl.advantages import completion_advantages
from megatron_dppo.rl.trees import (
    ForkStatistics,
    biased_settings,
    first_slots,
    interval,
    tree_advantages,
    variance_parts,
)
from megatron_dppo.rl.types import SEGMENT, Floats, Ints, StepMetadata
from tests.rl.integration import all_plans
from tests.rl.plans import step_config, step_metadata
from tests.rl.tree_toy import LONGEST, Forests, forests, fork_at, fork_by_entropy, plan_gradient, toy

PLAIN = toy()
STOPPING = toy((0,), (1, 0))
SHORT = toy((0, 0), (0, 1), (1, 0))
SURE_FIRST = dataclasses.replace(PLAIN, logits=PLAIN.logits | {(): 1.5})
"""Entropies above 0.65 after 0 and after 1 0, and above 0.6 after 1."""
SURE_SHORT = dataclasses.replace(SURE_FIRST, ends=frozenset({(0, 1), (1, 1)}))

CASES: dict[str, Callable[[], Forests]] = {
    "one level": lambda: forests(SHORT, (2, 2), fork_at(1)),
    "three roots": lambda: forests(toy((0, 0), (1, 0), (1, 1), (0, 1)), (3, 2), fork_at(1)),
    "three children": lambda: forests(PLAIN, (2, 3), fork_at(2)),
    "two levels": lambda: forests(PLAIN, (2, 2, 2), fork_at(1, 2)),
    "early stop": lambda: forests(STOPPING, (2, 2), fork_at(1)),
    "early stops": lambda: forests(STOPPING, (2, 2, 2), fork_at(1, 2)),
    "entropy": lambda: forests(SURE_FIRST, (2, 2), fork_by_entropy(SURE_FIRST, 0.65)),
    "entropy, two levels": lambda: forests(SURE_SHORT, (2, 2, 2), fork_by_entropy(SURE_SHORT, 0.6, 0.65)),
    "pruned before": lambda: forests(toy((0, 0), (0, 1), (1, 0), (1, 1)), (2, 2), fork_at(1), keep=(0.4,)),
    "pruned before, three children": lambda: forests(PLAIN, (2, 3), fork_at(2), keep=(0.4,)),
    "pruned before, two levels": lambda: forests(STOPPING, (2, 2, 2), fork_at(1, 2), keep=(0.6, 0.3)),
}


@cache
def case(name: str) -> Forests:
    return CASES[name]()


def advantages(given: Forests, **settings: object) -> Floats:
    return tree_advantages(given.rewards, given.segments, replace(given.tree, **settings))


@pytest.mark.parametrize("baseline", ["siblings", "roots", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_expected_estimate_is_the_gradient_of_the_reward(name: str, baseline: str) -> None:
    assert case(name).error(advantages(case(name), baseline=baseline)) < 1e-12


@pytest.mark.parametrize("settings", [{"baseline": "depth"}, {"fusion": "probability"}, {"depths": (0, 2)}], ids=str)
def test_setting_that_calls_itself_biased_is(settings: dict[str, object]) -> None:
    given = case("two levels")
    assert list(biased_settings(replace(given.tree, **settings)))
    assert not list(biased_settings(given.tree))
    assert given.error(advantages(given, **settings)) > 0.05


def write_out(given: Forests, outcome: int, baseline: str) -> dict[tuple[object, int], float]:
    """Return G·ω_u·weight·(V(u) − b(u)) of every node, by the tokens on its path and its level."""
    rewards, weights = given.rewards[outcome], given.segments["weight"][outcome, :, 1:]
    children = given.tree.children(len(rewards))
    below = [math.prod(children[level + 1 :]) for level in range(len(children))]
    total: dict[tuple[object, int], float] = defaultdict(float)

    def value(level: int, start: int) -> float:
        if level == len(children) - 1:
            return float(rewards[start])
        starts = [start + child * below[level + 1] for child in range(children[level + 1])]
        first, *others = (value(level + 1, s) for s in starts)
        estimates = [first + weights[s, level] * (v - first) for s, v in zip(starts[1:], others, strict=True)]
        return (first + sum(estimates)) / len(starts)

    for level, size in enumerate(below):
        for start in range(0, len(rewards), size):
            root = start // below[0]
            roots = [value(0, other * below[0]) for other in range(children[0]) if other != root]
            parent = start // (size * children[level]) * size * children[level]
            siblings = [parent + child * size for child in range(children[level]) if parent + child * size != start]
            known = [value(level, s) for s in siblings if level == 0 or weights[s, level - 1] > 0]
            b = np.mean(roots)
            if baseline == "siblings":
                b = np.mean(known or roots)
            elif baseline == "mixed":
                b = np.mean([*known, np.mean(roots)])
            ends = [*given.forks[outcome, start], given.lengths[outcome, start]]
            if ends[level] > (ends[level - 1] if level else 0):
                factor = size * math.prod(weights[start, :level])
                total[given.paths[outcome][start][: ends[level]], level] += factor * (value(level, start) - b)
    return total


@pytest.mark.parametrize("baseline", ["siblings", "roots", "mixed"])
@pytest.mark.parametrize("name", ["entropy, two levels", "pruned before, two levels"])
def test_advantages_are_the_formula_written_out_node_by_node(name: str, baseline: str) -> None:
    """A path in several slots is trained on once."""
    given = case(name)
    segments = advantages(given, baseline=baseline)
    repeated = first_slots(given.segments, given.tree) != np.arange(given.rewards.shape[1])
    assert repeated.any() and (segments[repeated] == 0.0).all()
    for outcome in range(0, len(given.probability), len(given.probability) // 12):
        expected = write_out(given, outcome, baseline)
        found: dict[tuple[object, int], float] = defaultdict(float)
        for path, at, slot in zip(given.paths[outcome], given.forks[outcome], segments[outcome], strict=True):
            for level, end in enumerate([*at, len(path)]):
                found[path[:end], level] += slot[level]
        assert found.keys() >= expected.keys()
        assert found == pytest.approx({node: expected.get(node, 0.0) for node in found}, abs=1e-12)


def tree_config(given: Forests, rule: str, **loss: object) -> Config:
    rollout = RolloutConfig(max_response_tokens=LONGEST, samples_per_prompt=given.rewards.shape[1], tree=given.tree)
    return replace(step_config(rule=rule, name="dr_grpo", **loss), rollout=rollout)


def tree_metadata(given: Forests, outcomes: slice = slice(None)) -> StepMetadata:
    """Return one prompt for each outcome."""
    segments = given.segments[outcomes]
    fields = {"rewards": given.rewards[outcomes], "score_norms": np.sqrt(segments["square"].sum(axis=-1))}
    return step_metadata(*segments.shape[:2], response_lengths=given.lengths[outcomes], segments=segments, **fields)


@pytest.mark.parametrize("name", ["early stop", "pruned before"])
def test_pruned_plan_is_unbiased_over_all_trees_and_draws(name: str) -> None:
    given, total, pruned = case(name), 0.0, False
    config = tree_config(given, "neyman")
    for outcome, probability in enumerate(given.probability.tolist()):
        tokens = given.segments["tokens"][outcome]
        segments: list[Ints] = [np.repeat(np.arange(len(each)), each) for each in tokens]
        for step, drawn in all_plans(tree_metadata(given, slice(outcome, outcome + 1)), config):
            pruned |= drawn < 1.0
            total += probability * drawn * plan_gradient(given.toy, step, given.paths[outcome], segments)
    true = given.toy.gradient()
    assert pruned
    assert np.linalg.norm(total * LONGEST - true) < 1e-9 * np.linalg.norm(true)


def test_score_of_a_path_is_the_norm_of_independent_segments() -> None:
    given = case("two levels")
    metadata, segments = tree_metadata(given), advantages(given)
    expected = np.sqrt((segments**2 * given.segments["square"]).sum(axis=-1))
    found = np.abs(completion_advantages(metadata, segments)) * metadata.score_norms
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_path_without_norms_has_the_root_mean_square_over_tokens() -> None:
    segments = np.zeros((1, 1, 2), SEGMENT)
    segments["tokens"] = 2, 6
    part = step_metadata(1, 1, segments=segments)
    found = completion_advantages(part, np.array([[[-4.0, 1.0]]]))
    assert found[0, 0] == pytest.approx(-np.sqrt((2 * 16.0 + 6 * 1.0) / 8))
    assert completion_advantages(part, np.array([[[0.0, 0.0]]]))[0, 0] == 0.0


def test_parts_of_each_prompt_are_an_analysis_of_variance() -> None:
    """[P, K, M, parameters], and squared norms alone."""
    gradients = np.random.default_rng(1).normal(size=(6, 3, 4, 5))
    gradients += np.random.default_rng(2).normal(size=(6, 3, 1, 5))
    between, within = variance_parts(*((gradients.sum(axis=axes) ** 2).sum(axis=-1) for axes in ((), (2,), (1, 2))))
    responses = gradients.mean(axis=2)
    assert within == pytest.approx(gradients.var(axis=2, ddof=1).sum(axis=-1).mean(axis=1))
    assert between == pytest.approx(responses.var(axis=1, ddof=1).sum(axis=-1) - within / 4)


EVERYONE, MANY = np.arange(20), 10**6
"""Prompts, and roots whose mean has no noise."""


def statistics(within: float, after: float, of_rewards: float = 0.5, between: float | None = None) -> ForkStatistics:
    parts = 1 - within if between is None else between, within, 1 - of_rewards, of_rewards, 100.0, 100.0 * (1 - after)
    return ForkStatistics(*(np.full(20, part) for part in parts))


def test_best_tree_gains_what_the_best_split_of_tokens_gains() -> None:
    """W/(B + W) = 0.9 after 0.1 of the tokens are left: M* = √(aW/(B(1 − a))) = 9."""
    known = statistics(0.9, 0.1)
    gains = [float(known.gain(EVERYONE, MANY, children)) for children in range(2, 20)]
    most = 1.0 / (np.sqrt(0.9 * 0.1) + np.sqrt(0.1 * 0.9)) ** 2
    assert 2 + int(np.argmax(gains)) == 9 and max(gains) == pytest.approx(most)
    roots, children, gain = known.best(40)
    assert roots * children <= 40 and 4 <= children <= 9 and 0.7 * most < gain.value < most
    assert gain.low == pytest.approx(gain.high), "all prompts say the same"
    assert known.best(3)[:2] == (2, 2), "the least tree that there is"


def test_few_roots_make_a_noisy_baseline() -> None:
    """Rewards of all roots drawn, and the mean of the other roots taken from those of one."""
    rng, roots, children, within = np.random.default_rng(5), 3, 3, 0.3
    rewards = rng.normal(size=(100_000, roots, 1)) * np.sqrt(1 - within)
    rewards = rewards + rng.normal(size=(100_000, roots, children)) * np.sqrt(within)
    tree = (rewards[:, 0, 0] - rewards[:, 1:].mean(axis=(1, 2))).var()
    flat = 1.0 + 1.0 / (roots * children - 1)
    known = statistics(0.5, 0.5, of_rewards=within)
    noise = known.gain(EVERYONE, MANY, children) / known.gain(EVERYONE, roots, children)
    assert noise == pytest.approx(tree / flat, rel=0.02)


def test_interval_is_as_wide_as_prompts_differ() -> None:
    """Means of 30 prompts, each 0 or 1: their share of ones is known to ± 0.18."""
    late = np.random.default_rng(3).random(30) < 0.5
    found = interval(lambda prompts: late[prompts].mean(axis=-1), 30)
    assert found.value == late.mean()
    assert found.high - found.low == pytest.approx(4 * np.sqrt(0.25 / 30), rel=0.2)


def test_estimates_below_zero_count_as_none() -> None:
    assert statistics(1.0, 0.5, between=-0.1).variance_after(EVERYONE) == 1.0

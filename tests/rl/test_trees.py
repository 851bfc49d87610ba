"""Law 2 for trees: over all trees of a small policy, the expected estimate is the gradient of the expected reward.

Each classic mistake, made on purpose, fails by the same sum. The figures beside them are shares of the true gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from megatron_dppo.config import replace
from megatron_dppo.rl.trees import biased_settings, first_slots, node_values, tree_advantages
from megatron_dppo.rl.types import Floats
from tests.rl.tree_toy import PREFIXES, Forests, forests, fork_at, fork_by_entropy, listed, toy, tree_of

PLAIN = toy()
STOPPING = toy((0,), (1, 0))
SURE_FIRST = dataclasses.replace(PLAIN, logits=PLAIN.logits | {(): 1.5})
"""Entropies above 0.65 after 0 and after 1 0, and above 0.6 after 1."""
SURE_SHORT = dataclasses.replace(SURE_FIRST, ends=frozenset({(0, 1), (1, 1)}))
TRUNK, LEAF = slice(0, 1), slice(1, len(PREFIXES))
"""Parameters of the tokens before and after a fork at 1."""

CASES: dict[str, Callable[[], Forests]] = {
    "one level": lambda: forests(PLAIN, (2, 2), fork_at(1)),
    "three roots": lambda: forests(toy((0, 0), (1, 0), (1, 1), (0, 1)), (3, 2), fork_at(1)),
    "three children": lambda: forests(PLAIN, (2, 3), fork_at(2)),
    "two levels": lambda: forests(PLAIN, (2, 2, 2), fork_at(1, 2)),
    "early stops": lambda: forests(STOPPING, (2, 2, 2), fork_at(1, 2)),
    "entropy": lambda: forests(SURE_FIRST, (2, 2), fork_by_entropy(SURE_FIRST, 0.65)),
    "entropy, two levels": lambda: forests(SURE_SHORT, (2, 2, 2), fork_by_entropy(SURE_SHORT, 0.6, 0.65)),
    "pruned before": lambda: forests(PLAIN, (2, 3), fork_at(2), keep=(0.4,)),
    "pruned before, two levels": lambda: forests(STOPPING, (2, 2, 2), fork_at(1, 2), keep=(0.6, 0.3)),
}
_known: dict[str, Forests] = {}


def case(name: str) -> Forests:
    if name not in _known:
        _known[name] = CASES[name]()
    return _known[name]


def planned(given: Forests, **settings: object) -> Floats:
    return tree_advantages(given.rewards, given.segments, replace(given.tree, **settings))


@pytest.mark.parametrize("baseline", ["siblings", "roots", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_the_expected_estimate_is_the_gradient_of_the_expected_reward(name: str, baseline: str) -> None:
    assert case(name).error(planned(case(name), baseline=baseline)) < 1e-12


def test_the_cases_are_what_their_names_say() -> None:
    entropy, stops, pruned = (case(name) for name in ("entropy", "early stops", "pruned before, two levels"))
    assert set(np.unique(entropy.forks)) == {1, 2, 3}, "some never fork, others at several places"
    assert ((stops.forks == stops.lengths[..., None]).sum(axis=-1) == 1).any(), "ended between its two forks"
    assert (case("entropy, two levels").segments["tokens"][..., 1] == 0).any(), "two forks at the same place"
    assert set(np.unique(pruned.segments["weight"][..., 1])) == {0.0, 1.0, 1 / 0.6}


@pytest.mark.parametrize("settings", [{"baseline": "depth"}, {"fusion": "probability"}, {"depths": (0, 2)}], ids=str)
def test_a_setting_that_calls_itself_biased_is(settings: dict[str, object]) -> None:
    given = case("two levels")
    assert list(biased_settings(replace(given.tree, **settings)))
    assert not list(biased_settings(given.tree))
    assert given.error(planned(given, **settings)) > 0.05


def by_level(given: Forests, baseline: Callable[[list[Floats], int], Floats]) -> Floats:
    """V(u) − b(u) with a baseline from the V of all levels, by slots."""
    values = node_values(given.rewards, given.segments, given.tree)
    slots = [np.repeat(v, given.rewards.shape[1] // v.shape[1], axis=1) for v in values]
    return np.stack([slots[level] - baseline(slots, level) for level in range(len(slots))], axis=-1)


def group_mean(slots: list[Floats], level: int) -> Floats:
    return slots[-1].mean(axis=1, keepdims=True)


def other_leaves(slots: list[Floats], level: int) -> Floats:
    """RLOO's: for each leaf the mean of all others, whose mean a node then has."""
    leaves = slots[-1].shape[1]
    return (slots[-1].sum(axis=1, keepdims=True) - slots[level]) / (leaves - 1)


def parents_value(slots: list[Floats], level: int) -> Floats:
    return slots[level - 1] if level else group_mean(slots, level)


@pytest.mark.parametrize(
    ("baseline", "trunk", "leaf"),
    [(group_mean, 1 / 2, 5 / 6), (other_leaves, 3 / 5, 1.0), (parents_value, 1 / 2, 2 / 3)],
)
def test_a_baseline_with_the_segments_own_reward_in_it_loses_gradient(
    baseline: Callable[[list[Floats], int], Floats], trunk: float, leaf: float
) -> None:
    """K = 2, M = 3. A mean over the leaves has half of the trunk's gradient."""
    given = forests(toy((0, 0), (0, 1), (1, 0), (1, 1)), (2, 3), fork_at(1))
    assert given.error(planned(given)) < 1e-12
    segments = by_level(given, baseline)
    assert given.share(segments, TRUNK) == pytest.approx(trunk, abs=1e-12)
    assert given.share(segments, LEAF) == pytest.approx(leaf, abs=1e-12)


def test_leaves_that_all_count_alike_are_biased_where_some_ended_early() -> None:
    given = case("early stops")
    slots = np.arange(given.rewards.shape[1])
    once = first_slots(given.segments, given.tree) == slots
    each = np.where(once, 1.0 / once.sum(axis=1, keepdims=True), 0.0) * len(slots)
    segments = by_level(given, lambda values, level: np.zeros_like(values[0]))
    assert given.error(segments) < 1e-12, "no baseline is one, too"
    assert given.error(segments * each[..., None]) > 0.05


def test_forks_chosen_in_hindsight_are_biased() -> None:
    """Before the least likely token of a finished path."""

    def grown():
        for p, path in PLAIN.responses():
            chances = [PLAIN.probability(path[:t], path[t]) for t in range(1, len(path))]
            at = 1 + int(np.argmin(chances))
            for q, other in PLAIN.responses(path[:at]):
                yield p * q, [(path, (at,), (1.0,)), (other, (at,), (1.0,))]

    roots = list(grown())
    given = listed(PLAIN, tree_of((2, 2)), ((one, other) for one in roots for other in roots))
    assert given.error(planned(given)) > 0.05


def written_out(given: Forests, outcome: int, baseline: str) -> dict[tuple[object, int], float]:
    """G·ω_u·weight·(V(u) − b(u)) of every node, by the tokens on its path and its level, node by node."""
    children, rewards, weights = (
        given.tree.children(given.rewards.shape[1]),
        given.rewards[outcome],
        given.segments["weight"][outcome, :, 1:],
    )
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
@pytest.mark.parametrize("name", ["early stops", "entropy, two levels", "pruned before, two levels"])
def test_what_is_trained_on_is_the_formula_written_out_node_by_node(name: str, baseline: str) -> None:
    """And a path in several slots is trained on once."""
    given = case(name)
    segments = planned(given, baseline=baseline)
    repeated = first_slots(given.segments, given.tree) != np.arange(given.rewards.shape[1])
    assert repeated.any() and (segments[repeated] == 0.0).all()
    for outcome in range(0, len(given.probability), len(given.probability) // 40):
        expected = written_out(given, outcome, baseline)
        found: dict[tuple[object, int], float] = defaultdict(float)
        for path, at, slot in zip(given.paths[outcome], given.forks[outcome], segments[outcome], strict=True):
            for level, end in enumerate([*at, len(path)]):
                found[path[:end], level] += slot[level]
        for node in expected.keys() | found.keys():
            assert found[node] == pytest.approx(expected[node], abs=1e-12)

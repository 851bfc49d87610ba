"""Law 2 for trees: over all trees of a small policy, the expected estimate is the gradient of the
expected reward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from megatron_dppo.config import BranchConfig, Config, RolloutConfig, TreeConfig, replace
from megatron_dppo.rl.advantages import compute_completion_advantages
from megatron_dppo.rl.trees import (
    compute_depth_advantages,
    compute_node_values,
    compute_tree_advantages,
    find_biased_settings,
)
from megatron_dppo.rl.types import SEGMENT, Floats, Ints, StepMetadata
from tests.rl.integration import all_plans
from tests.rl.plans import step_config, step_metadata
from tests.rl.tree_toy import LONGEST, Forests, forests, plan_gradient, toy

PLAIN = toy()
STOPPING = toy((0,), (1, 0))
OF_TWO = toy((0, 0), (0, 1), (1, 0), (1, 1))
"""Responses of two tokens."""

CASES: dict[str, Callable[[], Forests]] = {
    "three of each": lambda: forests(OF_TWO, (3, 3), (1,)),
    "two levels": lambda: forests(PLAIN, (2, 2, 2), (1, 2)),
    "early stop": lambda: forests(STOPPING, (2, 2), (1,)),
    "early stop, two levels": lambda: forests(STOPPING, (2, 2, 2), (1, 2)),
}


@cache
def case(name: str) -> Forests:
    return CASES[name]()


def advantages(given: Forests, **settings: object) -> Floats:
    return compute_tree_advantages(given.rewards, given.segments, replace(given.tree, **settings))


@pytest.mark.parametrize("name", CASES)
def test_expected_estimate_is_the_gradient_of_the_reward(name: str) -> None:
    assert case(name).error(advantages(case(name))) < 1e-12


@pytest.mark.parametrize(
    "settings", [{"baseline": "depth"}, {"fusion": "probability"}, {"depths": (0, 2)}], ids=str
)
def test_setting_that_calls_itself_biased_is(settings: dict[str, object]) -> None:
    given = case("two levels")
    assert list(find_biased_settings(replace(given.tree, **settings)))
    assert not list(find_biased_settings(given.tree))
    assert given.error(advantages(given, **settings)) > 0.05


def test_advantages_of_a_tree_written_out() -> None:
    """The first root, of the value 4, has three children of the values 2, 8 and 2, and each of them
    two. The second root, of the value −1, ended before its fork: its path in six slots is trained
    on once."""
    segments = np.zeros((1, 12, 3), SEGMENT)
    segments["tokens"] = 1
    segments["tokens"][0, 6:, 1:] = 0
    branches = BranchConfig(at=1, children=3), BranchConfig(at=2, children=2)
    tree = TreeConfig(roots=2, branches=branches)
    found = compute_tree_advantages(np.array([[4.0, 0, 2, 14, 5, -1, *[-1] * 6]]), segments, tree)
    expected = np.zeros((12, 3))
    expected[:6] = np.column_stack(
        [[5] * 6, np.repeat([-1, 7, -1], 2), [4.5, -1.5, -4.5, 13.5, 6, -3]]
    )
    expected[6, 0] = -30
    np.testing.assert_allclose(found[0], expected, atol=1e-12)


def test_fused_value_is_a_softmax_mean_of_the_children() -> None:
    """The children of the first root have the odds 3 to 1; single probabilities underflow."""
    segments = np.zeros((1, 4, 2), SEGMENT)
    segments["logprob"][0, :, 1] = [-1000.0, -1000.0 - np.log(3.0), -2000.0, -2000.0]
    branches = (BranchConfig(at=1, children=2),)
    tree = TreeConfig(roots=2, branches=branches, fusion="probability")
    roots, _ = compute_node_values(np.array([[1.0, 0.0, 1.0, 0.0]]), segments, tree)
    np.testing.assert_allclose(roots, [[0.75, 0.5]], rtol=1e-12)


def test_depth_advantages_are_in_deviations_of_the_depth() -> None:
    found = compute_depth_advantages(np.array([[1.0, 3.0, 9.0]]), np.array([[2, 1, 0]]))
    np.testing.assert_allclose(found, [[-1.0, 1.0, 0.0]], rtol=1e-7)


def tree_config(given: Forests) -> Config:
    rollout = RolloutConfig(
        max_response_tokens=LONGEST, samples_per_prompt=given.rewards.shape[1], tree=given.tree
    )
    return replace(step_config(name="dr_grpo"), rollout=rollout)


def tree_metadata(given: Forests, outcome: int) -> StepMetadata:
    """Return one prompt with the trees of an outcome."""
    segments = given.segments[[outcome]]
    fields = {
        "rewards": given.rewards[[outcome]],
        "score_norms": np.sqrt(segments["square"].sum(axis=-1)),
    }
    lengths = segments["tokens"].sum(axis=-1)
    return step_metadata(*lengths.shape, response_lengths=lengths, segments=segments, **fields)


def test_pruned_plan_is_unbiased_over_all_trees_and_draws() -> None:
    given, total, pruned = case("early stop"), 0.0, False
    config = tree_config(given)
    for outcome, probability in enumerate(given.probability.tolist()):
        tokens = given.segments["tokens"][outcome]
        segments: list[Ints] = [np.repeat(np.arange(len(each)), each) for each in tokens]
        for step, drawn in all_plans(tree_metadata(given, outcome), config):
            pruned |= drawn < 1.0
            total += (
                probability * drawn * plan_gradient(given.toy, step, given.paths[outcome], segments)
            )
    true = given.toy.gradient()
    assert pruned
    assert np.linalg.norm(total * LONGEST - true) < 1e-9 * np.linalg.norm(true)


def test_score_of_a_path_is_a_second_moment_over_segments() -> None:
    """Weighted by squared norms; by tokens where all norms are 0."""
    segments = np.zeros((1, 2, 2), SEGMENT)
    segments["tokens"] = 2, 6
    segments["square"][0, 1] = 9.0, 4.0
    found = compute_completion_advantages(
        step_metadata(1, 2, segments=segments), np.array([[[-4.0, 1.0], [2.0, -1.0]]])
    )
    assert found[0] == pytest.approx([-np.sqrt((2 * 16 + 6) / 8), np.sqrt((9 * 4 + 4) / 13)])

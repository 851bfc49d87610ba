"""Numbers from outside are checked, and rewards that differ by rounding are equal wherever rewards
are compared."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_dppo import api, prune
from megatron_dppo.config import Config, TreeConfig
from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.advantages import compute_group_advantages, estimate_advantages
from megatron_dppo.rl.numbers import (
    as_logprobs,
    as_mask,
    as_number,
    as_truth,
    find_equal_groups,
    is_right,
    round_rewards,
)
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptFeatures, PromptForecast
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.trees import compute_tree_advantages
from megatron_dppo.rl.types import SEGMENT, Group
from megatron_dppo.rollout.metadata import build_metadata
from tests.rl.plans import made_up_pool
from tests.rollout.scripted import completion_of

EQUAL = np.array([[0.1 + 0.2, 0.3, 0.15 + 0.15, 0.6 / 2.0]])
RIGHT = np.array([[0.7 + 0.2 + 0.1, 1.0, 0.1 * 3 + 0.7, 0.8 + 0.1 + 0.1]])
SINGLE = np.float32(0.1) * np.array([[3, 1, 2, 1]], np.float32) + np.float32(0.1) * np.array(
    [[4, 6, 5, 6]], np.float32
)
"""0.7 in single precision, added up in three ways."""
ONE_MORE = np.array([[1.0, 0.0, 0.0, 0.0]])
PADDED = np.array([[True, True, True, False]] * 2)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (Decimal("sNaN"), math.nan),
        *(
            (nothing, None)
            for nothing in (None, "0.5", [0.5], np.array([0.5]), 1j, np.complex64(1), b"1")
        ),
    ],
)
def test_scalars_of_every_kind_are_numbers(value: object, number: float | None) -> None:
    assert as_number(value) == number or np.isnan([as_number(value), number]).all()
    assert as_truth(value) is None


@pytest.mark.parametrize(
    "value", [True, 1.0, np.bool_(True), torch.tensor(1), Decimal(1)], ids=repr
)
def test_truth_is_true_or_one(value: object) -> None:
    assert as_truth(value) is True
    assert as_truth(1 - as_number(value)) is False
    for other in ("true", 2, -1, np.array([True]), object()):
        assert as_truth(other) is None


def test_masks_are_true_and_false() -> None:
    for mask in ([True, False], [1.0, 0.0], torch.tensor([1, 0])):
        assert as_mask(mask).tolist() == [True, False]
        assert as_mask(mask).dtype == np.bool_
    for mask in ([1, 0.5], [1, math.nan], [True, "no"], [1, None], [1, [0]]):
        with pytest.raises(ValueError):
            as_mask(mask)


def test_log_probabilities_are_at_most_zero_where_read() -> None:
    read = as_logprobs([-1.0, 1e-6, -0.0, 7.0], np.array([True, True, True, False]))
    assert read.tolist() == [-1.0, 0.0, 0.0, 7.0]
    assert read.dtype == np.float32
    for bad in (0.01, None, math.nan, -math.inf, "a"):
        with pytest.raises(ValueError, match="log-probabilities"):
            as_logprobs([-1.0, bad])


@pytest.mark.parametrize("scale", [1e-200, -1.0, 1e9])
@pytest.mark.parametrize(
    "rewards", [EQUAL, RIGHT, SINGLE.astype(float)], ids=["thirds", "ones", "single"]
)
def test_rounding_is_no_advantage_at_any_scale(rewards: np.ndarray, scale: float) -> None:
    assert len(np.unique(rewards)) > 1, "the case is meant to be one of rounding"
    for normalise in (True, False):
        assert (
            compute_group_advantages(round_rewards(scale * rewards), normalise=normalise) == 0.0
        ).all()
    assert not prune([[9, 9, 9, 9]], scale * rewards).mask.any()


@pytest.mark.parametrize("scale", [1e-200, 1e9])
def test_more_than_rounding_is_an_advantage(scale: float) -> None:
    rewards = scale * np.array([[1.0, 1.0 - 1e-6, 1.0, 1.0]])
    found = compute_group_advantages(rewards, normalise=True)
    np.testing.assert_allclose(found, [[3**-0.5, -(3**0.5), 3**-0.5, 3**-0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_no_baseline_makes_an_advantage_of_rounding(name: str) -> None:
    rewards = np.array([[*EQUAL[0], 7.0], [*EQUAL[0, ::-1], -7.0]])
    present = np.arange(5) < np.array([[4], [4]])
    rounded = round_rewards(rewards, present)
    found = estimate_advantages(name, rounded, {"inclusion": np.ones(2), "present": present})
    assert (found == 0.0).all(), "the last column takes no part"
    tenths = np.full((3, 7), 0.1)
    assert tenths[0].mean() != 0.1
    of_groups = np.repeat([[0.1 + 0.2], [0.3], [0.15 + 0.15]], 7, axis=1)
    for equal in (tenths, of_groups):
        columns = {"inclusion": np.ones(3), "present": np.ones((3, 7), np.bool_)}
        assert not estimate_advantages(name, equal, columns).any()


def test_tree_has_no_advantage_of_rounding() -> None:
    tree = TreeConfig(branches=(BranchConfig(at=1, children=2),), baseline="depth")
    segments = np.zeros((1, 4, 2), SEGMENT)
    segments["tokens"] = 1, 2
    assert (compute_tree_advantages(round_rewards(EQUAL), segments, tree) == 0.0).all()


def test_rounding_makes_no_mixed_group() -> None:
    """Metadata has rewards without rounding, from a run's groups and from a user."""
    rewards = np.array([EQUAL[0], RIGHT[0], [1.0, 0.0, 1.0, 1.0]])
    by_user = api.step_metadata(rewards, np.ones((3, 4)), np.ones(3))
    completions = (completion_of([1, 0]),) * 4
    groups = [
        Group(prompt, completions, row)
        for prompt, row in zip(made_up_pool(3), rewards, strict=True)
    ]
    of_roles = [np.stack([row, row[::-1]], axis=1) for row in rewards]
    of_run = build_metadata(
        groups, np.ones(3), samples=4, segments=2, owner=0, role_rewards=of_roles
    )
    for metadata in (by_user, of_run):
        assert find_nonzero_variance_groups(metadata, Config()).tolist() == [2]
    assert [len(np.unique(row)) for row in of_run.segments["reward"].reshape(3, -1)] == [1, 1, 2]


def test_reward_history_takes_rounding_for_equality() -> None:
    history, ids = PromptHistory(), np.array([1, 2])
    rewards = round_rewards(np.concatenate([RIGHT, np.array([[1.0, 0.0, 1.0 - 2**-53, 2.0**-60]])]))
    history.update(
        ids, rewards, compute_group_advantages(rewards, normalise=True), find_equal_groups(rewards)
    )
    assert history.binary
    assert history.count_equal_visits(ids).tolist() == [1, 0]
    assert history.pool_mean == (6.0 + 1.0) / (8.0 + 2.0), "four right; two right and two wrong"
    equal = round_rewards(EQUAL)
    history.update(
        ids[:1], equal, compute_group_advantages(equal, normalise=True), find_equal_groups(equal)
    )
    assert not history.binary
    assert history.count_equal_visits(ids[:1]).tolist() == [2]


def test_forecast_takes_rounding_for_equality() -> None:
    known = PromptForecast(PromptFeatures(made_up_pool(4)))
    one, zeros = np.ones(2), np.zeros((2, 4))
    for visits, rewards in ((1, [*RIGHT, *(1.0 - RIGHT + ONE_MORE)]), (2, [*EQUAL, *EQUAL])):
        rounded = round_rewards(np.array(rewards))
        known.evaluate_and_update(
            Outcomes(np.array([0, 1]), rounded, zeros, one, one, find_equal_groups(rounded))
        )
        assert known.binary == (visits == 1)
        assert known.count_equal_visits(np.array([0, 1])).tolist() == [visits, visits - 1]


def test_ones_and_zeros_are_exact_and_padding_stays() -> None:
    assert len(np.unique(round_rewards(np.array([[1.0, *EQUAL[0], 0.0, *SINGLE[0, :2]]])))) == 4
    rewards = np.array([[1.0 - 2**-53, 2.0**-60, 0.5, 3.0], [-0.0, 0.0, 0.0, np.nan]])
    np.testing.assert_array_equal(
        round_rewards(rewards, PADDED), [[1.0, 0.0, 0.5, 3.0], [0.0, 0.0, 0.0, np.nan]]
    )


def test_one_is_right_in_every_order_of_addition() -> None:
    assert all(map(is_right, RIGHT[0].tolist()))
    assert is_right(1.5) and not is_right(1.0 - 1e-6) and not is_right(float("nan"))

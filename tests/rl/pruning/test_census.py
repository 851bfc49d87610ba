"""The census counts every completion once, and says with what probability it was kept."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from megatron_dppo.rl.hosts import host_for
from megatron_dppo.rl.plan import take_groups
from megatron_dppo.rl.pruning.census import Cell, census
from megatron_dppo.rl.pruning.minibatch import Pruned, prune_minibatch
from megatron_dppo.rl.types import StepMetadata
from tests.rl.steps import step_config, step_metadata


def _draw(metadata: StepMetadata, *, rule: str = "neyman", keep: float = 0.5) -> tuple[StepMetadata, Pruned]:
    config = step_config(rule=rule, keep=keep)
    return metadata, prune_minibatch(metadata, config, host_for(config.loss), keep=keep, rng=np.random.default_rng(0))


def _sums(table: tuple[Cell, ...]) -> tuple[float, float, float]:
    return tuple(sum(cell[i] for cell in table) for i in (2, 3, 4))


def test_every_completion_is_counted_once_in_every_table() -> None:
    part, pruned = _draw(step_metadata(48))
    counted = census([(part, pruned)])
    teaches = pruned.advantage != 0.0
    assert counted.kept[0] + counted.pruned[0] + counted.idle[0] == teaches.size
    assert counted.idle[0] == (~teaches).sum() > 0
    assert counted.pruned[0] > 0
    rows = part.prompt_lengths[:, None] + part.response_lengths
    assert counted.kept[1] + counted.pruned[1] + counted.idle[1] == rows.sum()
    for table in (counted.by_group, counted.by_reward, counted.by_cause):
        completions, chance, kept = _sums(table)
        assert (completions, kept) == (teaches.sum(), counted.kept[0])
        assert chance == pytest.approx(pruned.inclusion[teaches].sum(), abs=1e-3)


def test_the_papers_rule_shows_as_what_it_is_the_majority_of_each_group_at_half() -> None:
    """Groups of eight with 1, 4 and 6 right answers, at keep 0.5."""
    rewards = np.array([[1.0] * right + [0.0] * (8 - right) for right in (1, 4, 6)])
    counted = census([_draw(step_metadata(3, rewards=rewards), rule="threshold")])
    assert counted.binary
    assert [cell[:4] for cell in counted.by_group] == [
        (0.125, -1.0, 7, 3.5),
        (0.125, 1.0, 1, 1.0),
        (0.5, -1.0, 4, 2.0),
        (0.5, 1.0, 4, 2.0),
        (0.75, -1.0, 2, 2.0),
        (0.75, 1.0, 6, 3.0),
    ]


def test_a_score_is_placed_by_octaves_of_the_median_and_a_length_by_its_own() -> None:
    """One group of |A| = 1, 1/L = 1/16: surprises of 1, 2, 4 and 8 about their median, 3."""
    metadata = step_metadata(
        1,
        4,
        rewards=np.array([[1.0, 0, 1, 0]]),
        response_lengths=np.full((1, 4), 16),
        surprise=np.array([[1.0, 2, 4, 8]]),
    )
    counted = census([_draw(metadata, rule="none")])
    assert [cell[:3] for cell in counted.by_cause] == [(4.0, -1.5, 1), (4.0, -0.5, 1), (4.0, 0.5, 1), (4.0, 1.5, 1)]


def test_rewards_of_any_kind_have_deviations_from_their_groups_mean() -> None:
    """1, 2, 3, 6: mean 3, standard deviation √3.5; the third teaches nothing."""
    counted = census([_draw(step_metadata(1, 4, rewards=np.array([[1.0, 2.0, 3.0, 6.0]])), rule="none")])
    assert not counted.binary
    assert [cell[:3] for cell in counted.by_reward] == [(-1.0, -1.0, 1), (-0.5, -1.0, 1), (1.5, 1.0, 1)]
    assert counted.idle[0] == 1
    assert {cell[0] for cell in counted.by_group} == {0.25}  # one of four is better than the mean


def test_minibatches_are_counted_together() -> None:
    whole = step_metadata(20, seed=4)
    halves = [_draw(take_groups(whole, groups), rule="threshold") for groups in np.split(np.arange(20), 2)]
    together, apart = census(halves), [census([half]) for half in halves]
    assert together.kept == tuple(sum(part.kept[i] for part in apart) for i in (0, 1))
    assert _sums(together.by_group) == tuple(sum(_sums(part.by_group)[i] for part in apart) for i in (0, 1, 2))


@pytest.mark.parametrize("groups", [0, 64])
def test_a_census_travels_as_it_is_and_is_small(groups: int) -> None:
    counted = census([_draw(step_metadata(groups))])
    assert pickle.loads(pickle.dumps(counted)) == counted
    row = json.loads(json.dumps(counted.as_row()))
    assert row["kept"] == list(counted.kept)
    assert len(json.dumps(row)) < 6000
    assert "-0.0" not in json.dumps(row)

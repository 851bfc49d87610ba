"""Metrics and census of a step's pruning, compared with every draw that the step could have had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import DistillationConfig, EntropyConfig
from megatron_dppo.rl.census import Cell
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.plan import select_groups
from megatron_dppo.rl.pruning.draw import (
    PruningDraw,
    compute_completion_terms,
    compute_prune_metrics,
    compute_pruning_stats,
    estimate_gradient_noise,
    make_empty_draw,
    prune_minibatch,
)
from megatron_dppo.rl.types import Bools, Floats, StepMetadata
from tests.rl.plans import step_config, step_metadata

NOISE = ("prune/noise_share_prompts", "prune/noise_share_completions")
INFLATION = "prune/variance_inflation"


def draw(
    metadata: StepMetadata, *, rule: str = "neyman", keep: float = 0.5, **loss: Any
) -> PruningDraw:
    config = step_config(rule=rule, keep=keep, **loss)
    return prune_minibatch(
        metadata, config, resolve_objective(config.loss), keep=keep, rng=np.random.default_rng(0)
    )


def outcomes(chances: Floats) -> Iterator[tuple[float, Bools]]:
    """Yield all outcomes of independent draws, each with its probability."""
    for outcome in product((False, True), repeat=chances.size):
        drawn = np.array(outcome).reshape(chances.shape)
        yield float(np.where(drawn, chances, 1.0 - chances).prod()), drawn


def test_entropy_bonus_gives_every_completion_a_score():
    """In groups of equal rewards β·c·norm, elsewhere √(A² + β²)·c·norm; all may be kept."""
    metadata = step_metadata(2, 3, rewards=np.array([[1.0, 0, 0], [1, 1, 1]]))
    config = step_config(entropy=EntropyConfig(coef=0.5))
    candidates, _, c, _ = compute_completion_terms(metadata, config, resolve_objective(config.loss))
    size = np.sqrt(candidates.advantage**2 + 0.25)
    np.testing.assert_allclose(candidates.score, size * c * metadata.score_norms)
    assert not candidates.zero_advantage.any()
    pruned = draw(metadata, entropy=EntropyConfig(target=0.2))
    assert (pruned.inclusion[1] > 0.0).all(), "an adaptive weight may be 0 now and grow later"


def test_noise_and_saved_tokens_are_estimated_without_bias():
    """Terms of norm h have directions of their own. The variance is integrated over all 2^12 draws
    of both levels."""
    rewards = np.array([[1.0, 0, 0], [1, 1, 0], [0, 1, 0]])
    metadata = step_metadata(3, 3, rewards=rewards)
    pi, inclusion = np.array([0.4, 1.0, 0.7]), np.random.default_rng(3).uniform(0.3, 1.0, (3, 3))
    pruned = replace(draw(metadata), inclusion=inclusion, weight=1.0 / (pi[:, None] * inclusion))
    metadata = replace(metadata, prompt_inclusion=pi)
    h = np.abs(pruned.advantage) * pruned.coefficient * metadata.score_norms
    estimates, variance, saved, truth = np.zeros(3), 0.0, 0.0, 0.0
    for chance, prompts in outcomes(pi):
        arrays = (
            "advantage",
            "coefficient",
            "inclusion",
            "weight",
            "kept",
            "zero_advantage",
            "segments",
            "magnitude",
        )
        rows = replace(pruned, **{name: getattr(pruned, name)[prompts] for name in arrays})
        parts = [(select_groups(metadata, np.flatnonzero(prompts)), rows)]
        estimates += chance * np.array(estimate_gradient_noise(parts))
        saved += chance * compute_prune_metrics(3.0, parts)["prune/saved_tokens_prompts"]
        truth += chance * float(metadata.tokens[~prompts].sum())
        for share, completions in outcomes(inclusion):
            error = h * (prompts[:, None] & completions) * pruned.weight - h
            variance += chance * share * float((error**2).sum())
    by_prompts = (h**2 * (1.0 / pi[:, None] - 1.0)).sum()
    np.testing.assert_allclose(
        estimates, [(h**2).sum(), by_prompts, variance - by_prompts], rtol=1e-9
    )
    assert saved == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(("rule", "teacher"), [("none", "T"), ("neyman", None)])
def test_masked_completions_are_no_noise_and_no_saving(rule, teacher):
    """With a teacher they would have a gradient too."""
    truncated = np.random.default_rng(2).random((24, 8)) < 0.4
    metadata = step_metadata(
        24, log_ratios=np.full((24, 8, 2), 1.0 if teacher else 0.0), truncated=truncated
    )
    pruned = draw(
        metadata, rule=rule, mask_truncated=True, distillation=DistillationConfig(teacher=teacher)
    )
    metrics = compute_prune_metrics(24.0, [(metadata, pruned)])
    assert not pruned.kept[truncated].any()
    assert pruned.zero_advantage[truncated].all()
    squares = (
        np.where(truncated, 0.0, pruned.magnitude * pruned.coefficient * metadata.score_norms) ** 2
    )
    assert metrics[INFLATION] == pytest.approx((squares * pruned.weight).sum() / squares.sum())
    idle = ~pruned.kept & pruned.zero_advantage
    assert metrics["prune/saved_tokens_completions"] == metadata.tokens[~pruned.kept & ~idle].sum()
    assert compute_pruning_stats([(metadata, pruned)]).zero_advantage == (
        idle.sum(),
        metadata.tokens[idle].sum(),
    )


def test_score_is_the_size_of_a_term_of_the_gradient():
    metadata = step_metadata(4, prompt_inclusion=np.array([1.0, 0.5, 0.8, 0.4]))
    config = step_config()
    candidates, *_ = compute_completion_terms(metadata, config, resolve_objective(config.loss))
    expected = np.abs(candidates.advantage) / metadata.sampled_lengths * metadata.score_norms
    np.testing.assert_allclose(candidates.score, expected / metadata.prompt_inclusion[:, None])


@pytest.mark.parametrize("rule", ["none", "neyman"])
def test_noise_of_sampling_is_one_over_the_inflation(rule):
    metadata = step_metadata(48, prompt_inclusion=np.linspace(0.3, 1.0, 48))
    metrics = compute_prune_metrics(
        metadata.window, [(metadata, draw(metadata, rule=rule, keep=0.3))]
    )
    assert 1.0 - sum(metrics[share] for share in NOISE) == pytest.approx(1.0 / metrics[INFLATION])
    assert metrics[NOISE[0]] > 0.05
    assert (metrics[NOISE[1]] > 0.05) == (rule != "none")


def test_tokens_are_trained_on_or_saved_or_of_zero_advantage():
    parts = [(part, draw(part)) for part in (step_metadata(16, seed=1), step_metadata(16, seed=2))]
    metrics = compute_prune_metrics(32.0, parts)
    kept = sum(int(part.tokens[pruned.kept].sum()) for part, pruned in parts)
    total = sum(
        int((part.prompt_lengths[:, None] + part.response_lengths).sum()) for part, _ in parts
    )
    zero_advantage = sum(int(part.tokens[pruned.advantage == 0.0].sum()) for part, pruned in parts)
    assert metrics["prune/zero_advantage_tokens"] == zero_advantage > 0
    assert kept + metrics["prune/saved_tokens_completions"] + zero_advantage == total
    assert metrics["prune/kept_token_fraction"] == kept / total


def test_biased_completion_rule_has_no_variance():
    """CPPO keeps the largest without weights; another rule keeps all, with a weight that is not
    1/π."""
    metadata = step_metadata(16)
    unpruned = draw(metadata, rule="none")
    heavy = replace(unpruned, weight=2.0 * unpruned.weight)
    for pruned in (draw(metadata, rule="top_k"), heavy):
        metrics = compute_prune_metrics(metadata.window, [(metadata, pruned)])
        assert np.isfinite(list(metrics.values())).all()
        assert not {INFLATION, *NOISE} & set(metrics)
    assert INFLATION in compute_prune_metrics(metadata.window, [(metadata, unpruned)])


def test_biased_prompt_rule_saves_its_prompts_at_the_mean_of_the_others():
    """Four of ten prompts were rolled out without known probabilities; then all of six, and two
    left out."""
    metadata = step_metadata(6, 4)
    tokens = metadata.tokens.sum(axis=1)
    used, discarded = (select_groups(metadata, np.arange(*ends)) for ends in ((0, 4), (4, 6)))
    metrics = compute_prune_metrics(10.0, [(used, draw(used))], biased_prompts=True)
    assert metrics["prune/saved_tokens_prompts"] == pytest.approx(6 * tokens[:4].mean())
    assert not {INFLATION, *NOISE} & set(metrics)

    metrics = compute_prune_metrics(
        6.0, [(used, draw(used)), (discarded, make_empty_draw(discarded))], biased_prompts=True
    )
    assert metrics["prune/kept_prompt_fraction"] == 1.0
    assert metrics["prune/saved_tokens_prompts"] == 0.0
    assert metrics["prune/zero_advantage_tokens"] >= tokens[4:].sum()


@pytest.mark.parametrize("groups", [0, 4])
def test_step_without_advantages_has_no_noise_of_pruning(groups):
    metadata = step_metadata(groups, rewards=np.ones((groups, 8)))
    metrics = compute_prune_metrics(4.0, [(metadata, draw(metadata))])
    assert [metrics[name] for name in (INFLATION, *NOISE)] == [1.0, 0.0, 0.0]


def test_census_counts_every_completion_once_in_every_table():
    """Two minibatches are counted together."""
    halves = [select_groups(step_metadata(48), groups) for groups in np.split(np.arange(48), 2)]
    parts = [(half, draw(half)) for half in halves]
    counted = compute_pruning_stats(parts)
    advantage, inclusion = (
        np.concatenate([getattr(pruned, name) for _, pruned in parts])
        for name in ("advantage", "inclusion")
    )
    useful = advantage != 0.0
    assert counted.kept[0] + counted.pruned[0] + counted.zero_advantage[0] == useful.size
    assert counted.zero_advantage[0] == (~useful).sum() > 0
    assert counted.pruned[0] > 0
    tokens = sum(half.tokens.sum() for half in halves)
    assert counted.kept[1] + counted.pruned[1] + counted.zero_advantage[1] == tokens
    for table in (counted.by_group, counted.by_reward, counted.by_cause):
        _, _, completions, chances, kept = map(sum, zip(*table, strict=True))
        assert (completions, kept) == (useful.sum(), counted.kept[0])
        assert chances == pytest.approx(inclusion[useful].sum(), abs=1e-3)


def count_one(rewards: list[list[float]], rule: str = "none", **fields: Any) -> Any:
    metadata = step_metadata(len(rewards), len(rewards[0]), rewards=np.array(rewards), **fields)
    return compute_pruning_stats([(metadata, draw(metadata, rule=rule))])


def cells(table: tuple[Cell, ...], columns: int) -> list[tuple[float, ...]]:
    return [cell[:columns] for cell in table]


def test_census_shows_that_the_paper_prunes_the_majority():
    """Groups of eight have 1, 4 and 6 right answers."""
    counted = count_one([[1.0] * right + [0.0] * (8 - right) for right in (1, 4, 6)], "threshold")
    assert counted.binary
    assert cells(counted.by_group, 4) == [
        (0.125, -1.0, 7, 3.5),
        (0.125, 1.0, 1, 1.0),
        (0.5, -1.0, 4, 2.0),
        (0.5, 1.0, 4, 2.0),
        (0.75, -1.0, 2, 2.0),
        (0.75, 1.0, 6, 3.0),
    ]


def test_census_places_scores_by_octaves_of_their_median():
    """|A| = 1 and 1/L = 1/16 for all; the score norms have the median 3."""
    norms = np.array([[1.0, 2, 4, 8]])
    counted = count_one([[1.0, 0, 1, 0]], response_lengths=np.full((1, 4), 16), score_norms=norms)
    assert cells(counted.by_cause, 3) == [
        (4.0, -1.5, 1),
        (4.0, -0.5, 1),
        (4.0, 0.5, 1),
        (4.0, 1.5, 1),
    ]


def test_census_places_graded_rewards_by_deviations_from_the_mean():
    """The mean is 3, the standard deviation √3.5; the third completion has no advantage, and one of
    four is better."""
    counted = count_one([[1.0, 2.0, 3.0, 6.0]])
    assert not counted.binary
    assert cells(counted.by_reward, 3) == [(-1.0, -1.0, 1), (-0.5, -1.0, 1), (1.5, 1.0, 1)]
    assert counted.zero_advantage[0] == 1
    assert {cell[0] for cell in counted.by_group} == {0.25}


@pytest.mark.parametrize("groups", [0, 64])
def test_census_row_is_small(groups):
    metadata = step_metadata(groups)
    counted = compute_pruning_stats([(metadata, draw(metadata))])
    row = json.dumps(counted.to_dict())
    assert json.loads(row)["kept"] == list(counted.kept)
    assert len(row) < 6000
    assert "-0.0" not in row

"""What the log says of a step's pruning, held against every draw that the step could have had."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_dppo.config import DistillationConfig
from megatron_dppo.rl.census import Cell
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import take_groups
from megatron_dppo.rl.pruning.draw import PruningDraw, census, gradient_noise, left_out, prune_metrics, prune_minibatch
from megatron_dppo.rl.types import StepMetadata
from tests.rl.plans import step_config, step_metadata

SHARES = ("prune/noise_share_prompts", "prune/noise_share_completions")


def _pruned(metadata: StepMetadata, *, rule: str = "neyman", keep: float = 0.5, kl_coef: float = 0.0) -> PruningDraw:
    config = step_config(rule=rule, keep=keep, kl_coef=kl_coef)
    return prune_minibatch(metadata, config, objective_for(config.loss), keep=keep, rng=np.random.default_rng(0))


def _window() -> tuple[StepMetadata, PruningDraw]:
    """Three mixed groups of three, all rolled out, with probabilities of prompts and completions written in."""
    rng = np.random.default_rng(3)
    whole = step_metadata(3, 3, rewards=np.array([[1.0, 0, 0], [1, 1, 0], [0, 1, 0]]), prompt_inclusion=np.ones(3))
    metadata = replace(whole, prompt_inclusion=np.array([0.4, 1.0, 0.7]))
    inclusion = rng.uniform(0.3, 1.0, (3, 3))
    weight = 1.0 / (metadata.prompt_inclusion[:, None] * inclusion)
    return metadata, replace(_pruned(whole), inclusion=inclusion, weight=weight)


def _draws(chances: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """All outcomes of independent draws, each with its probability."""
    for outcome in product((False, True), repeat=chances.size):
        drawn = np.array(outcome).reshape(chances.shape)
        yield float(np.where(drawn, chances, 1.0 - chances).prod()), drawn


def _rolled_out(metadata: StepMetadata, pruned: PruningDraw, groups: np.ndarray) -> tuple[StepMetadata, PruningDraw]:
    part = PruningDraw(
        pruned.advantage[groups], pruned.coefficient[groups], pruned.inclusion[groups], pruned.weight[groups],
        pruned.kept[groups], pruned.zero_advantage[groups], pruned.segments[groups], pruned.normaliser,
        pruned.magnitude[groups],
    )  # fmt: skip
    return take_groups(metadata, groups), part


def test_noise_is_estimated_without_bias_and_is_the_variance_of_independent_draws() -> None:
    """Terms of norm h in directions of their own: the variance is integrated over all draws of both levels, 2^12."""
    metadata, pruned = _window()
    h = np.abs(pruned.advantage) * pruned.coefficient * metadata.score_norms
    variance = 0.0
    estimates = np.zeros(3)
    for chance, prompts in _draws(metadata.prompt_inclusion):
        noise = gradient_noise([_rolled_out(metadata, pruned, np.flatnonzero(prompts))])
        estimates += chance * np.array(noise)
        for share, completions in _draws(pruned.inclusion):
            error = h * (prompts[:, None] & completions) * pruned.weight - h
            variance += chance * share * float((error**2).sum())
    assert estimates[0] == pytest.approx((h**2).sum(), rel=1e-9)
    assert estimates[1] + estimates[2] == pytest.approx(variance, rel=1e-9)
    alone = (h**2 * (1.0 / metadata.prompt_inclusion[:, None] - 1.0)).sum()
    assert estimates[1] == pytest.approx(alone, rel=1e-9)  # what is left of the variance if all completions are kept


@pytest.mark.parametrize("rule", ["none", "neyman"])
@pytest.mark.parametrize("teacher", [None, "T"])
def test_masked_completions_are_no_part_of_the_noise_and_no_saving(rule: str, teacher: str | None) -> None:
    """The inflation is that of a step in which they had no advantage. With a teacher they would have a gradient too."""
    truncated = np.random.default_rng(2).random((24, 8)) < 0.4
    metadata = step_metadata(24, log_ratios=np.full((24, 8, 2), 1.0 if teacher else 0.0), truncated=truncated)
    loss = {"mask_truncated": True, "distillation": DistillationConfig(teacher=teacher)}
    config = step_config(rule=rule, **loss)
    draw = prune_minibatch(metadata, config, objective_for(config.loss), keep=0.5, rng=np.random.default_rng(0))
    metrics = prune_metrics(24.0, [(metadata, draw)])
    assert not draw.kept[truncated].any() and draw.zero_advantage[truncated].all()
    squares = np.where(truncated, 0.0, draw.magnitude * draw.coefficient * metadata.score_norms) ** 2
    assert metrics["prune/variance_inflation"] == pytest.approx((squares * draw.weight).sum() / squares.sum())
    assert metrics["prune/variance_inflation"] >= 1.0
    idle = ~draw.kept & draw.zero_advantage
    assert metrics["prune/saved_tokens_completions"] == metadata.tokens[~draw.kept & ~idle].sum()
    assert census([(metadata, draw)]).zero_advantage == (idle.sum(), metadata.tokens[idle].sum())


@pytest.mark.parametrize("rule", ["none", "threshold", "neyman"])
def test_what_is_left_of_the_noise_is_samplings_and_is_one_over_the_inflation(rule: str) -> None:
    metadata = step_metadata(48, prompt_inclusion=np.linspace(0.3, 1.0, 48))
    metrics = prune_metrics(metadata.window, [(metadata, _pruned(metadata, rule=rule, keep=0.3))])
    assert 1.0 - sum(metrics[share] for share in SHARES) == pytest.approx(1.0 / metrics["prune/variance_inflation"])
    assert metrics[SHARES[0]] > 0.05
    assert (metrics[SHARES[1]] > 0.05) == (rule != "none")


def test_tokens_of_prompts_not_rolled_out_are_estimated_without_bias() -> None:
    metadata, pruned = _window()
    tokens = (metadata.prompt_lengths[:, None] + metadata.response_lengths).sum(axis=1)
    estimate = truth = 0.0
    for chance, prompts in _draws(metadata.prompt_inclusion):
        metrics = prune_metrics(3.0, [_rolled_out(metadata, pruned, np.flatnonzero(prompts))])
        estimate += chance * metrics["prune/saved_tokens_prompts"]
        truth += chance * float(tokens[~prompts].sum())
    assert estimate == pytest.approx(truth, rel=1e-9)


def test_tokens_rolled_out_are_trained_on_or_saved_or_of_zero_advantage() -> None:
    parts = [(part, _pruned(part)) for part in (step_metadata(16, seed=1), step_metadata(16, seed=2))]
    metrics = prune_metrics(32.0, parts)
    rows = [(part.prompt_lengths[:, None] + part.response_lengths, pruned.kept) for part, pruned in parts]
    kept, total = sum(int(t[k].sum()) for t, k in rows), sum(int(t.sum()) for t, _ in rows)
    zero_advantage = sum(int(t[pruned.advantage == 0.0].sum()) for (t, _), (_, pruned) in zip(rows, parts, strict=True))
    assert metrics["prune/zero_advantage_tokens"] == zero_advantage > 0
    assert kept + metrics["prune/saved_tokens_completions"] + zero_advantage == total
    assert metrics["prune/kept_token_fraction"] == kept / total


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_run_that_prunes_nothing_saves_nothing(kl_coef: float) -> None:
    """Zero advantages are dropped, unless a KL term gives them a gradient; neither is a saving."""
    metadata = step_metadata(16)
    pruned = _pruned(metadata, rule="none", kl_coef=kl_coef)
    metrics = prune_metrics(16.0, [(metadata, pruned)])
    assert metrics["prune/saved_tokens_completions"] == metrics["prune/saved_tokens_prompts"] == 0.0
    assert (metrics["prune/zero_advantage_tokens"] > 0) == (kl_coef == 0.0)


def test_a_biased_rule_has_finite_numbers_and_no_variance() -> None:
    """Inclusion 0 or 1 and no weights, as CPPO has it; or everything kept, but with a weight that is not 1/π."""
    metadata = step_metadata(16)
    unpruned = _pruned(metadata, rule="none")
    largest = (np.abs(unpruned.advantage) > np.median(np.abs(unpruned.advantage))).astype(float)
    cut = replace(unpruned, inclusion=largest, weight=largest, kept=largest > 0)
    heavy = replace(unpruned, weight=2.0 * unpruned.weight)
    for pruned in (cut, heavy):
        metrics = prune_metrics(metadata.window, [(metadata, pruned)])
        assert all(np.isfinite(value) for value in metrics.values())
        assert not {"prune/variance_inflation", *SHARES} & set(metrics)
    assert "prune/variance_inflation" in prune_metrics(metadata.window, [(metadata, unpruned)])


def test_a_biased_rule_for_prompts_has_no_variance_and_saves_its_prompts_at_the_mean_of_the_others() -> None:
    """Four of ten prompts were rolled out with no probability told; two of six, with all of the window rolled out."""
    metadata = step_metadata(6, 4)
    tokens = (metadata.prompt_lengths[:, None] + metadata.response_lengths).sum(axis=1)
    used, discarded = (take_groups(metadata, np.arange(*ends)) for ends in ((0, 4), (4, 6)))
    metrics = prune_metrics(10.0, [(used, _pruned(used))], biased_prompts=True)
    assert metrics["prune/saved_tokens_prompts"] == pytest.approx(6 * tokens[:4].mean())
    assert not {"prune/variance_inflation", *SHARES} & set(metrics)

    metrics = prune_metrics(6.0, [(used, _pruned(used)), (discarded, left_out(discarded))], biased_prompts=True)
    assert metrics["prune/kept_prompt_fraction"] == 1.0
    assert metrics["prune/saved_tokens_prompts"] == 0.0
    assert metrics["prune/zero_advantage_tokens"] >= tokens[4:].sum()


@pytest.mark.parametrize("rewards", [np.ones((4, 8)), np.ones((0, 8))])
def test_a_step_that_teaches_nothing_has_no_noise_of_pruning(rewards: np.ndarray) -> None:
    metadata = step_metadata(len(rewards), rewards=rewards)
    metrics = prune_metrics(4.0, [(metadata, _pruned(metadata))])
    assert metrics["prune/variance_inflation"] == 1.0
    assert [metrics[share] for share in SHARES] == [0.0, 0.0]


def _draw(metadata: StepMetadata, *, rule: str = "neyman", keep: float = 0.5) -> tuple[StepMetadata, PruningDraw]:
    config = step_config(rule=rule, keep=keep)
    return metadata, prune_minibatch(
        metadata, config, objective_for(config.loss), keep=keep, rng=np.random.default_rng(0)
    )


def _sums(table: tuple[Cell, ...]) -> tuple[float, float, float]:
    return tuple(sum(cell[i] for cell in table) for i in (2, 3, 4))


def test_every_completion_is_counted_once_in_every_table() -> None:
    part, pruned = _draw(step_metadata(48))
    counted = census([(part, pruned)])
    teaches = pruned.advantage != 0.0
    assert counted.kept[0] + counted.pruned[0] + counted.zero_advantage[0] == teaches.size
    assert counted.zero_advantage[0] == (~teaches).sum() > 0
    assert counted.pruned[0] > 0
    rows = part.prompt_lengths[:, None] + part.response_lengths
    assert counted.kept[1] + counted.pruned[1] + counted.zero_advantage[1] == rows.sum()
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
    """One group of |A| = 1, 1/L = 1/16: score norms of 1, 2, 4 and 8 about their median, 3."""
    metadata = step_metadata(
        1,
        4,
        rewards=np.array([[1.0, 0, 1, 0]]),
        response_lengths=np.full((1, 4), 16),
        score_norms=np.array([[1.0, 2, 4, 8]]),
    )
    counted = census([_draw(metadata, rule="none")])
    assert [cell[:3] for cell in counted.by_cause] == [(4.0, -1.5, 1), (4.0, -0.5, 1), (4.0, 0.5, 1), (4.0, 1.5, 1)]


def test_rewards_of_any_kind_have_deviations_from_their_groups_mean() -> None:
    """1, 2, 3, 6: mean 3, standard deviation √3.5; the third teaches nothing."""
    counted = census([_draw(step_metadata(1, 4, rewards=np.array([[1.0, 2.0, 3.0, 6.0]])), rule="none")])
    assert not counted.binary
    assert [cell[:3] for cell in counted.by_reward] == [(-1.0, -1.0, 1), (-0.5, -1.0, 1), (1.5, 1.0, 1)]
    assert counted.zero_advantage[0] == 1
    assert {cell[0] for cell in counted.by_group} == {0.25}  # one of four is better than the mean


@pytest.mark.parametrize("groups", [0, 64])
def test_a_census_travels_as_it_is_and_is_small(groups: int) -> None:
    counted = census([_draw(step_metadata(groups))])
    assert pickle.loads(pickle.dumps(counted)) == counted
    row = json.loads(json.dumps(counted.as_row()))
    assert row["kept"] == list(counted.kept)
    assert len(json.dumps(row)) < 6000
    assert "-0.0" not in json.dumps(row)

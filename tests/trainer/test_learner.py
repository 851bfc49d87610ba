"""From plan to weights: what must not move them, what must stop the run, and what several updates per rollout mean."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import learning_rate
from megatron_dppo.trainer.agreement import check_disagreement
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.rollout.scripted import world_of
from tests.steps import build, config_for, held_by, plan_for, step_of_groups, weights_of

FOUR_RANKS = LayoutConfig(tp=2, pp=2, dp=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def learn_from_equal_rewards(rank: int, size: int, config: Config) -> tuple[bool, dict[str, float], bool]:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    metadata = dataclasses.replace(metadata, rewards=np.ones_like(metadata.rewards))
    before = weights_of(policy, world)
    plan = plan_for(world, config, metadata)
    metrics = learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = weights_of(policy, world)
    return plan.updates, metrics, all(torch.equal(after[name], before[name]) for name in before)


def test_step_of_equal_groups_is_a_counted_no_op_on_every_rank(ranks: RankPool, path: Path) -> None:
    config = config_for(path, FOUR_RANKS, LossConfig(), 64, distributed=True)
    for updated, metrics, unchanged in ranks.run(4, learn_from_equal_rewards, config):
        assert not updated
        assert unchanged
        assert metrics == {"train/no_op_updates": 1.0}


def learn_from_truncated(
    rank: int, size: int, config: Config, finished: tuple[int, ...]
) -> tuple[set[tuple[int, int]], dict[str, float], bool]:
    """All completions are truncated but those of the first group that are ``finished``."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    truncated = np.ones_like(metadata.truncated)
    truncated[0, list(finished)] = False
    metadata = dataclasses.replace(metadata, truncated=truncated)
    before = weights_of(policy, world)
    plan = plan_for(world, config, metadata)
    metrics = learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = weights_of(policy, world)
    samples = plan.minibatches[0].samples
    kept = set(zip(samples.group.tolist(), samples.completion.tolist(), strict=True))
    return kept, metrics, all(torch.equal(after[name], before[name]) for name in before)


def test_a_truncated_completion_gives_no_gradient_where_it_is_masked_and_a_finished_one_does(
    ranks: RankPool, path: Path
) -> None:
    """Under a KL term, which trains on completions without an advantage as well."""
    config = config_for(path, LayoutConfig(dp=2), LossConfig(kl_coef=0.1, mask_truncated=True), 64, distributed=True)
    for kept, metrics, unchanged in ranks.run(2, learn_from_truncated, config, ()):
        assert unchanged and not kept
        assert metrics == {"train/no_op_updates": 1.0}
    for kept, metrics, unchanged in ranks.run(2, learn_from_truncated, config, (1,)):
        assert not unchanged and kept == {(0, 1)}
        assert metrics["train/grad_norm"] > 0.0


def learn_from_nan(rank: int, size: int, config: Config) -> tuple[str, bool]:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    (minibatch,) = plan.minibatches
    advantage = np.where(np.arange(len(minibatch.samples.owner)) == 1, np.nan, 1.0)
    samples = dataclasses.replace(minibatch.samples, advantage=advantage[:, None])
    plan = dataclasses.replace(plan, minibatches=(dataclasses.replace(minibatch, samples=samples),))
    before = weights_of(policy, world)
    with pytest.raises(UserError, match="not finite") as error:
        learner.learn(plan, held_by(rank, metadata, groups), step=1, version=0)
    after = weights_of(policy, world)
    return str(error.value), all(torch.equal(after[name], before[name]) for name in before)


def test_loss_that_is_not_finite_stops_every_rank_before_a_weight_moves(ranks: RankPool, path: Path) -> None:
    config = config_for(path, LayoutConfig(dp=2), LossConfig(), 64, distributed=True)
    for message, unchanged in ranks.run(2, learn_from_nan, config):
        assert "train/loss" in message
        assert unchanged


FRESH = 2
"""The one prompt that version 1 has answered; version 0 the others."""


def learn_from_another_policys_rollouts(
    rank: int, size: int, config: Config, version: int
) -> UserError | dict[str, float]:
    world, learner, _ = build(config)
    metadata, groups = step_of_groups(size)
    metadata.versions[FRESH] = 1
    try:
        return learner.learn(
            plan_for(world, config, metadata), held_by(rank, metadata, groups), step=0, version=version
        )
    except UserError as error:
        return error


@pytest.mark.parametrize(
    ("layout", "limits", "said"),
    [
        (LayoutConfig(dp=2), {"max_logprob_diff": None}, "rollout.max_logprob_diff = 0.0001"),
        (LayoutConfig(tp=2, pp=2, dp=1), {"max_prob_error": None}, "rollout.max_prob_error = 1.001"),
    ],
)
def test_engine_that_disagrees_stops_every_rank_and_leaves_evidence(
    layout: LayoutConfig, limits: dict[str, None], said: str, ranks: RankPool, path: Path, tmp_path: Path
) -> None:
    config = config_for(path, layout, LossConfig(), 64, distributed=True)
    config = replace(config, rollout=replace(config.rollout, **limits), run=replace(config.run, dir=str(tmp_path)))
    first, *others = ranks.run(layout.tp * layout.pp * layout.dp, learn_from_another_policys_rollouts, config, 1)
    file = tmp_path / "disagreement" / "step_0000001.json"
    assert said in str(first) and f"are in {file}." in str(first)
    assert {str(other) for other in others} == {str(first)}
    evidence = json.loads(file.read_text())
    _, groups = step_of_groups(2)
    kept = [(each["prompt_ids"], each["response_ids"], each["engine_logprobs"]) for each in evidence["completions"]]
    made = [
        (groups[FRESH].prompt.token_ids.tolist(), c.token_ids[c.loss_mask].tolist(), c.logprobs[c.loss_mask].tolist())
        for c in groups[FRESH].completions
    ]
    assert kept and all(each in made for each in kept), "those of the weights that the step starts from, and no others"
    for each in evidence["completions"]:
        difference = np.abs(np.subtract(each["trainer_logprobs"], each["engine_logprobs"]))
        assert each["mean_abs_diff"] == pytest.approx(difference.mean()) and each["versions"] == [1]
    assert [each["mean_abs_diff"] for each in evidence["completions"]] == sorted(
        (each["mean_abs_diff"] for each in evidence["completions"]), reverse=True
    )


@pytest.mark.parametrize(("difference", "error"), [(np.nan, 1.0), (0.0, np.nan), (np.inf, 1.0)])
def test_a_difference_that_is_no_number_is_past_every_limit(difference: float, error: float, tmp_path: Path) -> None:
    config = replace(Config(), run=replace(Config().run, dir=str(tmp_path)))
    with pytest.raises(UserError, match="disagree") as caught:
        check_disagreement(
            config,
            world_of(1, 0),
            who="the engine",
            when="in step 3",
            difference=difference,
            error=error,
            compared=list,
            name="step",
        )
    named = "rollout.max_prob_error" if np.isfinite(difference) else "rollout.max_logprob_diff"
    assert caught.value.setting == named


def test_tokens_of_older_weights_are_compared_with_nothing(ranks: RankPool, path: Path) -> None:
    config = config_for(path, LayoutConfig(pp=2, dp=1), LossConfig(), 64, distributed=True)
    config = replace(config, rollout=replace(config.rollout, max_logprob_diff=0.0, max_prob_error=1.0))
    for learned in ranks.run(2, learn_from_another_policys_rollouts, config, 2):
        assert not {"train/rollout_logprob_abs_diff", "train/token_mult_prob_error"} & learned.keys()


def test_one_step_ahead_importance_weights_are_cut_off_at_two(ranks: RankPool, path: Path) -> None:
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    ahead = replace(config, rollout=replace(config.rollout, ahead=1))
    on_policy_2 = replace(config, loss=LossConfig(tis_cap=2.0))
    ahead_3 = replace(ahead, loss=LossConfig(tis_cap=3.0))
    regions = [replace(each, loss=LossConfig(trust_region="tv")) for each in (config, ahead)]
    results = ranks.in_turn(1, *((learn, settings) for settings in (config, on_policy_2, ahead, ahead_3, *regions)))
    none, two, of_ahead, three, *of_regions = (metrics["train/pg_loss"] for [(metrics, _)] in results)
    assert of_ahead == two
    assert len({none, two, three}) == 3
    assert of_regions[0] == of_regions[1], "a trust region has the ratio to the engine itself"


def learn(rank: int, size: int, config: Config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    metrics = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    return metrics, weights_of(policy, world)


def test_second_update_of_a_rollout_is_measured_against_the_policy_before_the_first(
    ranks: RankPool, path: Path
) -> None:
    loss = LossConfig(updates_per_rollout=2)
    config = config_for(path, LayoutConfig(pp=2, dp=1), loss, 64, distributed=True)
    metrics, _ = ranks.run(2, learn, config)[0]
    assert metrics["train/no_op_updates"] == 0
    assert abs(metrics["train/ppo_kl"]) > 1e-4, "the first update moved the policy away from the old one"
    assert metrics["train/pg_clipfrac"] > 0


def test_recomputing_activations_changes_nothing(ranks: RankPool, path: Path) -> None:
    config = config_for(path, LayoutConfig(tp=2, dp=1, sequence_parallel=True), LossConfig(), 64, distributed=True)
    ways = [replace(config, model=replace(config.model, recompute=way)) for way in ("none", "selective", "full")]
    (_, expected), *others = (results[0] for results in ranks.in_turn(2, *((learn, way) for way in ways)))
    for _, ours in others:
        for name, tensor in expected.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


def test_bf16_update_points_where_the_fp32_one_does(ranks: RankPool, path: Path) -> None:
    config = config_for(path, LayoutConfig(tp=2, dp=1), LossConfig(), 64, distributed=True)
    config = replace(config, optimizer=replace(config.optimizer, lr=100.0))  # far enough to be seen in bf16 weights
    still = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    in_bf16 = replace(config, model=replace(config.model, dtype="bf16"))
    results = ranks.in_turn(2, *((learn, settings) for settings in (still, config, in_bf16)))
    (_, start), (_, expected), (_, ours) = (of_ranks[0] for of_ranks in results)
    moved = torch.cat([(ours[name].float() - start[name]).flatten() for name in start])
    wanted = torch.cat([(expected[name] - start[name]).flatten() for name in start])
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.95


def test_learning_rate_warms_up_and_decays_to_its_minimum() -> None:
    settings = replace(Config().optimizer, lr=1.0, min_lr=0.1, schedule="cosine", warmup_steps=4)
    rates = [learning_rate(settings, update, 24) for update in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(0.1)

"""From plan to weights: updates of several minibatches, steps that move no weight, and steps that
stop the run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor, compute_learning_rate
from megatron_dppo.rl.types import StepMetadata, StepPlan
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.agreement import check_disagreement
from megatron_dppo.trainer.learner import get_importance_cap
from tests.laws.test_split_invariance import LAYOUTS, ONE
from tests.ranks import RankPool
from tests.rollout.scripted import world_of
from tests.small_runs import die, live, rows, small_run, write_run
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

NAMES = ("mixed", "half")
"""Reward functions of ``write_run``."""
FRESH = 2
"""The one prompt with completions of version 1; all others are of version 0."""
Part = TypeVar("Part")


def configure(policy: Path, layout: LayoutConfig = ONE, **loss: object) -> Config:
    return config_for(policy, layout, LossConfig(**loss), 64, distributed=True)


@dataclasses.dataclass(frozen=True)
class Learned:
    """A step of the learner on a rank."""

    plan: StepPlan
    metrics: dict[str, float]
    error: UserError | None
    before: Weights
    after: Weights
    losses: list[float]
    """Sum of each update."""

    @property
    def kept_weights(self) -> bool:
        return all(map(torch.equal, self.after.values(), self.before.values()))


def unchanged(part: Part) -> Part:
    return part


def learn(
    rank: int,
    size: int,
    config: Config,
    change: Callable[[StepMetadata], StepMetadata] = unchanged,
    change_plan: Callable[[StepPlan], StepPlan] = unchanged,
    step: int = 1,
    version: int = 0,
) -> Learned:
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    metadata = change(metadata)
    plan = change_plan(plan_for(world, config, metadata))
    before, update = weights_of(policy, world), Actor.update
    metrics, error, losses = {}, None, []

    def record(actor: Actor, *arguments: object, **more: object) -> object:
        result = update(actor, *arguments, **more)
        losses.append(result.sums["train/loss"])
        return result

    with mock.patch.object(Actor, "update", record):
        try:
            metrics = learner.train(
                plan, held_by(rank, metadata, groups), step=step, version=version
            )
        except UserError as raised:
            error = raised
    return Learned(plan, metrics, error, before, weights_of(policy, world), losses)


def equal_rewards(metadata: StepMetadata) -> StepMetadata:
    return dataclasses.replace(metadata, rewards=np.ones_like(metadata.rewards))


def all_truncated(metadata: StepMetadata) -> StepMetadata:
    return dataclasses.replace(metadata, truncated=np.ones_like(metadata.truncated))


def one_finished(metadata: StepMetadata) -> StepMetadata:
    truncated = np.ones_like(metadata.truncated)
    truncated[0, 1] = False
    return dataclasses.replace(metadata, truncated=truncated)


def one_fresh(metadata: StepMetadata) -> StepMetadata:
    metadata.versions[FRESH] = 1
    return metadata


def one_not_a_number(plan: StepPlan) -> StepPlan:
    (minibatch,) = plan.minibatches
    advantage = np.where(np.arange(len(minibatch.owner)) == 1, np.nan, 1.0)
    return dataclasses.replace(
        plan, minibatches=(dataclasses.replace(minibatch, advantage=advantage[:, None]),)
    )


def test_step_without_a_gradient_is_a_counted_no_op(ranks: RankPool, policy: Path) -> None:
    """On every rank: groups of equal rewards, and masked truncated completions under a KL term,
    which trains on completions without an advantage. A finished completion is trained on."""
    masked = configure(policy, LAYOUTS["dp2"], kl_coef=0.1, mask_truncated=True)
    equal = (learn, configure(policy, LAYOUTS["pp2"]), equal_rewards)
    *idle, finished = ranks.in_turn(
        2, equal, (learn, masked, all_truncated), (learn, masked, one_finished)
    )
    for of_rank in itertools.chain(*idle):
        assert not of_rank.plan.updates
        assert of_rank.kept_weights
        assert of_rank.metrics == {"train/no_op_updates": 1.0}
    for of_rank in finished:
        samples = of_rank.plan.minibatches[0]
        assert [samples.group.tolist(), samples.completion.tolist()] == [[0], [1]]
        assert of_rank.metrics["train/grad_norm"] > 0.0
        assert not of_rank.kept_weights


def test_infinite_loss_stops_every_rank_before_a_weight_moves(
    ranks: RankPool, policy: Path
) -> None:
    for of_rank in ranks.run(
        2, learn, configure(policy, LAYOUTS["dp2"]), unchanged, one_not_a_number
    ):
        assert "train/loss" in str(of_rank.error)
        assert "not finite" in str(of_rank.error)
        assert of_rank.kept_weights


@pytest.mark.parametrize(
    ("layout", "unlimited", "limit"),
    [
        ("dp2", "max_logprob_diff", "rollout.max_logprob_diff = 0.0001"),
        ("pp2", "max_prob_error", "rollout.max_prob_error = 1.001"),
    ],
)
def test_disagreeing_engine_stops_every_rank_with_evidence(
    layout: str, unlimited: str, limit: str, ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    """Of completions of the step's own weights. Older completions are compared with nothing."""
    config = configure(policy, LAYOUTS[layout])
    config = replace(
        config,
        rollout=replace(config.rollout, **{unlimited: None}),
        run=replace(config.run, dir=str(tmp_path)),
    )
    strict = replace(
        config, rollout=replace(config.rollout, max_logprob_diff=0.0, max_prob_error=1.0)
    )
    of_fresh, of_old = ranks.in_turn(
        2, (learn, config, one_fresh, unchanged, 0, 1), (learn, strict, one_fresh, unchanged, 0, 2)
    )
    for of_rank in of_old:
        assert of_rank.error is None
        assert (
            not {"train/rollout_logprob_abs_diff", "train/token_mult_prob_error"}
            & of_rank.metrics.keys()
        )
    first, *others = (str(of_rank.error) for of_rank in of_fresh)
    file = tmp_path / "disagreement" / "step_0000001.json"
    assert limit in first
    assert f"are in {file}." in first
    assert {*others} == {first}
    made = [c.token_ids[c.loss_mask].tolist() for c in step_of_groups(2)[1][FRESH].completions]
    kept = [each["response_ids"] for each in json.loads(file.read_text())["completions"]]
    assert kept and all(tokens in made for tokens in kept)


@pytest.mark.parametrize(("difference", "error"), [(np.nan, 1.0), (0.0, np.nan), (np.inf, 1.0)])
def test_nan_and_infinite_differences_are_past_every_limit(
    difference: float, error: float, tmp_path: Path
) -> None:
    config = replace(Config(), run=replace(Config().run, dir=str(tmp_path)))
    words = {"source": "the engine", "context": "in step 3", "collect": list, "name": "step"}
    with pytest.raises(UserError, match="disagree") as caught:
        check_disagreement(config, world_of(1, 0), difference=difference, error=error, **words)
    named = "rollout.max_prob_error" if np.isfinite(difference) else "rollout.max_logprob_diff"
    assert caught.value.setting == named


@pytest.mark.parametrize(
    ("overrides", "cap"),
    [
        ((), None),
        (("loss.tis_cap=3",), 3.0),
        (("rollout.ahead=1",), 2.0),
        (("data.rollouts=file",), 2.0),
        (("rollout.ahead=1", "loss.tis_cap=3"), 3.0),
        (("rollout.ahead=1", "loss.trust_region=tv"), None),
        (("rollout.ahead=1", "loss.mask_above=9"), None),
    ],
)
def test_importance_weights_of_older_rollouts_are_capped(
    overrides: tuple[str, ...], cap: float | None
) -> None:
    """Rollouts ahead and of another policy have a cap of two, unless the weights are bounded
    otherwise."""
    assert get_importance_cap(load_config(None, overrides)) == cap


def test_second_update_is_measured_against_the_first_policy(ranks: RankPool, policy: Path) -> None:
    """Each update has its own learning rate; the loss is the mean of the updates."""
    config = configure(policy, LAYOUTS["pp2"], updates_per_rollout=2)
    config = replace(config, optimizer=replace(config.optimizer, warmup_steps=10))
    learned = ranks.run(2, learn, config)[0]
    metrics = learned.metrics
    assert metrics["train/no_op_updates"] == 0
    assert abs(metrics["train/ppo_kl"]) > 1e-4, (
        "the first update moved the policy away from the old one"
    )
    assert metrics["train/pg_clipfrac"] > 0
    assert metrics["train/lr"] == pytest.approx(0.4 * config.optimizer.lr), (
        "the fourth of ten updates of the warm-up"
    )
    assert len(learned.losses) == 2
    assert metrics["train/loss"] == pytest.approx(sum(learned.losses) / 2)


def test_bf16_update_has_the_direction_of_fp32(ranks: RankPool, policy: Path) -> None:
    config = configure(policy, LAYOUTS["tp2"])
    config = replace(
        config, optimizer=replace(config.optimizer, lr=100.0)
    )  # far enough to be seen in bf16 weights
    in_bf16 = replace(config, model=replace(config.model, dtype="bf16"))
    expected, ours = (
        of_ranks[0] for of_ranks in ranks.in_turn(2, (learn, config), (learn, in_bf16))
    )
    start = expected.before
    moved = torch.cat([(ours.after[name].float() - start[name]).flatten() for name in start])
    wanted = torch.cat([(expected.after[name] - start[name]).flatten() for name in start])
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.95


def test_learning_rate_warms_up_and_decays() -> None:
    settings = replace(Config().optimizer, lr=1.0, min_lr=0.1, schedule="cosine", warmup_steps=4)
    rates = [compute_learning_rate(settings, update, 24) for update in range(24)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "line",
    [
        "torch.set_grad_enabled(False)",
        "torch.kept = torch.inference_mode(); torch.kept.__enter__()",
    ],
)
def test_gradients_are_enabled_whatever_a_user_file_sets(
    line: str, ranks: RankPool, tmp_path: Path
) -> None:
    """A conversation's file has the line at its head, and a completion rule's file has it in its
    function."""
    folder = write_run(tmp_path / "policy")
    heads = {"plain": "", "disabled": line}
    for name, head in heads.items():
        (tmp_path / f"{name}.py").write_text(
            f"import torch\n{head}\n"
            "async def talk(client, prompt):\n    return [await "
            "client.generate(prompt.token_ids)]\n"
            f"def rule(candidates, keep):\n    {head or 'pass'}\n    return candidates.advantage * "
            "0 + 1\n"
        )
        own = (
            f"rollout.conversation={tmp_path / name}.py:talk",
            f"pruning.completions.function={tmp_path / name}.py:rule",
        )
        config = small_run(
            folder, tmp_path / name, *own, "run.steps=2", "loss.updates_per_rollout=2"
        )
        ranks.run(1, live, config)
    assert rows(tmp_path / "disabled") == rows(tmp_path / "plain")
    assert all(row["train/grad_norm"] > 0.0 for row in rows(tmp_path / "disabled")[1:])


def test_adaptive_entropy_and_several_rewards_resume_bit_for_bit(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The entropy of a random policy is below the target: the weight grows after each update, of
    which a step has two. The first update has no bonus."""
    folder = write_run(tmp_path / "policy")
    functions = [f"{{function: {folder / name}.py:compute_score, name: {name}}}" for name in NAMES]
    own = (
        "loss.advantage=gdpo",
        f"reward.function=[{', '.join(functions)}]",
        "loss.entropy.target=10",
        "loss.entropy.coef=0.1",
        "loss.entropy.delta=0.01",
        "loss.updates_per_rollout=2",
    )
    whole, broken = (small_run(folder, tmp_path / name, *own) for name in ("whole", "broken"))
    ranks.run(1, live, whole)
    ranks.run(1, die, broken)
    ranks.run(1, live, broken)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    steps = rows(tmp_path / "whole")[1:]
    weights = [row["train/entropy_coef"] for row in steps]
    assert weights == pytest.approx([0.11 + 0.02 * step for step in range(len(steps))])
    assert all(0.0 < row["train/entropy"] < 10.0 for row in steps)
    assert any(row["reward/mixed"] != row["reward/half"] for row in steps)
    assert any(row["prune/kept_prompt_fraction"] < 1.0 for row in steps)

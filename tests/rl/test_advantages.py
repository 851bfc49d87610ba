"""Advantages of groups, of minibatches and of roles, by hand and by enumeration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from megatron_dppo import config as cfg
from megatron_dppo.config import Config, PromptPruningConfig, RolloutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import (
    ESTIMATORS,
    check_estimator,
    compute_advantages,
    compute_group_advantages,
    estimate_advantages,
    read_columns,
    register,
    sum_normalized_rewards,
)
from megatron_dppo.rl.numbers import find_equal_groups, round_rewards
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.types import SEGMENT, StepMetadata
from tests.rl.integration import all_plans
from tests.rl.plans import plan, step_config, step_metadata
from tests.rl.tree_toy import LONGEST, PREFIXES, plan_gradient, toy


def test_binary_rewards_give_the_textbook_advantages() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    expected = [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [1, 1, -1, -1]]
    np.testing.assert_allclose(
        compute_group_advantages(rewards, normalise=True), expected, rtol=1e-15
    )
    expected = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    np.testing.assert_array_equal(compute_group_advantages(rewards, normalise=False), expected)


def test_sample_deviation_divides_by_one_less() -> None:
    """Of three rewards; the fourth is no part of its group."""
    rewards, present = np.array([[1.0, 0.0, 0.5, 7.0]]), np.array([[True, True, True, False]])
    found = estimate_advantages(
        "grpo_sample", rewards, {"inclusion": np.ones(1), "present": present}
    )
    np.testing.assert_allclose(found[..., 0], [[1.0, -1.0, 0.0, 0.0]], rtol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_moments_count_each_prompt_once(name: str) -> None:
    """A prompt with its answers repeated is one prompt; the weights 1/π are those of the
    objectives' formulas."""
    rewards, inclusion = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]), np.ones(3)
    present = np.arange(8) < np.array([[8], [4], [4]])
    found = estimate_advantages(
        name, np.tile(rewards, 2), {"inclusion": inclusion, "present": present}
    )[..., 0]
    columns = {"inclusion": inclusion, "present": np.ones(rewards.shape, np.bool_)}
    expected = estimate_advantages(name, rewards, columns)[..., 0]
    np.testing.assert_allclose(found[:, :4], expected, rtol=1e-12)
    assert not found[1:, 4:].any()
    tiny = estimate_advantages(name, 1e-4 * rewards, columns)[..., 0]
    np.testing.assert_allclose(tiny, expected, rtol=1e-12)


TWO_REWARDS = {
    "reward/right": np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]]),
    "reward/short": np.array([[0.0, 1, 0, 0], [0.5, 0.5, np.nan, 0.2], [0, 1, 1, 0]]),
}


def gdpo_config(right: float, short: float, **loss: Any) -> Config:
    return step_config(advantage="gdpo", reward_weights={"right": right, "short": short}, **loss)


def gdpo_metadata(parts: Mapping[str, np.ndarray] = TWO_REWARDS) -> StepMetadata:
    rewards = sum(np.nan_to_num(part) for part in parts.values())
    return step_metadata(*rewards.shape, rewards=rewards, parts=parts)


def test_gdpo_normalises_each_reward_by_itself() -> None:
    """The numbers are TRL 1.16's (multi_objective_aggregation="normalize_then_sum"), computed by
    ``test_trl.py``'s trainer and multiplied by √(12/11): TRL's last deviation is over one less."""
    part, config = gdpo_metadata(), gdpo_config(1.0, 0.5)
    found = compute_advantages(part, config, "gdpo")[..., 0]
    of_trl = [
        [1.44337565, 0.28867513, -0.86602539, -0.86602539],
        [1.33333331, 1.33333331, -0.99999998, -1.66666665],
        [0.49999999, -0.49999999, -0.49999999, 0.49999999],
    ]
    np.testing.assert_allclose(found, of_trl, atol=1e-6)
    assert find_nonzero_variance_groups(part, config).tolist() == [0, 1, 2], "the sums of row 2"


def test_gdpo_has_no_advantage_where_rewards_are_equal_or_cancel() -> None:
    """Rounding errors are no advantages, even in a minibatch without other advantages."""
    right = np.array([[0.7, 0.1, 0.4], [0.1 + 0.2, 0.3, 0.15 + 0.15], [np.nan] * 3])
    part = gdpo_metadata({"reward/right": right, "reward/short": 0.3 * right})
    config = gdpo_config(1.0, -1.0)
    assert not compute_advantages(part, config, "gdpo").any()
    assert not len(find_nonzero_variance_groups(part, config))
    kept = gdpo_config(1.0, 1.0)
    assert find_nonzero_variance_groups(part, kept).tolist() == [0]


def test_equal_sums_of_unequal_rewards_are_trained_on() -> None:
    """By the draws of completions, and by rules that replace groups without variance."""
    part = gdpo_metadata()
    assert find_equal_groups(part.rewards).tolist() == [False, False, True]
    for prompts in ("none", "dynamic_sampling"):
        config = gdpo_config(1.0, 0.5)
        pruning = cfg.replace(config.pruning, prompts=PromptPruningConfig(rule=prompts))
        (minibatch,) = plan(part, cfg.replace(config, pruning=pruning)).minibatches
        assert 2 in minibatch.group


def measure_bias_of_pruned_prompts(repeats: int) -> float:
    """Return the relative bias of Σ A·(the sum of normalised rewards)/π, over all draws of 5 ·
    ``repeats`` prompts."""
    two = np.random.default_rng(3).integers(0, 2, (2, 5, 4)).astype(float)
    rewards, inclusion = np.tile(two, (1, repeats, 1)), np.tile(np.linspace(0.5, 0.9, 5), repeats)
    weights = np.array([1.0, 0.5])
    size = sum_normalized_rewards({"compared": rewards, "weights": weights})

    def estimate(prompts: np.ndarray, pi: np.ndarray) -> float:
        columns = {"inclusion": pi, "present": np.ones((len(prompts), 4), bool)}
        columns |= {"compared": rewards[:, prompts], "weights": weights}
        found = estimate_advantages("gdpo", rewards[0, prompts], columns)[..., 0]
        return float((found * size[prompts] / pi[:, None]).sum())

    expected = 0.0
    for draw in itertools.product((False, True), repeat=len(inclusion)):
        probability = np.where(draw, inclusion, 1.0 - inclusion).prod()
        expected += probability * estimate(np.flatnonzero(draw), inclusion[list(draw)])
    everything = np.arange(len(inclusion))
    return expected / estimate(everything, np.ones(len(everything))) - 1.0


def test_bias_of_gdpo_with_pruned_prompts_falls_with_their_number() -> None:
    """The minibatch's deviation is estimated from the prompts rolled out, each with weight 1/π."""
    few, more = (measure_bias_of_pruned_prompts(repeats) for repeats in (1, 2))
    assert -0.01 < few < -0.003
    assert 1.7 < few / more < 3.0


def test_reward_without_values_is_refused() -> None:
    config = step_config(advantage="gdpo", reward_weights={"right": 1.0, "shrot": 1.0})
    with pytest.raises(UserError, match=r"reward_weights = shrot: no completion.*right, short"):
        plan(gdpo_metadata(), config)


SAMPLES = 3
POLICY = toy((0,), (1, 0))
PROBABILITY, PATHS = zip(*POLICY.responses(), strict=True)
ROLE = ([0], [0, 1], [0, 1, 0], [0, 1, 0])
"""The role of each token of a path: the solver first, after a 1 the critic, after another 1 the
solver again."""
REWARDS = np.array([[0.3, 0.0], [1.0, -0.5], [-0.4, 2.0], [0.8, 1.1]])
"""[paths, roles]"""


def role_metadata(chosen: tuple[int, ...]) -> StepMetadata:
    """Return one prompt, whose conversations take these paths."""
    segments = np.zeros((1, len(chosen), 2), SEGMENT)
    segments["reward"] = REWARDS[list(chosen)]
    for row, each in zip(segments[0], chosen, strict=True):
        path = PATHS[each]
        for at, role in enumerate(ROLE[each]):
            row["tokens"][role] += 1
            row["square"][role] += (1.0 - POLICY.probability(path[:at], path[at])) ** 2
    return step_metadata(
        1,
        len(chosen),
        response_lengths=np.array([[len(PATHS[each]) for each in chosen]]),
        score_norms=np.sqrt(segments["square"].sum(axis=-1)),
        segments=segments,
    )


def role_config() -> Config:
    rollout = RolloutConfig(
        max_response_tokens=LONGEST, samples_per_prompt=SAMPLES, roles=("solver", "critic")
    )
    return cfg.replace(step_config(name="rloo"), rollout=rollout)


def test_each_role_has_the_gradient_of_its_own_reward() -> None:
    """By its own words, over all conversations and draws. Where the critic speaks in one
    conversation alone, nothing is left to compare its reward with: its part is that of the other
    groups."""
    total, pruned, config = np.zeros(len(PREFIXES)), False, role_config()
    for chosen in itertools.product(range(len(PATHS)), repeat=SAMPLES):
        probability = np.prod([PROBABILITY[each] for each in chosen])
        for step, drawn in all_plans(role_metadata(chosen), config):
            pruned |= drawn < 1.0
            paths, roles = ([table[each] for each in chosen] for table in (PATHS, ROLE))
            total += probability * drawn * plan_gradient(POLICY, step, paths, roles)
    alone = PROBABILITY[0] ** (SAMPLES - 1)
    expected = np.zeros(len(PREFIXES))
    for path, said_by, rewards, chance in zip(
        PATHS, ROLE, REWARDS * [1.0, 1.0 - alone], PROBABILITY, strict=True
    ):
        expected += chance * rewards[said_by] @ POLICY.scores(path)[: len(path)]
    assert pruned
    np.testing.assert_allclose(total * LONGEST, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_facts_of_estimators_are_true(name: str) -> None:
    known = ESTIMATORS[name]
    for zero_if_equal, batch_moments in itertools.product((True, False), repeat=2):

        def own(rewards: np.ndarray, columns: Mapping[str, Any]) -> Any:
            return known.advantages(rewards, columns)

        own.zero_if_equal, own.batch_moments = zero_if_equal, batch_moments  # type: ignore[attr-defined]
        register("own.py:facts", own)
        if zero_if_equal <= known.zero_if_equal and batch_moments >= known.batch_moments:
            check_estimator("own.py:facts")
        else:
            with pytest.raises(
                UserError,
                match=r"Set NAME\.(zero_if_equal = False|batch_moments = True) below the function",
            ):
                check_estimator("own.py:facts")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (np.zeros((3, 5)), r"shape \(3, 5\) for rewards of \(3, 4\)"),
        (np.full((3, 4), np.nan), "not finite"),
        ([[np.zeros(2)] * 4] * 3, r"shape \(2,\) for a response of 1 tokens"),
        ([[np.zeros(1)] * 4] * 2, "is shorter"),
        (None, "TypeError"),
    ],
    ids=["shape", "NaN", "tokens", "groups", "None"],
)
def test_wrong_advantages_are_refused(returned: Any, problem: str) -> None:
    register("own.py:wrong", lambda rewards, columns: returned)
    with pytest.raises(UserError, match=problem):
        check_estimator("own.py:wrong")


def test_rounding_is_no_advantage_of_an_estimator_from_a_file() -> None:
    register(
        "own.py:centred", lambda rewards, columns: rewards - rewards.mean(axis=1, keepdims=True)
    )
    tenths = np.full((1, 7), 0.1)
    assert tenths.mean() != 0.1
    for rewards in (tenths, round_rewards(np.array([[0.1 + 0.2, 0.3, 0.15 + 0.15]]))):
        columns = {
            "present": np.ones(rewards.shape, np.bool_),
            "lengths": np.ones(rewards.shape, np.int64),
        }
        assert not estimate_advantages("own.py:centred", rewards, columns).any()


def test_error_for_an_absent_column_names_the_columns() -> None:
    register("own.py:absent", lambda rewards, columns: columns["reward/absent"])
    with pytest.raises(UserError) as refused:
        estimate_advantages("own.py:absent", np.eye(2), {"lengths": np.ones((2, 2), int)})
    assert refused.value.remedy.startswith("Read one of lengths: reward.function has returned")
    register("own.py:own", lambda rewards, columns: {}["weight"])
    with pytest.raises(UserError, match="KeyError: 'weight'") as refused:
        estimate_advantages("own.py:own", np.eye(2), {"lengths": np.ones((2, 2), int)})
    assert refused.value.remedy.startswith("Correct it")


def test_masked_completions_have_no_advantage_of_an_own_estimator() -> None:
    register("own.py:ones", lambda rewards, columns: np.ones_like(rewards))
    metadata = step_metadata(1, 4, truncated=np.array([[True, False, False, True]]))
    for mask, expected in ((True, [[0.0, 1.0, 1.0, 0.0]]), (False, [[1.0] * 4])):
        config = step_config(advantage="own.py:ones", mask_truncated=mask)
        found = compute_advantages(metadata, config, "own.py:ones")
        np.testing.assert_array_equal(found[..., 0], expected)


def test_parts_of_the_reward_are_columns() -> None:
    """NaN where a rank's reward function returned none."""
    one, other = (step_metadata(1, 2, prompt_ids=np.array([at])) for at in (5, 3))
    both = gather_metadata(
        [dataclasses.replace(one, parts={"reward/short": np.ones((1, 2))}), other], window=2.0
    )
    np.testing.assert_array_equal(
        read_columns(both)["reward/short"], [[np.nan, np.nan], [1.0, 1.0]]
    )


def decaying(rewards: np.ndarray, columns: Mapping[str, Any]) -> list[list[np.ndarray]]:
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    groups = zip(centred, columns["lengths"], strict=True)
    return [[a * 0.5 ** np.arange(n) for a, n in zip(*group, strict=True)] for group in groups]


def test_advantages_of_tokens_are_unbiased_under_pruning() -> None:
    register("own.py:decaying", decaying)
    config = step_config(name="dr_grpo", advantage="own.py:decaying")
    rewards = np.array([[1.0, 0.0, 0.25, 0.0]])
    lengths = np.array([[len(path) for path in PATHS]])
    metadata = step_metadata(
        1, 4, rewards=rewards, response_lengths=lengths, score_norms=np.sqrt(lengths / 4.0)
    )
    steps = [np.arange(len(path)) for path in PATHS]
    plans = list(all_plans(metadata, config))
    found = sum(drawn * plan_gradient(POLICY, step, PATHS, steps) for step, drawn in plans)
    expected = np.zeros(len(PREFIXES))
    for path, advantages in zip(PATHS, decaying(rewards, {"lengths": lengths})[0], strict=True):
        expected += (
            advantages @ POLICY.scores(path)[: len(path)] / (4 * config.rollout.max_response_tokens)
        )
    assert min(drawn for _, drawn in plans) < 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-9)

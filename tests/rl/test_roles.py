"""Credit by role, over all conversations of a small policy: law 2 with advantages that differ within a completion."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from megatron_dppo.config import Config, LossConfig, RolloutConfig, replace
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.advantages import advantages_of_segments, role_advantages
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.pack import build_pack, prompts_shared
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.pruning.draw import completion_candidates, prune_minibatch
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import (
    SEGMENT,
    Completion,
    Floats,
    Group,
    Prompt,
    StepMetadata,
    StepPlan,
    VersionSpan,
)
from megatron_dppo.rollout.metadata import metadata_of
from tests.rl.integration import FixedOffset, outcomes
from tests.rl.plans import step_config
from tests.rl.test_tree_plan import training_sample

SAMPLES, LONGEST = 3, 3
LOGITS = {(): 0.4, (1,): -0.7, (1, 1): 0.9}
"""Of token 1 after each of these. The solver says the first token; after a 1 the critic speaks, and after another 1 the
solver again."""
PATHS = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
SPOKEN = ([0], [0, 1], [0, 1, 0], [0, 1, 0])
"""Which role says each token of a path."""
REWARDS = np.array([[0.3, 0.0], [1.0, -0.5], [-0.4, 2.0], [0.8, 1.1]])
"""[paths, roles]"""


def chance(path: tuple[int, ...], at: int) -> float:
    one = 1.0 / (1.0 + np.exp(-LOGITS[path[:at]]))
    return one if path[at] else 1.0 - one


CHANCES = [[chance(path, at) for at in range(len(path))] for path in PATHS]
PROBABILITY = np.array([np.prod(chances) for chances in CHANCES])


def scores(path: tuple[int, ...]) -> Floats:
    """[L, parameters], ∇log π of each token."""
    found = np.zeros((len(path), len(LOGITS)))
    for at, token in enumerate(path):
        one = 1.0 / (1.0 + np.exp(-LOGITS[path[:at]]))
        found[at, list(LOGITS).index(path[:at])] = token - one
    return found


def by_own_words(role: int) -> Floats:
    """[parameters], E[r Σ ∇log π] over the tokens of a role, r being its reward."""
    mine = [scores(path)[np.array(said) == role].sum(axis=0) for path, said in zip(PATHS, SPOKEN, strict=True)]
    return (PROBABILITY * REWARDS[:, role]) @ np.array(mine)


def metadata_for(chosen: tuple[int, ...]) -> StepMetadata:
    """One prompt, whose conversations take these paths."""
    lengths = np.array([[len(PATHS[each]) for each in chosen]])
    segments = np.zeros((1, len(chosen), 2), SEGMENT)
    for row, each in zip(segments[0], chosen, strict=True):
        misses = (1.0 - np.array(CHANCES[each])) ** 2
        for role in (0, 1):
            mine = np.array(SPOKEN[each]) == role
            row[role] = mine.sum(), misses[mine].sum(), REWARDS[each, role], 0.0, 1.0
    return StepMetadata(
        prompt_ids=np.zeros(1, np.int64),
        prompt_inclusion=np.ones(1),
        prompt_lengths=np.full(1, 2),
        response_lengths=lengths,
        shared_lengths=prompts_shared(np.full(1, 2), len(chosen)),
        sampled_lengths=lengths,
        further_lengths=no_further(lengths.shape),
        rewards=REWARDS[list(chosen)].mean(axis=1)[None],
        score_norms=np.sqrt(segments["square"].sum(axis=-1)),
        log_ratios=np.zeros((*lengths.shape, 2)),
        teacher=np.full(1, -1),
        segments=segments,
        versions=np.zeros_like(lengths),
        truncated=np.zeros(lengths.shape, bool),
        owners=np.zeros(1, np.int64),
        window=1.0,
    )


def config_for(rule: str) -> Config:
    config = step_config(rule=rule, keep=0.5, name="rloo")
    rollout = RolloutConfig(max_response_tokens=LONGEST, samples_per_prompt=SAMPLES, roles=("solver", "critic"))
    return replace(config, rollout=rollout)


def plan(metadata: StepMetadata, config: Config) -> StepPlan:
    return plan_step(metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)


def gradient(chosen: tuple[int, ...], step: StepPlan) -> Floats:
    """[parameters], on-policy, by the advantages that a pack's tokens have."""
    samples, total = step.minibatches[0].samples, np.zeros(len(LOGITS))
    for k in range(len(samples.group)):
        path, said_by = PATHS[chosen[samples.completion[k]]], SPOKEN[chosen[samples.completion[k]]]
        sample = training_sample(step, k, path, said_by)
        pack = build_pack([sample], 8, pad_id=0, align=1)
        total += (pack.scale * pack.advantage) @ scores(path)
    return total


def test_over_all_conversations_and_draws_each_role_has_the_gradient_of_its_own_reward_by_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The critic is silent in some conversations, and where it speaks in one alone, nothing is left to compare it with:
    its part is that of the other groups."""
    total, config, pruned = np.zeros(len(LOGITS)), config_for("neyman"), False
    for chosen in itertools.product(range(len(PATHS)), repeat=SAMPLES):
        metadata, probability = metadata_for(chosen), PROBABILITY[list(chosen)].prod()
        known = prune_minibatch(metadata, config, objective_for(config.loss), keep=0.5, rng=np.random.default_rng(0))
        inclusion = known.inclusion[0, np.argsort(known.advantage[0], kind="stable")]
        pruned |= bool(((inclusion > 0.0) & (inclusion < 1.0)).any())
        for offset, length in outcomes(inclusion):
            monkeypatch.setattr(planning, "generator", lambda *_, offset=offset: FixedOffset(offset))
            total += probability * length * gradient(chosen, plan(metadata, config))
    silent = PROBABILITY[0] ** (SAMPLES - 1)
    expected = by_own_words(0) + (1.0 - silent) * by_own_words(1)
    assert pruned
    np.testing.assert_allclose(total * LONGEST, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [[1.0, 0.0], [-1.0, 1.0], [0.0, -1.0]]),
        ("dr_grpo", [[2.0, 0.0], [-2.0, 0.5], [0.0, -0.5]]),
        ("rloo", [[3.0, 0.0], [-3.0, 1.0], [0.0, -1.0]]),
    ],
)
def test_a_role_is_held_against_the_conversations_in_which_it_speaks(name: str, expected: list[list[float]]) -> None:
    """Its reward in the others, which may be anything, is of no token."""
    segments = np.zeros((1, 3, 2), SEGMENT)
    segments["reward"] = [[[4.0, 77.0], [0.0, 3.0], [2.0, 2.0]]]
    segments["tokens"] = [[[1, 0], [2, 5], [1, 1]]]
    metadata = metadata_for((0, 0, 0))
    found = role_advantages(dataclasses.replace(metadata, segments=segments), objective_for(LossConfig(name=name)))
    wanted = np.array(expected)
    if name == "grpo":
        wanted[:, 0] *= np.sqrt(3 / 2)
    np.testing.assert_allclose(found[0], wanted, atol=1e-12)


def test_the_score_of_a_conversation_is_a_second_moment_over_its_tokens() -> None:
    """√Σ_t A_t² (1 − p_t)² over all tokens that were sampled, whichever role has said them."""
    rng = np.random.default_rng(0)
    said_by = [np.array([0, 0, -1, 1, 0], np.int8), np.array([0, 1, 1, -1], np.int8), np.array([0, 0], np.int8)]
    completions = tuple(
        Completion(
            np.zeros(len(said), np.int32),
            np.log(rng.uniform(0.05, 0.95, len(said))).astype(np.float32),
            said >= 0,
            (VersionSpan(0, len(said)),),
            "stop",
            segments=said,
        )
        for said in said_by
    )
    group = Group(Prompt(0, np.array([7], np.int32), "", ""), completions, np.zeros(3))
    rewards = np.array([[1.0, 0.0], [0.0, 2.0], [0.5, 9.0]])
    metadata = dataclasses.replace(metadata_of([group], np.ones(1), 3, 2, 0, role_rewards=[rewards]), window=1.0)
    config = config_for("neyman")
    objective = objective_for(config.loss)
    advantages = advantages_of_segments(metadata, config, objective)
    found = completion_candidates(metadata, config, objective, advantages)
    for i, completion in enumerate(completions):
        sampled = completion.loss_mask
        per_token = advantages[0, i][completion.segments[sampled]]
        misses = -np.expm1(completion.logprobs[sampled].astype(np.float64))
        assert found.score[0, i] == pytest.approx(np.sqrt((per_token**2 * misses**2).sum()))
    assert metadata.segments["tokens"].tolist() == [[[3, 1], [1, 2], [2, 0]]]


def test_the_log_says_what_the_gradient_is_of() -> None:
    config = config_for("none")
    notes = plan(metadata_for((0, 1, 2)), config).notes
    assert any(note.startswith("rollout.roles: ") and "environment" in note for note in notes)
    alone = replace(config, rollout=replace(config.rollout, roles=()))
    assert not any("rollout.roles" in note for note in plan(metadata_for((0, 1, 2)), alone).notes)

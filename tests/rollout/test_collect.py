"""Collecting loses no group in part, keeps every weight with its own group, and counts what could
not be scored."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import RoutingShape, Selection, StepMetadata
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.metadata import compute_staleness
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from tests.rollout.scripted import (
    LIMIT_TOKENS,
    SAMPLES,
    Said,
    Script,
    ScriptedEngine,
    ScriptedWorkers,
    as_ranks,
    collect_config,
    pool_of,
    said,
    world_of,
)

ALONE = world_of(1, 0)
MIXED = said("score 1", "score 0", "score 0")
BROKEN = said("score 1", "raise it", "score 0")


class Bench:
    """A collector over a script. The settings are words."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *settings: str,
        world: World = ALONE,
        routing: RoutingShape | None = None,
    ) -> None:
        self.script, self.engine = script, ScriptedEngine(tokenizer, script)
        stops = (end_token_id(tokenizer),)
        config, workers = collect_config(*settings), ScriptedWorkers()
        self.collector = Collector(config, world, self.engine, workers, tokenizer, stops, routing)

    def collect(
        self, inclusion: Sequence[float] = (), window: int = 0, step: int = 4
    ) -> CompleteRollouts:
        """Collect the script's prompts, in its order, at these probabilities (default 1)."""
        count = len(self.script)
        selection = Selection(
            np.array([*self.script], np.int64),
            np.array(inclusion or [1.0] * count),
            window or count,
        )
        begun = self.collector.request(pool_of(10), StepRollouts(selection, step))
        return self.collector.merge([self.collector.finish(begun)])


def test_failed_groups_leave_whole_and_others_replace_them(tokenizer: Tokenizer) -> None:
    """Of N = 8, groups with Σ 1/π = 7.5 are left, and groups with Σ 1/π = 7 failed."""
    longer = said("score 0", "score 0  ", "score 3    ")
    script = {5: BROKEN, 8: MIXED, 1: longer, 7: said("sleep", "score 1", "none"), 3: MIXED}
    result = Bench(tokenizer, script).collect(inclusion=[0.5, 0.25, 0.4, 0.2, 1.0], window=8)
    known = result.metadata
    assert known.window == pytest.approx(8 * 7.5 / 14.5)
    assert (known.prompt_ids.tolist(), known.prompt_inclusion.tolist()) == (
        [1, 3, 8],
        [0.4, 1.0, 0.25],
    )
    np.testing.assert_array_equal(known.rewards, [[0, 0, 3], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(known.owners, [0, 0, 0])
    assert sorted(result.held) == [0, 1, 2]
    for row, group in result.held.items():
        assert group.prompt.id == known.prompt_ids[row]
        assert len(group.prompt.token_ids) == known.prompt_lengths[row]
        assert [len(c.token_ids) for c in group.completions] == known.response_lengths[row].tolist()
        np.testing.assert_array_equal(group.rewards, known.rewards[row])
    metrics = result.metrics
    assert metrics["rollout/generated_tokens"] == 9 * 8 + 6
    assert metrics["rollout/accuracy"] == pytest.approx(3 / 9)
    assert (
        metrics["rollout/dropped_groups"],
        metrics["reward/timeouts"],
        metrics["reward/errors"],
    ) == (2, 1, 2)
    assert (
        any("dropped from their step" in note for note in result.notes)
        and "raise it" in result.notes
    )


@pytest.mark.parametrize(("script", "window"), [({5: BROKEN, 2: BROKEN}, 0.0), ({}, 8.0)])
def test_empty_steps_write_their_row(tokenizer: Tokenizer, script: Script, window: float) -> None:
    """All groups failed, or this rank has no prompts."""
    bench = Bench(tokenizer, script)
    result = bench.collect(window=8)
    assert (len(result.metadata.prompt_ids), result.metadata.window, result.held) == (0, window, {})
    assert result.metadata.rewards.shape == (0, SAMPLES)
    json.dumps(result.metrics, allow_nan=False)
    assert [prompts for prompts, _ in bench.engine.asked] == [[*script]]
    assert bench.engine.finished == 1, "waiting is collective"


def test_roles_have_rewards_of_their_own_and_one_penalty(tokenizer: Tokenizer) -> None:
    """A role without a reward of its own has the score. The penalty is that of the whole
    conversation."""
    settings = (
        "reward.overlong_buffer=8",
        "rollout.roles=[solver,critic]",
        "rollout.conversation=a.py:rollout",
    )
    both, alone = [0] * 9 + [1] * 9, [0] * 8
    penalty = (20 - 8 - 18) / 8
    in_roles = [
        Said("score 1 =critic 3", segments=both),
        *(Said(f"score {n}", segments=alone) for n in (0, 1)),
    ]
    result = Bench(tokenizer, {3: in_roles}, *settings).collect()
    known = result.metadata.segments[0]
    assert known["reward"].tolist() == [[1.0 + penalty, 3.0 + penalty], [0.0, 0.0], [1.0, 1.0]]
    assert known["tokens"].tolist() == [[9, 9], [8, 0], [8, 0]]
    np.testing.assert_allclose(known["square"].sum(axis=-1), result.metadata.score_norms[0] ** 2)
    assert result.metrics["rollout/role_reward/solver"] == pytest.approx((2.0 + penalty) / 3)
    assert result.metrics["rollout/role_reward/critic"] == pytest.approx(3.0 + penalty)
    unknown = Said("score 1 =judge 2", segments=[0] * 17)
    for wrong, words in (
        (Said("score 1"), "a completion has none"),
        (unknown, "reward to the role 'judge'"),
    ):
        with pytest.raises(UserError, match=words):
            Bench(tokenizer, {3: [*in_roles[:2], wrong]}, *settings).collect()


def test_longest_sequence_is_overlong_and_given_text_is_scored(tokenizer: Tokenizer) -> None:
    """A limit of 20 tokens and a buffer of 8: the second sequence has 16 more than the prompt,
    which cost a half."""
    assert len(pool_of(10)[4].token_ids) == 7
    script = {
        4: [
            Said("score" + "x" * 20 + " 1", given=range(5, 25), starts=(5,)),
            *said("score 0", "score 0"),
        ]
    }
    settings = "reward.overlong_buffer=8", "rollout.conversation=a.py:rollout"
    result = Bench(tokenizer, script, *settings).collect()
    assert result.metrics["rollout/raw_reward"] == pytest.approx(1 / 3), (
        "the verifier reads: score 1"
    )
    assert result.metadata.rewards[0].tolist() == [0.5, 0.0, 0.0]
    assert result.metadata.further_lengths.tolist() == [[[23], [0], [0]]]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        (["loss.name=dapo"], [0.5, 0.0, 0.0]),
        (["loss.name=dapo", "reward.overlong_buffer=0"], [1.0, 1.0, 0.0]),
        (["loss.name=grpo"], [1.0, 1.0, 0.0]),
        (["loss.name=grpo", "reward.overlong_buffer=10"], [0.2, 0.0, -0.6]),
    ],
)
def test_overlong_penalty_is_trained_on_and_not_in_the_raw_reward(
    tokenizer: Tokenizer, settings: list[str], rewards: list[float]
) -> None:
    """18, 20 and 16 tokens, under a limit of 20. DAPO's buffer is a fifth of the limit."""
    overlong = [
        Said("score 1".ljust(17)),
        Said("score 1".ljust(20), ended=False),
        Said("score 0".ljust(15)),
    ]
    result = Bench(tokenizer, {0: overlong}, *settings).collect()
    np.testing.assert_allclose(result.metadata.rewards, [rewards], atol=1e-12)
    np.testing.assert_array_equal(result.held[0].rewards, result.metadata.rewards[0])
    assert result.metrics["rollout/raw_reward"] == pytest.approx(2 / 3)
    assert result.metrics["rollout/reward"] == pytest.approx(sum(rewards) / 3)
    assert result.metrics["rollout/accuracy"] == pytest.approx(2 / 3), (
        "right is right, however long"
    )


def test_score_norms_and_entropy_are_those_of_sampled_tokens(tokenizer: Tokenizer) -> None:
    """By the engine's probabilities. Neither given tokens nor a dropped group count."""
    p = [0.5] * 3 + [0.1] * 2 + [0.5] * 3
    script = {
        6: [Said("score 1", p, given=(3, 4)), Said("score 0", 0.25), Said("score 0", 1.0)],
        2: BROKEN,
    }
    result = Bench(tokenizer, script).collect()
    assert result.metadata.response_lengths.tolist() == [[8, 8, 8]]
    assert result.metadata.sampled_lengths.tolist() == [[6, 8, 8]]
    np.testing.assert_allclose(
        result.metadata.score_norms, np.sqrt([[6 * 0.5**2, 8 * 0.75**2, 0.0]]), rtol=1e-6
    )
    bits = 6 + 8 * 2
    assert result.metrics["rollout/entropy"] == pytest.approx(bits * math.log(2.0) / 22, rel=1e-6)
    assert result.metrics["rollout/generated_tokens"] == 22


def test_trees_fork_in_training_alone_and_shared_tokens_count_once(tokenizer: Tokenizer) -> None:
    tree = (
        "rollout.samples_per_prompt=8",
        "rollout.tree.roots=2",
        "rollout.tree.branches=[{at: 3}, {at: 6}]",
    )
    settings = "loss.name=dr_grpo", *tree
    p = [0.8] * 3 + [0.5] * 3 + [0.1] * 2
    twice, once = [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1]
    said_by_slot = [Said("score 1", p, segments=twice)] * 4 + [
        Said("score 0", p, segments=once)
    ] * 4
    bench = Bench(tokenizer, {6: said_by_slot}, *settings)
    result = bench.collect()
    segments = result.metadata.segments
    assert segments["tokens"].tolist() == [[[3, 3, 2]] * 4 + [[3, 5, 0]] * 4]
    np.testing.assert_allclose(segments["square"][0, 0], [0.12, 0.75, 1.62], rtol=1e-6)
    np.testing.assert_allclose(
        segments["logprob"][0, 0], np.log([0.8**3, 0.5**3, 0.1**2]), rtol=1e-6
    )
    assert result.metrics["rollout/generated_tokens"] == 8 * 8
    assert result.metrics["rollout/unique_tokens"] == (8 + 2 + 5 + 2) + (8 + 5)
    bench.collector.submit([pool_of(10)[6]], Sampling(4, 8, 1.0, (), seed=1))
    assert [len(sampling.branches) for _, sampling in bench.engine.asked] == [2, 0]
    with pytest.raises(UserError, match="completions without forks"):
        Bench(tokenizer, {2: said("score 1") * 8}, *settings).collect()


def test_metrics_of_a_step_written_out(tokenizer: Tokenizer) -> None:
    cut_off = Said("score 2".ljust(20), ended=False)
    script = {
        1: [Said("score 1"), cut_off, Said("score 0")],
        3: said("score 0", "score 0", "score 0 "),
    }
    result = Bench(tokenizer, {**script, 4: said("score 1") * 3}).collect()
    metrics = result.metrics
    del metrics["rollout/entropy"]
    assert (result.metadata.window, result.notes) == (3.0, ())
    assert metrics == {
        "rollout/raw_reward": 6 / 9,
        "rollout/reward": 6 / 9,
        "rollout/accuracy": pytest.approx(5 / 9),
        "rollout/response_len/mean": pytest.approx(85 / 9),
        "rollout/response_len/max": 20.0,
        "rollout/truncated_ratio": pytest.approx(1 / 9),
        "rollout/zero_std/ratio": pytest.approx(2 / 3),
        "rollout/generated_tokens": 85.0,
        "rollout/unique_tokens": 85.0,
        "rollout/dropped_groups": 0.0,
        "reward/timeouts": 0.0,
        "reward/errors": 0.0,
    }


def test_failures_past_their_share_stop_every_rank(tokenizer: Tokenizer) -> None:
    """The share is one of all completions, and may be reached."""
    script = {1: MIXED, 3: said("sleep", "raise it", "score 0")}

    def on_a_rank(world: World) -> str:
        metrics = (
            Bench(tokenizer, script, f"reward.max_failures={2 / 6}", world=world).collect().metrics
        )
        assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (1, 1)
        with pytest.raises(UserError) as caught:
            Bench(tokenizer, script, "reward.max_failures=0.33", world=world).collect()
        assert caught.value.setting == "reward.function"
        return caught.value.problem

    one, other = as_ranks(2, on_a_rank)
    assert one == other
    assert all(words in one for words in ("2 of 6 completions", "1 took", "1 failed", "raise it"))


def test_engine_is_asked_with_a_seed_of_the_step(tokenizer: Tokenizer) -> None:
    own = "eval.top_p=0.9", "eval.top_k=20", "eval.max_response_tokens=27"
    seeds = []
    for step, seed in ((0, 5), (0, 5), (1, 5), (0, 6)):
        bench = Bench(tokenizer, {3: MIXED, 1: MIXED}, f"run.seed={seed}", *own)
        bench.collect(step=step)
        ((asked, sampling),) = bench.engine.asked
        assert asked == [3, 1]
        assert (sampling.samples, sampling.max_tokens, sampling.temperature) == (
            SAMPLES,
            LIMIT_TOKENS,
            0.7,
        )
        assert (sampling.top_p, sampling.top_k) == (None, None), (
            "training samples from the whole distribution"
        )
        assert sampling.stop_token_ids == (end_token_id(tokenizer),)
        seeds.append(sampling.seed)
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


def test_completion_is_as_old_as_its_oldest_token(tokenizer: Tokenizer) -> None:
    """Of six completions, of eight tokens each, one has its first four from version 6."""
    mixed = Said("score 1", versions=np.repeat(np.array([6, 7], np.int32), 4))
    fresh = Said("score 0", versions=np.full(8, 7, np.int32))
    known = Bench(tokenizer, {4: [fresh, mixed, fresh], 2: [fresh] * 3}).collect().metadata
    assert known.versions.tolist() == [[7, 7, 7], [7, 6, 7]]
    empty = Bench(tokenizer, {}).collect(window=8).metadata
    names = "rollout/stale_tokens", "staleness/max", "staleness/mean", "staleness/bound"
    for metadata, version, bound, expected in (
        (known, 9, 3, [1.0, 3.0, 13 / 6, 3.0]),
        (empty, 9, 0, [0.0, 0.0, 0.0, 0.0]),
    ):
        assert compute_staleness(metadata, version, bound=bound) == pytest.approx(
            dict(zip(names, expected, strict=True))
        )
    # A late completion is not left out: late completions are long, and the rest would be a policy
    # of short ones.
    with pytest.raises(UserError, match="3 updates old") as raised:
        compute_staleness(known, 9, bound=2)
    assert raised.value.setting == "rollout.ahead"


def test_ranks_share_the_work_and_know_the_same(tokenizer: Tokenizer) -> None:
    script = {9: MIXED, 2: BROKEN, 5: said("score 0", "score 0", "score 0"), 1: MIXED, 7: MIXED}

    def on_a_rank(world: World) -> tuple[CompleteRollouts, list[int]]:
        bench = Bench(tokenizer, script, world=world)
        result = bench.collect(inclusion=[0.9, 0.2, 0.5, 0.1, 0.7], window=12)
        return result, [prompt for prompts, _ in bench.engine.asked for prompt in prompts]

    ((alone, _),) = as_ranks(1, on_a_rank)
    results = as_ranks(2, on_a_rank)
    assert sorted(prompt for _, asked in results for prompt in asked) == [1, 2, 5, 7, 9]
    for rank, (result, _) in enumerate(results):
        known = result.metadata
        assert result.metrics == pytest.approx(alone.metrics)
        assert result.notes == alone.notes
        for field in set(StepMetadata.__slots__) - {"owners", "segments", "parts"}:
            np.testing.assert_allclose(
                getattr(known, field), getattr(alone.metadata, field), rtol=1e-12
            )
        np.testing.assert_array_equal(known.segments, alone.metadata.segments)
        np.testing.assert_equal(known.parts, alone.metadata.parts)
        held = {row: group.prompt.id for row, group in result.held.items()}
        assert held == {
            row: int(known.prompt_ids[row]) for row in np.flatnonzero(known.owners == rank)
        }
        assert held, "both hold something"


def test_logged_metric_is_the_mean_over_its_completions_on_all_ranks(tokenizer: Tokenizer) -> None:
    """The group that failed has left, and no function replaces the count of failures."""
    script = {
        9: said("score 1 depth 1", "score 0", "score 0 depth 4"),
        2: said("score 0 deep 1", "score 1 errors 7", "score 0"),
        5: said("score 0 depth 7", "score 1", "score 1"),
        1: BROKEN[:2] + said("score 0 depth 9"),
    }
    for metrics in as_ranks(
        3, lambda world: Bench(tokenizer, script, world=world).collect().metrics
    ):
        logged = metrics["reward/depth"], metrics["reward/deep"], metrics["reward/errors"]
        assert logged == (pytest.approx(4.0), 1.0, 1.0)


def test_completions_without_kept_ids_to_replay_are_refused(tokenizer: Tokenizer) -> None:
    """Rollouts ask for the kept ids, and evaluations do not."""

    def on_a_rank(world: World) -> tuple[str, list[tuple[Any, ...]]]:
        settings = "rollout.top_k=9", "rollout.top_p=0.5"
        bench = Bench(tokenizer, {4: MIXED}, *settings, world=world)
        with pytest.raises(UserError, match="returned a completion without them") as caught:
            bench.collect()
        bench.collector.submit([pool_of(10)[4]], Sampling(1, 8, 1.0, (), seed=1))
        asked = [sampling for _, sampling in bench.engine.asked]
        return caught.value.setting, [(s.top_k, s.top_p, s.sampling_mask) for s in asked]

    expected = "rollout.top_k", [(9, 0.5, True), (None, None, False)]
    assert as_ranks(2, on_a_rank) == [expected] * 2


def test_completions_without_routing_to_replay_are_refused(tokenizer: Tokenizer) -> None:
    """Rollouts ask for the routing, and evaluations do not. A completion without stops every
    rank."""
    shape = RoutingShape(layers=2, per_token=1, experts=4)

    def on_a_rank(world: World) -> tuple[str, list[RoutingShape | None]]:
        bench = Bench(tokenizer, {4: MIXED}, world=world, routing=shape)
        with pytest.raises(UserError, match="a completion has none") as caught:
            bench.collect()
        bench.collector.submit([pool_of(10)[4]], Sampling(1, 8, 1.0, (), seed=1))
        return caught.value.setting, [sampling.routing for _, sampling in bench.engine.asked]

    assert as_ranks(2, on_a_rank) == [("loss.replay_routing", [shape, None])] * 2

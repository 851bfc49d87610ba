"""Collecting loses no group in part, keeps every weight with its own group, and counts what could not be scored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_dppo.config import BranchConfig, Config, EvalConfig, LossConfig, RunConfig, TreeConfig, replace
from megatron_dppo.data.prompts import PromptPool
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Prompt, RoutingShape, Score, Selection, StepMetadata, VersionSpan
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.engine import Completions, GroupCallback, Sampling
from megatron_dppo.rollout.metadata import staleness
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from tests.rollout.scripted import (
    FAILING,
    LIMIT_S,
    LIMIT_TOKENS,
    SAMPLES,
    Said,
    Script,
    ScriptedEngine,
    ScriptedWorkers,
    as_ranks,
    collect_config,
    pool_of,
    world_of,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(character_tokenizer(), folder, max_tokens=512)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardWorkers]:
    """Shared: what they report depends on what they have reported before, so no test of reports uses these."""
    pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
    yield pool
    pool.close()


@pytest.fixture
def fresh_workers() -> Iterator[RewardWorkers]:
    """Workers that have reported nothing yet."""
    pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
    yield pool
    pool.close()


def collect(collector: Collector, pool: PromptPool, selection: Selection, step: int) -> CompleteRollouts:
    return collector.collected([collector.finish(collector.request(pool, StepRollouts(selection, step)))])


@dataclass
class Bench:
    """A collector over a script, in this process."""

    tokenizer: Tokenizer
    workers: RewardWorkers

    def collector(self, script: Script, config: Config | None = None) -> Collector:
        self.engine = ScriptedEngine(self.tokenizer, script)
        stops = (end_token_id(self.tokenizer),)
        return Collector(config or collect_config(), world_of(1, 0), self.engine, self.workers, self.tokenizer, stops)

    def collect(self, script: Script, inclusion: Sequence[float] = (), config: Config | None = None, window: int = 0):
        """The script's prompts, in its order, at these probabilities (1 where none are given)."""
        selection = Selection(
            np.array(list(script), np.int64), np.array(inclusion or [1.0] * len(script)), window or len(script)
        )
        return collect(self.collector(script, config), pool_of(10), selection, step=4)


@pytest.fixture
def bench(tokenizer: Tokenizer, workers: RewardWorkers) -> Bench:
    return Bench(tokenizer, workers)


def said(*texts: str) -> list[Said]:
    return [Said(text) for text in texts]


MIXED = said("score 1", "score 0", "score 0")
BROKEN = said("score 1", "raise it", "score 0")


def test_rollouts_are_under_way_whatever_an_engine_returns_for_them(bench: Bench) -> None:
    """An engine of the user's own may have nothing to return; its prompts are not to be asked for twice."""

    class Wordless(ScriptedEngine):
        def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:  # type: ignore[override]
            super().begin(prompts, sampling)

    collector = bench.collector({4: MIXED})
    bench.engine.__class__ = Wordless
    rollouts = StepRollouts(Selection(np.array([4]), np.ones(1), 1), step=0)
    assert not rollouts.under_way
    assert collector.request(pool_of(10), rollouts).under_way
    rollouts.restart()
    assert not rollouts.under_way


def test_group_one_of_whose_scores_failed_leaves_whole(bench: Bench) -> None:
    result = bench.collect({4: MIXED, 2: BROKEN})
    assert result.metadata.prompt_ids.tolist() == [4]
    assert [group.prompt.id for group in result.held.values()] == [4]
    assert result.metrics["rollout/dropped_groups"] == 1.0
    assert result.metrics["rollout/generated_tokens"] == 3 * 8
    assert result.metrics["rollout/accuracy"] == pytest.approx(1 / 3)
    assert any("left their step" in note for note in result.notes)


def test_each_role_has_its_own_reward_and_the_penalty_of_the_whole_conversation(bench: Bench) -> None:
    """A role of which the function says nothing has the score. A number is the reward of all."""
    config = collect_config(overlong_buffer=8)
    config = replace(config, rollout=replace(config.rollout, roles=("solver", "critic")))
    both, alone = [0] * 9 + [1] * 8, [0] * 8
    in_roles = [Said("score 1 critic 3", segments=both), *(Said(f"score {n}", segments=alone) for n in (0, 1))]
    result = bench.collect({3: in_roles}, config=config)
    known = result.metadata.segments[0]
    penalty = (20 - 8 - 17) / 8
    assert known["reward"].tolist() == [[1.0 + penalty, 3.0 + penalty], [0.0, 0.0], [1.0, 1.0]]
    assert known["tokens"].tolist() == [[9, 8], [8, 0], [8, 0]]
    np.testing.assert_allclose(known["square"].sum(axis=-1), result.metadata.score_norms[0] ** 2)
    assert result.metrics["rollout/role_reward/solver"] == pytest.approx((2.0 + penalty) / 3)
    assert result.metrics["rollout/role_reward/critic"] == pytest.approx(3.0 + penalty)
    with pytest.raises(UserError, match="a completion came without"):
        bench.collect({3: [*in_roles[:2], Said("score 1")]}, config=config)
    unknown = [Said("score 1 judge 2", segments=[0] * 16), *in_roles[1:]]
    with pytest.raises(UserError, match="reward to the role 'judge'"):
        bench.collect({3: unknown}, config=config)
    assert bench.collect({3: MIXED}).metadata.segments.shape == (1, 3, 0)


def test_what_the_policy_was_given_is_part_of_the_response_and_of_no_figure_of_what_it_sampled(bench: Bench) -> None:
    given = Said("score 1", probability=(0.5, 0.5, 0.5, 1e-9, 1e-9, 0.5, 0.5, 0.5), given=(3, 4))
    result = bench.collect({4: [given, *said("score 0", "score 0")]})
    assert result.metadata.response_lengths.tolist() == [[8, 8, 8]]
    assert result.metadata.sampled_lengths.tolist() == [[6, 8, 8]]
    assert result.metadata.score_norms[0] == pytest.approx([math.sqrt(6) / 2, math.sqrt(8) / 2, math.sqrt(8) / 2])
    assert result.metrics["rollout/generated_tokens"] == 6 + 8 + 8
    assert result.metrics["rollout/entropy"] == pytest.approx(math.log(2))


def test_of_several_sequences_the_verifier_sees_what_was_said_and_the_longest_is_overlong(bench: Bench) -> None:
    """A limit of 20 tokens and a buffer of 8: the second sequence has 16 more than the prompt, which cost a half."""
    assert len(pool_of(10)[4].token_ids) == 7
    said_twice = Said("score" + "x" * 20 + " 1", given=range(5, 25), starts=(5,))
    config = collect_config(overlong_buffer=8)
    result = bench.collect({4: [said_twice, *said("score 0", "score 0")]}, config=config)
    assert result.metrics["rollout/raw_reward"] == pytest.approx(1 / 3), "what it was shown is: score 1"
    assert result.metadata.rewards[0].tolist() == [0.5, 0.0, 0.0]
    assert result.metadata.further_lengths.tolist() == [[[23], [0], [0]]]
    gspo = replace(config, loss=LossConfig(name="gspo"), rollout=replace(config.rollout, conversation="a.py:rollout"))
    with pytest.raises(UserError, match="came in 2 sequences"):
        bench.collect({4: [said_twice, *said("score 0", "score 0")]}, config=gspo)


def test_trees_are_grown_for_training_alone_and_what_their_leaves_share_counts_once(bench: Bench) -> None:
    tree = TreeConfig(roots=2, branches=(BranchConfig(at=3),))
    config = collect_config()
    config = replace(config, rollout=replace(config.rollout, samples_per_prompt=4, tree=tree))
    forked, ended = ({"segments": [0] * at + [1] * (8 - at), "weights": (1.0, 1.0)} for at in (3, 8))
    script = {4: [Said("score 1", **forked), Said("score 0", **forked), *[Said("score 1", **ended)] * 2]}
    collector = bench.collector(script, config)
    result = collect(collector, pool_of(10), Selection(np.array([4]), np.ones(1), 1), step=4)
    assert result.metrics["rollout/generated_tokens"] == 4 * 8
    assert result.metrics["rollout/unique_tokens"] == 8 + (8 - 3) + 8
    collector.ask([pool_of(10)[4]], samples=4, temperature=1.0, seed=1, max_tokens=8)
    assert [sampling.branches for _, sampling in bench.engine.asked] == [tree.branches, ()]


def test_what_is_left_stands_for_its_share_of_the_window_by_inverse_probabilities(bench: Bench) -> None:
    """Of N = 8, groups at π 0.5 and 1 are left (2 + 1), groups at π 0.25 and 0.4 failed (4 + 2.5)."""
    script = {5: MIXED, 1: BROKEN, 7: BROKEN, 3: MIXED}
    result = bench.collect(script, inclusion=[0.5, 0.25, 0.4, 1.0], window=8)
    assert result.metadata.window == pytest.approx(8 * 3.0 / 9.5)


def test_inclusion_stays_with_its_group_when_one_before_it_leaves(bench: Bench) -> None:
    script = {5: BROKEN, 8: MIXED, 1: MIXED, 7: BROKEN, 3: MIXED}
    result = bench.collect(script, inclusion=[0.2, 0.3, 0.4, 0.5, 0.6])
    assert dict(zip(result.metadata.prompt_ids.tolist(), result.metadata.prompt_inclusion, strict=True)) == {
        1: 0.4,
        3: 0.6,
        8: 0.3,
    }


def test_groups_are_held_under_the_row_that_describes_them(bench: Bench) -> None:
    script = {
        5: said("score 1", "score 0  ", "score 0"),
        2: BROKEN,
        1: said("score 0", "score 0", "score 3    "),
    }
    result = bench.collect(script)
    known = result.metadata
    assert sorted(result.held) == [0, 1]
    for row, group in result.held.items():
        assert group.prompt.id == known.prompt_ids[row]
        assert len(group.prompt.token_ids) == known.prompt_lengths[row]
        assert [len(c.token_ids) for c in group.completions] == known.response_lengths[row].tolist()
        np.testing.assert_array_equal(group.rewards, known.rewards[row])
    np.testing.assert_array_equal(known.rewards, [[0, 0, 3], [1, 0, 0]])
    np.testing.assert_array_equal(known.owners, [0, 0])


def test_step_all_of_whose_groups_failed_is_empty_and_still_writes_its_row(bench: Bench) -> None:
    result = bench.collect({5: BROKEN, 2: BROKEN}, inclusion=[0.5, 0.5])
    assert (len(result.metadata.prompt_ids), result.metadata.window, result.held) == (0, 0.0, {})
    assert result.metadata.rewards.shape == (0, SAMPLES)
    json.dumps(result.metrics, allow_nan=False)


def test_a_rank_without_prompts_meets_the_others_in_the_engine_all_the_same(bench: Bench) -> None:
    result = bench.collect({}, window=8)
    assert (len(result.metadata.prompt_ids), result.metadata.window, result.notes) == (0, 8.0, ())
    assert [prompts for prompts, _ in bench.engine.asked] == [[]]
    assert bench.engine.finished == 1, "waiting is collective"
    json.dumps(result.metrics, allow_nan=False)


OVERLONG = {0: [Said("score 1".ljust(17)), Said("score 1".ljust(20), ended=False), Said("score 0".ljust(15))]}
"""Of 18, 20 and 16 tokens, under a limit of 20."""


def test_overlong_penalty_is_in_what_is_trained_on_and_not_in_the_raw_reward(bench: Bench) -> None:
    """DAPO's buffer is a fifth of the limit, four tokens: 18 tokens cost a half, 20 cost 1, 16 cost nothing."""
    result = bench.collect(OVERLONG, config=collect_config(loss="dapo"))
    np.testing.assert_allclose(result.metadata.rewards, [[0.5, 0.0, 0.0]], atol=1e-12)
    np.testing.assert_array_equal(result.held[0].rewards, result.metadata.rewards[0])
    assert result.metrics["rollout/raw_reward"] == pytest.approx(2 / 3)
    assert result.metrics["rollout/reward"] == pytest.approx(0.5 / 3)
    assert result.metrics["rollout/accuracy"] == pytest.approx(2 / 3), "right is right, however long"


@pytest.mark.parametrize(
    ("loss", "buffer", "rewards"), [("grpo", None, [1, 1, 0]), ("dapo", 0, [1, 1, 0]), ("grpo", 10, [0.2, 0, -0.6])]
)
def test_buffer_is_the_hosts_unless_it_is_set(bench: Bench, loss: str, buffer: int | None, rewards: list) -> None:
    result = bench.collect(OVERLONG, config=collect_config(loss=loss, overlong_buffer=buffer))
    np.testing.assert_allclose(result.metadata.rewards, [rewards], atol=1e-12)


def test_score_norms_and_entropy_are_those_of_the_engines_probabilities(bench: Bench) -> None:
    p = np.linspace(0.1, 0.95, 8)
    script = {
        6: [Said("score 1", p), Said("score 0", 0.25), Said("score 0", 1.0)],
        2: BROKEN,
    }
    result = bench.collect(script)
    expected = [np.sqrt(((1 - p) ** 2).sum()), np.sqrt(8 * 0.75**2), 0.0]
    np.testing.assert_allclose(result.metadata.score_norms, [expected], rtol=1e-6)
    nats = -np.log(p).sum() + 8 * np.log(4.0)
    assert result.metrics["rollout/entropy"] == pytest.approx(nats / 24, rel=1e-6), "a dropped group adds to neither"


def test_the_planner_knows_where_every_path_of_a_tree_forks(bench: Bench) -> None:
    tree = TreeConfig(roots=2, branches=(BranchConfig(at=3), BranchConfig(at=6)))
    config = collect_config(loss="dr_grpo")
    config = replace(config, rollout=replace(config.rollout, samples_per_prompt=8, tree=tree))
    p = np.linspace(0.1, 0.8, 8)
    twice, once, ones = [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1], (1.0, 1.0, 1.0)
    long = [Said("score 1", p, segments=twice, weights=w) for w in ((1.0, 1.0, 2.5), ones, ones, ones)]
    short = [Said("score 0", p, segments=once, weights=ones)] * 4
    broken = [Said("broken", segments=[*once[1:]], weights=ones)] * 8
    segments = bench.collect({6: long + short, 2: broken}, config=config).metadata.segments
    assert segments.shape == (1, 8, 3)
    assert segments["tokens"][0].tolist() == [[3, 3, 2]] * 4 + [[3, 5, 0]] * 4
    assert segments["weight"][0, :2].tolist() == [[1.0, 1.0, 2.5], [1.0, 1.0, 1.0]]

    parts = p[:3], p[3:6], p[6:]
    np.testing.assert_allclose(segments["square"][0, 0], [((1.0 - part) ** 2).sum() for part in parts], rtol=1e-6)
    np.testing.assert_allclose(segments["square"][0, 7, 1:], [((1.0 - p[3:]) ** 2).sum(), 0.0], rtol=1e-6)
    np.testing.assert_allclose(segments["logprob"][0, 0], [np.log(part).sum() for part in parts], rtol=1e-6)
    assert bench.collect({2: broken}, config=config).metadata.segments.shape == (0, 8, 3), "as on the other ranks"
    with pytest.raises(UserError, match="that did not fork"):
        bench.collect({2: [Said("score 1")] * 8}, config=config)


def test_metrics_of_a_step_written_out(bench: Bench) -> None:
    script = {
        1: [Said("score 1"), Said("score 2".ljust(20), ended=False), Said("score 0")],
        3: said("score 0", "score 0", "score 0 "),
    }
    metrics = bench.collect(script).metrics
    del metrics["rollout/entropy"]
    assert metrics == {
        "rollout/raw_reward": 3 / 6,
        "rollout/reward": 3 / 6,
        "rollout/accuracy": pytest.approx(2 / 6),
        "rollout/response_len/mean": pytest.approx(61 / 6),
        "rollout/response_len/max": 20.0,
        "rollout/truncated_ratio": pytest.approx(1 / 6),
        "rollout/zero_std/ratio": 1 / 2,
        "rollout/generated_tokens": 61.0,
        "rollout/unique_tokens": 61.0,
        "rollout/dropped_groups": 0.0,
        "reward/timeouts": 0.0,
        "reward/errors": 0.0,
    }


def test_correctness_is_what_the_verifier_says_and_not_the_size_of_the_reward(bench: Bench) -> None:
    prompts = [Prompt(0, np.arange(3, dtype=np.int32), "", "-40", source, {"add": 2}) for source in ("here", "there")]
    collector = bench.collector({0: said("echo")})
    pending = collector.ask(prompts, samples=1, temperature=1.0, seed=0, max_tokens=9)
    answers = collector.answers(prompts, pending, of_all=2)
    assert answers.scores == [[Score(-38.0, True)], [Score(-38.0, False)]]
    assert answers.texts == [["echo"], ["echo"]], "the end of the turn is no part of the answer"


def test_too_many_failures_stop_the_run_with_the_first_traceback(
    tokenizer: Tokenizer, fresh_workers: RewardWorkers
) -> None:
    script = {1: MIXED, 3: said("raise first", "none", "score 0")}
    with pytest.raises(UserError) as caught:
        Bench(tokenizer, fresh_workers).collect(script, config=collect_config(max_failures=0.3))
    assert (caught.value.setting, caught.value.value) == ("reward.function", FAILING)
    problem = caught.value.problem
    assert "2 of 6 completions" in problem and "1.5 s of processor time or 15 s on the clock, 2 failed)" in problem
    assert "Traceback" in problem and "ValueError: first" in problem and "rewards_that_fail.py" in problem
    assert "NoneType" not in problem, "the first is enough"


def test_failures_are_a_share_of_all_completions_and_may_reach_their_limit(bench: Bench) -> None:
    script = {1: MIXED, 3: BROKEN}
    assert bench.collect(script, config=collect_config(max_failures=1 / 6)).metrics["reward/errors"] == 1.0
    with pytest.raises(UserError, match=r"reward\.max_failures"):
        bench.collect(script, config=collect_config(max_failures=0.16))


def test_timeouts_are_failures_too(tokenizer: Tokenizer) -> None:
    script = {1: MIXED, 3: said("sleep", "score 1", "sleep")}
    with pytest.raises(UserError, match=r"2 of 6 completions .*\(2 took more than 1\.5 s .*, 0 failed\)"):
        Bench(tokenizer, ScriptedWorkers()).collect(script, config=collect_config(max_failures=0.3))


def test_tracebacks_below_the_limit_are_noted(tokenizer: Tokenizer, fresh_workers: RewardWorkers) -> None:
    result = Bench(tokenizer, fresh_workers).collect({1: MIXED, 3: BROKEN})
    assert sum("ValueError: it" in note for note in result.notes) == 1


def test_engine_is_asked_as_configured_with_a_seed_of_the_step(bench: Bench) -> None:
    selection = Selection(np.array([3, 1]), np.ones(2), 2)
    seeds = []
    for step, seed in ((0, 5), (0, 5), (1, 5), (0, 6)):
        own = EvalConfig(top_p=0.9, top_k=20, max_response_tokens=LIMIT_TOKENS + 7)
        config = replace(collect_config(), run=RunConfig(seed=seed), eval=own)
        bench.collector({3: MIXED, 1: MIXED}, config).request(pool_of(5), StepRollouts(selection, step))
        ((asked, sampling),) = bench.engine.asked
        assert asked == [3, 1]
        assert (sampling.samples, sampling.max_tokens, sampling.temperature) == (SAMPLES, LIMIT_TOKENS, 0.7)
        assert (sampling.top_p, sampling.top_k) == (None, None), "training samples from the whole distribution"
        assert sampling.stop_token_ids == (end_token_id(bench.tokenizer),)
        seeds.append(sampling.seed)
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


def test_a_completion_is_as_old_as_its_oldest_token(bench: Bench) -> None:
    """One of six completions, of eight tokens each, has its first four from version 6."""
    mixed = Said("score 1", versions=(VersionSpan(6, 4), VersionSpan(7, 4)))
    fresh = Said("score 0", versions=(VersionSpan(7, 8),))
    result = bench.collect({4: [fresh, mixed, fresh], 2: [fresh] * 3})
    assert result.metadata.versions.tolist() == [[7, 7, 7], [7, 6, 7]]
    names = "rollout/stale_tokens", "staleness/max", "staleness/mean", "staleness/bound"

    def told(metadata: StepMetadata, version: int, bound: int) -> list[float]:
        known = staleness(metadata, version, bound=bound)
        assert known.keys() == set(names)
        return [known[name] for name in names]

    assert told(result.metadata, 7, 1) == pytest.approx([1 / 6, 1.0, 1 / 6, 1.0])
    assert told(result.metadata, 9, 3) == pytest.approx([1.0, 3.0, 13 / 6, 3.0])
    assert told(bench.collect({}, window=8).metadata, 9, 0) == [0.0, 0.0, 0.0, 0.0]


def test_a_completion_past_the_bound_stops_the_run(bench: Bench) -> None:
    """It is not left out: what comes late is long, and the rest would be a policy that is short."""
    mixed = Said("score 1", versions=(VersionSpan(4, 1), VersionSpan(7, 7)))
    metadata = bench.collect({4: [Said("score 0", versions=(VersionSpan(7, 8),)), mixed, mixed]}).metadata
    assert staleness(metadata, 7, bound=3)["staleness/max"] == 3.0
    with pytest.raises(UserError, match="3 updates old") as raised:
        staleness(metadata, 7, bound=2)
    assert raised.value.setting == "rollout.ahead"


def test_what_fails_in_the_engine_of_one_rank_stops_all_of_them(tokenizer: Tokenizer) -> None:
    class Failing(ScriptedEngine):
        def finish(self, pending: Completions, look: GroupCallback | None = None) -> Completions:
            super().finish(pending)
            raise RuntimeError("no server is left")  # on every rank, as the protocol has it

    def on_a_rank(world: World) -> str:
        engine = Failing(tokenizer, {4: MIXED, 2: MIXED})
        collector = Collector(collect_config(), world, engine, ScriptedWorkers(), tokenizer, (2,))
        with pytest.raises(RuntimeError) as caught:
            collect(collector, pool_of(10), Selection(np.array([4]), np.ones(1), 2), step=0)
        assert engine.finished == 1, "the rank without a prompt waits too"
        return str(caught.value)

    assert as_ranks(2, on_a_rank) == ["no server is left"] * 2


def test_ranks_share_the_work_and_know_the_same(tokenizer: Tokenizer) -> None:
    script = {9: MIXED, 2: BROKEN, 5: said("score 0", "score 0", "score 0"), 1: MIXED, 7: MIXED}
    selection = Selection(np.array(list(script)), np.array([0.9, 0.2, 0.5, 0.1, 0.7]), 12)

    def on_a_rank(world: World) -> tuple[CompleteRollouts, list[int]]:
        engine = ScriptedEngine(tokenizer, script)
        collector = Collector(collect_config(), world, engine, ScriptedWorkers(), tokenizer, (2,))
        result = collect(collector, pool_of(10), selection, step=0)
        return result, [prompt for prompts, _ in engine.asked for prompt in prompts]

    ((alone, _),) = as_ranks(1, on_a_rank)
    results = as_ranks(2, on_a_rank)
    assert sorted(prompt for _, asked in results for prompt in asked) == [1, 2, 5, 7, 9]
    for rank, (result, _) in enumerate(results):
        known = result.metadata
        assert result.metrics == pytest.approx(alone.metrics)
        assert result.notes == alone.notes
        for field in set(StepMetadata.__slots__) - {"owners", "segments"}:
            np.testing.assert_allclose(getattr(known, field), getattr(alone.metadata, field), rtol=1e-12)
        np.testing.assert_array_equal(known.segments, alone.metadata.segments)
        held = {row: group.prompt.id for row, group in result.held.items()}
        assert held == {row: int(known.prompt_ids[row]) for row in np.flatnonzero(known.owners == rank)}
        assert held, "both hold something"


def test_a_logged_metric_is_the_mean_over_the_completions_of_all_ranks_that_have_it(tokenizer: Tokenizer) -> None:
    logged = {9: said("score 1 depth 1", "score 0", "score 0 depth 4"), 2: said("score 0 deep 1", "score 1", "score 0")}
    script = {**logged, 5: said("score 0 depth 7", "score 1", "score 1"), 1: BROKEN[:2] + said("score 0 depth 9")}

    def on_a_rank(world: World) -> dict[str, float]:
        collector = Collector(
            collect_config(), world, ScriptedEngine(tokenizer, script), ScriptedWorkers(), tokenizer, (2,)
        )
        selection = Selection(np.array(list(script)), np.ones(4), 4)
        return collect(collector, pool_of(10), selection, step=0).metrics

    for metrics in (*as_ranks(1, on_a_rank), *as_ranks(2, on_a_rank), *as_ranks(3, on_a_rank)):
        assert metrics["reward/depth"] == pytest.approx(4.0), "(1 + 4 + 7) / 3: the group that failed has left"
        assert metrics["reward/deep"] == 1.0
        assert metrics["reward/errors"] == 1.0


def test_no_function_replaces_the_count_of_failures(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, {1: said("score 1 errors 7", "score 0", "score 0")})
    collector = Collector(collect_config(), world_of(1, 0), engine, ScriptedWorkers(), tokenizer, (2,))
    metrics = collect(collector, pool_of(10), Selection(np.array([1]), np.ones(1), 1), step=0).metrics
    assert metrics["reward/errors"] == 0.0


def test_every_rank_stops_for_the_failures_of_one(tokenizer: Tokenizer) -> None:
    selection = Selection(np.array([4, 2]), np.ones(2), 2)

    def on_a_rank(world: World) -> str:
        engine = ScriptedEngine(tokenizer, {4: MIXED, 2: BROKEN})
        config = collect_config(max_failures=0.1)
        collector = Collector(config, world, engine, ScriptedWorkers(), tokenizer, (2,))
        with pytest.raises(UserError) as caught:
            collect(collector, pool_of(10), selection, step=0)
        return str(caught.value)

    one, other = as_ranks(2, on_a_rank)
    assert one == other
    assert "1 of 6 completions" in one


def test_a_completion_without_routing_is_refused_where_it_is_to_be_replayed(tokenizer: Tokenizer) -> None:
    """Its rollouts are asked for it, and its evaluations are not. What comes without stops every rank."""
    shape = RoutingShape(layers=2, per_token=1, experts=4)

    def on_a_rank(world: World) -> tuple[str, list[Sampling]]:
        engine = ScriptedEngine(tokenizer, {4: MIXED, 2: MIXED})
        collector = Collector(collect_config(), world, engine, ScriptedWorkers(), tokenizer, (2,), shape)
        with pytest.raises(UserError, match="a completion came without") as caught:
            collect(collector, pool_of(10), Selection(np.array([4]), np.ones(1), 2), step=0)
        collector.ask([pool_of(10)[2]], samples=1, temperature=1.0, seed=1, max_tokens=8)
        return caught.value.setting, [sampling for _, sampling in engine.asked]

    for setting, (asked, evaluated) in as_ranks(2, on_a_rank):
        assert (setting, asked.routing, evaluated.routing) == ("loss.replay_routing", shape, None)

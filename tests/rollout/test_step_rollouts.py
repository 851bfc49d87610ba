"""A batch in flight comes back from a checkpoint as it was, with any number of ranks, each group on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import BranchConfig, Config, DistillationConfig, LossConfig, RolloutConfig, TreeConfig
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import SEGMENT, Completion, Group, Selection, StepMetadata, VersionSpan, no_segments
from megatron_dppo.rollout.engine import PartialRollout
from megatron_dppo.rollout.metadata import metadata_of
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts, read_in_flight, write_in_flight
from tests.rollout.scripted import as_ranks, pool_of, world_of

PROMPTS = (8, 1, 5, 3, 7)
"""As they were selected; the metadata has them sorted."""
SELECTION = Selection(np.array([*PROMPTS, 2]), np.array([0.1, 0.2, 1 / 3, 0.7, 1.0, 0.9]), 12)
METRICS = {"rollout/reward": 0.1 + 0.2, "rollout/generated_tokens": 51.0}


def group_of(prompt: int, *, routed: bool = False, samples: int = 3) -> Group:
    """Completions, some of one version and some of two, with log-probabilities of every bit."""
    rng = np.random.default_rng(prompt)
    completions = []
    for sample, length in enumerate(rng.integers(2, 9, samples).tolist()):
        first = int(rng.integers(1, length))
        mixed = (VersionSpan(3, first), VersionSpan(4, length - first))
        completions.append(
            Completion(
                rng.integers(3, 99, length).astype(np.int32),
                np.log(rng.random(length)).astype(np.float32),
                np.arange(length) != 1 + sample,
                (VersionSpan(4, length),) if sample == 1 else mixed,
                "length" if rng.random() < 0.5 else "stop",
                rng.integers(0, 300, (length + sample, 3, 2)).astype(np.uint16) if routed else None,
                teacher_logprobs=-rng.random(length).astype(np.float32) if prompt % 2 else None,
            )
        )
    return Group(pool_of(10)[prompt], tuple(completions), rng.random(samples))


def batch_of(world: World, *, routed: bool = False) -> StepRollouts:
    groups = {prompt: group_of(prompt, routed=routed) for prompt in PROMPTS[world.rank :: world.size]}
    shape = (len(groups), 3)
    part = StepMetadata(
        prompt_ids=np.array(list(groups), np.int64),
        prompt_inclusion=np.array(list(groups)) / 7.0,
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups.values()], np.int64),
        response_lengths=np.array([[len(c.token_ids) for c in g.completions] for g in groups.values()]).reshape(shape),
        shared_lengths=np.arange(3 * len(groups)).reshape(shape),
        sampled_lengths=np.array([[c.loss_mask.sum() for c in g.completions] for g in groups.values()]).reshape(shape),
        further_lengths=no_further(shape),
        rewards=np.array([g.rewards for g in groups.values()]).reshape(shape),
        score_norms=np.random.default_rng(0).random(shape),
        log_ratios=np.zeros((*shape, 2)),
        teacher=np.full(len(groups), -1),
        segments=no_segments(shape),
        versions=np.array([[c.oldest_version for c in g.completions] for g in groups.values()]).reshape(shape),
        truncated=np.random.default_rng(1).random(shape) < 0.5,
        owners=np.full(len(groups), world.rank),
        window=0.0,
    )
    metadata = gather_metadata(world.gather(part), window=11.7)
    held = {row: groups[p] for row, p in enumerate(metadata.prompt_ids.tolist()) if p in groups}
    return StepRollouts(SELECTION, 5, complete=CompleteRollouts(held, metadata, METRICS, ("a note",)))


def same_group(ours: Group, expected: Group) -> bool:
    return (
        ours.prompt.id == expected.prompt.id
        and np.array_equal(ours.rewards, expected.rewards)
        and all(
            np.array_equal(one.token_ids, other.token_ids)
            and np.array_equal(one.logprobs.view(np.int32), other.logprobs.view(np.int32))
            and np.array_equal(one.loss_mask, other.loss_mask)
            and (one.token_ids.dtype, one.logprobs.dtype, one.loss_mask.dtype) == (np.int32, np.float32, bool)
            and (one.versions, one.finish_reason) == (other.versions, other.finish_reason)
            and one.weights == other.weights
            and (one.teacher_logprobs is None) == (other.teacher_logprobs is None)
            and (one.teacher_logprobs is None or np.array_equal(one.teacher_logprobs, other.teacher_logprobs))
            and np.array_equal(one.segments, other.segments)
            and one.starts == other.starts
            and (one.routing is None) == (other.routing is None)
            and (one.routing is None or one.routing.dtype == np.uint16)
            and (one.routing is None or np.array_equal(one.routing, other.routing))
            for one, other in zip(ours.completions, expected.completions, strict=True)
        )
    )


def read(world: World, place: Path) -> StepRollouts:
    [batch] = read_in_flight(place, pool_of(10), world, 5)
    assert batch.complete is not None and batch.step == 5
    return batch


def fits(batch: StepRollouts, *, oldest: int = 0, routed: bool = False, **rollout: Any) -> bool:
    """Whether a run without teachers may go on with a batch."""
    if (whole := batch.complete) is not None:
        held = {row: replace(g, completions=tuple(map(untaught, g.completions))) for row, g in whole.held.items()}
        batch = replace(batch, complete=replace(whole, held=held))
    asked = RolloutConfig(**{"samples_per_prompt": 3} | rollout)
    return batch.fit(Config(rollout=asked), oldest=oldest, routed=routed)


def untaught(completion: Completion) -> Completion:
    return replace(completion, teacher_logprobs=None)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (2, 3), (3, 1), (2, 7), (7, 2)])
def test_every_group_comes_back_once_and_bit_by_bit(writers: int, readers: int, tmp_path: Path) -> None:
    written = as_ranks(writers, lambda world: wrote(world, tmp_path))
    back = as_ranks(readers, lambda world: read(world, tmp_path))
    expected = written[0].complete.metadata
    for rank, batch in enumerate(back):
        known = batch.complete.metadata
        assert (batch.complete.metrics, batch.complete.notes) == (METRICS, ("a note",))
        np.testing.assert_array_equal(batch.selection.prompt_ids, SELECTION.prompt_ids)
        np.testing.assert_array_equal(batch.selection.inclusion, SELECTION.inclusion)
        assert batch.selection.window == 12
        for field in set(StepMetadata.__slots__) - {"owners"}:
            np.testing.assert_array_equal(getattr(known, field), getattr(expected, field))
        assert sorted(batch.complete.held) == np.flatnonzero(known.owners == rank).tolist()
        if writers == readers:
            assert batch.complete.held.keys() == written[rank].complete.held.keys()
        for row, group in batch.complete.held.items():
            assert same_group(group, group_of(int(expected.prompt_ids[row])))
    assert sorted(row for batch in back for row in batch.complete.held) == list(range(len(PROMPTS)))
    counts = [len(batch.complete.held) for batch in back]
    assert writers == readers or max(counts) - min(counts) <= 1


def wrote(world: World, place: Path, *, routed: bool = False) -> StepRollouts:
    batch = batch_of(world, routed=routed)
    write_in_flight(place, [batch], world)
    return batch


@pytest.mark.parametrize("routed", [False, True])
def test_routing_comes_back_where_there_was_any(routed: bool, tmp_path: Path) -> None:
    as_ranks(2, lambda world: wrote(world, tmp_path, routed=routed))
    for batch in as_ranks(7, lambda world: read(world, tmp_path)):
        assert not batch.complete.held or fits(batch, routed=True) == routed
        for row, group in batch.complete.held.items():
            assert same_group(group, group_of(int(batch.complete.metadata.prompt_ids[row]), routed=routed))


@pytest.mark.parametrize(
    ("teacher", "read", "unread"), [("http://t:1", True, False), (None, False, True), ("T", False, False)]
)
def test_a_batch_knows_whether_its_teachers_are_those_of_the_run(teacher: str | None, read: bool, unread: bool) -> None:
    batch = batch_of(world_of(1, 0))

    def of(prompt: int) -> bool:
        rows = {row: group for row, group in batch.complete.held.items() if group.prompt.id == prompt}
        alone = replace(batch, complete=replace(batch.complete, held=rows))
        loss = LossConfig(distillation=DistillationConfig(teachers={"here": teacher}))
        rollout = RolloutConfig(samples_per_prompt=3)
        return alone.fit(Config(loss=loss, rollout=rollout), oldest=0, routed=False)

    odd, even = (next(p for p in PROMPTS if p % 2 == rest) for rest in (1, 0))
    assert (of(odd), of(even)) == (read, unread)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3)])
def test_several_steps_come_back_in_their_order(writers: int, readers: int, tmp_path: Path) -> None:
    """Also where prompts were drawn that nobody has rolled out; and a batch knows how old it is."""
    drawn = Selection(np.array([4, 2]), np.array([0.3, 1.0]), 2)

    def write(world: World) -> None:
        write_in_flight(tmp_path, [batch_of(world), batch_of(world), StepRollouts(drawn, 7)], world)

    as_ranks(writers, write)
    for first, second, third in as_ranks(readers, lambda world: read_in_flight(tmp_path, pool_of(10), world, 5)):
        assert [first.step, second.step, third.step] == [5, 6, 7]
        assert [fits(batch, oldest=oldest) for batch in (first, second) for oldest in (3, 4)] == [True, False] * 2
        for batch in (first, second):
            for row, group in batch.complete.held.items():
                assert same_group(group, group_of(int(batch.complete.metadata.prompt_ids[row])))
        assert third.complete is third.partial is None and third.selection.window == 2
        for field in ("prompt_ids", "inclusion"):
            np.testing.assert_array_equal(getattr(third.selection, field), getattr(drawn, field))


def test_a_checkpoint_without_a_batch_has_none(tmp_path: Path) -> None:
    assert read_in_flight(tmp_path, pool_of(10), world_of(1, 0), 5) == []


def test_a_batch_all_of_whose_groups_failed_comes_back_empty(tmp_path: Path) -> None:
    world = world_of(1, 0)
    batch = batch_of(world)
    fields = {name: getattr(batch.complete.metadata, name) for name in StepMetadata.__slots__}
    empty = StepMetadata(**{name: v if name == "window" else v[:0] for name, v in fields.items()})
    write_in_flight(tmp_path, [replace(batch, complete=replace(batch.complete, held={}, metadata=empty))], world)
    back = read(world, tmp_path).complete
    assert (back.held, back.metadata.rewards.shape, back.metadata.window) == ({}, (0, 3), 11.7)


def test_rollouts_of_another_version_are_told_with_a_way_on(tmp_path: Path) -> None:
    world = world_of(1, 0)
    wrote(world, tmp_path)
    file = tmp_path / "rollouts" / "step.npz"
    with np.load(file) as stored:
        np.savez(file, **{name: stored[name] for name in stored.files if name != "sampled_lengths"})
    with pytest.raises(UserError, match="without sampled_lengths") as raised:
        read(world, tmp_path)
    assert f"model.checkpoint={tmp_path}" in raised.value.remedy


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (3, 2)])
def test_what_was_broken_off_comes_back_on_the_rank_that_asks_for_it(
    writers: int, readers: int, routed: bool, tmp_path: Path
) -> None:
    """Some prompts have all of their completions, some one, and some none; a request that was aborted while it waited
    has no routing."""

    def group_in(prompt: int) -> Group:
        group = group_of(prompt, routed=routed)
        return replace(group, completions=(replace(group.completions[0], routing=None), *group.completions[1:]))

    def known(prompt: int) -> list[PartialRollout]:
        group = group_in(prompt)
        return [PartialRollout(prompt, slot, c, slot == 1) for slot, c in enumerate(group.completions)][: prompt % 4]

    def write(world: World) -> None:
        mine = SELECTION.prompt_ids[world.rank :: world.size].tolist()
        broken_off = StepRollouts(SELECTION, 5, partial=[one for prompt in mine for one in known(prompt)])
        write_in_flight(tmp_path, [broken_off, StepRollouts(SELECTION, 6)], world)

    as_ranks(writers, write)
    backs = as_ranks(readers, lambda world: read_in_flight(tmp_path, pool_of(10), world, 5))
    for rank, (back, drawn) in enumerate(backs):
        assert back.complete is drawn.complete is drawn.partial is None
        np.testing.assert_array_equal(back.selection.prompt_ids, SELECTION.prompt_ids)
        mine = {one.prompt for one in back.partial}
        assert mine == {p for p in SELECTION.prompt_ids[rank::readers].tolist() if p % 4}
        for prompt in mine:
            each = [one for one in back.partial if one.prompt == prompt]
            assert [(one.slot, one.ended) for one in each] == [(one.slot, one.ended) for one in known(prompt)]
            group = group_in(prompt)
            ours = replace(group, completions=tuple(one.completion for one in each))
            assert same_group(ours, replace(group, completions=group.completions[: len(each)]))
    first = backs[0][0]
    for oldest, limit, expected in ((3, 9, True), (4, 9, False), (3, 3, False)):
        assert fits(first, oldest=oldest, max_response_tokens=limit) == expected
    assert fits(first, routed=True) == routed


def test_sequences_come_back(tmp_path: Path) -> None:
    def cut(prompt: int) -> Group:
        group = group_of(prompt)
        starts = [(), (1,), (1, 2)] if prompt % 2 else [(), (), (1,)]
        each = (replace(c, starts=s) for c, s in zip(group.completions, starts, strict=True))
        return replace(group, completions=tuple(each))

    def write(world: World) -> StepMetadata:
        groups = {prompt: cut(prompt) for prompt in PROMPTS}
        metadata = gather_metadata([metadata_of(list(groups.values()), np.ones(len(groups)), 3, 0, 0)], window=11.7)
        held = {row: groups[p] for row, p in enumerate(metadata.prompt_ids.tolist())}
        write_in_flight(
            tmp_path, [StepRollouts(SELECTION, 5, complete=CompleteRollouts(held, metadata, METRICS, ()))], world
        )
        return metadata

    [metadata] = as_ranks(1, write)
    [batch] = as_ranks(1, lambda world: read(world, tmp_path))
    np.testing.assert_array_equal(batch.complete.metadata.further_lengths, metadata.further_lengths)
    assert metadata.further_lengths.shape[2] == 2
    assert all(same_group(group, cut(group.prompt.id)) for group in batch.complete.held.values())


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3)])
def test_roles_come_back_with_their_rewards(writers: int, readers: int, tmp_path: Path) -> None:
    def in_roles(prompt: int) -> Group:
        group = group_of(prompt)
        masks = [completion.loss_mask for completion in group.completions]
        said_by = [np.where(mask, np.arange(len(mask)) % 2, -1).astype(np.int8) for mask in masks]
        completions = (replace(c, segments=said) for c, said in zip(group.completions, said_by, strict=True))
        return replace(group, completions=tuple(completions))

    def write(world: World) -> StepMetadata:
        groups = {prompt: in_roles(prompt) for prompt in PROMPTS[world.rank :: world.size]}
        rewards = [np.random.default_rng(prompt).random((3, 2)) for prompt in groups]
        part = metadata_of(list(groups.values()), np.ones(len(groups)), 3, 2, world.rank, role_rewards=rewards)
        metadata = gather_metadata(world.gather(part), window=11.7)
        held = {row: groups[p] for row, p in enumerate(metadata.prompt_ids.tolist()) if p in groups}
        batch = StepRollouts(SELECTION, 5, complete=CompleteRollouts(held, metadata, METRICS, ()))
        write_in_flight(tmp_path, [batch], world)
        return metadata

    metadata = as_ranks(writers, write)[0]
    for batch in as_ranks(readers, lambda world: read(world, tmp_path)):
        np.testing.assert_array_equal(batch.complete.metadata.segments, metadata.segments)
        for row, group in batch.complete.held.items():
            assert same_group(group, in_roles(int(metadata.prompt_ids[row])))
        assert [fits(batch, roles=roles) for roles in (("a", "b"), ())] == [True, False]


def test_forks_come_back_with_their_weights(tmp_path: Path) -> None:
    """And rollouts are of use to a run whose trees are as large, and to no other."""
    world, batch = world_of(1, 0), batch_of(world_of(1, 0))
    held = {
        row: replace(
            g,
            completions=tuple(
                replace(c, segments=np.zeros(len(c.token_ids), np.int8), weights=(1.0, 1.0, i / 3))
                for i, c in enumerate(g.completions)
            ),
        )
        for row, g in batch.complete.held.items()
    }
    segments = np.zeros((len(PROMPTS), 3, 3), SEGMENT)
    segments["tokens"], segments["weight"] = np.arange(3), np.random.default_rng(0).random(segments.shape)
    metadata = replace(batch.complete.metadata, segments=segments)
    write_in_flight(tmp_path, [replace(batch, complete=replace(batch.complete, held=held, metadata=metadata))], world)
    back = read(world, tmp_path)
    np.testing.assert_array_equal(back.complete.metadata.segments, segments)
    for row, group in back.complete.held.items():
        assert same_group(group, held[row])
    branches = (BranchConfig(at=1), BranchConfig(at=2))
    trees = [TreeConfig(roots=2, branches=branches[:levels]) for levels in (0, 1, 2)]
    assert [fits(back, tree=tree) for tree in trees] == [False, False, True]
    assert [fits(batch, tree=tree) for tree in trees] == [True, False, False]
    assert not fits(back, roles=("three", "segments", "too"))


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-99])])
def test_a_damaged_file_is_told_on_every_rank(damage: Callable[[Path], None], tmp_path: Path) -> None:
    as_ranks(2, lambda world: wrote(world, tmp_path))
    damage(tmp_path / "rollouts" / "rank_00001.npz")

    def on_a_rank(world: World) -> str:
        with pytest.raises(UserError, match="cannot be read") as caught:
            read(world, tmp_path)
        return str(caught.value)

    one, other = as_ranks(2, on_a_rank)
    assert one == other and one.startswith(f"run.dir = {tmp_path}: ")


@pytest.mark.parametrize("pool", [pool_of(8), pool_of(10)[::-1]], ids=["fewer prompts", "others"])
def test_another_pool_is_refused(pool: list, tmp_path: Path) -> None:
    wrote(world_of(1, 0), tmp_path)
    with pytest.raises(UserError, match="no such prompt is in the pool"):
        read_in_flight(tmp_path, pool, world_of(1, 0), 5)

"""Rollouts in flight come back from a checkpoint bit by bit, with any number of ranks, each group
on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.types import Completion, Group, Selection, StepMetadata
from megatron_dppo.rollout.engine import PartialRollout
from megatron_dppo.rollout.metadata import build_metadata
from megatron_dppo.rollout.step_rollouts import (
    CompleteRollouts,
    StepRollouts,
    read_in_flight,
    write_in_flight,
)
from megatron_dppo.settings import load_config
from tests.rollout.scripted import as_ranks, pool_of, world_of

PROMPTS = (8, 1, 5, 3, 7)
"""In the order of their selection; the metadata has them sorted."""
SELECTION = Selection(np.array([*PROMPTS, 2]), np.array([0.1, 0.2, 1 / 3, 0.7, 1.0, 0.9]), 12)
METRICS = {"rollout/reward": 0.1 + 0.2, "rollout/generated_tokens": 51.0}
SEGMENTS = {"roles": 2, "forks": 3}


def group_of(prompt: int, kind: str = "plain") -> Group:
    """Return completions, some of one version and some of two, with log-probabilities of every
    bit."""
    rng = np.random.default_rng(prompt)
    completions = []
    for sample, length in enumerate(rng.integers(3, 9, 3).tolist()):
        mask = np.arange(length) != 1 + sample
        kept = [range(token) for token in rng.integers(1, 9, length) * mask]
        fields: dict[str, Any] = {
            "plain": {},
            "routed": {"routing": rng.integers(0, 300, (length + sample, 3, 2)).astype(np.uint16)},
            "masked": {"sampling_mask": SamplingMask.from_lists(kept)},
            "sequences": {"starts": [(), (1,), (1, 2)][sample] if prompt % 2 else ()},
            "roles": {"segments": np.where(mask, np.arange(length) % 2, -1).astype(np.int8)},
            "forks": {"segments": np.arange(length, dtype=np.int8) // 3},
            "taught": {"teacher_logprobs": -rng.random(length).astype(np.float32)}
            if prompt % 2
            else {},
        }[kind]
        first = int(rng.integers(1, length))
        mixed = np.repeat(np.array([3, 4], np.int32), [first, length - first])
        completion = Completion(
            rng.integers(3, 99, length).astype(np.int32),
            np.log(rng.random(length)).astype(np.float32),
            mask,
            np.full(length, 4, np.int32) if sample == 1 else mixed,
            "length" if rng.random() < 0.5 else "stop",
            **fields,
        )
        completions.append(completion)
    return Group(pool_of(10)[prompt], tuple(completions), rng.random(3))


def complete_of(
    world: World, kind: str = "plain", prompts: tuple[int, ...] = PROMPTS
) -> StepRollouts:
    """Return complete rollouts of step 5, of which each rank holds a share."""
    groups = {prompt: group_of(prompt, kind) for prompt in prompts[world.rank :: world.size]}
    rng = np.random.default_rng(0)
    rewards = [rng.random((3, SEGMENTS.get(kind, 0))) for _ in groups]
    inclusion = np.array([*groups]) / 7.0
    part = build_metadata(
        [*groups.values()], inclusion, 3, SEGMENTS.get(kind, 0), world.rank, role_rewards=rewards
    )
    part = replace(part, log_ratios=rng.random(part.log_ratios.shape))
    metadata = gather_metadata(world.gather(part), window=11.7)
    held = {row: groups[p] for row, p in enumerate(metadata.prompt_ids.tolist()) if p in groups}
    return StepRollouts(
        SELECTION, 5, complete=CompleteRollouts(held, metadata, METRICS, ("a note",))
    )


def write(world: World, place: Path, kind: str = "plain") -> StepRollouts:
    batch = complete_of(world, kind)
    write_in_flight(place, [batch], world)
    return batch


def read(world: World, place: Path) -> StepRollouts:
    [batch] = read_in_flight(place, pool_of(10), world, 5)
    return batch


def bits_of(completion: Completion) -> list[Any]:
    mask = completion.sampling_mask
    fields = set(Completion.__slots__) - {"sampling_mask"}
    values = [getattr(completion, field) for field in sorted(fields)]
    values += [mask.counts, mask.token_ids] if mask else [None]
    return [(v.dtype, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]


@pytest.mark.parametrize(
    ("kind", "writers", "readers"),
    [
        ("plain", 3, 1),
        ("routed", 2, 7),
        ("masked", 2, 3),
        ("sequences", 1, 1),
        ("roles", 2, 3),
        ("forks", 1, 1),
        ("taught", 2, 3),
    ],
)
def test_groups_come_back_once_and_bit_by_bit(
    kind: str, writers: int, readers: int, tmp_path: Path
) -> None:
    written = as_ranks(writers, lambda world: write(world, tmp_path, kind))
    back = as_ranks(readers, lambda world: read(world, tmp_path))
    expected = written[0].complete.metadata
    for rank, batch in enumerate(back):
        known = batch.complete.metadata
        assert (batch.step, batch.selection.window, known.window) == (5, 12, 11.7)
        assert (batch.complete.metrics, batch.complete.notes) == (METRICS, ("a note",))
        np.testing.assert_array_equal(batch.selection.prompt_ids, SELECTION.prompt_ids)
        np.testing.assert_array_equal(batch.selection.inclusion, SELECTION.inclusion)
        for field in set(StepMetadata.__slots__) - {"owners"}:
            np.testing.assert_array_equal(getattr(known, field), getattr(expected, field))
        assert sorted(batch.complete.held) == np.flatnonzero(known.owners == rank).tolist()
        for row, group in batch.complete.held.items():
            wanted = group_of(int(expected.prompt_ids[row]), kind)
            assert group.prompt.id == wanted.prompt.id
            np.testing.assert_array_equal(group.rewards, wanted.rewards)
            assert [*map(bits_of, group.completions)] == [*map(bits_of, wanted.completions)]
    assert sorted(row for batch in back for row in batch.complete.held) == list(range(len(PROMPTS)))


ROLES = ["rollout.conversation=f.py:f", "rollout.roles=[a,b]"]
TREE = "rollout.tree.roots=2", "rollout.tree.branches=[{at: 1}, {at: 2}]"
TEACHER = "loss.distillation.teachers={here: WHO}"
ODD, EVEN = (1,), (8,)
"""Of the prompts, a teacher has read the odd ones."""


@pytest.mark.parametrize(
    ("kind", "prompts", "settings", "fits"),
    [
        ("plain", PROMPTS, ["rollout.samples_per_prompt=4"], False),
        ("roles", PROMPTS, ROLES, True),
        ("plain", PROMPTS, ROLES, False),
        ("forks", PROMPTS, TREE, True),
        ("plain", PROMPTS, TREE, False),
        ("taught", ODD, [TEACHER.replace("WHO", "'http://t:1'")], True),
        ("taught", EVEN, [TEACHER.replace("WHO", "'http://t:1'")], False),
        ("taught", ODD, [TEACHER.replace("WHO", "null")], False),
        ("taught", EVEN, [TEACHER.replace("WHO", "null")], True),
        ("taught", EVEN, [TEACHER.replace("WHO", "T")], False),
    ],
)
def test_rollouts_fit_the_settings_that_asked_for_them(
    kind: str, prompts: tuple[int, ...], settings: list[str], fits: bool
) -> None:
    config = load_config(None, ["rollout.samples_per_prompt=3", *settings])
    assert (
        complete_of(world_of(1, 0), kind, prompts).can_resume(
            config, min_version=0, needs_routing=False
        )
        == fits
    )


def test_rollouts_fit_by_age_and_routing() -> None:
    config = load_config(None, ["rollout.samples_per_prompt=3"])
    plain, routed = (complete_of(world_of(1, 0), kind) for kind in ("plain", "routed"))
    assert [
        plain.can_resume(config, min_version=oldest, needs_routing=False) for oldest in (3, 4)
    ] == [True, False]
    assert [
        each.can_resume(config, min_version=0, needs_routing=True) for each in (plain, routed)
    ] == [False, True]


@pytest.mark.parametrize(
    ("kind", "settings", "fits"),
    [
        ("masked", ["rollout.top_k=9"], True),
        ("masked", [], False),
        ("plain", ["rollout.top_k=9"], False),
    ],
)
def test_rollouts_with_other_log_probabilities_are_not_resumed(
    kind: str, settings: list[str], fits: bool
) -> None:
    """Whole and in parts."""
    config = load_config(None, ["rollout.samples_per_prompt=3", *settings])
    parts = [PartialRollout(8, 0, group_of(8, kind).completions[0], True)]
    for rollouts in (complete_of(world_of(1, 0), kind), StepRollouts(SELECTION, 5, partial=parts)):
        assert rollouts.can_resume(config, min_version=0, needs_routing=False) == fits


def test_completion_without_a_sampled_token_needs_no_mask() -> None:
    """As of an agent that failed."""
    config = load_config(None, ["rollout.samples_per_prompt=3", "rollout.top_k=9"])
    plain = group_of(8).completions[0]
    failed = replace(plain, loss_mask=np.zeros_like(plain.loss_mask))
    parts = [PartialRollout(8, 0, failed, True)]
    rollouts = StepRollouts(SELECTION, 5, partial=parts)
    assert rollouts.can_resume(config, min_version=0, needs_routing=False)


def test_rollouts_of_a_version_without_sampling_masks_come_back(tmp_path: Path) -> None:
    written = write(world := world_of(1, 0), tmp_path)
    for file in tmp_path.rglob("*.npz"):
        with np.load(file) as stored:
            older = {name: stored[name] for name in stored.files if not name.startswith("mask_")}
        np.savez(file, **older)
    back = read(world, tmp_path)
    assert written.complete is not None and back.complete is not None
    for row, group in written.complete.held.items():
        found = back.complete.held[row].completions
        assert list(map(bits_of, found)) == list(map(bits_of, group.completions))


def test_steps_come_back_in_their_order_and_partial_rollouts_to_their_rank(tmp_path: Path) -> None:
    """Complete, broken off, and drawn. Some prompts of the second have all of their completions,
    some one, and some none; a request that was aborted while it waited has no routing."""
    drawn = Selection(np.array([4, 2]), np.array([0.3, 1.0]), 2)

    def broken_off(prompt: int) -> list[PartialRollout]:
        first, *others = group_of(prompt, "routed").completions
        completions = replace(first, routing=None), *others
        return [PartialRollout(prompt, slot, c, slot == 1) for slot, c in enumerate(completions)][
            : prompt % 4
        ]

    def write_steps(world: World) -> None:
        mine = SELECTION.prompt_ids[world.rank :: world.size].tolist()
        partial = StepRollouts(
            SELECTION, 6, partial=[one for prompt in mine for one in broken_off(prompt)]
        )
        write_in_flight(tmp_path, [complete_of(world), partial, StepRollouts(drawn, 7)], world)

    as_ranks(3, write_steps)
    backs = as_ranks(2, lambda world: read_in_flight(tmp_path, pool_of(10), world, 5))
    for rank, (complete, partial, last) in enumerate(backs):
        assert (complete.step, partial.step, last.step) == (5, 6, 7)
        assert complete.complete is not None
        assert partial.complete is last.complete is last.partial is None
        np.testing.assert_array_equal(partial.selection.prompt_ids, SELECTION.prompt_ids)
        np.testing.assert_array_equal(last.selection.inclusion, drawn.inclusion)
        expected = [
            one for prompt in SELECTION.prompt_ids[rank::2].tolist() for one in broken_off(prompt)
        ]
        ours, expected = (
            sorted((one.prompt, one.slot, one.ended, bits_of(one.completion)) for one in each)
            for each in (partial.partial, expected)
        )
        assert ours == expected
    partial = backs[0][1]
    for oldest, limit, fits in ((3, 9, True), (4, 9, False), (3, 3, False)):
        config = load_config(None, [f"rollout.max_response_tokens={limit}"])
        assert partial.can_resume(config, min_version=oldest, needs_routing=False) == fits
    assert partial.can_resume(load_config(None, []), min_version=0, needs_routing=True)


def test_checkpoint_without_rollouts_has_none(tmp_path: Path) -> None:
    assert read_in_flight(tmp_path, pool_of(10), world_of(1, 0), 5) == []


def test_step_of_failed_groups_alone_comes_back_empty(tmp_path: Path) -> None:
    write_in_flight(tmp_path, [complete_of(world := world_of(1, 0), prompts=())], world)
    back = read(world, tmp_path).complete
    assert (back.held, back.metadata.rewards.shape, back.metadata.window) == ({}, (0, 3), 11.7)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-99])]
)
def test_damaged_file_is_refused_on_every_rank(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    as_ranks(2, lambda world: write(world, tmp_path))
    damage(tmp_path / "rollouts" / "rank_00001.npz")

    def on_a_rank(world: World) -> str:
        with pytest.raises(UserError, match="cannot be read") as caught:
            read(world, tmp_path)
        return str(caught.value)

    one, other = as_ranks(2, on_a_rank)
    assert one == other and one.startswith(f"run.dir = {tmp_path}: ")


@pytest.mark.parametrize("pool", [pool_of(8), pool_of(10)[::-1]], ids=["fewer prompts", "others"])
def test_another_pool_is_refused(pool: list, tmp_path: Path) -> None:
    write(world_of(1, 0), tmp_path)
    with pytest.raises(UserError, match="no such prompt is in the pool"):
        read_in_flight(tmp_path, pool, world_of(1, 0), 5)

"""Tokens move once: every rank gets exactly the rows of its replica's packs, whoever generated them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.parallel.exchange import deliver
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.types import Completion, Group, MinibatchPlan, Prompt, RoutingShape, TrainingSamples, VersionSpan
from tests.ranks import RankPool

PROMPT_LENGTHS = (3, 1, 5)
RESPONSE_LENGTHS = ((4, 1), (2, 7), (6, 3))
OWNERS = (1, 0, 1)
ADVANTAGES = np.array([1.0, 1 / 3, -2 / 7])
"""Of the segments of sample 1; of sample k, k times as large."""
SHAPE = RoutingShape(layers=5, per_token=3, experts=300)


def routing_of(index: int, sample: int) -> np.ndarray:
    """Of all tokens but the last, and of fewer where the policy was given the last ones."""
    tokens = PROMPT_LENGTHS[index] + RESPONSE_LENGTHS[index][sample] - 1 - sample
    rng = np.random.default_rng([index, sample])
    return rng.integers(0, SHAPE.experts, (tokens, SHAPE.layers, SHAPE.per_token)).astype(SHAPE.dtype)


def roles_of(index: int, sample: int) -> np.ndarray:
    """−1 where the policy sampled nothing."""
    tokens = np.arange(RESPONSE_LENGTHS[index][sample])
    return np.where(tokens % 3 == index, -1, tokens % 2).astype(np.int8)


def segments_of(index: int, sample: int) -> np.ndarray:
    """Those of a tree's leaf, all of whose tokens were sampled."""
    return np.minimum(np.arange(RESPONSE_LENGTHS[index][sample]) // (1 + index), 2).astype(np.int8)


def group(index: int, segments: Callable[[int, int], np.ndarray] | None = None) -> Group:
    prompt = Prompt(index, np.arange(PROMPT_LENGTHS[index], dtype=np.int32) + 100 * index, "", "")
    completions = tuple(
        Completion(
            np.arange(length, dtype=np.int32) + 1000 * index + 100 * sample,
            -np.arange(length, dtype=np.float32) / 7 - index - sample,
            np.arange(length) % 3 != index,
            (VersionSpan(0, length),),
            "stop",
            routing_of(index, sample),
            teacher_logprobs=None if index == 1 else np.arange(length, dtype=np.float32) - 100 * index - sample,
            segments=segments(index, sample) if segments else None,
        )
        for sample, length in enumerate(RESPONSE_LENGTHS[index])
    )
    return Group(prompt, completions, np.zeros(2))


def plan() -> MinibatchPlan:
    """Five of six completions over two replicas, out of order; the second replica has an empty pack."""
    groups, completions = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 1])
    kept = TrainingSamples(
        group=groups,
        completion=completions,
        sequence=np.zeros(5, np.int64),
        owner=np.array(OWNERS)[groups],
        version=np.arange(5) + 20,
        prompt_length=np.array(PROMPT_LENGTHS)[groups],
        response_length=np.array(RESPONSE_LENGTHS)[groups, completions],
        shared_length=np.array([0, 2, 0, 1, 0]),
        advantage=np.arange(5.0)[:, None] / 3,
        teacher=np.full(5, -1),
        weight=np.ones(5),
        scale=np.arange(5.0) / 10,
    )
    return MinibatchPlan(kept, 1.0, 32, (((4, 0), (2,)), ((1, 3), ())))


def received(rank: int, size: int, layout: LayoutConfig, routed: bool) -> tuple[int, list, np.ndarray]:
    world = initialize(layout, seed=1, timeout_s=60.0)
    held = {i: group(i) for i in range(3) if OWNERS[i] == rank}
    layers = [np.arange(rank, SHAPE.layers, 2) for rank in range(size)]  # some have more of them than others
    return (
        world.dp_rank,
        deliver(world, plan(), held, SHAPE if routed else None, layers, taught=routed),
        layers[rank],
    )


def received_segments(rank: int, size: int, segments: Callable[[int, int], np.ndarray]) -> tuple[int, list]:
    world = initialize(LayoutConfig(dp=2), seed=1, timeout_s=60.0)
    held = {i: group(i, segments) for i in range(3) if OWNERS[i] == rank}
    given = plan()
    samples = replace(given.samples, advantage=np.outer(np.arange(5), ADVANTAGES))
    return world.dp_rank, deliver(world, replace(given, samples=samples), held)


@pytest.mark.parametrize("segments", [roles_of, segments_of])
def test_tokens_keep_their_segments_on_the_way(ranks: RankPool, segments: Callable[[int, int], np.ndarray]) -> None:
    for replica, packs in ranks.run(2, received_segments, segments):
        for pack, rows in zip(packs, plan().packs[replica], strict=True):
            for got, row in zip(pack, rows, strict=True):
                samples = plan().samples
                expected = segments(int(samples.group[row]), int(samples.completion[row]))
                np.testing.assert_array_equal(got.loss_mask, expected >= 0)
                sampled = np.flatnonzero(got.loss_mask)
                np.testing.assert_array_equal(got.advantage[sampled], (row * ADVANTAGES)[expected[sampled]])


def test_every_rank_of_a_replica_gets_its_samples_in_the_planned_order(ranks: RankPool) -> None:
    four = LayoutConfig(tp=2, dp=2), LayoutConfig(pp=2, dp=2)
    for size, layout, routed in ((2, LayoutConfig(dp=2), True), (4, four[0], False), (4, four[1], True)):
        for replica, packs, layers in ranks.run(size, received, layout, routed):
            expected = plan().packs[replica]
            assert [len(pack) for pack in packs] == [len(pack) for pack in expected]
            for pack, rows in zip(packs, expected, strict=True):
                for got, row in zip(pack, rows, strict=True):
                    source = group(int(plan().samples.group[row]))
                    completion = source.completions[int(plan().samples.completion[row])]
                    np.testing.assert_array_equal(got.prompt_ids, source.prompt.token_ids)
                    np.testing.assert_array_equal(got.response_ids, completion.token_ids)
                    np.testing.assert_array_equal(got.engine_logprobs, completion.logprobs)
                    np.testing.assert_array_equal(got.loss_mask, completion.loss_mask)
                    assert (got.scale, got.version) == (row / 10, row + 20)
                    assert got.advantage == row / 3
                    if not routed:
                        assert got.routing is None and got.teacher_logprobs is None
                        continue
                    said = completion.teacher_logprobs
                    none = np.full(len(got.response_ids), np.nan, np.float32)
                    np.testing.assert_array_equal(got.teacher_logprobs, none if said is None else said)
                    known = completion.routing[:, layers]
                    np.testing.assert_array_equal(got.routing[: len(known)], known)
                    assert len(got.routing) == len(got.prompt_ids) + len(got.response_ids) - 1
                    assert (got.routing[len(known) :] == 65535).all()

"""Tokens move once: every rank gets the rows of its replica's packs, whoever generated them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.parallel.exchange import deliver
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.types import Completion, Group, MinibatchPlan, Prompt, RoutingShape, TrainingSamples, VersionSpan

PROMPT_LENGTHS = (3, 1, 5)
RESPONSE_LENGTHS = ((4, 1), (2, 7), (6, 3))
OWNERS = (1, 0, 1)
ADVANTAGES = np.array([1.0, 1 / 3, -2 / 7])
"""Of the segments of sample 1; those of sample k are k times as large."""
SHAPE = RoutingShape(layers=5, per_token=3, experts=300)
Segments = Callable[[int, int], np.ndarray]


def routing_of(index: int, sample: int) -> np.ndarray:
    """Return the experts of all tokens but the last, and of fewer where the policy did not read the last ones."""
    tokens = PROMPT_LENGTHS[index] + RESPONSE_LENGTHS[index][sample] - 1 - sample
    rng = np.random.default_rng([index, sample])
    return rng.integers(0, SHAPE.experts, (tokens, SHAPE.layers, SHAPE.per_token)).astype(SHAPE.dtype)


def roles_of(index: int, sample: int) -> np.ndarray:
    """Return two alternating roles, and −1 for tokens that the policy did not sample."""
    tokens = np.arange(RESPONSE_LENGTHS[index][sample])
    return np.where(tokens % 3 == index, -1, tokens % 2).astype(np.int8)


def group(index: int, segments: Segments | None) -> Group:
    prompt = Prompt(index, np.arange(PROMPT_LENGTHS[index], dtype=np.int32) + 100 * index, "", "")
    completions = tuple(
        Completion(
            np.arange(length, dtype=np.int32) + 1000 * index + 100 * sample,
            -np.arange(length, dtype=np.float32) / 7 - index - sample,
            np.arange(length) % 3 != index if segments is None else segments(index, sample) >= 0,
            (VersionSpan(0, length),),
            "stop",
            routing_of(index, sample),
            teacher_logprobs=None if index == 1 else np.arange(length, dtype=np.float32) - 100 * index - sample,
            segments=segments and segments(index, sample),
        )
        for sample, length in enumerate(RESPONSE_LENGTHS[index])
    )
    return Group(prompt, completions, np.zeros(2))


def plan(segments: Segments | None) -> MinibatchPlan:
    """Return five of six completions over two replicas, out of order; the second replica has an empty pack."""
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
        advantage=np.outer(np.arange(5), ADVANTAGES if segments else ADVANTAGES[:1]),
        teacher=np.full(5, -1),
        weight=np.ones(5),
        scale=np.arange(5.0) / 10,
    )
    return MinibatchPlan(kept, 1.0, 32, (((4, 0), (2,)), ((1, 3), ())))


def receive(
    rank: int, size: int, layout: LayoutConfig, segments: Segments | None, routed: bool
) -> tuple[int, list[list[TrainingSample]], np.ndarray]:
    world = initialize(layout, seed=1, timeout_s=60.0)
    held = {i: group(i, segments) for i in range(3) if OWNERS[i] == rank}
    layers = [np.arange(rank, SHAPE.layers, 2) for rank in range(size)]  # some ranks have more layers than others
    packs = deliver(world, plan(segments), held, SHAPE if routed else None, layers, taught=routed)
    return world.dp_rank, packs, layers[rank]


@pytest.mark.parametrize(
    ("layout", "segments", "routed"),
    [
        (LayoutConfig(pp=2, dp=2), None, True),
        (LayoutConfig(dp=2), roles_of, False),
    ],
    ids=["routing and teacher", "segments"],
)
def test_ranks_get_the_samples_of_their_replica_in_order(ranks, layout, segments, routed):
    given = plan(segments)
    for replica, packs, layers in ranks.run(layout.pp * 2, receive, layout, segments, routed):
        expected = given.packs[replica]
        assert [len(pack) for pack in packs] == [len(pack) for pack in expected]
        for row, got in zip(chain(*expected), chain(*packs), strict=True):
            source = group(int(given.samples.group[row]), segments)
            completion = source.completions[int(given.samples.completion[row])]
            np.testing.assert_array_equal(got.prompt_ids, source.prompt.token_ids)
            np.testing.assert_array_equal(got.response_ids, completion.token_ids)
            np.testing.assert_array_equal(got.engine_logprobs, completion.logprobs)
            np.testing.assert_array_equal(got.loss_mask, completion.loss_mask)
            assert (got.scale, got.version, got.shared) == (row / 10, row + 20, given.samples.shared_length[row])
            of_token = 0 if segments is None else completion.segments[got.loss_mask]
            of_sampled = got.advantage if segments is None else got.advantage[got.loss_mask]
            np.testing.assert_array_equal(of_sampled, (row * ADVANTAGES)[of_token])
            if not routed:
                assert got.routing is got.teacher_logprobs is None
                continue
            nan = np.full(len(got.response_ids), np.nan, np.float32)
            known = nan if completion.teacher_logprobs is None else completion.teacher_logprobs
            np.testing.assert_array_equal(got.teacher_logprobs, known)
            read = completion.routing[:, layers]
            np.testing.assert_array_equal(got.routing[: len(read)], read)
            assert len(got.routing) == len(got.prompt_ids) + len(got.response_ids) - 1
            assert (got.routing[len(read) :] == 65535).all()

"""Tokens move once: every rank gets the rows of its replica's packs, whoever generated them."""

from itertools import chain

import numpy as np

from megatron_dppo.config import LayoutConfig
from megatron_dppo.parallel.exchange import exchange_samples
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.types import Completion, Group, MinibatchPlan, Prompt, RoutingShape

PROMPT_LENGTHS = (3, 1, 5)
RESPONSE_LENGTHS = ((4, 1), (2, 7), (6, 3))
OWNERS = (1, 0, 1)
ADVANTAGES = np.array([1.0, 1 / 3, -2 / 7])
"""Of the segments of sample 1; those of sample k are k times as large."""
SHAPE = RoutingShape(layers=5, per_token=3, experts=300)


def routing_of(index: int, sample: int) -> np.ndarray:
    """Return the experts of all tokens but the last, and of fewer where the policy did not read the
    last ones."""
    tokens = PROMPT_LENGTHS[index] + RESPONSE_LENGTHS[index][sample] - 1 - sample
    rng = np.random.default_rng([index, sample])
    return rng.integers(0, SHAPE.experts, (tokens, SHAPE.layers, SHAPE.per_token)).astype(
        SHAPE.dtype
    )


def completion(index: int, sample: int) -> Completion:
    """Return a completion of two alternating roles, in which every third token is not the policy's
    (-1)."""
    length = RESPONSE_LENGTHS[index][sample]
    tokens, number = np.arange(length), 1000 * index + 100 * sample
    segments = np.where(tokens % 3 == index, -1, tokens % 2).astype(np.int8)
    return Completion(
        tokens.astype(np.int32) + number,
        -tokens.astype(np.float32) / 7 - number,
        segments >= 0,
        np.full(length, 0, np.int32),
        "stop",
        routing_of(index, sample),
        teacher_logprobs=None if index == 1 else tokens.astype(np.float32) - number,
        segments=segments,
    )


def group(index: int) -> Group:
    prompt = Prompt(index, np.arange(PROMPT_LENGTHS[index], dtype=np.int32) + 100 * index, "", "")
    return Group(prompt, (completion(index, 0), completion(index, 1)), np.zeros(2))


def plan() -> MinibatchPlan:
    """Return five of six completions over two replicas, out of order; the second replica has an
    empty pack."""
    groups, completions = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 1])
    return MinibatchPlan(
        group=groups,
        completion=completions,
        sequence=np.zeros(5, np.int64),
        owner=np.array(OWNERS)[groups],
        version=np.arange(5) + 20,
        prompt_length=np.array(PROMPT_LENGTHS)[groups],
        response_length=np.array(RESPONSE_LENGTHS)[groups, completions],
        shared_length=np.array([0, 2, 0, 1, 0]),
        advantage=np.outer(np.arange(5), ADVANTAGES),
        teacher=np.full(5, -1),
        weight=np.ones(5),
        scale=np.arange(5.0) / 10,
        normaliser=1.0,
        capacity=32,
        packs=(((4, 0), (2,)), ((1, 3), ())),
    )


def receive(
    rank: int, size: int, layout: LayoutConfig
) -> tuple[int, list[list[TrainingSample]], np.ndarray]:
    world = initialize(layout, seed=1, timeout_s=60.0)
    held = {i: group(i) for i in range(3) if OWNERS[i] == rank}
    layers = [
        np.arange(rank, SHAPE.layers, 2) for rank in range(size)
    ]  # some ranks have more layers than others
    return world.dp_rank, exchange_samples(world, plan(), held, SHAPE, layers), layers[rank]


def test_ranks_get_the_samples_of_their_replica_in_order(ranks):
    given = plan()
    for replica, packs, layers in ranks.run(4, receive, LayoutConfig(pp=2, dp=2)):
        expected = given.packs[replica]
        assert [len(pack) for pack in packs] == [len(pack) for pack in expected]
        for row, got in zip(chain(*expected), chain(*packs), strict=True):
            index, sample = int(given.group[row]), int(given.completion[row])
            source, sent = group(index), completion(index, sample)
            for ours, theirs in (
                (got.prompt_ids, source.prompt.token_ids),
                (got.response_ids, sent.token_ids),
                (got.engine_logprobs, sent.logprobs),
                (got.loss_mask, sent.loss_mask),
                (got.advantage[got.loss_mask], row * ADVANTAGES[sent.segments[got.loss_mask]]),
                (got.teacher_logprobs, sent.teacher_logprobs),
                (got.routing, sent.routing[:, layers]),
            ):
                np.testing.assert_array_equal(ours, theirs)
            assert (got.scale, got.version, got.shared) == (
                row / 10,
                row + 20,
                given.shared_length[row],
            )

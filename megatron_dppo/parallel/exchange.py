"""The one journey of a step's tokens: from the rank that generated them straight to the ranks that train on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.parallel.world import World
from megatron_dppo.rl.pack import PackedRow
from megatron_dppo.rl.types import Completion, Group, MinibatchPlan, Rows


@dataclass(frozen=True, slots=True)
class _Route:
    """The rows that one rank sends to another, in the order in which the receiver trains on them."""

    rows: list[int]
    words: int
    """Length of their encoding, in int32."""


def deliver(world: World, plan: MinibatchPlan, held: Mapping[int, Group]) -> list[list[PackedRow]]:
    """Send the kept rows of a minibatch to their replicas. Collective over all ranks.

    Every length is known from the plan, so one all-to-all carries all: token ids, and log-probabilities bit-cast.

    Args:
        world: this rank's place.
        plan: the same on every rank.
        held: the groups that this rank generated, by prompt row of the step's metadata.

    Returns:
        The rows of each pack that this rank trains on, in the plan's order.
    """
    mine = [row for pack in plan.packs[world.dp_rank] for row in pack]
    outgoing = [_route(plan.rows, world.rank, [r for p in plan.packs[d] for r in p]) for d in world.replica_of]
    incoming = [_route(plan.rows, source, mine) for source in range(world.size)]
    parts = [_encode(plan.rows, row, held) for route in outgoing for row in route.rows]
    sent = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *parts]))
    received = torch.empty(sum(route.words for route in incoming), dtype=torch.int32)
    if world.size == 1:
        received = sent
    else:
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[route.words for route in incoming],
            input_split_sizes=[route.words for route in outgoing],
            group=world.control,
        )
    by_row = dict(_decode(plan.rows, [row for route in incoming for row in route.rows], received.numpy()))
    return [[by_row[row] for row in pack] for pack in plan.packs[world.dp_rank]]


def _route(rows: Rows, source: int, wanted: list[int]) -> _Route:
    chosen = [row for row in wanted if rows.owner[row] == source]
    words = sum(int(rows.prompt_length[row] + 2 * rows.response_length[row]) for row in chosen)
    return _Route(chosen, words)


def _encode(rows: Rows, row: int, held: Mapping[int, Group]) -> np.ndarray:
    group = held[int(rows.group[row])]
    completion: Completion = group.completions[int(rows.sample[row])]
    return np.concatenate([group.prompt.token_ids, completion.token_ids, completion.logprobs.view(np.int32)])


def _decode(rows: Rows, order: list[int], words: np.ndarray) -> Iterator[tuple[int, PackedRow]]:
    position = 0
    for row in order:
        prompt, response = int(rows.prompt_length[row]), int(rows.response_length[row])
        a, b, c = position + prompt, position + prompt + response, position + prompt + 2 * response
        yield (
            row,
            PackedRow(
                prompt_ids=words[position:a],
                response_ids=words[a:b],
                engine_logprobs=words[b:c].view(np.float32),
                advantage=float(rows.advantage[row]),
                scale=float(rows.scale[row]),
                version=int(rows.version[row]),
            ),
        )
        position = c

"""Sends a minibatch's tokens from the ranks that generated them to the ranks that train on them, in one all-to-all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.parallel.world import World
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.sequences import prompt_and_response
from megatron_dppo.rl.types import (
    Completion,
    Group,
    Ints,
    MinibatchPlan,
    Routing,
    RoutingShape,
    TrainingSamples,
    unknown_expert,
)


@dataclass(frozen=True, slots=True)
class RoutingWanted:
    """Which part of the completions' routing each rank gets: the layers of its pipeline stage.

        RoutingWanted(RoutingShape(layers=4, per_token=2, experts=8), layers=([0, 1], [2, 3]))

    are two stages. A token's routing takes four bytes to each. The lists stand for arrays.
    """

    shape: RoutingShape
    layers: Sequence[Ints]
    """By rank: its layers, counted from 0 over the whole policy, ascending."""

    def rows(self, samples: TrainingSamples, k: int) -> int:
        """Tokens of a sample that have a routing: all but the last, which no engine reads."""
        return int(samples.prompt_length[k] + samples.response_length[k]) - 1

    def words(self, samples: TrainingSamples, k: int, rank: int) -> int:
        """Length of a sample's routing for a rank, in int32."""
        values = self.rows(samples, k) * len(self.layers[rank]) * self.shape.per_token
        return -(-values * self.shape.dtype.itemsize // 4)

    def encode(self, samples: TrainingSamples, k: int, rank: int, completion: Completion) -> np.ndarray:
        if completion.routing is None:
            raise ValueError("a completion without routing is to be trained on with loss.replay_routing = rollout")
        shape, dtype, rows = self.shape, self.shape.dtype, self.rows(samples, k)
        table = np.full((rows, len(self.layers[rank]), shape.per_token), unknown_expert(dtype), dtype)
        known = completion.routing[:rows, self.layers[rank]]
        table[: len(known)] = known
        flat = table.view(np.uint8).ravel()
        return np.pad(flat, (0, -len(flat) % 4)).view(np.int32)

    def decode(self, samples: TrainingSamples, k: int, rank: int, words: np.ndarray) -> Routing:
        shape = (self.rows(samples, k), len(self.layers[rank]), self.shape.per_token)
        return words.view(self.shape.dtype)[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True, slots=True)
class _Route:
    """The training samples that one rank sends to another, in the order in which the receiver trains on them."""

    samples: list[int]
    words: int
    """Length of their encoding, in int32."""


def deliver(
    world: World,
    plan: MinibatchPlan,
    held: Mapping[int, Group],
    routing: RoutingWanted | None = None,
    *,
    taught: bool = False,
) -> list[list[TrainingSample]]:
    """Send the training samples of a minibatch to their replicas. Collective over all ranks.

    Every length is known from the plan, so one all-to-all carries all: token ids, log-probabilities bit-cast, loss
    masks, four tokens a word, and, where they are wanted, the teacher's log-probabilities, and routing. A token's place
    in the mask has the number of its segment, from 1.

    Args:
        world: this rank's place.
        plan: the same on every rank.
        held: the groups that this rank generated, by their index in the step's metadata.
        routing: what of their routing goes to which rank; None: nothing.
        taught: whether servers teach, so that what they said of tokens goes along; NaN where they do not.

    Returns:
        The samples of each pack that this rank trains on, in the plan's order.
    """
    way = _Encoding(plan.samples, routing, taught)
    mine = [k for pack in plan.packs[world.dp_rank] for k in pack]
    outgoing = [
        way.route(world.rank, [k for pack in plan.packs[d] for k in pack], to) for to, d in enumerate(world.replica_of)
    ]
    incoming = [way.route(source, mine, world.rank) for source in range(world.size)]
    parts = [part for to, route in enumerate(outgoing) for k in route.samples for part in way.encode(k, held, to)]
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
    order = [k for route in incoming for k in route.samples]
    received_samples = dict(way.decode(order, received.numpy(), world.rank))
    return [[received_samples[k] for k in pack] for pack in plan.packs[world.dp_rank]]


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Samples as int32. ``k`` is the number of one."""

    samples: TrainingSamples
    routing: RoutingWanted | None
    taught: bool

    def route(self, source: int, wanted: list[int], to: int) -> _Route:
        chosen = [k for k in wanted if self.samples.owner[k] == source]
        words = sum(self._ends(k)[-1] for k in chosen)
        if self.routing is not None:
            words += sum(self.routing.words(self.samples, k, to) for k in chosen)
        return _Route(chosen, words)

    def encode(self, k: int, held: Mapping[int, Group], to: int) -> Iterator[np.ndarray]:
        samples, group = self.samples, held[int(self.samples.group[k])]
        completion: Completion = group.completions[int(samples.completion[k])]
        prompt, of = prompt_and_response(group.prompt.token_ids, completion, int(samples.sequence[k]))
        logprobs, mask, known = completion.logprobs[of], completion.loss_mask[of], completion.teacher_logprobs
        segments = mask.astype(np.int8) if completion.segments is None else completion.segments[of] + np.int8(1)
        yield from (prompt, completion.token_ids[of], logprobs.view(np.int32))
        if self.taught:
            yield (np.full_like(logprobs, np.nan) if known is None else known[of]).view(np.int32)
        yield np.pad(segments, (0, -len(segments) % 4)).view(np.int32)
        if self.routing is not None:
            yield self.routing.encode(samples, k, to, completion)

    def decode(self, order: list[int], words: np.ndarray, rank: int) -> Iterator[tuple[int, TrainingSample]]:
        samples, routing, position = self.samples, self.routing, 0
        for k in order:
            a, b, c, d, end = self._ends(k)
            part, position = words[position : position + end], position + end
            segments, advantage, table = part[d:].view(np.int8)[: b - a], samples.advantage[k], None
            if routing is not None:
                start, position = position, position + routing.words(samples, k, rank)
                table = routing.decode(samples, k, rank, words[start:position])
            sample = TrainingSample(
                prompt_ids=part[:a],
                response_ids=part[a:b],
                engine_logprobs=part[b:c].view(np.float32),
                teacher_logprobs=part[c:d].view(np.float32) if self.taught else None,
                loss_mask=segments > 0,
                advantage=advantage[segments - np.int8(1)] if len(advantage) > 1 else advantage[0],
                scale=float(samples.scale[k]),
                version=int(samples.version[k]),
                shared=int(samples.shared_length[k]),
                routing=table,
            )
            yield k, sample

    def _ends(self, k: int) -> tuple[int, ...]:
        """Where the parts of a sample's encoding end, in words: prompt, response, log-probabilities, those of its
        teacher, loss mask."""
        prompt, response = int(self.samples.prompt_length[k]), int(self.samples.response_length[k])
        return tuple(accumulate((prompt, response, response, response * self.taught, -(-response // 4))))

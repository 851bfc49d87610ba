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
    RoutingShape,
    TrainingSamples,
    unknown_expert,
)


def deliver(
    world: World,
    plan: MinibatchPlan,
    held: Mapping[int, Group],
    routing: RoutingShape | None = None,
    layers: Sequence[Ints] = (),
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
        routing: shape of the routing that goes along; None: none does.
        layers: by rank, those whose routing it gets, ascending: the layers of its pipeline stage.
        taught: whether servers teach, so that what they said of tokens goes along; NaN where they do not.

    Returns:
        The samples of each pack that this rank trains on, in the plan's order.
    """
    way = _Encoding(plan.samples, routing, layers, taught)
    packs = [[k for pack in plan.packs[replica] for k in pack] for replica in world.replica_of]
    outgoing = [way.owned(wanted, world.rank) for wanted in packs]
    incoming = [way.owned(packs[world.rank], source) for source in range(world.size)]
    parts = [part for to, samples in enumerate(outgoing) for k in samples for part in way.encode(k, held, to)]
    sent = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *parts]))
    sizes = [sum(way.ends(k, world.rank)[-1] for k in samples) for samples in incoming]
    received = torch.empty(sum(sizes), dtype=torch.int32)
    if world.size == 1:
        received = sent
    else:
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=sizes,
            input_split_sizes=[sum(way.ends(k, to)[-1] for k in samples) for to, samples in enumerate(outgoing)],
            group=world.control,
        )
    order = [k for samples in incoming for k in samples]
    received_samples = dict(way.decode(order, received.numpy(), world.rank))
    return [[received_samples[k] for k in pack] for pack in plan.packs[world.dp_rank]]


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Samples as int32. ``k`` is the number of one; the rest as in :func:`deliver`."""

    samples: TrainingSamples
    routing: RoutingShape | None
    layers: Sequence[Ints]
    taught: bool

    def owned(self, wanted: Sequence[int], rank: int) -> list[int]:
        """Those of the wanted samples whose tokens a rank holds."""
        return [k for k in wanted if self.samples.owner[k] == rank]

    def encode(self, k: int, held: Mapping[int, Group], to: int) -> Iterator[np.ndarray]:
        samples, group = self.samples, held[int(self.samples.group[k])]
        completion: Completion = group.completions[int(samples.completion[k])]
        prompt, of = prompt_and_response(group.prompt.token_ids, completion, int(samples.sequence[k]))
        logprobs, mask, known = completion.logprobs[of], completion.loss_mask[of], completion.teacher_logprobs
        segments = mask.astype(np.int8) if completion.segments is None else completion.segments[of] + np.int8(1)
        yield from (prompt, completion.token_ids[of], logprobs.view(np.int32))
        if self.taught:
            yield (np.full_like(logprobs, np.nan) if known is None else known[of]).view(np.int32)
        yield _words(segments)
        if self.routing is not None:
            if completion.routing is None:
                raise ValueError("a completion without routing is to be trained on with loss.replay_routing = rollout")
            dtype = self.routing.dtype
            table = np.full(self._routed(self.routing, k, to), unknown_expert(dtype), dtype)
            read = completion.routing[: len(table), self.layers[to]]
            table[: len(read)] = read
            yield _words(table.view(np.int8).ravel())

    def decode(self, order: list[int], words: np.ndarray, rank: int) -> Iterator[tuple[int, TrainingSample]]:
        samples, position = self.samples, 0
        for k in order:
            a, b, c, d, e, end = self.ends(k, rank)
            part, position = words[position : position + end], position + end
            segments, advantage, table = part[d:e].view(np.int8)[: b - a], samples.advantage[k], None
            if self.routing is not None:
                shape = self._routed(self.routing, k, rank)
                table = part[e:].view(self.routing.dtype)[: math.prod(shape)].reshape(shape)
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

    def ends(self, k: int, to: int) -> tuple[int, ...]:
        """Where the parts of a sample's encoding for a rank end, in words: prompt, response, log-probabilities, those
        of its teacher, loss mask, routing."""
        prompt, response = int(self.samples.prompt_length[k]), int(self.samples.response_length[k])
        routing = 0
        if self.routing is not None:
            routing = -(-math.prod(self._routed(self.routing, k, to)) * self.routing.dtype.itemsize // 4)
        return tuple(accumulate((prompt, response, response, response * self.taught, -(-response // 4), routing)))

    def _routed(self, routing: RoutingShape, k: int, to: int) -> tuple[int, int, int]:
        """Shape of a sample's routing for a rank. No engine reads the last token."""
        tokens = int(self.samples.prompt_length[k] + self.samples.response_length[k])
        return tokens - 1, len(self.layers[to]), routing.per_token


def _words(values: np.ndarray) -> np.ndarray:
    """Bytes as int32, the last word filled up."""
    return np.pad(values, (0, -len(values) % 4)).view(np.int32)

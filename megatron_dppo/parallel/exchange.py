"""Sends a minibatch's tokens from the ranks that generated them to the ranks that train on them, in one all-to-all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.parallel.world import World
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.types import Completion, Group, MinibatchPlan, TrainingSamples


@dataclass(frozen=True, slots=True)
class _Route:
    """The training samples that one rank sends to another, in the order in which the receiver trains on them."""

    samples: list[int]
    words: int
    """Length of their encoding, in int32."""


def deliver(world: World, plan: MinibatchPlan, held: Mapping[int, Group]) -> list[list[TrainingSample]]:
    """Send the training samples of a minibatch to their replicas. Collective over all ranks.

    Every length is known from the plan, so one all-to-all carries all: token ids, log-probabilities bit-cast, and loss
    masks, four tokens a word.

    Args:
        world: this rank's place.
        plan: the same on every rank.
        held: the groups that this rank generated, by their index in the step's metadata.

    Returns:
        The samples of each pack that this rank trains on, in the plan's order.
    """
    mine = [k for pack in plan.packs[world.dp_rank] for k in pack]
    outgoing = [_route(plan.samples, world.rank, [r for p in plan.packs[d] for r in p]) for d in world.replica_of]
    incoming = [_route(plan.samples, source, mine) for source in range(world.size)]
    parts = [_encode(plan.samples, k, held) for route in outgoing for k in route.samples]
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
    received_samples = dict(_decode(plan.samples, [k for route in incoming for k in route.samples], received.numpy()))
    return [[received_samples[k] for k in pack] for pack in plan.packs[world.dp_rank]]


def _route(samples: TrainingSamples, source: int, wanted: list[int]) -> _Route:
    chosen = [k for k in wanted if samples.owner[k] == source]
    words = sum(_ends(int(samples.prompt_length[k]), int(samples.response_length[k]))[-1] for k in chosen)
    return _Route(chosen, words)


def _ends(prompt: int, response: int) -> tuple[int, int, int, int]:
    """Where the parts of a sample's encoding end, in words: prompt, response, log-probabilities, loss mask."""
    return prompt, prompt + response, prompt + 2 * response, prompt + 2 * response + -(-response // 4)


def _encode(samples: TrainingSamples, k: int, held: Mapping[int, Group]) -> np.ndarray:
    group = held[int(samples.group[k])]
    completion: Completion = group.completions[int(samples.completion[k])]
    mask = np.pad(completion.loss_mask, (0, -len(completion.loss_mask) % 4)).view(np.int32)
    return np.concatenate([group.prompt.token_ids, completion.token_ids, completion.logprobs.view(np.int32), mask])


def _decode(samples: TrainingSamples, order: list[int], words: np.ndarray) -> Iterator[tuple[int, TrainingSample]]:
    position = 0
    for k in order:
        prompt, response = int(samples.prompt_length[k]), int(samples.response_length[k])
        a, b, c, d = _ends(prompt, response)
        part, position = words[position : position + d], position + d
        yield (
            k,
            TrainingSample(
                prompt_ids=part[:a],
                response_ids=part[a:b],
                engine_logprobs=part[b:c].view(np.float32),
                loss_mask=part[c:].view(bool)[:response],
                advantage=float(samples.advantage[k]),
                scale=float(samples.scale[k]),
                version=int(samples.version[k]),
            ),
        )

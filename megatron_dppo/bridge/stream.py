"""The one way in which weights leave the actor: buckets of whole tensors under Hugging Face's names.

A bucket takes one gather: every rank that has a share of it sends that share straight to each rank that consumes, and
nothing is sent on from there. Pipeline stages take turns in filling a bucket, so that all of them send at once, and a
bucket is on its way while its consumer has the one before. Replicas do not speak to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dppo.bridge.load import bind, slices_of
from megatron_dppo.bridge.mapping import Entry, Split, entries
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World

Tensors = dict[str, torch.Tensor]


class Consumers(StrEnum):
    """Which ranks of a replica get buckets with tensors. The others only send, and get empty ones."""

    EVERYONE = "every rank gets every bucket"
    LEADER = "the first rank gets every bucket"
    STAGE_LEADERS = "the first tensor-parallel rank of each pipeline stage gets the buckets of its stage"


def weight_stream(
    model: PolicyModel,
    shape: PolicyShape,
    world: World,
    *,
    to: Consumers = Consumers.EVERYONE,
    bucket_mib: int = 64,
    dtype: torch.dtype | None = None,
) -> Iterator[Tensors]:
    """The policy's tensors by their Hugging Face names, whole, without padding, each in exactly one bucket.

    Collective over the replica (a stage of it with ``STAGE_LEADERS``): all its ranks get as many buckets, those that
    consume get the same in the same order, and all must take them to the end, since a rank that stops early leaves the
    others waiting. Between two buckets a consumer may do what it likes, other collectives included, provided that every
    rank does them at the same bucket.

    A bucket's tensors may be views of the live parameters or of a buffer of the stream's. They are to be read only, and
    copied by whoever keeps them past the next bucket or the next update of the policy. With tied embeddings the output
    layer's copy is left out.

    A rank that consumes holds two buckets, the one that is handed out included, and besides them an embedding or output
    layer that is larger than a bucket, while it passes. Any other rank holds its share of a bucket and of such a layer.

    Args:
        model: the bare model.
        to: who consumes.
        bucket_mib: most MiB in a bucket; a parameter whose tensors take more has a bucket of its own.
        dtype: of the tensors; None: that of the parameters, which must then be one.
    """
    parameters = bind(model, shape, world)
    if dtype is None:
        (dtype,) = {parameter.dtype for parameter in parameters.values()}
    stages = [world.pp_rank] if to is Consumers.STAGE_LEADERS else range(world.pp)
    buckets = plan_buckets(shape, stages, tp=world.tp, pp=world.pp, most_bytes=bucket_mib * 2**20, dtype=dtype)
    exchange = _Gathers(buckets, parameters, world, to, bucket_mib * 2**20 // dtype.itemsize, dtype)
    ahead = exchange.start(buckets[0])
    for following in [*buckets[1:], None]:
        tensors = exchange.finish(ahead)
        if following is not None:
            ahead = exchange.start(following)
        yield tensors


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the mapping in a bucket."""

    entry: Entry
    stage: int
    """The pipeline stage that has it."""
    shard: tuple[int, ...]
    """Shape of the parameter on each of the stage's ranks."""


Bucket = list[Item]


def plan_buckets(
    shape: PolicyShape, stages: Sequence[int], *, tp: int, pp: int, most_bytes: int, dtype: torch.dtype
) -> list[Bucket]:
    """The entries of ``stages``, which take turns, in buckets as full as that order allows."""
    buckets: list[Bucket] = []
    room = 0
    for turn in zip_longest(*(entries(shape, stage, pp) for stage in stages)):
        for stage, entry in zip(stages, turn, strict=True):
            if entry is None or entry.row.is_copy:
                continue
            size = entry.elements * dtype.itemsize
            if size > room:
                buckets.append([])
                room = most_bytes
            buckets[-1].append(Item(entry, stage, entry.shard_shape(tp)))
            room -= size
    return buckets


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A bucket on its way."""

    bucket: Bucket
    shares: torch.Tensor
    """Flat, one rank's after the other's; on a rank that only sends, its own."""
    shards: Mapping[tuple[int, Entry], torch.Tensor]
    """Their parts, by rank and entry."""
    works: Sequence[dist.Work]


class _Gathers:
    """This rank's part in the gathers of one stream. Ranks are counted within the group that they take place in.

    Two buffers serve all buckets, since fresh memory for each would take a CPU longer than a gather: the shares of the
    bucket on its way arrive in one, are put together in the other, and stay there until the next bucket has arrived.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[Entry, torch.Tensor],
        world: World,
        to: Consumers,
        most_elements: int,
        dtype: torch.dtype,
    ) -> None:
        self._parameters, self._world, self._dtype = parameters, world, dtype
        self._most_elements = most_elements
        if to is Consumers.STAGE_LEADERS:
            self._group, self._first_stage = parallel_state.get_tensor_model_parallel_group(), world.pp_rank
        else:
            self._group, self._first_stage = parallel_state.get_model_parallel_group(), 0
        # Gloo sends from the host's memory, and receives into it.
        self._device = torch.device("cpu") if dist.get_backend(self._group) == "gloo" else world.device
        self._rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        consumers = range(ranks if to is Consumers.EVERYONE else 1)
        self._consumes = self._rank in consumers
        self._receivers = [rank for rank in consumers if rank != self._rank]
        pooled = [bucket for bucket in buckets if not self._lies_ready(bucket)]
        self._shares = self._empty(max(map(self._arriving, pooled), default=0))
        self._tensors = self._empty(max(map(self._put_together, pooled), default=0))
        if ranks > 1:  # NCCL wants every rank in the first operation of a group, and a bucket need not concern all
            dist.barrier(self._group)

    def start(self, bucket: Bucket) -> _Ahead:
        """Send this rank's share to whoever consumes, and receive the others' if it consumes itself. Does not wait."""
        total = self._arriving(bucket)
        shares = self._empty(total) if self._lies_ready(bucket) else self._shares[:total]
        shards: dict[tuple[int, Entry], torch.Tensor] = {}
        exchanges: list[dist.P2POp] = []
        start = 0
        for rank, items in self._slots(bucket).items():
            share = shares[start : start + sum(prod(item.shard) for item in items)]
            start += len(share)
            for item, shard in zip(items, share.split([prod(item.shard) for item in items]), strict=True):
                shards[rank, item.entry] = shard.view(item.shard)
            if rank == self._rank:
                for item in items:
                    shards[rank, item.entry].copy_(self._parameters[item.entry])
                exchanges += [dist.P2POp(dist.isend, share, group=self._group, group_peer=to) for to in self._receivers]
            else:
                exchanges.append(dist.P2POp(dist.irecv, share, group=self._group, group_peer=rank))
        return _Ahead(bucket, shares, shards, dist.batch_isend_irecv(exchanges) if exchanges else [])

    def finish(self, ahead: _Ahead) -> Tensors:
        """Wait for a bucket and put it together, where the one before was."""
        for work in ahead.works:
            work.wait()
        if not self._consumes:
            return {}
        tensors: Tensors = {}
        start = 0
        for item in ahead.bucket:
            entry = item.entry
            if self._at_hand(item):
                tensors |= whole_tensors(entry, self._parameters[entry], self._dtype)
            elif self._lies_ready(ahead.bucket):
                tensors |= _views(entry, ahead.shares)
            else:
                whole = _views(entry, self._tensors[start:])
                start += entry.elements
                shards = [
                    self._parameters[entry] if rank == self._rank else ahead.shards[rank, entry]
                    for rank in self._holders(item)
                ]
                fill_tensors(entry, shards, whole)
                tensors |= whole
        return tensors

    def _slots(self, bucket: Bucket) -> dict[int, list[Item]]:
        """What each rank has of the bucket, in the order of the ranks, as far as it is sent or received here.

        What a consumer has itself it takes from its parameters, unless the shares lie ready.
        """
        slots: dict[int, list[Item]] = {}
        for item in bucket:
            for rank in self._holders(item):
                if rank == self._rank:
                    wanted = bool(self._receivers) or (self._lies_ready(bucket) and not self._at_hand(item))
                else:
                    wanted = self._consumes
                if wanted:
                    slots.setdefault(rank, []).append(item)
        return dict(sorted(slots.items()))

    def _holders(self, item: Item) -> range:
        """The ranks that an entry comes from: all of its stage, or the first where each has it whole."""
        first = (item.stage - self._first_stage) * self._world.tp
        return range(first, first + (self._world.tp if item.entry.row.split is not Split.REPLICATED else 1))

    def _at_hand(self, item: Item) -> bool:
        """Whether this rank has the entry whole among its parameters."""
        whole = self._world.tp == 1 or item.entry.row.split is Split.REPLICATED
        return item.stage == self._world.pp_rank and whole

    def _lies_ready(self, bucket: Bucket) -> bool:
        """Whether it is an embedding too large for the buffers: its shares are the tensor already, and some padding."""
        entry = bucket[0].entry
        return entry.row.split is Split.VOCABULARY and entry.elements > self._most_elements

    def _arriving(self, bucket: Bucket) -> int:
        return sum(prod(item.shard) for items in self._slots(bucket).values() for item in items)

    def _put_together(self, bucket: Bucket) -> int:
        return sum(item.entry.elements for item in bucket if self._consumes and not self._at_hand(item))

    def _empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)


def fill_tensors(entry: Entry, shards: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what the tensor-parallel ranks hold of ``entry`` into whole Hugging Face tensors.

    Args:
        shards: the parameter of each rank, in the order of the ranks; for a replicated entry any one of them is enough.
        tensors: at least those of ``entry.tensors``, by name; written in place.
    """
    for tp_rank, shard in enumerate(shards):
        for slice_, held in slices_of(entry, shard, tp_rank, len(shards)):
            if slice_.name is not None:
                tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)


def whole_tensors(entry: Entry, parameter: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """The Hugging Face tensors of a parameter that is not split over ranks, by name.

    They are views of the parameter where a tensor lies in it in one piece and ``dtype`` is the parameter's own: all but
    queries, keys and values, which alternate.
    """
    sizes = entry.tensors
    tensors: Tensors = {}
    for slice_, held in slices_of(entry, parameter, 0, 1):
        if slice_.name is None:
            continue
        if held.shape == sizes[slice_.name]:
            tensors[slice_.name] = held.to(dtype)
            continue
        if slice_.name not in tensors:
            tensors[slice_.name] = parameter.new_empty(sizes[slice_.name], dtype=dtype)
        tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)
    return tensors


def _views(entry: Entry, flat: torch.Tensor) -> Tensors:
    """The entry's tensors, one after the other from the beginning of ``flat``."""
    tensors: Tensors = {}
    for name, size in entry.tensors.items():
        tensors[name], flat = flat[: prod(size)].view(size), flat[prod(size) :]
    return tensors

"""The actor's weights as a stream of buckets: whole tensors under Hugging Face's names.

Export, the local engine and the servers' transports all read this stream. A bucket takes one
gather: every rank sends its shards straight to each rank that consumes, and nothing is sent on from
there. Pipeline stages take turns in filling a bucket, so that all of them send at once. While a
consumer has one bucket, the next is on its way. Only the ranks that together have one copy of the
policy exchange anything: copies send one another nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, zip_longest
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dppo.bridge.chunks import promote_dtype
from megatron_dppo.bridge.load import (
    MergedParameters,
    bind_adapters,
    bind_parameters,
    iterate_slices,
)
from megatron_dppo.bridge.mapping import Entry, list_adapter_entries, list_entries
from megatron_dppo.config import LayoutConfig, LoraConfig
from megatron_dppo.models.family import Split
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.layout import list_stage_layers
from megatron_dppo.parallel.world import World
from megatron_dppo.process.streams import record_progress

Tensors = dict[str, torch.Tensor]


class Consumers(StrEnum):
    """Which ranks of a copy of the policy get buckets with tensors. The others only send, and get
    empty ones."""

    EVERYONE = "every rank gets every bucket"
    LEADER = "the first rank gets every bucket"
    STAGE_LEADERS = "the first rank of each pipeline stage gets the buckets of its stage"


def weight_stream(
    chunks: Sequence[PolicyModel],
    world: World,
    *,
    to: Consumers = Consumers.EVERYONE,
    bucket_mib: int = 64,
    dtype: torch.dtype | None = None,
) -> Iterator[Tensors]:
    """The policy's tensors by their Hugging Face names, whole, without padding, each in exactly one
    bucket.

    Collective over a copy of the policy (:attr:`World.shard_group_size` ranks of each pipeline
    stage), or over one stage of it with ``STAGE_LEADERS``. All of these ranks get the same number
    of buckets, and those that consume get the same tensors in the same order. Every rank must take
    the stream to its end, since the others wait for it. Between two buckets a rank may take part in
    other collectives, if all ranks do so at the same bucket.

    A bucket's tensors may be views of the live parameters or of a buffer of the stream. They must
    not be written to. Whoever keeps one past the next bucket, or past the next update of the
    policy, must copy it. With tied embeddings the output layer's copy is left out. Of a policy with
    adapters, tensors are the merged ones.

    A rank that consumes holds two buckets, the one that is handed out included. An embedding or
    output layer that is larger than a bucket comes on top while it passes. Any other rank holds its
    shards of a bucket and of such a layer.

    Args:
        chunks: the bare model, one for each virtual stage.
        to: who consumes.
        bucket_mib: most MiB in a bucket; a parameter whose tensors take more has a bucket of its
            own.
        dtype: of the tensors; None: that of the parameters, which must then be one. What is fp32 in
            every policy has buckets of its own, after all others.
    """
    bound = bind_parameters(chunks, world)
    adapters = bind_adapters(chunks, world)
    if dtype is None:
        (dtype,) = {
            parameter.dtype for entry, parameter in bound.items() if not entry.mapping.exact
        }
    parameters = (
        MergedParameters(bound, adapters, chunks[0].lora.scale, world) if adapters else bound
    )
    yield from _stream(parameters, chunks[0].shape, world, to, bucket_mib, dtype)


def adapter_stream(
    chunks: Sequence[PolicyModel],
    world: World,
    *,
    to: Consumers = Consumers.LEADER,
    bucket_mib: int = 64,
) -> Iterator[Tensors]:
    """The policy's adapters by PEFT's names; otherwise as :func:`weight_stream`."""
    parameters = {
        entry: parameter.detach() for entry, parameter in bind_adapters(chunks, world).items()
    }
    (dtype,) = {parameter.dtype for parameter in parameters.values()}
    yield from _stream(parameters, chunks[0].shape, world, to, bucket_mib, dtype, chunks[0].lora)


def _stream(
    parameters: Mapping[Entry, torch.Tensor],
    shape: PolicyShape,
    world: World,
    target: Consumers,
    bucket_mib: int,
    dtype: torch.dtype,
    lora: LoraConfig | None = None,
) -> Iterator[Tensors]:
    stages = [world.pp_rank] if target is Consumers.STAGE_LEADERS else range(world.layout.pp)
    buckets = plan_buckets(
        shape, stages, world.layout, most_bytes=bucket_mib * 2**20, dtype=dtype, lora=lora
    )
    gathers = _Gathers(
        buckets, parameters, world, target, bucket_mib * 2**20 // dtype.itemsize, dtype
    )
    gather = gathers.start(buckets[0])
    for following in [*buckets[1:], None]:
        tensors = gathers.finish(gather)
        if following is not None:
            gather = gathers.start(following)
        record_progress()
        yield tensors


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the mapping in a bucket.

        Item(entry, stage=1, shard=(96, 64))

    is sent by both ranks of stage 1, if tp is 2 and the whole parameter is [192, 64].
    """

    entry: Entry
    stage: int
    """The pipeline stage that has it."""
    shard: tuple[int, ...]
    """Shape of the parameter on each rank that has a part of it."""


Bucket = list[Item]


def plan_buckets(
    shape: PolicyShape,
    stages: Sequence[int],
    layout: LayoutConfig,
    *,
    most_bytes: int,
    dtype: torch.dtype,
    lora: LoraConfig | None = None,
) -> list[Bucket]:
    """The entries of ``stages``, which take turns, in buckets as full as that order
    allows; those of the adapters of ``lora`` instead, if it is given."""
    buckets: list[Bucket] = []
    layers = [list_stage_layers(shape.num_layers, stage, layout) for stage in stages]
    of_stages = [
        list(list_adapter_entries(shape, lora, each) if lora else list_entries(shape, each))
        for each in layers
    ]
    turns = [list(zip(stages, turn, strict=True)) for turn in zip_longest(*of_stages)]
    for exact in (False, True):  # a bucket's tensors have one type
        room = 0
        for stage, entry in chain.from_iterable(turns):
            if entry is None or entry.mapping.is_copy or entry.mapping.exact is not exact:
                continue
            size = entry.elements * promote_dtype(dtype, entry).itemsize
            if size > room:
                buckets.append([])
                room = most_bytes
            buckets[-1].append(Item(entry, stage, entry.shard_shape(entry.count_parts(layout))))
            room -= size
    return buckets


@dataclass(frozen=True, slots=True)
class _Gather:
    """A bucket on its way."""

    bucket: Bucket
    memory: torch.Tensor
    """Received shards, one rank's after another's; on a rank that only sends, its own shards."""
    shards: Mapping[tuple[int, Entry], torch.Tensor]
    """Each shard in it, by rank and entry."""
    works: Sequence[dist.Work]


class _Gathers:
    """This rank's part in the gathers of one stream. Ranks are counted within the group that they
    take place in.

    Two buffers serve all buckets, since fresh memory for each would take a CPU longer than a
    gather. Shards are received in one of them. Tensors are put together in the other, and stay
    there until the next bucket is finished.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[Entry, torch.Tensor],
        world: World,
        target: Consumers,
        most_elements: int,
        dtype: torch.dtype,
    ) -> None:
        self._parameters = parameters
        self._world = world
        self._dtype = dtype
        self._most_elements = most_elements
        self._group = _get_copy_group(world, stage_only=target is Consumers.STAGE_LEADERS)
        self._first_stage = world.pp_rank if target is Consumers.STAGE_LEADERS else 0
        # Gloo sends from the host's memory, and receives into it.
        self._device = (
            torch.device("cpu") if dist.get_backend(self._group) == "gloo" else world.device
        )
        self._rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        consumers = range(ranks if target is Consumers.EVERYONE else 1)
        self._consumes = self._rank in consumers
        self._receivers = [rank for rank in consumers if rank != self._rank]
        buffered = [bucket for bucket in buckets if not self._is_large_embedding(bucket)]
        self._received = self._allocate_buffer(
            map(self._count_exchanged_elements, buffered), buffered
        )
        self._assembled = self._allocate_buffer(
            map(self._count_assembled_elements, buffered), buffered
        )
        if (
            ranks > 1
            # NCCL wants every rank in the first operation of a group, and a bucket need not concern
            # all.
        ):
            # Else NCCL guesses the GPU from the rank, and may take another process's.
            dist.barrier(
                self._group, device_ids=None if self._device.index is None else [self._device.index]
            )

    def start(self, bucket: Bucket) -> _Gather:
        """Send this rank's shards to all who consume, and receive those of others if it consumes.
        Does not wait."""
        total = self._count_exchanged_elements(bucket)
        memory = (
            torch.empty(total, dtype=self._dtype, device=self._device)
            if self._is_large_embedding(bucket)
            else self._received.view(self._get_dtype(bucket))[:total]
        )
        shards: dict[tuple[int, Entry], torch.Tensor] = {}
        exchanges: list[dist.P2POp] = []
        start = 0
        for rank, items in self._plan_exchanges(bucket).items():
            sizes = [prod(item.shard) for item in items]
            share = memory[start : start + sum(sizes)]
            start += len(share)
            for item, shard in zip(items, share.split(sizes), strict=True):
                shards[rank, item.entry] = shard.view(item.shard)
            if rank == self._rank:
                for item in items:
                    shards[rank, item.entry].copy_(self._parameters[item.entry])
                exchanges += [
                    dist.P2POp(dist.isend, share, group=self._group, group_peer=to)
                    for to in self._receivers
                ]
            else:
                exchanges.append(dist.P2POp(dist.irecv, share, group=self._group, group_peer=rank))
        return _Gather(
            bucket, memory, shards, dist.batch_isend_irecv(exchanges) if exchanges else []
        )

    def finish(self, gather: _Gather) -> Tensors:
        """Wait for a bucket, and put its tensors together in the memory of the bucket before."""
        for work in gather.works:
            work.wait()
        if not self._consumes:
            return {}
        tensors: Tensors = {}
        start = 0
        dtype = self._get_dtype(gather.bucket)
        for item in gather.bucket:
            entry = item.entry
            if self._has_whole(item):
                tensors |= extract_tensors(entry, self._parameters[entry], dtype)
            elif self._is_large_embedding(gather.bucket):
                tensors |= _view_tensors(entry, gather.memory)
            else:
                whole = _view_tensors(entry, self._assembled.view(dtype)[start:])
                start += entry.elements
                shards = [
                    self._parameters[entry] if rank == self._rank else gather.shards[rank, entry]
                    for rank in self._get_senders(item)
                ]
                fill_tensors(entry, shards, whole)
                tensors |= whole
        return tensors

    def _plan_exchanges(self, bucket: Bucket) -> dict[int, list[Item]]:
        """The items of which each rank's shard goes through this rank's memory, by rank, in the
        order of the ranks.

        This rank's own shards are among them if another rank receives them. If none does, they are
        read from the parameters when the bucket is finished; only that of a large embedding is
        copied in between the others'.
        """
        items: dict[int, list[Item]] = {}
        for item in bucket:
            for rank in self._get_senders(item):
                if rank == self._rank:
                    wanted = bool(self._receivers) or (
                        self._is_large_embedding(bucket) and not self._has_whole(item)
                    )
                else:
                    wanted = self._consumes
                if wanted:
                    items.setdefault(rank, []).append(item)
        return dict(sorted(items.items()))

    def _get_senders(self, item: Item) -> range:
        """The ranks whose shards make an entry: all that have a part, or the first where each has
        it whole."""
        entry = item.entry
        layout = self._world.layout
        first = (item.stage - self._first_stage) * self._world.shard_group_size
        if entry.expert is not None:
            first += entry.expert_rank(layout.ep) * layout.expert_tp
        return range(
            first,
            first + (1 if entry.mapping.split is Split.REPLICATED else entry.count_parts(layout)),
        )

    def _has_whole(self, item: Item) -> bool:
        """Whether this rank has the entry whole among its parameters."""
        entry = item.entry
        whole = (
            entry.count_parts(self._world.layout) == 1 or entry.mapping.split is Split.REPLICATED
        )
        return whole and entry in self._parameters

    def _is_large_embedding(self, bucket: Bucket) -> bool:
        """Whether the bucket is an embedding or output layer that is larger than a bucket may be.

        Its shards are consecutive rows of the tensor, and padding comes last. Received one after
        another into memory of its own, they are the whole tensor already, so that it need not be in
        memory twice.
        """
        entry = bucket[0].entry
        return entry.mapping.split is Split.VOCABULARY and entry.elements > self._most_elements

    def _count_exchanged_elements(self, bucket: Bucket) -> int:
        return sum(
            prod(item.shard) for items in self._plan_exchanges(bucket).values() for item in items
        )

    def _count_assembled_elements(self, bucket: Bucket) -> int:
        return sum(
            item.entry.elements for item in bucket if self._consumes and not self._has_whole(item)
        )

    def _get_dtype(self, bucket: Bucket) -> torch.dtype:
        return promote_dtype(self._dtype, bucket[0].entry)

    def _allocate_buffer(self, elements: Iterable[int], buckets: Sequence[Bucket]) -> torch.Tensor:
        """Bytes for any one of the buckets, of which each has so many elements; a multiple of every
        type's size."""
        sizes = (
            count * self._get_dtype(bucket).itemsize
            for count, bucket in zip(elements, buckets, strict=True)
        )
        return torch.empty(
            -(-max(sizes, default=0) // 8) * 8, dtype=torch.uint8, device=self._device
        )


def _get_copy_group(world: World, *, stage_only: bool) -> dist.ProcessGroup:
    """The ranks that together have one copy of the policy, stage by stage, or of one stage of
    it."""
    if world.shard_group_size == world.layout.tp:
        stage = parallel_state.get_tensor_model_parallel_group
        whole = parallel_state.get_model_parallel_group
    else:
        stage = parallel_state.get_expert_tensor_and_model_parallel_group
        whole = parallel_state.get_expert_tensor_model_pipeline_parallel_group
    return stage() if stage_only else whole()


def fill_tensors(
    entry: Entry, shards: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write what the tensor-parallel ranks hold of ``entry`` into whole Hugging Face tensors.

    Args:
        shards: the parameter of each rank, in the order of the ranks; for a replicated entry any
            one of them is enough.
        tensors: at least those of ``entry.tensors``, by name; written in place.
    """
    for tp_rank, shard in enumerate(shards):
        for slice_, held in iterate_slices(entry, shard, tp_rank, len(shards)):
            if slice_.name is not None:
                tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)


def extract_tensors(entry: Entry, parameter: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """The Hugging Face tensors of a parameter that is not split over ranks, by name.

    They are views of the parameter where a tensor lies in it in one piece and ``dtype`` is the
    parameter's own: all but queries, keys and values, which alternate.
    """
    sizes = entry.tensors
    tensors: Tensors = {}
    for slice_, held in iterate_slices(entry, parameter, 0, 1):
        if slice_.name is None:
            continue
        if held.shape == sizes[slice_.name]:
            tensors[slice_.name] = held.to(dtype)
            continue
        if slice_.name not in tensors:
            tensors[slice_.name] = parameter.new_empty(sizes[slice_.name], dtype=dtype)
        tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)
    return tensors


def _view_tensors(entry: Entry, flat: torch.Tensor) -> Tensors:
    """The entry's tensors, one after the other from the beginning of ``flat``."""
    tensors: Tensors = {}
    for name, size in entry.tensors.items():
        tensors[name] = flat[: prod(size)].view(size)
        flat = flat[prod(size) :]
    return tensors

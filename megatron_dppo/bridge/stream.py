"""The actor's weights as a stream of buckets: whole tensors under Hugging Face's names.

Readers of the stream: export, the local engine and the servers' transports.

- A bucket takes a single gather: every rank sends its shards straight to each consumer.
- The next bucket is transferred while a consumer holds the current bucket.
- Only the ranks of the same copy of the policy communicate.
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
    """Ranks of a copy of the policy that receive tensors. The remaining ranks send, and receive
    empty buckets."""

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
    """Stream the policy's tensors by Hugging Face names, whole, without padding, each in one
    bucket.

    Collective over a copy of the policy (:attr:`World.shard_group_size` ranks of each pipeline
    stage), or over a single stage with ``STAGE_LEADERS``:

    - All participating ranks receive the same number of buckets, and all consumers the same tensors
      in the same order.
    - Every rank must exhaust the stream, because the remaining ranks wait.
    - Between two buckets a rank may take part in other collectives, if all ranks do at the same
      bucket.

    The tensors of a bucket:

    - Tensors may be views of live parameters or of a buffer of the stream, and must not be written
      to.
    - Copy a tensor to keep it past the next bucket or the next update of the policy.
    - With tied embeddings the output layer's copy is left out.
    - Adapters are merged.

    A consumer holds two buckets in memory. An embedding or output layer larger than a bucket adds
    its size during its transfer. A rank that only sends holds its own shards of a bucket or of
    a large layer.

    Args:
        chunks: bare model, an element per virtual stage.
        bucket_mib: MiB of a bucket at most; a parameter with larger tensors has a separate bucket.
        dtype: type of the tensors; ``None``: the common type of the parameters. Tensors that are
            fp32 in every policy have separate buckets, after all other buckets.
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
    """Stream the policy's adapters by PEFT's names; otherwise as :func:`weight_stream`."""
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
    # Start the next bucket first, to overlap transfer and use.
    gather = gathers.start(buckets[0])
    for following in [*buckets[1:], None]:
        tensors = gathers.finish(gather)
        if following is not None:
            gather = gathers.start(following)
        record_progress()
        yield tensors


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the mapping in a bucket."""

    entry: Entry
    stage: int
    shard: tuple[int, ...]
    """Shape of the parameter on each rank with a part of the entry."""


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
    """Assign the entries of ``stages``, or of the adapters with ``lora``, to buckets, in turns."""
    buckets: list[Bucket] = []
    layers = [list_stage_layers(shape.num_layers, stage, layout) for stage in stages]
    of_stages: list[list[Entry]] = []
    for ranges in layers:
        entries = list_adapter_entries(shape, lora, ranges) if lora else list_entries(shape, ranges)
        of_stages.append(list(entries))
    # Alternate between the stages, because all stages can then send at the same time.
    turns = [list(zip(stages, turn, strict=True)) for turn in zip_longest(*of_stages)]
    # Separate fp32 entries, because all tensors of a bucket have the same type.
    for exact in (False, True):
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
    """A bucket in transfer."""

    bucket: Bucket
    memory: torch.Tensor
    """Received shards, rank after rank; on a rank that only sends, its own shards."""
    shards: Mapping[tuple[int, Entry], torch.Tensor]
    """Views of ``memory``, by rank and entry."""
    works: Sequence[dist.Work]


class _Gathers:
    """This rank's part in the gathers of a stream. Ranks are numbered in the group of the
    gathers."""

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
        # Gloo needs host memory for sent and received tensors.
        self._device = (
            torch.device("cpu") if dist.get_backend(self._group) == "gloo" else world.device
        )
        self._rank = dist.get_rank(self._group)
        ranks = dist.get_world_size(self._group)
        consumers = range(ranks if target is Consumers.EVERYONE else 1)
        self._consumes = self._rank in consumers
        self._receivers = [rank for rank in consumers if rank != self._rank]
        # Two buffers serve all buckets, because allocating memory for each bucket would take a CPU
        # longer than a gather. Shards arrive in the first buffer. Tensors are assembled in the
        # second buffer, and remain valid until the next bucket is finished.
        buffered = [bucket for bucket in buckets if not self._is_large_embedding(bucket)]
        self._received = self._allocate_buffer(
            map(self._count_exchanged_elements, buffered), buffered
        )
        self._assembled = self._allocate_buffer(
            map(self._count_assembled_elements, buffered), buffered
        )
        # NCCL requires every rank in a group's first operation, and a bucket may involve only some
        # ranks.
        if ranks > 1:
            # Without device_ids NCCL derives the GPU from the rank, and may pick another process's
            # GPU.
            dist.barrier(
                self._group, device_ids=None if self._device.index is None else [self._device.index]
            )

    def start(self, bucket: Bucket) -> _Gather:
        """Start to send this rank's shards to all consumers, and to receive."""
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
        """Wait for a bucket, and assemble its tensors in the memory of the previous bucket."""
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
                shards = []
                for rank in self._get_senders(item):
                    is_own = rank == self._rank
                    shards.append(self._parameters[entry] if is_own else gather.shards[rank, entry])
                fill_tensors(entry, shards, whole)
                tensors |= whole
        return tensors

    def _plan_exchanges(self, bucket: Bucket) -> dict[int, list[Item]]:
        """Return the items whose shards pass through this rank's memory, by rank, in order."""
        items: dict[int, list[Item]] = {}
        for item in bucket:
            for rank in self._get_senders(item):
                if rank == self._rank:
                    # Copy this rank's own shard into memory only to send the shard, or to complete
                    # a large embedding. Otherwise finish() reads the shard from the parameters.
                    wanted = bool(self._receivers) or (
                        self._is_large_embedding(bucket) and not self._has_whole(item)
                    )
                else:
                    wanted = self._consumes
                if wanted:
                    items.setdefault(rank, []).append(item)
        return dict(sorted(items.items()))

    def _get_senders(self, item: Item) -> range:
        """Return the ranks whose shards form an entry: all with a part, or the first if
        replicated."""
        entry = item.entry
        layout = self._world.layout
        first = (item.stage - self._first_stage) * self._world.shard_group_size
        if entry.expert is not None:
            first += entry.expert_rank(layout.ep) * layout.expert_tp
        is_whole = entry.mapping.split is Split.REPLICATED
        return range(first, first + (1 if is_whole else entry.count_parts(layout)))

    def _has_whole(self, item: Item) -> bool:
        entry = item.entry
        whole = (
            entry.count_parts(self._world.layout) == 1 or entry.mapping.split is Split.REPLICATED
        )
        return whole and entry in self._parameters

    def _is_large_embedding(self, bucket: Bucket) -> bool:
        """Return whether the bucket is an embedding or output layer larger than the limit."""
        # Shards are consecutive rows of the tensor, with the padding last. Received into separate
        # memory, they form the whole tensor without a second copy.
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
        """Allocate bytes for any one of the buckets."""
        sizes = (
            count * self._get_dtype(bucket).itemsize
            for count, bucket in zip(elements, buckets, strict=True)
        )
        # A multiple of every type's size, for views of any type.
        return torch.empty(
            -(-max(sizes, default=0) // 8) * 8, dtype=torch.uint8, device=self._device
        )


def _get_copy_group(world: World, *, stage_only: bool) -> dist.ProcessGroup:
    """Return the ranks of a copy of the policy, stage by stage, or of a single stage."""
    if world.shard_group_size == world.layout.tp:
        stage = parallel_state.get_tensor_model_parallel_group
        whole = parallel_state.get_model_parallel_group
    else:
        stage = parallel_state.get_expert_tensor_and_model_parallel_group
        whole = parallel_state.get_expert_tensor_model_pipeline_parallel_group
    return stage() if stage_only else whole()


def fill_tensors(
    entry: Entry,
    shards: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write the tensor-parallel shards of ``entry`` into whole Hugging Face tensors.

    Args:
        shards: parameter of each rank, in order; any single shard of a replicated entry.
        tensors: at least the tensors of ``entry.tensors``, by name; written in place.
    """
    for tp_rank, shard in enumerate(shards):
        for slice_, held in iterate_slices(entry, shard, tp_rank, len(shards)):
            if slice_.name is not None:
                tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)


def extract_tensors(entry: Entry, parameter: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return the Hugging Face tensors of an unsplit parameter, by name.

    A tensor is a view if it is contiguous in the parameter and ``dtype`` is the parameter's type.
    """
    sizes = entry.tensors
    tensors: Tensors = {}
    for slice_, held in iterate_slices(entry, parameter, 0, 1):
        if slice_.name is None:
            continue
        if held.shape == sizes[slice_.name]:
            tensors[slice_.name] = held.to(dtype)
            continue
        # Queries, keys and values alternate in the parameter, and are copied.
        if slice_.name not in tensors:
            tensors[slice_.name] = parameter.new_empty(sizes[slice_.name], dtype=dtype)
        tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length).copy_(held)
    return tensors


def _view_tensors(entry: Entry, flat: torch.Tensor) -> Tensors:
    """Return views of the entry's tensors, stored consecutively in ``flat``."""
    tensors: Tensors = {}
    for name, size in entry.tensors.items():
        tensors[name] = flat[: prod(size)].view(size)
        flat = flat[prod(size) :]
    return tensors

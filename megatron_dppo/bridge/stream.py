"""The one way in which weights leave the actor: buckets of whole tensors under Hugging Face's names.

A bucket belongs to one pipeline stage. The stages gather their buckets over the tensor-parallel ranks side by side, one
gather for a bucket; then each stage's bucket goes to the other stages of the replica, one broadcast for a bucket. Only
what tensor parallelism has split is gathered, nothing is sent twice, and replicas do not speak to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dppo.bridge.binding import bind
from megatron_dppo.bridge.mapping import Entry, entries
from megatron_dppo.bridge.shards import fill_tensors, gathers, whole_tensors
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World

Tensors = dict[str, torch.Tensor]


def weight_stream(
    model: PolicyModel,
    shape: PolicyShape,
    world: World,
    *,
    bucket_mib: int = 64,
    dtype: torch.dtype | None = None,
) -> Iterator[Tensors]:
    """The policy's tensors by their Hugging Face names, whole, without padding, each in exactly one bucket.

    Collective over the replica: all its ranks get the same buckets in the same order, and all must take them to the end
    (a rank that stops early leaves the others waiting). Between two buckets a consumer may do what it likes, other
    collectives included, provided that every rank does them at the same bucket.

    A bucket's tensors may be views of the live parameters or of a buffer of the stream's. They are to be read only, and
    copied by whoever keeps them past the next bucket or the next update of the policy. Besides what its consumer holds,
    the stream takes the memory of two buckets and of a rank's part of a third. With tied embeddings the output layer's
    copy is left out.

    Args:
        model: the bare model.
        bucket_mib: most MiB in a bucket; a single tensor larger than this has a bucket of its own.
        dtype: of the tensors; None: that of the parameters, which must then be one.
    """
    parameters = bind(model, shape, world)
    if dtype is None:
        (dtype,) = {parameter.dtype for parameter in parameters.values()}
    plans = [plan_buckets(shape, stage, world.pp, bucket_mib * 2**20, dtype) for stage in range(world.pp)]
    if world.tp == world.pp == 1:
        for bucket in plans[0]:
            yield {
                name: tensor
                for entry in bucket
                for name, tensor in whole_tensors(entry, parameters[entry], dtype).items()
            }
        return
    for buckets in zip_longest(*plans):  # a round: one bucket of each stage that still has one
        mine = buckets[world.pp_rank]
        gathered = _gather(mine, parameters, world, dtype) if mine else None
        for stage, bucket in enumerate(buckets):
            if bucket is None:
                continue
            own = gathered if stage == world.pp_rank else None
            flat = _buffer(bucket, world, dtype) if own is None else own
            if world.pp > 1:
                dist.broadcast(flat, group=parallel_state.get_pipeline_model_parallel_group(), group_src=stage)
            yield _views(bucket, flat)
        del gathered, own, flat  # not kept while the next round is gathered


def plan_buckets(shape: PolicyShape, stage: int, stages: int, most_bytes: int, dtype: torch.dtype) -> list[list[Entry]]:
    """What each bucket of a pipeline stage holds: entries in the order of the forward pass, as many as fit."""
    buckets: list[list[Entry]] = []
    room = 0
    for entry in entries(shape, stage, stages):
        if entry.row.copies:
            continue
        size = _elements(entry) * dtype.itemsize
        if size > room:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(entry)
        room -= size
    return buckets


def _gather(
    bucket: list[Entry], parameters: Mapping[Entry, torch.Tensor], world: World, dtype: torch.dtype
) -> torch.Tensor:
    """The bucket's tensors, whole, one after the other in one flat tensor, on every tensor-parallel rank."""
    flat = _buffer(bucket, world, dtype)
    tensors = _views(bucket, flat)
    split = [entry for entry in bucket if world.tp > 1 and gathers(entry)]
    for entry in bucket:
        if entry not in split:
            fill_tensors(entry, [parameters[entry]], tensors)
    if not split:
        return flat
    sizes = [parameters[entry].numel() for entry in split]
    local = torch.empty(sum(sizes), dtype=dtype, device=world.device)
    for entry, part in zip(split, local.split(sizes), strict=True):
        part.copy_(parameters[entry].flatten())
    shards = torch.empty(world.tp * len(local), dtype=dtype, device=world.device)
    dist.all_gather_into_tensor(shards, local, group=parallel_state.get_tensor_model_parallel_group())
    for entry, parts in zip(split, shards.view(world.tp, -1).split(sizes, dim=1), strict=True):
        shape = parameters[entry].shape
        fill_tensors(entry, [part.view(shape) for part in parts], tensors)
    return flat


def _buffer(bucket: list[Entry], world: World, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sum(map(_elements, bucket)), dtype=dtype, device=world.device)


def _views(bucket: list[Entry], flat: torch.Tensor) -> Tensors:
    sizes = {name: size for entry in bucket for name, size in entry.tensors.items()}
    parts = flat.split([prod(size) for size in sizes.values()])
    return {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}


def _elements(entry: Entry) -> int:
    return sum(prod(size) for size in entry.tensors.values())

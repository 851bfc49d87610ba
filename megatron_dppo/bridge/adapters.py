"""Adapters beside the policy's weights: what they begin with, how they are merged, and as shards of a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_dppo.bridge.load import bind_adapters, fill_parameter, part_of, slices_of
from megatron_dppo.bridge.mapping import Entry, adapters_of_tensor
from megatron_dppo.models.family import REPLICATED
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.seeds import Purpose, engine_seed


def draw_adapters(chunks: Sequence[PolicyModel], world: World, *, seed: int) -> None:
    """Begin as PEFT does: A uniform within ±1/√inputs (Kaiming's with a = √5), B zero, so that nothing is added yet.

    Each A is drawn whole, by the seed and its name, and then cut: adapters are the same in every layout.
    """
    for entry, parameter in bind_adapters(chunks, world).items():
        ((name, size),) = entry.tensors.items()
        if not name.endswith("lora_A.weight"):
            parameter.data.zero_()
            continue
        of_name = engine_seed(seed, zlib.crc32(name.encode()), Purpose.ADAPTERS)
        bound = 1.0 / math.sqrt(size[1])
        whole = torch.empty(size).uniform_(-bound, bound, generator=torch.Generator().manual_seed(of_name))
        fill_parameter(
            entry,
            parameter.data,
            lambda _, axis, start, stop, whole=whole: whole.narrow(axis, start, stop - start),  # type: ignore[misc]
            part_of(entry, world),
            entry.parts(world.layout),
        )


class MergedParameters(Mapping[Entry, torch.Tensor]):
    """The parameters of this rank with their adapters merged in, each made when it is asked for.

    A rank's part of W + alpha/rank · B A takes no more of B and A than the rank's parts. The sum is taken in fp32, and
    rounded once to the parameter's type.

    Args:
        parameters: of the policy without adapters.
        adapters: of these parameters.
        scale: alpha/rank.
    """

    def __init__(
        self,
        parameters: Mapping[Entry, torch.Tensor],
        adapters: Mapping[Entry, torch.Tensor],
        scale: float,
        world: World,
    ) -> None:
        self._parameters, self._scale, self._world = parameters, scale, world
        self._adapters = {name: matrix.detach() for entry, matrix in adapters.items() for name in entry.tensors}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, entry: object) -> bool:
        return entry in self._parameters

    def __getitem__(self, entry: Entry) -> torch.Tensor:
        parameter = self._parameters[entry]
        pairs = {name: adapters_of_tensor(name) for name in entry.tensors}
        if not any(a in self._adapters for a, _ in pairs.values()):
            return parameter
        part, merged = part_of(entry, self._world), parameter.to(torch.float32, copy=True)
        for slice_, held in slices_of(entry, merged, part, entry.parts(self._world.layout)):
            a, b = (self._adapters.get(name) for name in pairs[slice_.name or ""])
            if a is None or b is None:
                continue
            if entry.axis == 0:  # of a matrix's rows on this rank, a run
                b = b.narrow(0, slice_.start - part * len(b), slice_.length)
            held.addmm_(b.float(), a.float(), alpha=self._scale)
        return merged.to(parameter.dtype)


def adapter_state(chunks: Sequence[PolicyModel], world: World) -> dict[str, Any]:
    """Megatron's description of the adapters' shards. Layers and experts are leading dimensions, as of the policy's own
    parameters, and nothing in it depends on the layout."""
    shape = chunks[0].shape
    state = {}
    for entry, parameter in bind_adapters(chunks, world).items():
        leading = list(zip(entry.leading, (shape.num_layers, shape.experts), strict=False))
        offsets = [(axis, index, count) for axis, (index, count) in enumerate(leading)]
        part, whole = part_of(entry, world), entry.mapping.split is REPLICATED
        if not whole:
            offsets.append((len(leading) + entry.axis, part, entry.parts(world.layout)))
        copy = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if entry.expert is None
            else parallel_state.get_expert_data_parallel_rank()
        )
        state[_name(entry)] = ShardedTensor.from_rank_offsets(
            entry.key, parameter, *offsets, replica_id=(0, part if whole else 0, copy), prepend_axis_num=len(leading)
        )
    return {"adapters": state}


def load_adapter_state(chunks: Sequence[PolicyModel], state: Mapping[str, Any], world: World) -> None:
    """Put what was read for :func:`adapter_state` into the adapters."""
    with torch.no_grad():
        for entry, parameter in bind_adapters(chunks, world).items():
            parameter.copy_(state["adapters"][_name(entry)])


def _name(entry: Entry) -> str:
    (name,) = entry.tensors
    return name

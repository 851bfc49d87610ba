"""The parameters of a live model, each with its entry of the mapping."""

from __future__ import annotations

import re

import torch

from megatron_dppo.bridge.mapping import Entry, entries
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def bind(model: PolicyModel, shape: PolicyShape, world: World) -> dict[Entry, torch.Tensor]:
    """Every entry of this rank's pipeline stage with its parameter (detached, sharing memory), in the mapping's order.

    Raises:
        ValueError: if an entry or a parameter of the model is left over, or one has another shape than the mapping
            says. A fault of the program, not of the user: the model was not built for this shape and layout.
    """
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    parameters = {
        _LAYER.sub(lambda local: str(numbers[int(local[0])]), name): parameter.detach()
        for name, parameter in model.named_parameters()
    }
    bound: dict[Entry, torch.Tensor] = {}
    for entry in entries(shape, world.pp_rank, world.pp):
        names = [name for name in entry.megatron if name in parameters]
        if len(names) != 1:
            raise ValueError(f"{len(names)} parameters of the model are {' or '.join(entry.megatron)}, not one")
        parameter = parameters.pop(names[0])
        if parameter.shape != entry.shard_shape(world.tp):
            expected = list(entry.shard_shape(world.tp))
            raise ValueError(f"{names[0]} has shape {list(parameter.shape)}, and the mapping makes it {expected}")
        bound[entry] = parameter
    if parameters:
        raise ValueError(f"no entry of the mapping matches {', '.join(parameters)}")
    return bound

"""Weights from a Hugging Face directory into a model, each rank reading its own slices and no more."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.bridge.binding import bind
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.shards import fill_parameter
from megatron_dppo.bridge.slices import SliceReader
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World


def load_policy(model: PolicyModel, path: Path, shape: PolicyShape, world: World) -> None:
    """Fill every parameter of this rank's shard from the safetensors files, cast to the parameter's dtype.

    No rank holds more than one slice besides its parameters. Local to the rank: call it inside ``world.together``.
    An optimizer that exists already must copy its master weights again afterwards.

    Args:
        model: the bare model, on its device.
        path: Hugging Face directory.

    Raises:
        UserError: naming ``model.path``, if the files are not the weights of such a policy.
    """
    stored = check_weights(path, shape)
    with SliceReader(stored) as reader:
        for entry, parameter in bind(model, shape, world).items():
            fill_parameter(entry, parameter, reader.read, world.tp_rank, world.tp)

"""Weights from a Hugging Face directory into a model, each rank reading its own slices and no more."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_dppo.bridge.binding import bind
from megatron_dppo.bridge.safetensors_files import StoredTensor, check_weights
from megatron_dppo.bridge.shards import fill_parameter
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
    with ExitStack() as stack:
        reader = _SliceReader(stored, stack)
        for entry, parameter in bind(model, shape, world).items():
            fill_parameter(entry, parameter, reader.read, world.tp_rank, world.tp)


class _SliceReader:
    """Reads slices of tensors, opening each file once."""

    def __init__(self, stored: dict[str, StoredTensor], stack: ExitStack) -> None:
        self._stored, self._stack = stored, stack
        self._files: dict[Path, safe_open] = {}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        file = self._stored[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        tensor = self._files[file].get_slice(name)
        return tensor[start:stop] if axis == 0 else tensor[:, start:stop]

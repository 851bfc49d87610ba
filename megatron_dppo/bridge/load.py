"""Load weights into a live model from a Hugging Face directory or a Megatron checkpoint.

Each rank reads only its own slices.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import (
    FORMAT,
    Checksums,
    CorruptCheckpointError,
    build_corruption_error,
    convert_corruption_errors,
    find_checkpoint,
    warn_missing_checksums,
)
from megatron_dppo.bridge.chunks import TYPES
from megatron_dppo.bridge.mapping import (
    Entry,
    Slice,
    describe_mismatch,
    get_adapter_names,
    list_adapter_entries,
    list_entries,
)
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.stored_policy import (
    StoredPolicy,
    disable_unsafe_pickles,
    find_unsafe_pickle,
    read_metadata,
)
from megatron_dppo.bridge.torch_dist import COMMON, WRITTEN_BY
from megatron_dppo.config import LoraConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.family import REPLICATED
from megatron_dppo.models.lora import NAME
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.layout import list_stage_layers
from megatron_dppo.parallel.world import World
from megatron_dppo.process.streams import record_progress
from megatron_dppo.rl.seeds import Purpose, derive_engine_seed

_EXPERT_NAMES = (r"local_experts\.", r"linear_fc[12]\.weight", r"linear_fc[12]\.lora\.")
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile("|".join(rf"(?<=mlp\.experts\.{name})\d+" for name in _EXPERT_NAMES))


def bind_parameters(chunks: Sequence[PolicyModel], world: World) -> dict[Entry, torch.Tensor]:
    """Return this rank's entries with their parameters (detached, sharing memory), in order.

    Raises:
        ValueError: if entries and parameters do not match. The cause is a bug, not a user error:
            the model was not built for this shape and layout.
    """
    wanted = list_entries(chunks[0].shape, _list_layers(chunks, world))
    return {
        entry: parameter.detach()
        for entry, parameter in _bind(chunks, world, wanted, adapters=False).items()
    }


def bind_adapters(chunks: Sequence[PolicyModel], world: World) -> dict[Entry, torch.nn.Parameter]:
    """Return this rank's adapter entries with the parameters themselves; empty without adapters."""
    lora = chunks[0].lora
    wanted = list_adapter_entries(chunks[0].shape, lora, _list_layers(chunks, world))
    return _bind(chunks, world, wanted, adapters=True) if lora.rank else {}


def _list_layers(chunks: Sequence[PolicyModel], world: World) -> list[range]:
    return list_stage_layers(chunks[0].shape.num_layers, world.pp_rank, world.layout)


def _bind(
    chunks: Sequence[PolicyModel],
    world: World,
    requested: Iterable[Entry],
    *,
    adapters: bool,
) -> dict[Entry, torch.nn.Parameter]:
    parameters = {
        name: p for name, p in _iter_parameters(chunks, world) if (f".{NAME}." in name) is adapters
    }
    held = [
        entry
        for entry in requested
        if entry.expert is None or entry.expert_rank(world.layout.ep) == world.ep_rank
    ]
    # Layer specifications name some parameters differently: use the name that this model has.
    names: dict[str, Entry] = {}
    for entry in held:
        present = (name for name in entry.megatron_names if name in parameters)
        names[next(present, entry.key)] = entry
    expected = {
        name: entry.shard_shape(entry.count_parts(world.layout)) for name, entry in names.items()
    }
    # Compare all names and shapes, because an unmatched parameter would keep its random weights.
    found = {name: (*parameter.shape,) for name, parameter in parameters.items()}
    if problem := describe_mismatch(chunks[0].shape, expected, found):
        raise ValueError(f"the mapping is not of this model: {problem}")
    return {entry: parameters[name] for name, entry in names.items()}


def _iter_parameters(
    chunks: Sequence[PolicyModel], world: World
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters by names with policy-wide indices of layers and experts."""
    first_expert = world.ep_rank * (chunks[0].shape.experts // world.layout.ep)
    for chunk in chunks:
        # Megatron counts layers from 1.
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            of_layer = _LAYER.sub(lambda local, numbers=numbers: str(numbers[int(local[0])]), name)  # type: ignore[misc]
            yield _EXPERT.sub(lambda local: str(first_expert + int(local[0])), of_layer), parameter


def get_shard_index(entry: Entry, world: World) -> int:
    """Return this rank's index among the ranks that share the parameter."""
    return world.tp_rank if entry.expert is None else world.etp_rank


def fill_parameter(
    entry: Entry,
    parameter: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    tp_rank: int,
    tp: int,
) -> None:
    """Fill ``parameter`` with the shard of rank ``tp_rank`` of ``tp``.

    Args:
        parameter: shape ``entry.shard_shape(tp)``; written in place.
        tensors: at least the tensors of ``entry.tensors``, by name, on the host or on the
            device.
    """
    for slice_, held in iterate_slices(entry, parameter, tp_rank, tp):
        if slice_.name is None:
            held.zero_()
        else:
            held.copy_(tensors[slice_.name].narrow(entry.axis, slice_.start, slice_.length))


def iterate_slices(
    entry: Entry,
    parameter: torch.Tensor,
    tp_rank: int,
    tp: int,
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Yield the slices of rank ``tp_rank`` of ``tp``, each with a view of ``parameter``."""
    offset = 0
    for slice_ in entry.list_slices(tp_rank, tp):
        yield slice_, parameter.narrow(entry.axis, offset, slice_.length)
        offset += slice_.length


def load_policy(chunks: Sequence[PolicyModel], path: Path, world: World) -> None:
    """Fill this rank's parameters from the safetensors files.

    - Local to the rank: call inside ``world.run_on_all_ranks``.
    - An existing optimizer must copy its master weights again afterwards.

    Args:
        chunks: bare model, on its device.
        path: Hugging Face directory.

    Raises:
        UserError: naming ``model.path``, if the files are not a policy of this shape.
    """
    stored = check_weights(path, chunks[0].shape)

    bound = bind_parameters(chunks, world)
    for entry, parameter in bound.items():
        record_progress()
        # Cast and copy straight from the mapped file, to keep a single slice in memory.
        found = {name: stored[name] for name in entry.tensors}
        tensors = {
            name: torch.from_numpy(each.map_values()).view(TYPES[each.dtype])
            for name, each in found.items()
        }
        fill_parameter(
            entry,
            parameter,
            tensors,
            get_shard_index(entry, world),
            entry.count_parts(world.layout),
        )
    # Collect all flags on the device, because each transfer would wait for the device.
    flags = [torch.isfinite(parameter).all() for parameter in bound.values()]
    finite = torch.stack(flags).tolist()
    if not all(finite):
        entry = next(entry for entry, good in zip(bound, finite, strict=True) if not good)
        problem = f"{entry.key} holds values that are not finite"
        raise UserError("model.path", path, problem, "fetch the model again")


def load_checkpoint(chunks: Sequence[PolicyModel], folder: Path, world: World) -> None:
    """Fill every parameter from a checkpoint, without the optimizer's state. Collective.

    Args:
        chunks: bare model, on its device, in any layout.
        folder: checkpoint, or the folder with the tracker file.

    Raises:
        UserError: on every rank, if the checkpoint is missing, unreadable or of another policy.
    """
    setting = "model.checkpoint"
    checkpoint = world.broadcast(lambda: find_checkpoint(folder, setting))
    shape = chunks[0].shape
    world.broadcast(lambda: check_policy(checkpoint, shape, setting))

    def check() -> None:
        policy = StoredPolicy(checkpoint, shape, setting)
        policy.check(share=world.rank, num_shares=world.size)
        if world.is_rank0 and policy.checksums is None:
            warn_missing_checksums(checkpoint)

    world.run_on_all_ranks(check, description="check of a checkpoint")
    state = model_state(chunks, build_sharding_metadata())
    load_model_state(chunks, read_sharded(state, checkpoint, setting, world))


def check_policy(
    checkpoint: Path,
    shape: PolicyShape,
    setting: str,
    lora: LoraConfig | None = None,
) -> None:
    """Check that a checkpoint is complete and of a policy of this shape, or of adapters of
    ``lora``.

    Call this check before Megatron or torch read the checkpoint.

    Raises:
        UserError: naming ``setting`` and the first wrong tensor or file.
    """
    # No code that a pickle requests is run here; Megatron and torch run any code.
    with convert_corruption_errors(checkpoint, setting):
        if (checksums := Checksums.read(checkpoint)) is not None:
            checksums.check_small_files()
        StoredPolicy(checkpoint, shape, setting, lora)
        _check_common(checkpoint)


def model_state(chunks: Sequence[PolicyModel], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's description of the model's shards."""
    # Names of tensors in a checkpoint do not contain the chunk.
    return {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)
    }


def load_model_state(chunks: Sequence[PolicyModel], state: Mapping[str, Any]) -> None:
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"])


def build_sharding_metadata() -> dict[str, Any]:
    """Return the ranks' group that Megatron requires to describe shards."""
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def read_sharded(
    state: dict[str, Any],
    checkpoint: Path,
    setting: str,
    world: World,
) -> dict[str, Any]:
    """Read the tensors of a sharded state from a checkpoint that passed ``check_policy``.
    Collective.

    Raises:
        UserError: on every rank, if a file contradicts the checkpoint's index.
    """

    def attempt() -> dict[str, Any]:
        failure: BaseException
        # CheckpointException is no subclass of Exception. From Megatron 0.17 on, only the failing
        # rank raises this error.
        try:
            with disable_unsafe_pickles():
                return dist_checkpointing.load(state, str(checkpoint))
        except CheckpointException as error:
            failure, _ = next(iter(error.failures.values()))
        except CheckpointingException as error:
            failure = error
        where = find_unsafe_pickle(checkpoint) or "a file"
        problem = f"{where} cannot be read ({type(failure).__name__}: {failure})"
        raise build_corruption_error(checkpoint, setting, problem) from failure

    return world.run_on_all_ranks(attempt, description="reading of a checkpoint")


def _check_common(checkpoint: Path) -> None:
    """Check that Megatron can read a checkpoint's content other than ranks' tensors.

    Raises:
        CorruptCheckpointError: naming the file.
    """
    try:
        written_by = json.loads((checkpoint / FORMAT).read_bytes())
        if "sharded_backend" not in written_by or {**WRITTEN_BY, **written_by} != WRITTEN_BY:
            raise ValueError(f"it contains {written_by}, and only {WRITTEN_BY} is supported")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{FORMAT} cannot be read ({error})") from error
    # From Megatron 0.19 on, the common state is stored among the shards.
    if os.path.lexists(checkpoint / COMMON):
        try:
            with disable_unsafe_pickles():
                common = torch.load(checkpoint / COMMON, map_location="cpu")
            if not isinstance(common, dict):
                raise ValueError(f"it holds a {type(common).__name__}")
        # A damaged archive can raise any exception.
        except Exception as error:
            raise CorruptCheckpointError(
                f"{COMMON} cannot be read ({type(error).__name__}: {error})"
            ) from error
    elif not any(
        key.startswith("common_state") for key in read_metadata(checkpoint).state_dict_metadata
    ):
        raise CorruptCheckpointError(f"{COMMON} is missing")


def init_adapters(chunks: Sequence[PolicyModel], world: World, *, seed: int) -> None:
    """Initialize adapters like PEFT: A uniform within ±1/√inputs (Kaiming with a = √5), B zero."""
    for entry, parameter in bind_adapters(chunks, world).items():
        ((name, size),) = entry.tensors.items()
        if not name.endswith("lora_A.weight"):
            parameter.data.zero_()
            continue
        # Each A is drawn whole, and the name is part of the seed, so that adapters are equal in
        # every layout and order.
        name_seed = derive_engine_seed(seed, zlib.crc32(name.encode()), Purpose.ADAPTERS)
        bound = 1.0 / math.sqrt(size[1])
        whole = torch.empty(size).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(name_seed)
        )
        fill_parameter(
            entry,
            parameter.data,
            {name: whole},
            get_shard_index(entry, world),
            entry.count_parts(world.layout),
        )


class MergedParameters(dict[Entry, torch.Tensor]):
    """The parameters of this rank with adapters merged in, each computed on access.

    Args:
        parameters: parameters of the policy without adapters.
        adapters: adapters of ``parameters``.
        scale: alpha/rank.
    """

    def __init__(
        self,
        parameters: Mapping[Entry, torch.Tensor],
        adapters: Mapping[Entry, torch.Tensor],
        scale: float,
        world: World,
    ) -> None:
        super().__init__(parameters)
        self._scale = scale
        self._world = world
        self._adapters = {
            name: matrix.detach() for entry, matrix in adapters.items() for name in entry.tensors
        }

    def __getitem__(self, entry: Entry) -> torch.Tensor:
        parameter = super().__getitem__(entry)
        pairs = {name: get_adapter_names(name) for name in entry.tensors}
        if not any(a in self._adapters for a, _ in pairs.values()):
            return parameter
        part = get_shard_index(entry, self._world)
        # W + alpha/rank · B A is computed in fp32, and rounded once to the parameter's type.
        merged = parameter.to(torch.float32, copy=True)
        for slice_, held in iterate_slices(
            entry, merged, part, entry.count_parts(self._world.layout)
        ):
            a, b = (self._adapters.get(name) for name in pairs[slice_.name or ""])
            if a is None or b is None:
                continue
            # With rows split over ranks, the slice needs only the matching rows of B.
            if entry.axis == 0:
                b = b.narrow(0, slice_.start - part * len(b), slice_.length)
            held.addmm_(b.float(), a.float(), alpha=self._scale)
        return merged.to(parameter.dtype)


def adapter_state(chunks: Sequence[PolicyModel], world: World) -> dict[str, Any]:
    """Return Megatron's description of the adapters' shards, the same for any layout."""
    state = {}
    for entry, parameter in bind_adapters(chunks, world).items():
        # Layers and experts are leading dimensions, as for the policy's own parameters.
        leading = list(zip(entry.leading_indices, entry.leading_sizes, strict=True))
        offsets = [(axis, index, count) for axis, (index, count) in enumerate(leading)]
        part = get_shard_index(entry, world)
        # Replicas of a shard need distinct ids, because Megatron saves only replica (0, 0, 0).
        whole = entry.mapping.split is REPLICATED
        if not whole:
            offsets.append((len(leading) + entry.axis, part, entry.count_parts(world.layout)))
        copy = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if entry.expert is None
            else parallel_state.get_expert_data_parallel_rank()
        )
        state[_get_tensor_name(entry)] = ShardedTensor.from_rank_offsets(
            entry.key,
            parameter,
            *offsets,
            replica_id=(0, part if whole else 0, copy),
            prepend_axis_num=len(leading),
        )
    return {"adapters": state}


def load_adapter_state(
    chunks: Sequence[PolicyModel],
    state: Mapping[str, Any],
    world: World,
) -> None:
    with torch.no_grad():
        for entry, parameter in bind_adapters(chunks, world).items():
            parameter.copy_(state["adapters"][_get_tensor_name(entry)])


def _get_tensor_name(entry: Entry) -> str:
    (name,) = entry.tensors
    return name

"""Weights from a Megatron checkpoint into a model of any layout, each rank reading its own slices and no more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import (
    FORMAT,
    checkpoint_place,
    damaged,
    refusing_damage,
    say_unchecked,
)
from megatron_dppo.bridge.checksums import Checksums, DamagedError
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import COMMON, WRITTEN_BY, foreign_pickle
from megatron_dppo.bridge.unpickling import plain_values_only, read_metadata
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World


def load_checkpoint(model: PolicyModel, folder: Path, world: World) -> None:
    """Fill every parameter from the checkpoint that ``model.checkpoint`` names. Collective.

    What else the checkpoint holds (an optimizer's state) is not read.

    Args:
        model: the bare model, on its device, in any layout.
        folder: the checkpoint, or the folder whose tracker names it.

    Raises:
        UserError: on every rank, if there is none, if it is of another policy, or cannot be read.
    """
    setting = "model.checkpoint"
    place = world.from_leader(lambda: checkpoint_place(folder, setting))
    world.from_leader(lambda: check_policy(place, model.shape, setting))

    def check() -> None:
        policy = StoredPolicy(place, model.shape, setting)
        policy.check(share=world.rank, of=world.size)
        if world.leads and not policy.checked:
            say_unchecked(place)

    world.together(check, what="check of a checkpoint")
    state = {"model": model.sharded_state_dict(metadata=sharding())}
    model.load_state_dict(read(state, place, setting, world)["model"])


def check_policy(place: Path, shape: PolicyShape, setting: str) -> None:
    """Look whether a checkpoint is of a policy of this shape and all there, without reading its tensors.

    Nothing that it may ask for is run: Megatron and torch, which run anything, are to read it only after this.

    Raises:
        UserError: naming ``setting`` and the first tensor or file that is amiss.
    """
    with refusing_damage(place, setting):
        if (checksums := Checksums.read(place)) is not None:
            checksums.check_sizes()
            checksums.check(checksums.small)
        StoredPolicy(place, shape, setting)
        _check_common(place)


def sharding() -> dict[str, Any]:
    """What Megatron wants to know of the ranks when it describes shards."""
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def read(state: dict[str, Any], place: Path, setting: str, world: World) -> dict[str, Any]:
    """Read what a sharded state describes, of a checkpoint that ``check_policy`` has let pass. Collective.

    Raises:
        UserError: on every rank, naming ``setting``, if a file does not hold what the checkpoint says.
    """

    def attempt() -> dict[str, Any]:
        failure: BaseException
        try:
            with plain_values_only():
                return dist_checkpointing.load(state, str(place))
        except CheckpointException as error:  # torch's, and no Exception; from Megatron 0.17 on, on the one rank alone
            failure, _ = next(iter(error.failures.values()))
        except CheckpointingException as error:
            failure = error
        where = foreign_pickle(place) or "a file"
        raise damaged(place, setting, f"{where} cannot be read ({type(failure).__name__}: {failure})") from failure

    return world.together(attempt, what="reading of a checkpoint")


def _check_common(place: Path) -> None:
    """Look whether Megatron will be able to read what is no tensor of a rank's.

    Raises:
        DamagedError: naming the file.
    """
    try:
        written_by = json.loads((place / FORMAT).read_bytes())
        if "sharded_backend" not in written_by or {**WRITTEN_BY, **written_by} != WRITTEN_BY:
            raise ValueError(f"it says {written_by}, and {WRITTEN_BY} is read here")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{FORMAT} cannot be read ({error})") from error
    if os.path.lexists(place / COMMON):  # from Megatron 0.19 on it is among the shards
        try:
            with plain_values_only():
                common = torch.load(place / COMMON, map_location="cpu")
            if not isinstance(common, dict):
                raise ValueError(f"it holds a {type(common).__name__}")
        except Exception as error:  # whatever a damaged archive makes of it
            raise DamagedError(f"{COMMON} cannot be read ({type(error).__name__}: {error})") from error
    elif not any(key.startswith("common_state") for key in read_metadata(place).state_dict_metadata):
        raise DamagedError(f"{COMMON} is missing")

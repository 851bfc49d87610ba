"""Weights from a Megatron checkpoint into a model of any layout, each rank reading its own slices and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import checkpoint_place
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.errors import UserError
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
    state = {"model": model.sharded_state_dict(metadata=sharding())}
    model.load_state_dict(read(state, place, setting, world)["model"])


def check_policy(place: Path, shape: PolicyShape, setting: str) -> None:
    """Look whether a checkpoint is of a policy of this shape and all there, without reading what it holds.

    Raises:
        UserError: naming ``setting`` and the first tensor or file that is amiss.
    """
    StoredPolicy(place, shape, setting)


def sharding() -> dict[str, Any]:
    """What Megatron wants to know of the ranks when it describes shards."""
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def read(state: dict[str, Any], place: Path, setting: str, world: World) -> dict[str, Any]:
    """Read what a sharded state describes. Collective.

    Raises:
        UserError: on every rank, naming ``setting``, if a file does not hold what the checkpoint says.
    """

    def attempt() -> dict[str, Any]:
        try:
            return dist_checkpointing.load(state, str(place))
        except CheckpointException as error:  # torch's, and no Exception; from Megatron 0.17 on, on the one rank alone
            failure, _ = next(iter(error.failures.values()))
        problem = f"cannot be read ({type(failure).__name__}: {failure})"
        remedy = "Fetch its files again, or write the number of another checkpoint into the tracker beside it"
        raise UserError(setting, place, problem, remedy) from failure

    return world.together(attempt, what="reading of a checkpoint")

"""Checkpoints in Megatron's layout, written so that a kill at any instant leaves the last good one.

``RUN/checkpoints/iter_0000100/`` holds Megatron's distributed format and ``trainer_state.json``;
``latest_checkpointed_iteration.txt`` names the one to resume from. A checkpoint is written beside its place, renamed
into it, and only then named: whatever the file does not name, or is hidden, was never finished or is being removed.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor
from megatron_dppo.parallel.world import World

TRACKER = "latest_checkpointed_iteration.txt"


def latest_step(folder: Path) -> int | None:
    """The step of the last good checkpoint under ``folder``, None if there is none."""
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else None


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, world: World, *, keep: int) -> None:
        self._folder, self._world, self._keep = folder, world, keep

    def save(self, actor: Actor, step: int, trainer_state: dict[str, Any]) -> None:
        """Write everything that the steps after ``step`` depend on. Collective.

        Args:
            actor: whose weights and optimizer state are written, each rank its shards.
            step: finished steps.
            trainer_state: the leader's, JSON-able: data order, pruning history.

        Raises:
            UserError: on every rank, if it does not fit on the disk; the last good checkpoint stays.
        """
        place, partial = self._path(step), self._folder / f".iter_{step:07d}.partial"
        self._world.from_leader(lambda: self._make_room(partial, place, _bytes(actor, self._world)))
        try:
            save_shards(_sharded_state(actor, loading=False), partial)
        except (OSError, RuntimeError, CheckpointException) as error:  # the last is no Exception, and says little
            free = shutil.disk_usage(self._folder).free
            if isinstance(error, OSError) or free < _bytes(actor, self._world):
                raise _disk_error(self._folder, f"{free / 2**20:.1f} MiB free") from error
            raise
        self._world.from_leader(lambda: self._put_in_place(partial, place, step, trainer_state))

    def load(self, actor: Actor) -> tuple[int, dict[str, Any]]:
        """Restore the last good checkpoint into ``actor``. Collective. Returns its step and the trainer's state."""
        step = self._world.from_leader(lambda: latest_step(self._folder))
        if step is None:
            raise FileNotFoundError(f"no {TRACKER} in {self._folder}")
        place = self._path(step)
        state = dist_checkpointing.load(_sharded_state(actor, loading=True), str(place))
        actor.bare.load_state_dict(state["model"])
        actor.optimizer.load_state_dict(state["optimizer"])
        return step, json.loads((place / "trainer_state.json").read_text())

    def _path(self, step: int) -> Path:
        return self._folder / f"iter_{step:07d}"

    def _make_room(self, partial: Path, place: Path, needed: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in (*self._folder.glob(".iter_*"), place):
            shutil.rmtree(stale, ignore_errors=True)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise _disk_error(self._folder, f"{free / 2**20:.1f} MiB free, {needed / 2**20:.1f} MiB needed")
        partial.mkdir()

    def _put_in_place(self, partial: Path, place: Path, step: int, trainer_state: dict[str, Any]) -> None:
        try:
            with (partial / "trainer_state.json").open("w") as file:
                json.dump(trainer_state, file)
            _sync_tree(partial)
            partial.rename(place)
            tracker = self._folder / (TRACKER + ".partial")
            tracker.write_text(f"{step}\n")
            _sync(tracker)
            tracker.replace(self._folder / TRACKER)
            _sync(self._folder)
        except OSError as error:
            raise _disk_error(self._folder, error) from error
        finished = sorted(path for path in self._folder.glob("iter_*") if int(path.name[5:]) <= step)
        for old in finished[: -self._keep]:
            leaving = old.rename(self._folder / f".{old.name}.old")  # never half a checkpoint under a good name
            shutil.rmtree(leaving, ignore_errors=True)


def save_shards(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state in Megatron's distributed format, each rank its own part. Collective.

    Megatron would start a process that hands over the results of asynchronous writers. Here they are written at once, a
    queue within this process will do, and nothing is left to outlive a rank that is killed.
    """
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(state, str(folder), validate_access_integrity=False)


def _sharded_state(actor: Actor, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = actor.bare.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": actor.optimizer.sharded_state_dict({"model": model}, is_loading=loading, metadata=metadata),
    }


def _bytes(actor: Actor, world: World) -> int:
    """An upper estimate of a checkpoint, taken on the leader: its shard, with fp32 master weights and two moments."""
    shard = sum(parameter.numel() * (parameter.element_size() + 12) for parameter in actor.bare.parameters())
    return shard * world.tp * world.pp * 5 // 4 + 2**20  # names, offsets and the trainer's state come on top


def _disk_error(folder: Path, error: object) -> UserError:
    return UserError(
        "run.dir",
        folder.parent,
        f"a checkpoint could not be written ({error}); the last good one is untouched",
        "Free some room or point run.dir at another disk, and run the same command again: it resumes",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)

"""Checkpoints in Megatron's layout; a kill at any instant leaves the last good checkpoint.

``RUN/checkpoints/iter_0000100/`` holds Megatron's distributed format and the trainer's state;
``latest_checkpointed_iteration.txt`` names the checkpoint for a resume.

- A checkpoint is written to a hidden folder, then renamed, then named in that file.
- A hidden folder, or a folder not named in that file, was never finished or is being removed.
- The checksums of a checkpoint's files are checked before anything else is read.
- Unrelated files in the folder are left alone.

``RUN/checkpoints/hf/`` has the policy's configuration and tokenizer, so that a conversion of the
weights needs no other folder.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.bridge.checkpoint_folder import (
    HF_FOLDER,
    TRACKER,
    Checksums,
    FileChecksum,
    convert_corruption_errors,
    find_latest_checkpoint,
    format_iteration_name,
    list_steps,
    parse_step,
    warn_missing_checksums,
)
from megatron_dppo.bridge.hf_directory import copy_config_and_tokenizer
from megatron_dppo.bridge.load import (
    adapter_state,
    build_sharding_metadata,
    check_policy,
    load_adapter_state,
    load_model_state,
    model_state,
    read_sharded,
)
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.config import Config, LoraConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor
from megatron_dppo.parallel.world import World
from megatron_dppo.process.files import replace_directory, replace_file
from megatron_dppo.process.streams import print_message
from megatron_dppo.trainer.fingerprints import compute_fingerprints
from megatron_dppo.trainer.shards import ShardSave
from megatron_dppo.trainer.writer import FILES, CheckpointFormat, check_resumable, write_state

_UNFINISHED = re.compile(r"\.iter_\d{7,}\.(partial|old)")


@dataclass(frozen=True, slots=True)
class _PendingCheckpoint:
    shards: ShardSave
    step: int
    trainer_state: dict[str, Any]
    needed: int
    """Required disk space in bytes."""
    also_keep: int | None


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, config: Config, world: World) -> None:
        self._folder = Path(config.run.dir) / "checkpoints"
        self._source = config.model.folder
        self._keep = config.run.keep_checkpoints
        self._world = world
        self._background = config.run.checkpoint_in_background
        self._dtype = config.model.torch_dtype
        self._writer = world.broadcast(lambda: CheckpointFormat.from_config(config))
        self._files = world.broadcast(lambda: compute_fingerprints(config))
        self._unfinished: _PendingCheckpoint | None = None

    def save(
        self,
        actor: Actor,
        step: int,
        trainer_state: dict[str, Any],
        write_extra: Callable[[Path], None] | None = None,
        *,
        also_keep: int | None = None,
    ) -> None:
        """Write all state that the steps after ``step`` depend on. Collective.

        With ``run.checkpoint_in_background`` the checkpoint is valid only after :meth:`finish`.

        Args:
            actor: policy with optimizer; each rank writes its shards.
            step: number of finished steps.
            trainer_state: state of rank 0, JSON-able: data order, reward history.
            write_extra: function that writes this rank's own files into a folder; not collective.
            also_keep: step whose checkpoint is kept in addition to the latest
                ``run.keep_checkpoints``.

        Raises:
            UserError: on every rank, if the disk is too small; the last good checkpoint is kept.
        """
        self.finish()
        partial = self._folder / f".{format_iteration_name(step)}.partial"
        needed = _estimate_bytes(actor)
        self._world.broadcast(lambda: self._prepare_folder(partial, self.path(step), needed))
        with self._convert_disk_errors(needed):
            state = _sharded_state(actor, self._writer, loading=False)
            # Shorter than the timeout of a collective, so that the late rank reports first.
            limit_s = 0.9 * self._world.layout.timeout_s
            shards = ShardSave(
                state, partial, self._world, background=self._background, limit_s=limit_s
            )
            if write_extra is not None:
                self._world.run_on_all_ranks(
                    lambda: write_extra(partial), description="part of the checkpoint"
                )
        self._unfinished = _PendingCheckpoint(shards, step, trainer_state, needed, also_keep)
        if not self._background:
            self.finish()

    def is_written(self) -> bool:
        """Return whether :meth:`finish` needs no wait for this rank."""
        return self._unfinished is None or self._unfinished.shards.is_written()

    def finish(self) -> None:
        """Finish the pending checkpoint, if any, and make it valid. Collective.

        Raises:
            UserError: like :meth:`save`.
        """
        if self._unfinished is None:
            return
        unfinished = self._unfinished
        self._unfinished = None
        with self._convert_disk_errors(unfinished.needed):
            checksums = unfinished.shards.finish()
        all_checksums: dict[str, FileChecksum] = {}
        for of_rank in self._world.gather(checksums):
            all_checksums |= of_rank
        self._world.broadcast(lambda: self._put_in_place(unfinished, all_checksums))

    def load(self, actor: Actor) -> tuple[int, dict[str, Any]] | None:
        """Restore the last good checkpoint, written in any layout, into ``actor``. Collective.

        Returns:
            Step and trainer's state; ``None`` without a checkpoint.

        Raises:
            UserError: on every rank, if this run cannot resume from the checkpoint, or a file is
                damaged; then no state is restored.
        """
        place = self._world.broadcast(self._find_latest)
        if place is None:
            return None
        stored = self._world.broadcast(lambda: check_resumable(place, self._writer))
        self._world.broadcast(lambda: check_policy(place, actor.shape, "run.dir", _get_lora(actor)))
        self._world.run_on_all_ranks(
            lambda: self._check(place), description="check of a checkpoint"
        )
        state = _sharded_state(actor, self._writer, loading=True)
        state = read_sharded(state, place, "run.dir", self._world)
        if self._writer.optimizer == "plain":
            _restore_steps(state["optimizer"])
        if _get_lora(actor):
            load_adapter_state(actor.chunks, state, self._world)
        else:
            load_model_state(actor.chunks, state)
        # The optimizer's settings are not restored, because this run's settings are in force.
        settings = [{**group} for group in actor.optimizer.param_groups]
        for inner in _inner_optimizers(state["optimizer"]):
            # From 0.19 on, Megatron also matches parameter groups by these learning rates.
            for group in inner["param_groups"]:
                group |= {name: settings[0][name] for name in ("max_lr", "min_lr") if name in group}
        actor.optimizer.load_state_dict(state["optimizer"])
        # The loaded moments are separate tensors, and have to be moved to the host as well.
        actor.offload()
        for group, saved in zip(actor.optimizer.param_groups, settings, strict=True):
            group |= {
                name: value for name, value in saved.items() if name not in ("params", "step")
            }
            # Torch's Adam writes a float, and Transformer Engine's Adam accepts no float.
            if "step" in group:
                group["step"] = int(group["step"])
        step = parse_step(place)
        assert step is not None
        return step, stored.trainer

    def _find_latest(self) -> Path | None:
        place = find_latest_checkpoint(self._folder)
        if place is not None and not (self._folder / TRACKER).exists():
            text = (
                f"note: {self._folder} has no {TRACKER}: the run resumes from {place.name}, the "
                "newest complete checkpoint"
            )
            print_message(text)
        return place

    def _check(self, place: Path) -> None:
        """Compare this rank's fraction of the files with the checksums."""
        with convert_corruption_errors(place, "run.dir"):
            checksums = Checksums.read(place)
            if checksums is not None:
                checksums.check(share=self._world.rank, num_shares=self._world.size)
            elif self._world.is_rank0:
                warn_missing_checksums(place)

    def path(self, step: int) -> Path:
        return self._folder / format_iteration_name(step)

    @contextmanager
    def _convert_disk_errors(self, needed: int) -> Iterator[None]:
        """Raise a UserError with the free space."""
        # Torch reports a full disk vaguely and inconsistently.
        try:
            yield
        # CheckpointException is not a subclass of Exception.
        except (OSError, RuntimeError, CheckpointException) as error:
            free = shutil.disk_usage(self._folder).free
            if isinstance(error, OSError) or free < needed:
                raise _build_disk_error(self._folder, f"{free / 2**20:.1f} MiB free") from error
            raise

    def _prepare_folder(self, partial: Path, place: Path, needed: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Remove leftovers of killed saves, and an older checkpoint of the same step.
        leftovers = [path for path in self._folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
        for stale in [*leftovers, place]:
            _remove(stale)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise _build_disk_error(
                self._folder, f"{free / 2**20:.1f} MiB free, {needed / 2**20:.1f} MiB needed"
            )
        partial.mkdir()

    def _put_in_place(
        self,
        pending: _PendingCheckpoint,
        checksums: Mapping[str, FileChecksum],
    ) -> None:
        step = pending.step
        partial = pending.shards.folder
        try:
            # Write configuration and tokenizer first, so that no checkpoint lacks these files.
            if not (hf := self._folder / HF_FOLDER).exists():
                with replace_directory(hf) as draft:
                    copy_config_and_tokenizer(self._source, draft, self._dtype)
                    _flush_tree(draft)
            _keep_common_state(partial)
            write_state(partial, {**pending.trainer_state, FILES: self._files}, self._writer)
            Checksums(partial, checksums).write()
            _flush_tree(partial)
            partial.rename(self.path(step))
            with replace_file(self._folder / TRACKER) as tracker:
                tracker.write_text(f"{step}\n")
                _flush(tracker)
                # The disk must have the checkpoint's name before the tracker names the checkpoint.
                _flush(self._folder)
            _flush(self._folder)
        except OSError as error:
            raise _build_disk_error(self._folder, error) from error
        finished = [number for number in list_steps(self._folder) if number <= step]
        for number in finished[: -self._keep]:
            if number != pending.also_keep:
                # Rename before removal, so that no partial checkpoint has a valid name.
                old = self.path(number)
                _remove(old.rename(self._folder / f".{old.name}.old"))


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _keep_common_state(folder: Path) -> None:
    """Write ``common.pt`` if Megatron did not."""
    # From 0.19 on, Megatron stores the common state among the shards; older versions do not look
    # there.
    if not (common := folder / "common.pt").exists():
        data = io.BytesIO()
        torch.save(dist_checkpointing.load_common_state_dict(str(folder)), data)
        common.write_bytes(data.getbuffer())


def _sharded_state(
    actor: Actor,
    checkpoint_format: CheckpointFormat,
    *,
    loading: bool,
) -> dict[str, Any]:
    metadata = {
        **build_sharding_metadata(),
        # Without the prefix the names do not depend on the number of Megatron's inner optimizers.
        "chained_optim_avoid_prefix": True,
        # A single replica gathers the optimizer state, in host memory; otherwise each replica would
        # gather the state, through the GPU.
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }
    if checkpoint_format.optimizer != "plain":
        metadata["distrib_optim_sharding_type"] = checkpoint_format.optimizer
    adapted = _get_lora(actor) is not None
    model = (
        adapter_state(actor.chunks, actor.world) if adapted else model_state(actor.chunks, metadata)
    )
    return model | {
        "optimizer": actor.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        )
    }


def _get_lora(actor: Actor) -> LoraConfig | None:
    """Return the adapters that a checkpoint stores instead of the whole policy."""
    lora = actor.chunks[0].lora
    return lora if lora.rank else None


def _restore_steps(optimizer: dict[Any, Any]) -> None:
    """Restore the step count of a plain optimizer."""
    # Megatron omits a count of 0, and Transformer Engine's Adam stores it in the parameter groups.
    for inner in _inner_optimizers(optimizer):
        steps = [group["step"] for group in inner["param_groups"] if "step" in group]
        inner["state"].setdefault("common_step", torch.tensor(float(max(steps, default=0))))


def _inner_optimizers(optimizer: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the states of torch's optimizers in Megatron's state: one, or one per kind of
    parameters, by number."""
    parts = list(optimizer.values()) if 0 in optimizer else [optimizer]
    # With bf16 or sharding, torch's state is nested beside the master weights.
    return [part.get("optimizer", part) for part in parts]


def _estimate_bytes(actor: Actor) -> int:
    """Return an upper estimate of a checkpoint's bytes."""
    lora = actor.chunks[0].lora
    weight = next(actor.parameters()).element_size()
    trained = count_parameters(actor.shape, lora if lora.rank else None) * (weight + 12)
    # Trained weights, fp32 master weights and two moments, with room for padding, names, offsets
    # and the trainer's state.
    return trained * 5 // 4 + 2**20


def _build_disk_error(folder: Path, error: object) -> UserError:
    problem = f"a checkpoint could not be written ({error}); the last good one is untouched"
    remedy = (
        "Free some room or point run.dir at another disk, and run the same command again: it "
        "resumes"
    )
    return UserError("run.dir", folder.parent, problem, remedy)


def _remove(path: Path) -> None:
    """Remove a folder, or a file in the folder's place."""
    if path.is_dir() and not path.is_symlink():
        # The next save retries failed removals.
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)

"""Whether ``run.dir`` can be written to, and has room for what a run writes. Needs no torch."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from megatron_dppo.bridge.mapping import parameters
from megatron_dppo.config import Config
from megatron_dppo.config.types import Command
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

MASTER_AND_MOMENTS = 12
"""Bytes per weight of the optimizer's state: an fp32 master copy and Adam's two moments."""
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
OVERHEAD = 4 * 2**20
"""Bytes of what lies around the weights: logs, the tokenizer, the picture."""


def check_run_dir(folder: Path) -> None:
    """
    Raises:
        UserError: nothing can be written there.
    """
    place = _existing(folder)
    if not place.is_dir():
        raise UserError("run.dir", folder, f"{place} is a file", "Name a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError("run.dir", folder, f"{place} cannot be written to", "Name a directory that you may write to")


def check_room(config: Config, shape: PolicyShape, command: Command) -> None:
    """
    Raises:
        UserError: less is free on the disk than the command will write.
    """
    folder = Path(config.run.dir)
    needed = bytes_to_write(config, shape, command) - _size(folder / "checkpoints")
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed:
        fewer = "lower run.keep_checkpoints, " if command == "train" and config.run.keep_checkpoints > 1 else ""
        raise UserError(
            "run.dir",
            folder,
            f"checkpoints and export will take about {_readable(needed)}, and {_readable(free)} are free there",
            f"Free some room, {fewer}or point run.dir at another disk",
        )


def bytes_to_write(config: Config, shape: PolicyShape, command: Command) -> int:
    """The most that a run has on the disk at one time: checkpoints (those that it keeps, the best one, and one more
    while the newest is being written) and the export."""
    weights, dtype = parameters(shape), WEIGHT_BYTES[config.model.dtype]
    if command == "sft":
        return weights * dtype + OVERHEAD
    run = config.run
    written = math.ceil(run.steps / run.checkpoint_every) if run.checkpoint_every else 1
    checkpoints = min(written, run.keep_checkpoints + run.keep_best + 1)
    return weights * ((dtype + MASTER_AND_MOMENTS) * checkpoints + (dtype if run.export else 0)) + OVERHEAD


def _existing(folder: Path) -> Path:
    """The folder, or the nearest thing above it that exists."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0


def _readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

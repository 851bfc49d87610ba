"""Disk space of a run: its checkpoints, its export and weights for its servers. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.bridge.mapping import parameters
from megatron_dppo.config import WEIGHT_BYTES, Config
from megatron_dppo.config.types import Command
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rollout.servers.launch import syncs_by_files

MASTER_AND_MOMENTS = 12
"""Bytes per weight of the optimizer's state: an fp32 master copy and Adam's two moments."""
OVERHEAD = 4 * 2**20
"""Bytes of what lies around the weights: logs, the tokenizer, the picture."""


@dataclass(frozen=True, slots=True)
class Disk:
    """About what a run takes on the disk of its folder, in bytes."""

    checkpoint: int
    """One: the weights that are trained, and the optimizer's state."""
    checkpoints: int
    """How many: those that are kept, the best one, and one more while the newest is being written."""
    export: int
    """The policy for Hugging Face, and its adapters, if it has any."""
    sync: int = 0
    """Weights that servers read back at a sync; 0 if ``rollout.sync.folder`` names another place."""

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export + self.sync + OVERHEAD


def disk_needed(config: Config, shape: PolicyShape, command: Command = "train") -> Disk:
    """Disk space of a training command for a policy of this shape."""
    weights, dtype, run, lora = parameters(shape), WEIGHT_BYTES[config.model.dtype], config.run, config.model.lora
    if command == "sft":
        return Disk(0, 0, weights * dtype)
    written = math.ceil(run.steps / run.checkpoint_every) if run.checkpoint_every else 1
    trained = parameters(shape, lora) if lora.rank else weights
    exported = weights + (trained if lora.rank else 0) if run.export else 0
    sync = config.rollout.sync
    synced = (trained if sync.adapter else weights) if syncs_by_files(config.rollout) and sync.folder is None else 0
    return Disk(
        checkpoint=trained * (dtype + MASTER_AND_MOMENTS),
        checkpoints=min(written, run.keep_checkpoints + run.keep_best + 1),
        export=exported * dtype,
        sync=synced * dtype,
    )


def size_text(size: float) -> str:
    """Bytes in the largest unit that they fill."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

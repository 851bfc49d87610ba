"""``train CONFIG --check``: what can be known to be wrong before a rank starts, and how far the run is."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import latest_step
from megatron_dppo.config import Config
from megatron_dppo.config.types import Command
from megatron_dppo.parallel.layout import resolve_layout
from megatron_dppo.trainer.preflight import preflight


def check(config: Config, command: Command, *, ranks: int = 0) -> str:
    """One line, ``RUN.DIR: 30 of 100 steps are done``, which job scripts read.

    Args:
        config: of the run.
        command: that would be run.
        ranks: that will be started; 0: as many as the layout wants.

    Raises:
        UserError: for the first thing that is wrong.
    """
    preflight(config, command)
    if ranks:
        resolve_layout(config.layout, ranks)
    done = latest_step(Path(config.run.dir) / "checkpoints") or 0
    return f"{config.run.dir}: {done} of {config.run.steps} steps are done"

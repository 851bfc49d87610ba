"""How the kept share changes over a run."""

from __future__ import annotations

import math

from megatron_dppo.config import ScheduleConfig


def scheduled_keep(keep: float, schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The share to keep at one step.

    It starts at 1 and goes to ``keep``, at once (``constant``), along a line or along half a cosine over the first
    ``schedule.ramp`` of the run; ``adaptive`` solves for it at every step, from ``keep`` upwards. Over the last
    ``schedule.off_last`` of the run nothing is pruned, as InfoBatch has it (arXiv:2303.04947), so that training ends on
    the plain objective's own noise.

    Args:
        keep: the share that the schedule goes to.
        schedule: its shape.
        step: counted from 0.
        total_steps: of the whole run, so that a resumed run goes on where it was.
    """
    if total_steps - step <= round(schedule.off_last * total_steps):
        return 1.0
    ramp = schedule.ramp * total_steps
    if schedule.shape in ("constant", "adaptive") or step >= ramp:
        return keep
    progress = step / ramp
    if schedule.shape == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - keep) * progress

"""How much of a step is pruned, and how many prompts it therefore looks at."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megatron_dppo.config import Config, PruningConfig, ScheduleConfig
from megatron_dppo.rl.types import Floats, Ints, StepMetadata


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


HALVINGS = 24
"""Of the interval in which the share is looked for: past the seventh digit no draw can tell."""


def inflation(squares: Floats, inclusion: Floats) -> float:
    """Σ s²/π over Σ s², by which independent draws multiply the sum of squares of the terms; 1 without pruning.

    Args:
        squares: s², of any shape. Where it is 0 nothing is asked of π.
        inclusion: π, in the same shape.
    """
    total = squares.sum()
    ever = (squares > 0.0) & (inclusion > 0.0)
    return float((squares[ever] / inclusion[ever]).sum() / total) if total > 0.0 else 1.0


def least_share(inflation_at: Callable[[float], float], keep: float, most: float) -> float:
    """The least share in [keep, 1] whose inflation is at most ``most``; inflation falls as the share grows."""
    if inflation_at(keep) <= most:
        return keep
    low, high = keep, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if inflation_at(middle) <= most else (middle, high)
    return high


def window_size(config: Config, step: int) -> int:
    """N of a step: ``rollout.prompts_per_step``, over the share of completions kept where prompts refill it.

    CPPO (arXiv:2503.22342, section 4.3) fills the place of pruned completions with those of further questions. With a
    window fixed before any draw N and Z grow with it, and what was unbiased stays so.
    """
    prompts, completions = config.rollout.prompts_per_step, config.pruning.completions
    if config.pruning.refill == "none" or completions.rule == "none":
        return prompts
    return round(prompts / scheduled_keep(completions.keep, completions.schedule, step, config.run.steps))


def in_rounds(pruning: PruningConfig) -> bool:
    """Whether a step goes on rolling out until it has enough groups of mixed reward, and leaves the others out."""
    rule = pruning.prompts.rule
    return rule == "dynamic_sampling" or (rule == "greso" and pruning.refill == "prompts")


def mixed(metadata: StepMetadata) -> Ints:
    """The rows of groups whose rewards differ."""
    return np.flatnonzero((metadata.rewards != metadata.rewards[:, :1]).any(axis=1))


def next_round(wanted: int, found: int, looked_at: int) -> int:
    """How many prompts to look at next: what is missing over the share of them that has been of use so far.

    GRESO's adaptive batch (arXiv:2506.02177, section 4.2), where DAPO takes a whole batch again.

    Args:
        wanted: groups of mixed reward that the step is to have.
        found: those that it has.
        looked_at: prompts that it took to find them.
    """
    missing = wanted - found
    return 0 if missing <= 0 else min(wanted, math.ceil(missing * looked_at / max(found, 1)))

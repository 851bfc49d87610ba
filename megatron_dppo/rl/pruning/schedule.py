"""How much of a step is kept, and how many prompts it looks at for that."""

from __future__ import annotations

import math
from typing import overload

import numpy as np

from megatron_dppo.config import Config, PruningConfig, ScheduleConfig
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.types import Ints, StepMetadata


@overload
def scheduled_keep(keep: float, schedule: ScheduleConfig, step: int, total_steps: int) -> float: ...


@overload
def scheduled_keep(keep: Keep, schedule: ScheduleConfig, step: int, total_steps: int) -> Keep: ...


def scheduled_keep(keep: Keep, schedule: ScheduleConfig, step: int, total_steps: int) -> Keep:
    """The share to keep at one step.

    ``constant``: ``keep`` from the first step. ``linear``, ``cosine``: from 1 to ``keep``
    over the first ``schedule.ramp`` of the run. Over the last ``schedule.off_last`` of the run
    nothing is pruned, as in InfoBatch (arXiv:2303.04947), so that training ends without the noise
    of pruning.

    Args:
        keep: the share that the schedule goes to.
        schedule: its shape.
        step: counted from 0.
        total_steps: of the whole run.
    """
    if total_steps - step <= round(schedule.off_last * total_steps):
        return 1.0
    ramp = schedule.ramp * total_steps
    if schedule.shape == "constant" or keep == "auto" or step >= ramp:
        return keep
    progress = step / ramp
    if schedule.shape == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - keep) * progress


def compute_window_size(config: Config, inflation: float = 1.0) -> int:
    """N of a step, the number of prompts that it considers: ``rollout.prompts_per_step``, times
    ``inflation`` over ``pruning.target_noise`` if that is set.

    The variance of a step is proportional to inflation/N. N is fixed before any draw, so that
    nothing is biased.

    Args:
        config: of the run.
        inflation: by how much pruning has multiplied the variance of earlier steps, at least 1.
    """
    prompts = config.rollout.prompts_per_step
    noise = config.pruning.target_noise
    return max(1, round(prompts * inflation / noise)) if noise else prompts


def uses_resampling(pruning: PruningConfig) -> bool:
    """Whether a step rolls out in rounds until it has enough groups of mixed reward, and leaves the
    others out."""
    rule = pruning.prompts.rule
    return rule == "dynamic_sampling" or (rule == "greso" and pruning.resample == "prompts")


def find_nonzero_variance_groups(metadata: StepMetadata) -> Ints:
    """Return the indices of groups with unequal rewards."""
    rewards = metadata.rewards
    return np.flatnonzero((rewards != rewards[:, :1]).any(axis=1))


def compute_resample_size(num_groups: int, num_found: int, num_sampled: int) -> int:
    """How many prompts to look at next: the missing groups over the share of prompts that were
    mixed so far.

    That is GRESO's adaptive batch (arXiv:2506.02177, section 4.2). DAPO takes a whole batch again.

    Args:
        num_groups: groups of mixed reward that the step is to have.
        num_found: those that it has.
        num_sampled: prompts that it took to find them.
    """
    missing = num_groups - num_found
    return (
        0 if missing <= 0 else min(num_groups, math.ceil(missing * num_sampled / max(num_found, 1)))
    )

"""Schedule of a step's kept fraction, and number of its prompts."""

from __future__ import annotations

import math
from typing import overload

import numpy as np

from megatron_dppo.config import Config, PruningConfig, ScheduleConfig
from megatron_dppo.config.types import Keep
from megatron_dppo.rl.advantages import read_columns, sum_normalized_rewards
from megatron_dppo.rl.numbers import find_equal_groups
from megatron_dppo.rl.types import Ints, StepMetadata


@overload
def scheduled_keep(keep: float, schedule: ScheduleConfig, step: int, total_steps: int) -> float: ...


@overload
def scheduled_keep(keep: Keep, schedule: ScheduleConfig, step: int, total_steps: int) -> Keep: ...


def scheduled_keep(keep: Keep, schedule: ScheduleConfig, step: int, total_steps: int) -> Keep:
    """Return the fraction to keep at one step.

    - ``constant``: ``keep`` from the first step.
    - ``linear``, ``cosine``: from 1 to ``keep`` over the first ``schedule.ramp`` of the run.
    - Last ``schedule.off_last`` of the run: 1.

    Args:
        keep: final fraction of the schedule.
        step: counted from 0.
    """
    # As in InfoBatch (arXiv:2303.04947): training ends without the noise of pruning.
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
    """Return N, the number of prompts considered by a step.

    N is ``rollout.prompts_per_step``, times ``inflation`` / ``pruning.target_noise`` if that is
    set.

    Args:
        inflation: factor of pruning on the variance of earlier steps, at least 1.
    """
    prompts = config.rollout.prompts_per_step
    noise = config.pruning.target_noise
    # The variance of a step is proportional to inflation/N. N is fixed before any draw, and
    # therefore biases no estimate.
    return max(1, round(prompts * inflation / noise)) if noise else prompts


def uses_resampling(pruning: PruningConfig) -> bool:
    """Return whether a step rolls out in rounds until enough groups have non-zero variance, and
    drops the rest."""
    rule = pruning.prompts.rule
    return rule == "dynamic_sampling" or (rule == "greso" and pruning.resample == "prompts")


def find_nonzero_variance_groups(metadata: StepMetadata, config: Config) -> Ints:
    """Return the groups of unequal rewards.

    Under GDPO these are the groups whose normalised rewards do not cancel: equal sums of unequal
    rewards may have advantages.
    """
    values = metadata.rewards
    if compared := config.compared_rewards:
        values = sum_normalized_rewards(read_columns(metadata, compared))
    return np.flatnonzero(~find_equal_groups(values))


def compute_resample_size(num_groups: int, num_found: int, num_sampled: int) -> int:
    """Return the number of prompts of the next round: missing groups / fraction of prompts with
    non-zero variance.

    This is GRESO's adaptive batch (arXiv:2506.02177, section 4.2).

    Args:
        num_groups: groups with non-zero variance that the step needs.
        num_found: the groups found.
        num_sampled: prompts rolled out to find ``num_found`` groups.
    """
    missing = num_groups - num_found
    if missing <= 0:
        return 0
    # DAPO would sample a whole batch again.
    return min(num_groups, math.ceil(missing * num_sampled / max(num_found, 1)))

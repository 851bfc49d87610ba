"""How many prompts a step looks at, where pruning is to leave packs full: the window, and further rounds of it."""

from __future__ import annotations

import math

import numpy as np

from megatron_dppo.config import Config, PruningConfig
from megatron_dppo.rl.pruning.schedule import scheduled_keep
from megatron_dppo.rl.types import Ints, StepMetadata


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

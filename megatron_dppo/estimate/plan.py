"""Plan of a run: fit in memory, time and cost."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic_core import to_jsonable_python

from megatron_dppo.config import Config
from megatron_dppo.estimate.assumptions import Assumptions, needs_flash_attn
from megatron_dppo.estimate.memory import (
    Memory,
    Parameters,
    count_parameter_kinds,
    resolve_shape,
)
from megatron_dppo.estimate.search import with_settings
from megatron_dppo.estimate.servers import ServerMemory, estimate_memory
from megatron_dppo.estimate.time import StepTime, estimate_step_time, get_measured_variance
from megatron_dppo.estimate.workload import Placement, Setup, assign_gpus, disable_pruning
from megatron_dppo.trainer.preflight import DiskUsage, check_config, estimate_disk


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of the whole run."""

    gpu_hours: float
    money: float | None
    """Money at ``cluster.price_per_gpu_hour``; None if not set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Estimates of a run before its start."""

    config: Config
    assumptions: Assumptions
    parameters: Parameters
    placement: Placement
    disk: DiskUsage
    actor: Memory
    server: ServerMemory
    fits: bool
    needs_flash_attn: bool
    """Whether Transformer Engine needs flash-attn for fused attention on these GPUs."""
    pruned: StepTime
    unpruned: StepTime
    cost: Cost
    cost_unpruned: Cost
    variance: tuple[float, float] | None
    """Factor of pruning on the gradient's variance: minimum and maximum; None if unknown."""
    efficiency: tuple[float, float] | None
    """Seconds of an unpruned step of fewer prompts with equal noise / seconds of a pruned step:
    minimum and maximum; None if ``variance`` is None."""

    @property
    def speed_up(self) -> float:
        """Seconds of a step without pruning / with pruning."""
        return self.unpruned.seconds / self.pruned.seconds

    @property
    def checkpoint_seconds(self) -> float:
        return self.disk.checkpoint / (self.assumptions.checkpoint_gb_s * 1e9)

    @property
    def stop_seconds(self) -> int:
        """Seconds that a step without pruning and a checkpoint take, in whole minutes: the number
        in ``--signal`` of a Slurm job."""
        return 60 * math.ceil((self.unpruned.seconds + self.checkpoint_seconds) / 60.0)


def make_plan(config: Config, assume: Assumptions) -> Plan:
    """Plan a run, by ``assume`` for facts missing in ``config``.

    Raises:
        UserError: settings contradict each other, or the layout does not divide the policy or the
            cluster.
    """
    check_config(config)
    shape = resolve_shape(config.model.path)
    setup = Setup(config, shape, assign_gpus(config, shape), assume)
    actor, server = estimate_memory(setup)
    # By default fp32 uses torch's layers.
    may_use_te = config.model.dtype == "bf16" and config.model.spec != "torch"
    fits = actor.fits and server.fits
    most = max(server.concurrency, 1)

    def estimate_step(config: Config, prompts: int) -> StepTime:
        change = {"rollout.prompts_per_step": max(1, prompts), "pruning.target_noise": None}
        own = dataclasses.replace(setup, config=with_settings(config, change))
        return estimate_step_time(own, concurrency=most)

    def estimate_unpruned_step(prompts: int) -> StepTime:
        return estimate_step(disable_pruning(config), prompts)

    prompts = config.rollout.prompts_per_step
    given = assume.variance
    variance = get_measured_variance(config) if given is None else (given, given)
    window = prompts
    if (noise := config.pruning.target_noise) and variance:
        window = round(prompts * fmean(variance) / noise)
    pruned = estimate_step(config, window)
    # An unpruned step of 1/factor of the prompts has the pruned step's variance.
    as_noisy = variance and [
        estimate_unpruned_step(round(window / factor)).seconds / pruned.seconds
        for factor in variance
    ]
    unpruned = estimate_unpruned_step(prompts)
    return Plan(
        config=config,
        assumptions=assume,
        parameters=count_parameter_kinds(shape),
        placement=setup.placement,
        disk=estimate_disk(config, shape),
        actor=actor,
        server=server,
        fits=fits,
        needs_flash_attn=may_use_te and needs_flash_attn(config.cluster.gpu, shape.head_dim),
        pruned=pruned,
        unpruned=unpruned,
        cost=_compute_cost(setup, pruned),
        cost_unpruned=_compute_cost(setup, unpruned),
        variance=variance,
        efficiency=(as_noisy[1], as_noisy[0]) if as_noisy else None,
    )


def _compute_cost(setup: Setup, step: StepTime) -> Cost:
    hours = step.seconds * setup.config.run.steps * setup.placement.gpus / 3600.0
    price = setup.config.cluster.price_per_gpu_hour
    return Cost(hours, None if price is None else hours * price)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan, settings and assumptions as plain objects; memory and disk in bytes. Times
    and costs are None if the run does not fit.
    """
    found = to_jsonable_python(plan)
    for part, memory in (
        (found["actor"], plan.actor),
        (found["server"]["memory"], plan.server.memory),
    ):
        part |= {"total": memory.total, "fits": memory.fits}
    found["disk"] |= {"total": plan.disk.total}
    found |= {"speed_up": plan.speed_up, "stop_seconds": plan.stop_seconds}
    times = (
        "stop_seconds",
        "pruned",
        "unpruned",
        "cost",
        "cost_unpruned",
        "speed_up",
        "variance",
        "efficiency",
    )
    return found if plan.fits else found | dict.fromkeys(times)

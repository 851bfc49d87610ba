"""The plan of a run: whether it fits in memory, how long it takes, what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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
    """The cost of the whole run."""

    gpu_hours: float
    money: float | None
    """At ``cluster.price_per_gpu_hour``; None if that is not set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known before a run."""

    config: Config
    assumptions: Assumptions
    parameters: Parameters
    placement: Placement
    disk: DiskUsage
    actor: Memory
    server: ServerMemory
    fits: bool
    needs_flash_attn: bool
    """Whether Transformer Engine's layers have no fused attention on these GPUs without
    flash-attn."""
    pruned: StepTime
    unpruned: StepTime
    cost: Cost
    cost_unpruned: Cost
    variance: tuple[float, float] | None
    """By how much pruning multiplies the gradient's variance, at least and at most; None if that is
    not known."""
    efficiency: tuple[float, float] | None
    """Seconds of an unpruned step of so many fewer prompts that it is as noisy, over those with
    pruning: at least and at most; None if ``variance`` is not known."""

    @property
    def speed_up(self) -> float:
        """Seconds of a step without pruning over those with it."""
        return self.unpruned.seconds / self.pruned.seconds


def make_plan(config: Config, assume: Assumptions) -> Plan:
    """Plan a run.

    Args:
        config: of the run.
        assume: what it does not say.

    Raises:
        UserError: for settings that contradict each other, and a layout that divides neither policy
            nor cluster.
    """
    check_config(config)
    shape = resolve_shape(config.model.path)
    setup = Setup(config, shape, assign_gpus(config, shape), assume)
    actor, server = estimate_memory(setup)
    may_use_te = config.model.dtype == "bf16" and config.model.spec != "torch"
    fits = actor.fits and server.fits
    most = max(server.concurrency, 1)

    pruned = estimate_step_time(setup, concurrency=most)

    def estimate_unpruned_step(prompts: int) -> StepTime:
        fewer = with_settings(
            disable_pruning(config), {"rollout.prompts_per_step": max(1, prompts)}
        )
        return estimate_step_time(dataclasses.replace(setup, config=fewer), concurrency=most)

    prompts = config.rollout.prompts_per_step
    given = assume.variance
    variance = get_measured_variance(config) if given is None else (given, given)
    as_noisy = variance and [
        estimate_unpruned_step(round(prompts / factor)).seconds / pruned.seconds
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
    """The plan, its settings and its assumptions as plain objects; memory and disk in bytes.

    There are no times where it does not fit.
    """
    found = to_jsonable_python(plan)
    for part, memory in (
        (found["actor"], plan.actor),
        (found["server"]["memory"], plan.server.memory),
    ):
        part |= {"total": memory.total, "fits": memory.fits}
    found["disk"] |= {"total": plan.disk.total}
    found["speed_up"] = plan.speed_up
    times = ("pruned", "unpruned", "cost", "cost_unpruned", "speed_up", "variance", "efficiency")
    return found if plan.fits else found | dict.fromkeys(times)

"""A run's plan: what it holds, whether that fits, how long its steps take, and what they cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.hardware import GPUS
from megatron_dppo.estimate.memory import Memory, ServerMemory, actor_memory, resident_bytes, server_memory
from megatron_dppo.estimate.parameters import Parameters, parameters_of, shape_of
from megatron_dppo.estimate.placement import Placement, place
from megatron_dppo.estimate.remedy import Change, remedies
from megatron_dppo.estimate.time import StepTime, step_time
from megatron_dppo.estimate.work import lengths_of, prompt_tokens, without_pruning
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the whole run."""

    gpu_hours: float
    money: float | None
    """At cluster.price_per_gpu_hour; None without one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known beforehand."""

    config: Config
    assumptions: Assumptions
    parameters: Parameters
    placement: Placement
    actor: Memory
    server: ServerMemory
    fits: bool
    remedies: list[Change]
    """Where it does not fit: settings under which it would, each a way of its own."""
    pruned: StepTime
    unpruned: StepTime
    cost: Cost
    cost_unpruned: Cost

    @property
    def speed_up(self) -> float:
        """Seconds of a step without pruning over those with it."""
        return self.unpruned.seconds / self.pruned.seconds


def make_plan(config: Config, assume: Assumptions) -> Plan:
    """Plan a run.

    Raises:
        UserError: for settings that contradict each other, and a layout that divides neither policy nor cluster.
    """
    check_config(config)
    shape = shape_of(config.model.path)
    actor, server, placement = _memory(config, shape, assume)
    fits = actor.fits and server.fits

    def would_fit(changed: Config) -> bool:
        its_actor, its_server, _ = _memory(changed, shape, assume)
        return its_actor.fits and its_server.fits

    gpu, most = GPUS[config.cluster.gpu], max(server.concurrency, 1)
    pruned = step_time(config, shape, placement, gpu, assume, concurrency=most)
    unpruned = step_time(without_pruning(config), shape, placement, gpu, assume, concurrency=most)
    return Plan(
        config=config,
        assumptions=assume,
        parameters=parameters_of(shape),
        placement=placement,
        actor=actor,
        server=server,
        fits=fits,
        remedies=[] if fits else remedies(config, shape, would_fit),
        pruned=pruned,
        unpruned=unpruned,
        cost=_cost(config, placement, pruned),
        cost_unpruned=_cost(config, placement, unpruned),
    )


def _memory(config: Config, shape: PolicyShape, assume: Assumptions) -> tuple[Memory, ServerMemory, Placement]:
    placement, gpu = place(config, shape), GPUS[config.cluster.gpu]
    actor = actor_memory(config, shape, placement, gpu, assume)
    server = server_memory(
        config,
        shape,
        gpu,
        assume,
        tp=min(placement.servers),
        resident=resident_bytes(config, actor) if placement.shared else 0.0,
        mean_tokens=prompt_tokens(config, assume) + lengths_of(config, assume).mean,
    )
    return actor, server, placement


def _cost(config: Config, placement: Placement, step: StepTime) -> Cost:
    hours = step.seconds * config.run.steps * placement.gpus / 3600.0
    price = config.cluster.price_per_gpu_hour
    return Cost(hours, None if price is None else hours * price)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan, its settings and its assumptions as plain objects; memory in bytes."""
    found = asdict(plan)
    for part, memory in ((found["actor"], plan.actor), (found["server"]["memory"], plan.server.memory)):
        part |= {"total": memory.total, "fits": memory.fits}
    return found | {"speed_up": plan.speed_up}

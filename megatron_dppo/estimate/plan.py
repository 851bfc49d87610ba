"""The plan of a run: whether it fits in memory, which settings would make it fit, how long it takes, what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from pydantic_core import to_jsonable_python

from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.levers import SHARES, LeverRow, lever_table, measured_price, pruning_of
from megatron_dppo.estimate.memory import (
    Memory,
    Parameters,
    ServerMemory,
    actor_memory,
    parameters_of,
    resident_bytes,
    server_memory,
    shape_of,
)
from megatron_dppo.estimate.time import StepTime, step_time
from megatron_dppo.estimate.workload import Placement, Setup, place, without_pruning
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config

MOST_AT_ONCE = 3
"""Settings that are changed together."""
MOST_FOUND = 3
"""Ways that are proposed."""

Change = dict[str, Any]


def with_settings(config: Config, change: Mapping[str, Any]) -> Config:
    """The configuration with other values of some settings, by their dotted names."""
    for key, value in change.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def remedies(config: Config, shape: PolicyShape, fits: Callable[[Config], bool]) -> list[Change]:
    """The fewest changes after which a run fits: up to three ways, those that cost least first.

    Args:
        config: that does not fit.
        shape: of the policy.
        fits: whether another one does; may raise UserError for one that is no configuration at all.
    """
    options = list(_options(config, shape))
    for size in range(1, MOST_AT_ONCE + 1):
        found: list[Change] = []
        for chosen in combinations(options, size):
            change = next((c for c in map(_merged, product(*chosen)) if _works(config, c, fits)), None)
            if change is not None:
                found.append(change)
            if len(found) == MOST_FOUND:
                break
        if found:
            return found
    return []


def _merged(parts: tuple[Change, ...]) -> Change:
    return {key: value for part in parts for key, value in part.items()}


def _works(config: Config, change: Change, fits: Callable[[Config], bool]) -> bool:
    try:
        changed = with_settings(config, change)
        if not fits(changed):
            return False
        check_config(changed)
    except UserError:
        return False
    return True


def _options(config: Config, shape: PolicyShape) -> Iterator[list[Change]]:
    """Changes that may help. Each list has the values of one thing, mildest first."""
    layout, cluster, rollout = config.layout, config.cluster, config.rollout
    if not config.optimizer.distributed:
        yield [{"optimizer.distributed": True}]
    if layout.tp > 1 and not layout.sequence_parallel:
        yield [{"layout.sequence_parallel": True}]
    if layout.vpp > 1:
        yield [{"layout.vpp": 1}]
    if config.model.recompute == "selective":
        yield [{"model.recompute": "full"}]
    if config.model.recompute == "none":
        yield [{"model.recompute": "selective"}, {"model.recompute": "full"}]
    if config.optimizer.distributed and not config.optimizer.offload:
        yield [{"optimizer.offload": True}]
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // layout.tp) * layout.tp
    tokens = sorted({max(config.pack.max_tokens >> i, least) for i in (1, 2, 3)}, reverse=True)
    if tokens[-1] < config.pack.max_tokens:
        yield [{"pack.max_tokens": size} for size in tokens]
    if parts := _larger(layout.tp, min(cluster.gpus_per_node, shape.kv_heads), shape.kv_heads):
        yield [{"layout.tp": tp, "layout.sequence_parallel": True} for tp in parts]
    if parts := _larger(layout.ep, shape.experts, shape.experts):
        whole = {"layout.etp": 1} if layout.expert_tp > 1 else {}
        yield [{"layout.ep": ep} | whole for ep in parts]
    if stages := _larger(layout.pp, 16, shape.num_layers):
        yield [{"layout.pp": pp} for pp in stages]
    yield [{"layout.cp": layout.cp * factor} for factor in (2, 4)]
    if rollout.engine != "local" and isinstance(rollout.launch.tp, int):
        sizes, count = _larger(rollout.launch.tp, cluster.gpus_per_node, shape.heads), rollout.launch.count
        fewer = [{"rollout.launch.count": max(count * rollout.launch.tp // tp, 1)} if count else {} for tp in sizes]
        if sizes:
            yield [{"rollout.launch.tp": tp} | less for tp, less in zip(sizes, fewer, strict=True)]
    yield [{"cluster.nodes": cluster.nodes * factor} for factor in (2, 4, 8)]


def _larger(value: int, most: int, of: int) -> list[int]:
    """Divisors of ``of`` above a value, up to a limit."""
    return [number for number in range(value + 1, most + 1) if of % number == 0]


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
    actor: Memory
    server: ServerMemory
    fits: bool
    remedies: list[Change]
    """Changes of settings, each of which would make the run fit. Empty if it fits."""
    pruned: StepTime
    unpruned: StepTime
    cost: Cost
    cost_unpruned: Cost

    @property
    def speed_up(self) -> float:
        """Seconds of a step without pruning over those with it."""
        return self.unpruned.seconds / self.pruned.seconds

    @property
    def steps_ratio(self) -> float | None:
        """Steps without pruning over steps with it: assumed, or measured of as much pruning; None if neither."""
        if self.assumptions.steps_ratio is not None:
            return self.assumptions.steps_ratio
        pruning = pruning_of(self.config)
        price = measured_price(pruning) if pruning else None
        return price and price.steps_ratio

    @property
    def speed_up_to_accuracy(self) -> float | None:
        """Times as fast to the same accuracy as without pruning; None if the price in steps is not known."""
        return self.steps_ratio and self.speed_up * self.steps_ratio

    @property
    def lever_shares(self) -> tuple[tuple[float, float], ...]:
        """The share of a step that rollouts take, and that no lever shortens: of this run without pruning, its phases
        one after the other, and then of three others, of which the second is not known and counts as none."""
        phases = self.unpruned.phases
        total = sum(phases.values())
        fixed = sum(phases[phase] for phase in ("gradient reduction", "weight sync", "overhead"))
        return (phases["generation"] / total, fixed / total), *((share, 0.0) for share in SHARES)

    @property
    def levers(self) -> tuple[LeverRow, ...]:
        """What each lever brings at each of ``lever_shares``."""
        mixed = self.assumptions.mixed_share if self.config.loss.equal_groups_idle else 1.0
        return tuple(lever_table(self.lever_shares, mixed=mixed))


def make_plan(config: Config, assume: Assumptions) -> Plan:
    """Plan a run.

    Raises:
        UserError: for settings that contradict each other, and a layout that divides neither policy nor cluster.
    """
    check_config(config)
    shape = shape_of(config.model.path)
    setup = Setup(config, shape, place(config, shape), assume)
    actor, server = _memory(setup)
    fits, most = actor.fits and server.fits, max(server.concurrency, 1)

    def would_fit(changed: Config) -> bool:
        return all(part.fits for part in _memory(Setup(changed, shape, place(changed, shape), assume)))

    pruned = step_time(setup, concurrency=most)
    unpruned = step_time(dataclasses.replace(setup, config=without_pruning(config)), concurrency=most)
    return Plan(
        config=config,
        assumptions=assume,
        parameters=parameters_of(shape),
        placement=setup.placement,
        actor=actor,
        server=server,
        fits=fits,
        remedies=[] if fits else remedies(config, shape, would_fit),
        pruned=pruned,
        unpruned=unpruned,
        cost=_cost(setup, pruned),
        cost_unpruned=_cost(setup, unpruned),
    )


def _memory(setup: Setup) -> tuple[Memory, ServerMemory]:
    actor = actor_memory(setup)
    resident = resident_bytes(setup.config, actor) if setup.placement.shared else 0.0
    return actor, server_memory(setup, resident=resident)


def _cost(setup: Setup, step: StepTime) -> Cost:
    hours = step.seconds * setup.config.run.steps * setup.placement.gpus / 3600.0
    price = setup.config.cluster.price_per_gpu_hour
    return Cost(hours, None if price is None else hours * price)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan, its settings and its assumptions as plain objects; memory in bytes."""
    found = to_jsonable_python(plan)
    for part, memory in ((found["actor"], plan.actor), (found["server"]["memory"], plan.server.memory)):
        part |= {"total": memory.total, "fits": memory.fits}
    names = ("speed_up", "steps_ratio", "speed_up_to_accuracy", "lever_shares", "levers")
    return found | {name: to_jsonable_python(getattr(plan, name)) for name in names}

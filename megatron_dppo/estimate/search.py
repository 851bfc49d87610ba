"""Search for the fastest and the cheapest settings of given GPUs (``megatron-dppo plan --search``):
split between training and generation, the trainer's layout, recomputation and pack size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GIB, Assumptions
from megatron_dppo.estimate.kernels import estimate_stage_times
from megatron_dppo.estimate.memory import (
    Memory,
    count_persistent_bytes,
    count_resident_bytes,
    count_stage_layers,
    estimate_actor_memory,
    estimate_rank_memory,
    resolve_shape,
)
from megatron_dppo.estimate.servers import ServerMemory, estimate_memory, estimate_server_memory
from megatron_dppo.estimate.time import (
    bound_step_seconds,
    estimate_step_time,
    estimate_trainer_phases,
)
from megatron_dppo.estimate.workload import Setup, assign_gpus
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.streams import report_progress
from megatron_dppo.rollout.servers.launch import load_engine_spec
from megatron_dppo.trainer.preflight import check_config

SPARE = 0.05
"""Fraction of a GPU's available memory left free."""
TILE = 256
"""Divisor of a pack's rows on every rank, for whole tiles in products."""
PACKS = (8192, 12288, 16384, 20480, 24576, 32768)
"""Tokens of a pack to try, beside the longest sequence and the run's own size."""
RECOMPUTATION = ("none", "selective", "full")
"""Kinds of recomputation, the cheapest first."""
CONTEXT = (1, 2, 4, 8)
MOST_VIRTUAL = 8

MOST_GPUS = 2048
"""Maximum number of GPUs; the number of splits grows with its square."""
MANY_SPLITS = 1000
"""Least number of splits of a search that prints progress, because it takes seconds."""

Change = dict[str, Any]
"""Values of settings, by dotted name."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings for given GPUs, and estimates of a step."""

    change: Change
    """Settings that differ from the run's."""
    gpus: int
    seconds: float
    actor: Memory
    """Memory of the trainer's fullest rank."""
    server: ServerMemory
    lack: float
    """Bytes missing on the fullest GPU if the trainer leaves :data:`SPARE` free; 0 if it fits."""

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search. All proposals have the run's pruning, and are equally noisy."""

    fastest: Proposal | None
    cheapest: Proposal | None
    """Proposal with the fewest GPU-hours of a step."""
    on_policy: Proposal | None
    """If ``rollout.ahead`` is above 0, the fastest proposal with ``rollout.ahead=0`` and servers on
    the trainer's GPUs."""
    closest: Proposal | None
    """Proposal with the smallest ``lack``, if no proposal fits."""


def search(config: Config, assume: Assumptions, gpus: int) -> SearchResult:
    """Find the fastest and the cheapest step on at most ``gpus`` GPUs.

    Args:
        config: the run; lengths and algorithm are not varied.
        gpus: maximum number of GPUs; whole nodes, if more than one.

    Raises:
        UserError: ``gpus`` is no number of whole nodes, or above :data:`MOST_GPUS`, or
            settings contradict each other in every proposal.
    """
    node = config.cluster.gpus_per_node
    if gpus > MOST_GPUS:
        raise UserError("--gpus", gpus, "is more than a search tries", f"Give at most {MOST_GPUS}")
    if gpus < 1 or (gpus > node and gpus % node):
        raise UserError(
            "--gpus",
            gpus,
            f"is no number of nodes of {node} GPUs",
            f"Give a multiple of {node}, or fewer",
        )
    shape = resolve_shape(config.model.path)
    refused = list[UserError]()
    changes = list(list_splits(config, shape, gpus))
    setups: list[Setup] = []
    floors: dict[int, float] = {}
    with report_progress(
        "search of splits", len(changes), enabled=len(changes) >= MANY_SPLITS
    ) as advance:
        for i, change in enumerate(changes):
            run = with_settings(config, change)
            placement = assign_gpus(replace(run, layout=LayoutConfig()), shape)
            setups.append(Setup(run, shape, placement, assume))
            server = estimate_server_memory(setups[i], resident=0.0)
            if server.fits:
                floors[i] = bound_step_seconds(setups[i], concurrency=server.concurrency)
            advance(1)
    lay_out = _cache_by_trainer(find_best_layout)

    @cache
    def proposal(i: int) -> Proposal | None:
        if (setup := lay_out(setups[i])) is None:
            return None
        found = make_proposal(config, setup)
        try:
            check_config(with_settings(config, found.change))
        except UserError as error:
            refused.append(error)
            return None
        return found

    def best(
        candidates: Iterable[int], cost: Callable[[float, int], tuple[float, float]]
    ) -> Proposal | None:
        found = None
        least = (inf, inf)
        for floor, i in sorted((cost(floors[i], setups[i].placement.gpus), i) for i in candidates):
            # Floors ascend: no later candidate can cost less.
            if floor >= least:
                break
            if (other := proposal(i)) and cost(other.seconds, other.gpus) < least:
                found = other
                least = cost(other.seconds, other.gpus)
        return found

    own = [i for i in floors if setups[i].config.rollout.ahead == config.rollout.ahead]
    fastest = best(own, lambda seconds, gpus: (seconds, gpus))
    cheapest = best(own, lambda seconds, gpus: (seconds * gpus, seconds))
    on_policy = best(floors.keys() - set(own), lambda seconds, gpus: (seconds, gpus))
    if fastest or on_policy:
        return SearchResult(fastest, cheapest, on_policy, None)
    if refused:
        raise refused[0]
    missed = [
        make_proposal(config, setup)
        for setup in map(_cache_by_trainer(find_smallest_layout), setups)
        if setup
    ]
    return SearchResult(
        None, None, None, min(missed, key=attrgetter("lack", "gpus", "seconds"), default=None)
    )


def _cache_by_trainer(solve: Callable[[Setup], Setup | None]) -> Callable[[Setup], Setup | None]:
    """Solve once for all splits with equal numbers of GPUs for the trainer alone."""
    solved: dict[int, Setup | None] = {}

    def found(setup: Setup) -> Setup | None:
        ranks = 0 if setup.placement.shared else setup.placement.ranks
        # On shared GPUs the best layout depends on the servers.
        if not ranks or ranks not in solved:
            solved[ranks] = solve(setup)
        if (best := solved[ranks]) is None:
            return None
        layout = best.layout
        own = {
            "layout": replace(layout, dp=None),
            "model": best.config.model,
            "pack": best.config.pack,
        }
        return _replace_layout(setup, replace(setup.config, **own), layout)

    return found


def make_proposal(config: Config, setup: Setup) -> Proposal:
    """Propose a setup, as changes of the run's settings."""
    actor, server = estimate_memory(setup)
    pairs = zip(setup.config.iter_settings(), config.iter_settings(), strict=True)
    change = {key: value for (key, value), (_, own) in pairs if value != own}
    if setup.config.rollout.colocated and server.fits:
        change |= _make_memory_change(setup, count_resident_bytes(setup.config, actor), server)
    lack = max(actor.total - (1.0 - SPARE) * actor.room, server.memory.lack, 0.0)
    seconds = estimate_step_time(setup, concurrency=max(server.concurrency, 1)).seconds
    return Proposal(change, setup.placement.gpus, seconds, actor, server, lack)


def _make_memory_change(setup: Setup, resident: float, server: ServerMemory) -> Change:
    """Return the flag that bounds a server's memory on the trainer's GPU; empty if already set."""
    flags = setup.config.rollout.launch.flags
    room = setup.gpu.memory_gib * GIB
    parts = server.memory.parts
    spec = load_engine_spec(setup.config.rollout.engine)
    flag, _ = spec.memory_flag
    if flag in {word.partition("=")[0].replace("_", "-") for word in flags}:
        return {}
    # The flag is a fraction of the free memory or of the whole GPU, depending on the engine.
    of_free = (parts["weights"] + parts["cache"]) / (room - resident)
    share = of_free if spec.memory_of_free else server.memory.total / room
    return {"rollout.launch.flags": (*flags, f"{flag}={int(100 * share) / 100}")}


def list_splits(config: Config, shape: PolicyShape, gpus: int) -> Iterator[Change]:
    """Yield settings that divide at most ``gpus`` GPUs between training and rollouts.

    - One node: servers run beside the trainer or share its GPUs.
    - Several nodes: servers have separate nodes.
    - Servers that already run are unchanged.
    """
    rollout = config.rollout
    per_node = config.cluster.gpus_per_node
    if rollout.served and rollout.servers not in ((), "slurm"):
        yield {}
        return
    apart = {
        "rollout.colocated": False,
        "rollout.sync.transport": "collective" if rollout.colocated else rollout.sync.transport,
    }
    shared = {"rollout.colocated": True, "rollout.sync.transport": "disk", "rollout.ahead": 0}
    one_node = [(1, count) for count in range(1, min(gpus, per_node) + 1)]
    several_nodes = [(nodes, per_node) for nodes in range(2, gpus // per_node + 1)]
    for nodes, each in one_node + several_nodes:
        machines = {
            "cluster.nodes": nodes,
            "cluster.server_nodes": 0,
            "cluster.gpus_per_node": each,
        }
        if not rollout.served:
            yield machines
            continue
        # Key heads must divide evenly, or be copied evenly.
        sizes = [
            tp
            for tp in list_divisors(shape.heads, each)
            if not shape.kv_heads % tp or not tp % shape.kv_heads
        ]
        for tp in sizes:
            if nodes > 1 and each % tp == 0:
                servers = {
                    "rollout.servers": "slurm",
                    "rollout.launch.count": 0,
                    "rollout.launch.tp": tp,
                } | apart
                for train in range(1, nodes):
                    yield (
                        machines
                        | servers
                        | {"cluster.nodes": train, "cluster.server_nodes": nodes - train}
                    )
            for count in range(1, each // tp + 1 if nodes == 1 else 1):
                servers = {
                    "rollout.servers": (),
                    "rollout.launch.count": count,
                    "rollout.launch.tp": tp,
                }
                yield machines | servers | (apart if count * tp < each else shared)


def find_best_layout(setup: Setup) -> Setup | None:
    """Find the fitting layout, recomputation and pack size with the least seconds of the trainer,
    or of the step if servers share its GPUs."""
    shared = setup.placement.shared
    best = None
    least = inf
    # Bounds ascend: no layout after the first bound above the best is faster.
    for bound, beside, plain in sorted(_list_bounded_layouts(setup), key=itemgetter(0)):
        if bound >= least:
            break
        least_recomputed = RECOMPUTATION.index(plain.config.model.recompute)
        runs = [
            with_settings(plain.config, {"model.recompute": each})
            for each in RECOMPUTATION[least_recomputed:]
        ]
        for cut in list_cuts(plain):
            for other in (_replace_layout(plain, run, cut) for run in runs):
                seconds = sum(estimate_trainer_phases(other).values())
                # More recomputation takes longer.
                if seconds + beside >= least:
                    break
                if all(_has_spare(estimate_rank_memory(other, stage)) for stage in range(cut.pp)):
                    seconds = _estimate_step_seconds(other) if shared else seconds
                    best, least = (other, seconds) if seconds < least else (best, least)
                    break
    return best


def find_smallest_layout(setup: Setup) -> Setup | None:
    """Find the layout of least trainer memory, with full recomputation and the smallest packs."""
    smallest = {cp: _list_pack_sizes(setup.config, cp)[0] for cp in CONTEXT}
    runs = {
        cp: with_settings(setup.config, _make_pack_change(size, "full"))
        for cp, size in smallest.items()
    }
    tried = (_replace_layout(setup, runs[layout.cp], layout) for layout in list_layouts(setup))
    return min(tried, key=lambda each: estimate_actor_memory(each).total, default=None)


def _list_bounded_layouts(setup: Setup) -> Iterator[tuple[float, float, Setup]]:
    """Yield layouts with the most equal stages, every pack size, and the least recomputation that
    may fit.

    Each item: a lower bound of :func:`find_best_layout`'s seconds under any cut, the bound's part
    outside the trainer, the setup.
    """

    @cache
    def run(size: int, recompute: str) -> Config:
        return with_settings(setup.config, _make_pack_change(size, recompute))

    for layout in list_layouts(setup):
        # No other cut has fewer layers in the second of several stages, or in the first of two.
        stage = int(layout.pp > 2)
        whole = _replace_layout(setup, setup.config, layout)
        persistent = sum(count_persistent_bytes(whole, stage).values())
        if persistent > (1.0 - SPARE) * setup.gpu.memory_gib * GIB:
            continue
        beside = _bound_rollout_seconds(whole)
        for size in _list_pack_sizes(setup.config, layout.cp):
            others = (
                _replace_layout(setup, run(size, recompute), layout) for recompute in RECOMPUTATION
            )
            fitting = (other for other in others if _has_spare(estimate_rank_memory(other, stage)))
            if other := next(fitting, None):
                yield _bound_trainer_seconds(other) + beside, beside, other


def _bound_rollout_seconds(setup: Setup) -> float:
    """Return the least seconds of a step outside the trainer if servers share its GPUs; 0 if not,
    or if rollouts are ahead."""
    if not setup.placement.shared or setup.config.rollout.ahead:
        return 0.0
    stages = range(setup.layout.pp)
    held = (
        count_persistent_bytes(setup, stage) | {"reserved": setup.assume.reserved_gib * GIB}
        for stage in stages
    )
    resident = min(count_resident_bytes(setup.config, Memory(0, parts, 0.0)) for parts in held)
    most = estimate_server_memory(setup, resident=resident).concurrency
    return bound_step_seconds(setup, concurrency=max(most, 1), training=0.0)


def _bound_trainer_seconds(setup: Setup) -> float:
    """Return the trainer's least seconds under any cut of a layout."""
    layout = setup.layout
    packs = setup.packs
    if layout.pp == 1:
        return sum(estimate_trainer_phases(setup).values())
    # The slowest stage is no faster than the mean; most virtual stages wait least.
    mean = sum(each.update.total for each in estimate_stage_times(setup)) / layout.pp
    virtual = min(MOST_VIRTUAL, max(setup.shape.num_layers // layout.pp, 1))
    waits = (layout.pp - 1) / max(packs, layout.pp) / virtual
    return mean * packs * setup.work.updates / setup.assume.busy_share * (1 + waits)


def _has_spare(memory: Memory) -> bool:
    return memory.total <= (1.0 - SPARE) * memory.room


def _estimate_step_seconds(setup: Setup) -> float:
    """Estimate a step's seconds; infinity if a server does not fit."""
    _, server = estimate_memory(setup)
    return estimate_step_time(setup, concurrency=server.concurrency).seconds if server.fits else inf


def _make_pack_change(size: int, recompute: str) -> Change:
    return {"pack.max_tokens": size, "model.recompute": recompute}


def _replace_layout(setup: Setup, run: Config, layout: LayoutConfig) -> Setup:
    return dataclasses.replace(
        setup, config=run, placement=dataclasses.replace(setup.placement, layout=layout)
    )


def list_layouts(setup: Setup) -> Iterator[LayoutConfig]:
    """Yield layouts of the trainer's ranks that divide the policy, with the most equal stages."""
    shape = setup.shape
    ranks = setup.placement.ranks
    per_node = setup.config.cluster.gpus_per_node
    tensor_ranks = list_divisors(shape.kv_heads, per_node)
    for tp, cp, pp in product(tensor_ranks, CONTEXT, range(1, shape.num_layers + 1)):
        cut = next(list_stage_sizes(shape.num_layers, pp), None)
        if ranks % (tp * cp * pp) or tp * cp > per_node or cut is None:
            continue
        inside: list[tuple[int, int | None, bool]] = [
            (1, None, parallel) for parallel in sorted({tp > 1, False})
        ]
        if shape.experts:
            pairs = product(list_divisors(shape.experts, shape.experts), sorted({1, tp}))
            inside = [(ep, etp, tp > 1) for ep, etp in pairs if ranks // pp % (ep * etp) == 0]
        for ep, etp, parallel in inside:
            yield replace(
                setup.config.layout, tp=tp, cp=cp, pp=pp, dp=ranks // (tp * cp * pp), ep=ep,
                etp=etp, vpp=1,
                sequence_parallel=parallel, first_stage_layers=cut[0], last_stage_layers=cut[1],
            )  # fmt: skip


def list_cuts(setup: Setup) -> Iterator[LayoutConfig]:
    """Yield the layout with every cut into stages and virtual stages."""
    layout = setup.layout
    for first, last in list_stage_sizes(setup.shape.num_layers, layout.pp):
        cut = replace(layout, first_stage_layers=first, last_stage_layers=last)
        counts = {count_stage_layers(setup.shape, stage, cut) for stage in range(layout.pp)}
        for vpp in range(1, MOST_VIRTUAL + 1 if layout.pp > 1 else 2):
            divides = not any(count % vpp for count in counts)
            if divides and (vpp == 1 or layout.pp > 2 or not first):
                yield replace(cut, vpp=vpp)


def list_stage_sizes(layers: int, pp: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield layers of first and last stage, the most equal first; None: equal to the rest."""
    # The head takes the time of a layer or two: the last stage may have fewer layers, never more.
    if layers % pp == 0:
        yield None, None
    each = -(-layers // pp)
    for middle, first in product((each, each + 1) if pp > 2 else (each,), range(3)):
        first = middle - first if pp > 2 else each + first
        last = layers - first - middle * (pp - 2)
        if pp > 1 and 0 < last <= first and not first == last == middle:
            yield first, last


def _list_pack_sizes(config: Config, cp: int) -> list[int]:
    """List tokens of a pack, in whole tiles, for at least the longest sequence."""
    unit = TILE * cp
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    sizes = {-(-size // unit) * unit for size in (longest, config.pack.max_tokens, *PACKS)}
    return sorted(size for size in sizes if size >= longest)


def with_settings(config: Config, change: Mapping[str, Any]) -> Config:
    for key, value in change.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def list_divisors(total: int, limit: int) -> list[int]:
    """List divisors of ``total`` up to ``limit``."""
    return [number for number in range(1, limit + 1) if total % number == 0]

"""Settings found by trying: the fastest that fit (``megatron-dppo plan --search``), or the fewest changes under which
a run fits that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, islice, product
from operator import attrgetter, itemgetter, or_
from typing import Any

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GIB
from megatron_dppo.estimate.memory import Memory, held_bytes, layers_of_stage, rank_memory
from megatron_dppo.estimate.time import trainer_phases
from megatron_dppo.estimate.workload import Setup, place
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config

SPARE = 0.05
"""Share of the room on a GPU that a proposal leaves free."""
TILE = 256
"""Rows of a pack are a multiple of it on every rank: products use whole tiles."""
PACKS = (8192, 12288, 16384, 20480, 24576, 32768)
"""Tokens of a pack that are tried, beside the longest sequence and the run's own size."""
RECOMPUTATION = ("none", "selective", "full")
"""The cheapest first."""
REFINED, MOST_VIRTUAL = 4, 8
"""For each proposal, so many layouts are tried with other stages; so many virtual stages at most."""

MOST_AT_ONCE = MOST_FOUND = 3
"""Settings that are changed together, and ways that are proposed, to make a run fit."""
MOST_STAGES, MOST_NODES = 16, 8
"""Pipeline stages that are tried for that, and times as many nodes as there are."""

Change = dict[str, Any]
"""Values of settings, by their dotted names."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings under which the run fits."""

    change: Change
    """Settings that differ from the run's."""
    seconds: float
    """Seconds of a step on the trainer's GPUs."""
    actor: Memory
    """Memory of the fullest rank."""


def search(setup: Setup, count: int, fits: Callable[[Setup], Memory | None]) -> list[Proposal]:
    """The fastest settings for the trainer that fit with :data:`SPARE` room: at most ``count``, the fastest first.

    All layouts are tried with stages as equal as can be, the fastest then with other stages and virtual ones.

    Args:
        setup: of the run. Its GPUs, lengths and algorithm stay.
        count: proposals.
        fits: memory of the trainer's fullest rank; None if trainer or servers do not fit.
    """
    plain = sorted(_tried(setup, layouts(setup)), key=itemgetter(0))[: REFINED * count]
    refined = [each for _, other in plain for each in _tried(other, _recut(other), other.config.pack.max_tokens)]
    found: dict[str, Proposal] = {}
    for seconds, other in sorted(plain + refined, key=itemgetter(0)):
        try:
            check_config(other.config)
            place(other.config, setup.shape)
        except UserError:
            continue
        memory, change = fits(other), changed(setup.config, _settings(other.config))
        if memory and _spares(memory):
            found.setdefault(repr(change), Proposal(change, seconds, memory))
        if len(found) == count:
            break
    return list(found.values())


def _tried(setup: Setup, among: Iterable[LayoutConfig], tokens: int | None = None) -> Iterator[tuple[float, Setup]]:
    """Seconds and setups of layouts that fit, with the least recomputation; packs of ``tokens``, or of any size."""
    for layout in among:
        placement = dataclasses.replace(setup.placement, layout=layout)
        for size in [tokens] if tokens else _pack_sizes(setup.config, layout):
            for recompute in RECOMPUTATION:
                config = replace(
                    setup.config, layout=replace(layout, dp=None),
                    model=replace(setup.config.model, recompute=recompute),
                    pack=replace(setup.config.pack, max_tokens=size),
                )  # fmt: skip
                other = dataclasses.replace(setup, config=config, placement=placement)
                if sum(held_bytes(other, 0).values()) > setup.gpu.memory_gib * GIB:
                    break
                if all(_spares(rank_memory(other, stage)) for stage in {0, min(1, layout.pp - 1), layout.pp - 1}):
                    yield sum(trainer_phases(other).values()), other
                    break


def _spares(memory: Memory) -> bool:
    return memory.total <= (1.0 - SPARE) * memory.room


def _settings(config: Config) -> Change:
    """All that the search chooses."""
    layout = {f"layout.{name}": value for name, value in config.layout}
    return layout | {"model.recompute": config.model.recompute, "pack.max_tokens": config.pack.max_tokens}


def layouts(setup: Setup) -> Iterator[LayoutConfig]:
    """Layouts of the trainer's ranks that divide the policy, with stages as equal as can be."""
    shape, ranks, per_node = setup.shape, setup.placement.ranks, setup.config.cluster.gpus_per_node
    for tp, cp, pp in product(larger(0, per_node, shape.kv_heads), (1, 2, 4, 8), range(1, shape.num_layers + 1)):
        cut = next(stages(shape.num_layers, pp), None)
        if ranks % (tp * cp * pp) or tp * cp > per_node or cut is None:
            continue
        experts: list[tuple[int, int | None]] = [(1, None)]
        if shape.experts:
            pairs = product(larger(0, shape.experts, shape.experts), sorted({1, tp}))
            experts = [(ep, etp) for ep, etp in pairs if ranks // pp % (ep * etp) == 0]
        for ep, etp in experts:
            yield LayoutConfig(
                tp=tp, cp=cp, pp=pp, dp=ranks // (tp * cp * pp), ep=ep, etp=etp, sequence_parallel=tp > 1,
                first_stage_layers=cut[0], last_stage_layers=cut[1],
            )  # fmt: skip


def _recut(setup: Setup) -> Iterator[LayoutConfig]:
    """The layout with other stages and virtual stages."""
    layout = setup.placement.layout
    for first, last in stages(setup.shape.num_layers, layout.pp):
        cut = replace(layout, first_stage_layers=first, last_stage_layers=last)
        counts = {layers_of_stage(setup.shape, stage, cut) for stage in range(layout.pp)}
        for vpp in range(1, MOST_VIRTUAL + 1 if layout.pp > 1 else 2):
            if not any(count % vpp for count in counts):
                yield replace(cut, vpp=vpp)


def stages(layers: int, pp: int) -> Iterator[tuple[int | None, int | None]]:
    """Layers of the first and the last pipeline stage, the most equal ones first; None: as many as the others.

    The last stage has the head, which takes the time of one or two layers: it may have fewer layers, never more.
    """
    if layers % pp == 0:
        yield None, None
    each = -(-layers // pp)
    for middle, first in product((each, each + 1) if pp > 2 else (each,), range(3)):
        first = middle - first if pp > 2 else each + first
        last = layers - first - middle * (pp - 2)
        if pp > 1 and 0 < last <= first and not first == last == middle:
            yield first, last


def _pack_sizes(config: Config, layout: LayoutConfig) -> list[int]:
    """Tokens of a pack, in whole tiles, that hold the longest sequence."""
    unit = TILE * layout.cp
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    sizes = {-(-size // unit) * unit for size in (longest, config.pack.max_tokens, *PACKS)}
    return sorted(size for size in sizes if size >= longest)


@dataclass(frozen=True, slots=True)
class Closest:
    """Why nothing makes a run fit."""

    change: Change
    """The change, of all that were tried, under which the fullest GPU lacks the least."""
    lack: float
    """Bytes that it then lacks."""
    limits: list[str]
    """How far the policy and the machines allow each way of dividing it to go."""


def with_settings(config: Config, change: Mapping[str, Any]) -> Config:
    """The configuration with other values of some settings, by their dotted names."""
    for key, value in change.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def changed(config: Config, change: Change) -> Change:
    """Without what is so already."""
    return {key: value for key, value in change.items() if attrgetter(key)(config) != value}


def nodes_of(config: Config) -> int:
    """All nodes, those of servers included."""
    return config.cluster.nodes + config.cluster.server_nodes


def larger(value: int, most: int, of: int) -> list[int]:
    """Divisors of ``of`` above a value, up to a limit."""
    return [number for number in range(value + 1, most + 1) if of % number == 0]


def remedies(
    config: Config, shape: PolicyShape, lack: Callable[[Config], float]
) -> tuple[list[Change], Closest | None]:
    """The fewest changes after which a run fits: up to three ways, those that cost least first. Or what comes closest.

    More nodes are proposed only where nothing helps on those that there are.

    Args:
        config: that does not fit.
        shape: of the policy.
        lack: bytes that another one lacks on its fullest GPU, 0 where it fits; may raise UserError for one that is no
            configuration at all.
    """
    options = [[changed(config, change) for change in option] for option in _options(config, shape)]
    more = [{"cluster.nodes": config.cluster.nodes * factor} for factor in (2, 4, MOST_NODES)]
    tried: list[tuple[float, Change]] = []

    def fitting(values: Iterable[list[Change]]) -> Change | None:
        ways = (reduce(or_, parts) for parts in product(*values))
        return next((change for change in ways if _works(config, change, lack, tried)), None)

    for besides in ([], [more]):
        for size in range(1 - len(besides), MOST_AT_ONCE + 1 - len(besides)):
            ways = (fitting([*chosen, *besides]) for chosen in combinations(options, size))
            if found := list(islice(filter(None, ways), MOST_FOUND)):
                return found, None
    missing, change = min(tried, key=itemgetter(0), default=(lack(config), {}))
    return [], Closest(change, missing, list(_limits(config, shape)))


def _works(config: Config, change: Change, lack: Callable[[Config], float], tried: list[tuple[float, Change]]) -> bool:
    """Whether a run fits with a change; what it lacks else is added to ``tried``."""
    try:
        changed = with_settings(config, change)
        if missing := lack(changed):
            tried.append((missing, change))
            return False
        check_config(changed)
    except UserError:
        return False
    return True


def _options(config: Config, shape: PolicyShape) -> Iterator[list[Change]]:
    """Changes that may help on the nodes that there are. Each list has the values of one thing, mildest first."""
    layout, cluster, rollout = config.layout, config.cluster, config.rollout
    if not config.optimizer.distributed:
        yield [{"optimizer.distributed": True}]
    if layout.tp > 1 and not layout.sequence_parallel:
        yield [{"layout.sequence_parallel": True}]
    if layout.vpp > 1:
        yield [{"layout.vpp": 1}]
    if more := RECOMPUTATION[RECOMPUTATION.index(config.model.recompute) + 1 :]:
        yield [{"model.recompute": recompute} for recompute in more]
    if config.optimizer.distributed and not config.optimizer.offload:
        yield [{"optimizer.offload": True}]
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // layout.tp) * layout.tp
    tokens = sorted({max(config.pack.max_tokens >> i, least) for i in (1, 2, 3)}, reverse=True)
    if tokens[-1] < config.pack.max_tokens:
        yield [{"pack.max_tokens": size} for size in tokens]
    if parts := larger(layout.tp, min(cluster.gpus_per_node, shape.kv_heads), shape.kv_heads):
        yield [{"layout.tp": tp, "layout.sequence_parallel": True} for tp in parts]
    if parts := larger(layout.ep, shape.experts, shape.experts):
        whole = {"layout.etp": 1} if layout.expert_tp > 1 else {}
        yield [{"layout.ep": ep} | whole for ep in parts]
    if parts := [pp for pp in _stage_counts(shape) if pp > layout.pp]:
        names = "layout.pp", "layout.first_stage_layers", "layout.last_stage_layers"
        yield [dict(zip(names, (pp, *next(stages(shape.num_layers, pp))), strict=True)) for pp in parts]
    yield [{"layout.cp": layout.cp * factor} for factor in (2, 4)]
    if rollout.served and isinstance(rollout.launch.tp, int):
        sizes, count = larger(rollout.launch.tp, cluster.gpus_per_node, shape.heads), rollout.launch.count
        fewer = [{"rollout.launch.count": max(count * rollout.launch.tp // tp, 1)} if count else {} for tp in sizes]
        if sizes:
            yield [{"rollout.launch.tp": tp} | less for tp, less in zip(sizes, fewer, strict=True)]
    if cluster.server_nodes > 1:  # nodes that generated train instead
        moved = sorted({max(cluster.server_nodes * quarters // 4, 1) for quarters in (1, 2, 3)})
        counts = [(cluster.nodes + nodes, cluster.server_nodes - nodes) for nodes in moved]
        yield [{"cluster.nodes": train, "cluster.server_nodes": serve} for train, serve in counts]


def _stage_counts(shape: PolicyShape) -> list[int]:
    """Numbers of pipeline stages: those that divide the layers, and powers of two."""
    layers = shape.num_layers
    return [
        pp for pp in range(1, MOST_STAGES + 1) if layers % pp == 0 or (pp in (4, 8, 16) and any(stages(layers, pp)))
    ]


def _limits(config: Config, shape: PolicyShape) -> Iterator[str]:
    layout, cluster = config.layout, config.cluster
    tp = max(larger(0, min(cluster.gpus_per_node, shape.kv_heads), shape.kv_heads))
    yield (
        f"layout.tp = {layout.tp}, at most {tp}: it divides the {shape.kv_heads} key-value heads, and is within a node "
        f"of {cluster.gpus_per_node} GPUs"
    )
    pp = max(_stage_counts(shape))
    yield f"layout.pp = {layout.pp}, tried up to {pp}: it cuts the {shape.num_layers} layers into stages"
    if shape.experts:
        yield f"layout.ep = {layout.ep}, at most {shape.experts}: it divides the {shape.experts} experts"
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    gpus = cluster.nodes * cluster.gpus_per_node
    yield f"tp x pp x cp x dp is the number of GPUs that train, of which {nodes} have {gpus}"

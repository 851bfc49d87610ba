"""The fewest changes under which a run fits that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, islice, product
from operator import attrgetter, itemgetter, or_

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.search import RECOMPUTATION, Change, larger, stages, with_settings
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config

MOST_AT_ONCE = MOST_FOUND = 3
"""Settings that are changed together, and ways that are proposed, to make a run fit."""
MOST_STAGES, MOST_NODES = 16, 8
"""Pipeline stages that are tried for that, and times as many nodes as there are."""


@dataclass(frozen=True, slots=True)
class Closest:
    """Why nothing makes a run fit."""

    change: Change
    """The change, of all that were tried, under which the fullest GPU lacks the least."""
    lack: float
    """Bytes that it then lacks."""
    limits: list[str]
    """How far the policy and the machines allow each way of dividing it to go."""


def nodes_of(config: Config) -> int:
    """All nodes, those of servers included."""
    return config.cluster.nodes + config.cluster.server_nodes


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
    options = [[_changed(config, change) for change in option] for option in _options(config, shape)]
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


def _changed(config: Config, change: Change) -> Change:
    """Without what is so already."""
    return {key: value for key, value in change.items() if attrgetter(key)(config) != value}

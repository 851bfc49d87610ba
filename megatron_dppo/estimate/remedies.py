"""Which settings would make a run fit that does not, found by trying; where none does, what holds it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config

MOST_AT_ONCE = 3
"""Settings that are changed together."""
MOST_FOUND = 3
"""Ways that are proposed."""
MOST_STAGES = 16
MOST_NODES = 8
"""Times as many nodes as there are."""

Change = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Closest:
    """Why nothing makes a run fit."""

    change: Change
    """The change, of all that were tried, under which the fullest GPU lacks the least."""
    lack: float
    """Bytes that it then lacks."""
    limits: list[str]
    """How far the policy and the machines allow each way of dividing it to go."""


class Search(NamedTuple):
    """Result of trying changes."""

    changes: list[Change]
    closest: Closest | None
    """None where a change is found, or none was looked for."""


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


def remedies(config: Config, shape: PolicyShape, lack: Callable[[Config], float]) -> Search:
    """The fewest changes after which a run fits: up to three ways, those that cost least first.

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
    for among in (options, [*options, more]):
        for size in range(1, MOST_AT_ONCE + 1):
            found: list[Change] = []
            for chosen in combinations(among, size):
                if among is not options and more not in chosen:
                    continue
                change = next((c for c in map(_merged, product(*chosen)) if _works(config, c, lack, tried)), None)
                if change is not None:
                    found.append(change)
                if len(found) == MOST_FOUND:
                    break
            if found:
                return Search(found, None)
    missing, change = min(tried, key=lambda pair: pair[0], default=(lack(config), {}))
    return Search([], Closest(change, missing, list(_limits(config, shape))))


def _merged(parts: tuple[Change, ...]) -> Change:
    return {key: value for part in parts for key, value in part.items()}


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
    if parts := larger(layout.tp, min(cluster.gpus_per_node, shape.kv_heads), shape.kv_heads):
        yield [{"layout.tp": tp, "layout.sequence_parallel": True} for tp in parts]
    if parts := larger(layout.ep, shape.experts, shape.experts):
        whole = {"layout.etp": 1} if layout.expert_tp > 1 else {}
        yield [{"layout.ep": ep} | whole for ep in parts]
    if stages := [pp for pp in range(layout.pp + 1, MOST_STAGES + 1) if _stages(pp, shape.num_layers)]:
        yield [{"layout.pp": pp, **(_stages(pp, shape.num_layers) or {})} for pp in stages]
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


def larger(value: int, most: int, of: int) -> list[int]:
    """Divisors of ``of`` above a value, up to a limit."""
    return [number for number in range(value + 1, most + 1) if of % number == 0]


def _stages(pp: int, layers: int) -> Change | None:
    """How to cut the layers into pipeline stages: equally, or for a power of two with fewer at both ends."""
    if layers % pp == 0:
        return {"layout.first_stage_layers": None, "layout.last_stage_layers": None}
    if pp & (pp - 1) or pp < 4:
        return None
    ends = layers - -(-layers // pp) * (pp - 2)
    first, last = ends - ends // 2, ends // 2
    return {"layout.first_stage_layers": first, "layout.last_stage_layers": last} if last > 0 else None


def _limits(config: Config, shape: PolicyShape) -> Iterator[str]:
    layout, cluster = config.layout, config.cluster
    tp = max(larger(0, min(cluster.gpus_per_node, shape.kv_heads), shape.kv_heads))
    yield (
        f"layout.tp = {layout.tp}, at most {tp}: it divides the {shape.kv_heads} key-value heads, and is within a node "
        f"of {cluster.gpus_per_node} GPUs"
    )
    pp = [size for size in range(1, MOST_STAGES + 1) if _stages(size, shape.num_layers)]
    yield f"layout.pp = {layout.pp}, tried up to {max(pp)}: it cuts the {shape.num_layers} layers into stages"
    if shape.experts:
        yield f"layout.ep = {layout.ep}, at most {shape.experts}: it divides the {shape.experts} experts"
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    gpus = cluster.nodes * cluster.gpus_per_node
    yield f"tp x pp x cp x dp is the number of GPUs that train, of which {nodes} have {gpus}"

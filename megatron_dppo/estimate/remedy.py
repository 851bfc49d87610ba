"""Settings under which a run that does not fit would. Found by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.trainer.preflight import check_config

MOST_AT_ONCE = 3
"""Settings changed together."""
MOST_FOUND = 3

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
    """For each thing that can be changed its values, mildest first."""
    layout, cluster, rollout = config.layout, config.cluster, config.rollout
    if not config.optimizer.distributed:
        yield [{"optimizer.distributed": True}]
    if layout.tp > 1 and not layout.sequence_parallel:
        yield [{"layout.sequence_parallel": True}]
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

"""``megatron-dppo plan --search``: the layouts, recomputation and pack sizes that train fastest on the GPUs at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GIB
from megatron_dppo.estimate.memory import Memory, held_bytes, layers_of_stage, rank_memory
from megatron_dppo.estimate.remedies import Change, changed, larger
from megatron_dppo.estimate.time import trainer_phases
from megatron_dppo.estimate.workload import Setup, place
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

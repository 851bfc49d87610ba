"""Layout over the available ranks. Needs no torch, for use before any rank starts."""

from __future__ import annotations

import math

from megatron_dppo.config import LayoutConfig, replace
from megatron_dppo.errors import UserError

FAST_MULTIPLE = 128
"""Tokens of the tiles into which GPU matrix kernels cut a pack."""


def compute_capacity_multiple(layout: LayoutConfig, max_tokens: int, *, cuda: bool) -> int:
    """Return the divisor of a pack's tokens: required by the layout, on GPUs also preferred by
    kernels."""
    fast = math.lcm(layout.pack_multiple, FAST_MULTIPLE)
    # The kernels' divisor must divide ``max_tokens``, because otherwise the longest valid sequence
    # would not fit.
    return fast if cuda and max_tokens % fast == 0 else layout.pack_multiple


def list_stage_layers(layers: int, stage: int, layout: LayoutConfig) -> list[range]:
    """List the layers of each virtual stage of a pipeline stage, numbered over the whole policy.

    Raises:
        ValueError: the layout cannot cut the layers; ``check_layout`` refuses the layout.
    """
    counts = _count_stage_layers(layers, layout)
    if any(count % layout.vpp for count in counts) or sum(counts) != layers:
        raise ValueError(f"{layers} layers cannot be cut into {layout.pp} x {layout.vpp} stages")
    chunks = [count // layout.vpp for count in counts]
    # Megatron-Core interleaves: virtual stage v of all stages, then virtual stage v + 1.
    starts = [turn * sum(chunks) + sum(chunks[:stage]) for turn in range(layout.vpp)]
    return [range(start, start + chunks[stage]) for start in starts]


def _count_stage_layers(layers: int, layout: LayoutConfig) -> list[int]:
    """Return the layers of each pipeline stage, [pp]; a remainder stays unassigned."""
    given = {0: layout.first_stage_layers, layout.pp - 1: layout.last_stage_layers}
    fixed = {stage: count for stage, count in given.items() if count is not None}
    equal = (layers - sum(fixed.values())) // max(layout.pp - len(fixed), 1)
    return [fixed.get(stage, equal) for stage in range(layout.pp)]


def count_interleaved_packs(packs: int, stages: int) -> int:
    """Return the packs that the interleaved schedule sends through a virtual stage before the
    next."""
    # Megatron requires no remainder, or a remainder of at least the number of pipeline stages.
    return next(
        size for size in range(stages, packs + 1) if packs % size == 0 or packs % size >= stages
    )


def format_layout(layout: LayoutConfig) -> str:
    """Format as ``tp 2 x pp 1 x cp 1 x dp 4; experts: ep 8 x etp 1``."""
    sizes = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp or 1}"
    if layout.ep > 1 or layout.expert_tp != layout.tp:
        sizes += f"; experts: ep {layout.ep} x etp {layout.expert_tp}"
    return sizes + (f"; vpp {layout.vpp}" if layout.vpp > 1 else "")


def resolve_layout(layout: LayoutConfig, ranks: int) -> LayoutConfig:
    """Return the layout with ``dp`` filled in for a number of ranks.

    Raises:
        UserError: the layout does not divide the ranks.
    """
    model = layout.tp * layout.pp * layout.cp
    dp = layout.dp or max(ranks // model, 1)
    if model * dp != ranks:
        problem = f"does not divide the {ranks} ranks that were started"
        remedy = (
            f"Start a multiple of {model} ranks, or set layout.tp, pp and dp so that their "
            f"product is {ranks}"
        )
        sizes = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp or 'any'}"
        raise UserError("layout", sizes, problem, remedy)
    # Experts are cut over the ranks of a pipeline stage, across tp, cp and dp.
    stage = layout.tp * layout.cp * dp
    of_experts = layout.expert_tp * layout.ep
    if stage % of_experts:
        name, other = ("ep", layout.expert_tp) if layout.ep > 1 else ("etp", layout.ep)
        possible = [size for size in range(1, getattr(layout, name)) if stage % (size * other) == 0]
        lower = f", or layout.{name} to {' or '.join(map(str, possible))}" if possible else ""
        problem = (
            f"needs a multiple of {of_experts} ranks in a pipeline stage (layout.ep x layout.etp), "
            f"which has {stage}: {format_layout(replace(layout, dp=dp))}"
        )
        remedy = f"Set layout.dp to a multiple of {layout.min_ranks // model}{lower}"
        raise UserError(f"layout.{name}", getattr(layout, name), problem, remedy)
    return replace(layout, dp=dp)

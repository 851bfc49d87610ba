"""A layout over the ranks that there are. Needs no torch, so that it can be asked before any rank starts."""

from __future__ import annotations

import math

from megatron_dppo.config import LayoutConfig, replace
from megatron_dppo.errors import UserError

FAST_MULTIPLE = 128
"""Tokens that matrix kernels of GPUs cut a pack into."""


def capacity_multiple(layout: LayoutConfig, max_tokens: int, *, cuda: bool) -> int:
    """What the tokens of a pack are a multiple of: what the layout needs, on GPUs also what their kernels like.

    Args:
        layout: of the run.
        max_tokens: most tokens in a pack. Where that is no multiple itself, what the layout needs is all: the longest
            sequence that is allowed would else not fit.
        cuda: whether the ranks have GPUs.
    """
    fast = math.lcm(layout.pack_multiple, FAST_MULTIPLE)
    return fast if cuda and max_tokens % fast == 0 else layout.pack_multiple


def resolve_layout(layout: LayoutConfig, ranks: int) -> LayoutConfig:
    """The layout with ``dp`` filled in for so many ranks.

    Raises:
        UserError: if the layout does not divide the ranks.
    """
    model = layout.tp * layout.pp * layout.cp
    dp = layout.dp or max(ranks // model, 1)
    if model * dp != ranks:
        raise UserError(
            "layout",
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp or 'any'}",
            f"does not divide the {ranks} ranks that were started",
            f"Start a multiple of {model} ranks, or set layout.tp, pp and dp so that their product is {ranks}",
        )
    return replace(layout, dp=dp)

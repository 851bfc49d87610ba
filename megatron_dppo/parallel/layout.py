"""A layout over the ranks that there are. Needs no torch, so that it can be asked before any rank starts."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError


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

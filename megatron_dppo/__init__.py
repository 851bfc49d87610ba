"""Reinforcement learning of Qwen3 policies on Megatron-Core with Dynamic Pruning Policy
Optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.rl.pruning import prune as prune

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import ``prune`` on first use: commands that only read settings need no NumPy."""
    if name != "prune":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_dppo.rl.pruning import prune

    return prune

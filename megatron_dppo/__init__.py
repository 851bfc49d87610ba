"""Reinforcement learning of Qwen3 policies on Megatron-Core with Dynamic Pruning Policy Optimization."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "Config": "megatron_dppo.config",
    "Run": "megatron_dppo.api",
    "load_config": "megatron_dppo.api",
    "prune": "megatron_dppo.rl.prune",
    "train": "megatron_dppo.api",
}


def __getattr__(name: str) -> object:
    """What is asked for is imported then: ``prune`` wants NumPy alone, and commands that only read settings wait for
    nothing. ``__init__.pyi`` tells type checkers of it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)

"""Leaves of trees, as tests read them."""

from __future__ import annotations

import numpy as np

from megatron_dppo.rl.types import Completion


def forks_of(leaf: Completion) -> tuple[int, ...]:
    """After how many tokens the path to a leaf has forked, at each level; its length where it ended before."""
    levels = range(1, len(leaf.weights))
    return tuple(int(np.count_nonzero(np.asarray(leaf.segments) < level)) for level in levels)

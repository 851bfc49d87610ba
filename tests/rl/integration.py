"""Exact expectations over a draw: every outcome of a systematic or a Bernoulli draw, with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from megatron_dppo.rl.types import Floats


def outcomes(inclusion: Floats) -> Iterator[tuple[float, float]]:
    """An offset inside each stretch on which a systematic draw is constant, and the length of the stretch."""
    breaks = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(inclusion) % 1.0]))
    for start, end in itertools.pairwise(breaks.tolist()):
        yield (start + end) / 2, end - start


class FixedOffset:
    """Stands in for a random generator whose next number is known: the variable that is integrated over."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    def random(self) -> float:
        return self.offset


class FixedMask:
    """Stands in for a random generator of independent draws, of which those that are not certain come out as told."""

    def __init__(self, mask: tuple[bool, ...], uncertain: np.ndarray) -> None:
        self.mask, self.uncertain = mask, uncertain

    def random(self, shape: tuple[int, ...]) -> Floats:
        uniforms = np.full(shape, 0.5)
        uniforms[self.uncertain] = np.where(self.mask, 0.0, np.nextafter(1.0, 0.0))
        return uniforms

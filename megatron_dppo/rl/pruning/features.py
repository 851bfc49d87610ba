"""Features of a prompt before anything is generated for it, as numbers for a linear model."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron_dppo.rl.types import Floats, Ints, Prompt

NUMBER = re.compile(r"\d+(?:\.\d+)?")
LONGEST_NUMBER = 15
"""Digits that are read of a number: more are beyond what its logarithm or a sum can show."""
PLAIN = 9
"""Lengths and numbers, which come with their squares as well."""
SOURCES, TOKENS, PAIRS = 8, 16, 16
"""Buckets for the data source, for tokens and for pairs of neighbouring tokens."""
SAMPLE = 1024
"""How many prompts of the pool, evenly spaced, set the scale of each feature."""
KEPT = 1 << 15
"""Most prompts whose features are kept: what comes back in between is read again."""
WIDEST = 4.0
"""Deviations from the mean at which a feature is cut off, so that one odd prompt moves no model."""


class PromptFeatures:
    """The features of a pool's prompts, D = 59 for each: a 1, and others of mean 0 and deviation 1 over the pool.

    They are lengths, the numbers in the text (how many, their sum, the largest; plain, as logarithm and squared), the
    data source, and hashed tokens and pairs of tokens. A prompt is read when it is first asked for. The scale comes
    from the pool alone, so that a resumed run has the same features without any state.

    The plain features of "2+3=" are, before they are scaled, [4, 1.61, 1.61, 2, 1.10, 5, 1.79, 3, 1.39]: 4 tokens, two
    numbers of sum 5, the largest 3.
    """

    size = 1 + PLAIN + SOURCES + TOKENS + PAIRS + PLAIN
    """D"""

    def __init__(self, pool: Sequence[Prompt]) -> None:
        """``pool[i].id == i``."""
        self._pool = pool
        self._known: dict[int, Floats] = {}

    def of(self, prompt_ids: Ints) -> Floats:
        """[N, D]"""
        return np.array([self._of(prompt_id) for prompt_id in prompt_ids.tolist()]).reshape(-1, self.size)

    def _of(self, prompt_id: int) -> Floats:
        if prompt_id not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            scaled = _scaled(_read(self._pool[prompt_id]), self._scale[0], self._scale[1])
            squares = scaled[:PLAIN] ** 2 - self._scale[2][:PLAIN]
            self._known[prompt_id] = np.concatenate([[1.0], scaled, squares])
        return self._known[prompt_id]

    @cached_property
    def _scale(self) -> Floats:
        """[3, raw features]: means, deviations, and mean squares of what is scaled by these. Only the leader asks."""
        sample = np.linspace(0, len(self._pool) - 1, min(len(self._pool), SAMPLE)).round().astype(np.int64)
        raw = np.array([_read(self._pool[i]) for i in sample.tolist()])
        mean, spread = raw.mean(axis=0), raw.std(axis=0)
        return np.array([mean, spread, (_scaled(raw, mean, spread) ** 2).mean(axis=0)])


def _scaled(raw: Floats, mean: Floats, spread: Floats) -> Floats:
    varies = spread > 1e-9
    return np.clip(np.divide(raw - mean, spread, out=np.zeros_like(raw), where=varies), -WIDEST, WIDEST)


def _read(prompt: Prompt) -> Floats:
    numbers = np.array([float(text[:LONGEST_NUMBER]) for text in NUMBER.findall(prompt.text)])
    tokens = prompt.token_ids.tolist()
    sizes = np.array([len(tokens), len(numbers), numbers.sum(), numbers.max(initial=0.0)])
    length, count, total, largest = np.log1p(sizes)
    plain = [sizes[0], length, np.log1p(len(prompt.text)), sizes[1], count, sizes[2], total, sizes[3], largest]
    source = _hashed([prompt.data_source], SOURCES)
    return np.concatenate([plain, source, np.sqrt(_hashed(tokens, TOKENS)), np.sqrt(_hashed(pairwise(tokens), PAIRS))])


def _hashed(items: Iterable[object], buckets: int) -> Floats:
    """[buckets], how many of the items fall into each. Python's own hash differs from process to process."""
    counts = np.zeros(buckets)
    for item in items:
        counts[zlib.crc32(repr(item).encode()) % buckets] += 1.0
    return counts

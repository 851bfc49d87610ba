"""Random generators for each step and purpose, so that a plan is a pure function of its seed."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    # Append new numbers at the end, because existing numbers make runs reproducible.
    PROMPTS = 0
    """Prompts of the window that are rolled out."""
    MINIBATCHES = 1
    """Partition of groups into optimizer steps."""
    COMPLETIONS = 2
    """Completions that are trained on."""
    ORDER = 3
    """Order of prompts in an epoch; ``step`` is the epoch."""
    SAMPLING = 4
    """An engine's sampling."""
    AGREEMENT = 5
    """Sampling for the comparison of servers with the actor."""
    EVALUATION = 6
    """Sampling for held-out problems; ``step`` is 0, so that all policies get the same seeds."""
    ADAPTERS = 7
    """Initial weights of adapters; ``step`` is a number from the adapter's name."""


def make_generator(seed: int, step: int, purpose: Purpose, attempt: int = 0) -> np.random.Generator:
    """Make the generator of a purpose at a step; equal arguments give equal draws."""
    return np.random.default_rng(_make_seed_sequence(seed, step, purpose, attempt))


def derive_engine_seed(seed: int, step: int, purpose: Purpose, attempt: int = 0) -> int:
    """Return the random seed of an engine's sampling, below 2³²; ``attempt``: earlier draws of the
    step for the purpose."""
    return int(_make_seed_sequence(seed, step, purpose, attempt).generate_state(1)[0])


def _make_seed_sequence(
    seed: int,
    step: int,
    purpose: Purpose,
    attempt: int,
) -> np.random.SeedSequence:
    # Purpose and step are a spawn key, because entropy is padded with zeros and could collide.
    return np.random.SeedSequence(
        entropy=seed, spawn_key=(int(purpose), step, *([attempt] if attempt else []))
    )

"""Random generators: one for every step and purpose, so that a plan is a pure function of its
seed."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """Random draws. Runs are reproducible by these numbers, so that a new one is added at the
    end."""

    PROMPTS = 0
    """Which prompts of the window are rolled out."""
    MINIBATCHES = 1
    """Which groups share an optimizer step."""
    COMPLETIONS = 2
    """Which completions are trained on."""
    ORDER = 3
    """In which order an epoch visits the prompts; ``step`` is then the epoch."""
    SAMPLING = 4
    """The seed that an engine's sampling is given."""
    AGREEMENT = 5
    """The same, for comparing servers with the actor."""
    EVALUATION = 6
    """The same, for answering held-out problems; ``step`` is 0, so that all policies are given the
    same seeds."""
    ADAPTERS = 7
    """Initial weights of adapters; ``step`` is a number of the adapter's name."""


def make_generator(seed: int, step: int, purpose: Purpose, attempt: int = 0) -> np.random.Generator:
    """The generator of one purpose at one step of a run with ``run.seed = seed``: same arguments,
    same draws."""
    return np.random.default_rng(_make_seed_sequence(seed, step, purpose, attempt))


def derive_engine_seed(seed: int, step: int, purpose: Purpose, attempt: int = 0) -> int:
    """The seed, below 2³², that an engine is given for its sampling.

    Args:
        attempt: how often the step has drawn for this purpose before.
    """
    return int(_make_seed_sequence(seed, step, purpose, attempt).generate_state(1)[0])


def _make_seed_sequence(
    seed: int, step: int, purpose: Purpose, attempt: int
) -> np.random.SeedSequence:
    """Purpose and step are a spawn key. As entropy they could collide, since entropy is padded with
    zeros."""
    return np.random.SeedSequence(
        entropy=seed, spawn_key=(int(purpose), step, *([attempt] if attempt else []))
    )

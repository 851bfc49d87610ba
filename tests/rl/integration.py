"""Exact expectations over a draw: every outcome of a systematic or a Bernoulli draw, with its
probability."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES, find_completion_rule
from megatron_dppo.rl.pruning.sampling import Rule, draw_bernoulli
from megatron_dppo.rl.types import Bools, Floats, StepMetadata, StepPlan
from tests.rl.plans import plan

Drawn = list[tuple[Floats, Bools]]
"""For each draw the inclusion probabilities and the kept units, in the order of the draw."""


class FixedOffset:
    """Random generator whose next number is known: the variable that is integrated over."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    def random(self) -> float:
        return self.offset


class FixedUniforms:
    """Random generator of independent draws whose numbers are known."""

    def __init__(self, uniforms: Floats) -> None:
        self.uniforms = uniforms

    def random(self, shape: tuple[int, ...]) -> Floats:
        return self.uniforms.reshape(shape)


def outcomes(inclusion: Floats) -> Iterator[tuple[float, float]]:
    """Yield an offset inside each stretch on which a systematic draw is constant, and the length of
    the stretch."""
    yield from outcomes_of_all([inclusion])


def outcomes_of_all(inclusions: Sequence[Floats]) -> Iterator[tuple[float, float]]:
    """Yield an offset inside each stretch on which several systematic draws with one offset are
    constant, and the length of the stretch."""
    breaks = np.concatenate([[0.0, 1.0], *(np.cumsum(each) % 1.0 for each in inclusions)])
    for start, end in itertools.pairwise(np.unique(breaks).tolist()):
        yield (start + end) / 2, end - start


def just_below(inclusion: Floats) -> Floats:
    """Return the largest uniform numbers that keep units of these probabilities."""
    return np.nextafter(inclusion, 0.0)


def just_above(inclusion: Floats) -> Floats:
    """Return uniform numbers that drop units of these probabilities, unless they are 1."""
    return np.minimum(np.nextafter(inclusion, 1.0), np.nextafter(1.0, 0.0))


def independent_draws(inclusion: Floats) -> Iterator[tuple[FixedUniforms, float]]:
    """Yield a generator for every outcome of independent draws, and the outcome's probability."""
    (uncertain,) = np.nonzero((inclusion > 0.0) & (inclusion < 1.0))
    kept = np.ones(len(inclusion), bool)
    for mask in itertools.product([False, True], repeat=len(uncertain)):
        kept[uncertain] = mask
        chances = np.where(kept, inclusion, 1.0 - inclusion)[uncertain]
        yield (
            FixedUniforms(np.where(kept, just_below(inclusion), just_above(inclusion))),
            float(chances.prod()),
        )


def generators(rule: Rule[Any], inclusion: Floats) -> Iterator[tuple[Any, float]]:
    """Yield a generator for every outcome of a rule's draw, and the outcome's probability."""
    if rule.draw is draw_bernoulli:
        yield from independent_draws(inclusion)
    else:
        yield from ((FixedOffset(offset), length) for offset, length in outcomes(inclusion))


@contextmanager
def recorded_draws(rules: Any, name: str, rule: Rule[Any]) -> Iterator[Drawn]:
    """Enter ``rule`` in a table of rules under ``name``, with draws that are recorded."""
    drawn: Drawn = []

    def draw(inclusion: Floats, rng: np.random.Generator) -> Bools:
        drawn.append((inclusion, rule.draw(inclusion, rng)))
        return drawn[-1][1]

    with mock.patch.dict(rules, {name: replace(rule, draw=draw)}):
        yield drawn


def all_plans(
    metadata: StepMetadata, config: Config, **options: Any
) -> Iterator[tuple[StepPlan, float]]:
    """Yield every plan that the draw of a step's completions can give, and its probability."""
    name = config.pruning.completions.named
    rule = find_completion_rule(name)
    with recorded_draws(COMPLETION_RULES, name, rule) as drawn:
        plan(metadata, config, **options)
    [(inclusion, _)] = drawn
    for rng, probability in generators(rule, inclusion):
        with mock.patch.object(planning, "make_generator", lambda *_, rng=rng: rng):
            yield plan(metadata, config, **options), probability

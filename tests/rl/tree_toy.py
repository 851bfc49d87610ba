"""Trees of a policy so small that all can be listed, each with its probability: expectations
without sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dppo.config import BranchConfig, TreeConfig
from megatron_dppo.rl.types import SEGMENT, Floats, Ints, Segments, StepPlan

Tokens = tuple[int, ...]
Slot = tuple[Tokens, tuple[int, ...]]
"""A leaf: its tokens, and where its path forks."""
Grown = Iterator[tuple[float, list[Slot]]]
LONGEST = 3
PREFIXES = [
    prefix for length in range(LONGEST) for prefix in itertools.product((0, 1), repeat=length)
]


@dataclass(frozen=True)
class Toy:
    """Tokens 0 and 1, a logit of 1 for every prefix, a reward for every response."""

    logits: dict[Tokens, float]
    rewards: dict[Tokens, float]
    ends: frozenset[Tokens] = frozenset()
    """Responses that end before ``LONGEST`` tokens."""

    def ended(self, prefix: Tokens) -> bool:
        return len(prefix) == LONGEST or prefix in self.ends

    def probability(self, prefix: Tokens, token: int) -> float:
        one = 1.0 / (1.0 + math.exp(-self.logits[prefix]))
        return one if token else 1.0 - one

    def scores(self, response: Tokens) -> Floats:
        """[LONGEST, parameters], ∇ log π of each token; zeros past the end."""
        table = np.zeros((LONGEST, len(PREFIXES)))
        for t, token in enumerate(response):
            table[t, PREFIXES.index(response[:t])] = token - self.probability(response[:t], 1)
        return table

    def responses(self, prefix: Tokens = ()) -> Iterator[tuple[float, Tokens]]:
        if self.ended(prefix):
            yield 1.0, prefix
            return
        for token in (0, 1):
            for rest, response in self.responses((*prefix, token)):
                yield self.probability(prefix, token) * rest, response

    def gradient(self) -> Floats:
        """[parameters], of the expected reward."""
        return sum(
            p * self.rewards[response] * self.scores(response).sum(axis=0)
            for p, response in self.responses()
        )


def toy(*ends: Tokens, seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    logits = {prefix: float(rng.normal()) for prefix in PREFIXES}
    longest = itertools.product((0, 1), repeat=LONGEST)
    return Toy(
        logits,
        {response: float(rng.normal()) for response in (*PREFIXES, *longest)},
        frozenset(ends),
    )


@dataclass(frozen=True)
class Forests:
    """All trees of one prompt: Q outcomes of G leaves."""

    toy: Toy
    tree: TreeConfig
    probability: Floats
    """[Q]"""
    paths: list[list[Tokens]]
    """[Q][G]"""
    rewards: Floats
    segments: Segments

    @cached_property
    def scores(self) -> Floats:
        """[Q, G, LONGEST, parameters]"""
        place = {
            path: row for row, path in enumerate({path for group in self.paths for path in group})
        }
        return np.array([self.toy.scores(path) for path in place])[
            [[place[p] for p in group] for group in self.paths]
        ]

    def error(self, segments: Floats) -> float:
        """Return the error of the expected estimate from advantages of segments [Q, G, B + 1],
        relative to the truth.

        The estimate of an outcome is the mean over its slots of Σ_t A_t ∇ log π_t.
        """
        forks = np.cumsum(self.segments["tokens"], axis=-1)[..., None, :-1]
        advantage = np.take_along_axis(
            segments, (forks <= np.arange(LONGEST)[:, None]).sum(axis=-1), axis=-1
        )
        share = self.probability[:, None, None] / segments.shape[1]
        expected, true = (
            np.einsum("qgt,qgtp->p", share * advantage, self.scores),
            self.toy.gradient(),
        )
        return float(np.linalg.norm(expected - true) / np.linalg.norm(true))


def plan_gradient(
    policy: Toy, step: StepPlan, paths: Sequence[Tokens], segments: Sequence[Ints]
) -> Floats:
    """Return the on-policy gradient of a plan of one prompt, Σ over kept paths of scale · Σ_t A_t
    ∇log π_t.

    Args:
        policy: what generated.
        step: the plan.
        paths: of the prompt's completions.
        segments: for each of them the segment of every token.
    """
    samples, total = step.minibatches[0], np.zeros(len(PREFIXES))
    for k, slot in enumerate(samples.completion):
        advantage = samples.advantage[k, segments[slot]]
        total += samples.scale[k] * advantage @ policy.scores(paths[slot])[: len(advantage)]
    return total


def forests(policy: Toy, children: Sequence[int], forks: Sequence[int]) -> Forests:
    """All trees of K = children[0] roots.

    Args:
        policy: what generates.
        children: K, M₁, …, M_B.
        forks: tokens before the fork of each level.
    """
    branches = tuple(
        BranchConfig(at=level, children=count) for level, count in enumerate(children[1:], start=1)
    )
    roots = list(_grown(policy, children, forks))
    outcomes = list(itertools.product(roots, repeat=children[0]))
    probability = np.array([math.prod(p for p, _ in trees) for trees in outcomes])
    assert math.isclose(probability.sum(), 1.0, abs_tol=1e-12)
    groups = [[slot for _, slots in trees for slot in slots] for trees in outcomes]
    rows = {slot: _segments(policy, slot) for slot in {slot for group in groups for slot in group}}
    return Forests(
        policy,
        TreeConfig(roots=children[0], branches=branches),
        probability,
        [[path for path, _ in group] for group in groups],
        rewards=np.array([[policy.rewards[path] for path, _ in group] for group in groups]),
        segments=np.array([[rows[slot] for slot in group] for group in groups], SEGMENT),
    )


def _grown(
    policy: Toy, children: Sequence[int], forks: Sequence[int], prefix: Tokens = (), level: int = 0
) -> Grown:
    """All that a branch can become. The slots have the forks from ``level`` on."""
    missing = len(children) - 1 - level
    if policy.ended(prefix):
        slot = (prefix, (len(prefix),) * missing)
        yield 1.0, [slot] * math.prod(children[level + 1 :])
    elif missing and len(prefix) == forks[level]:
        below = list(_grown(policy, children, forks, prefix, level + 1))
        for branches in itertools.product(below, repeat=children[level + 1]):
            slots = [
                (path, (len(prefix), *ends)) for _, branch in branches for path, ends in branch
            ]
            yield math.prod(p for p, _ in branches), slots
    else:
        for token in (0, 1):
            for p, slots in _grown(policy, children, forks, (*prefix, token), level):
                yield policy.probability(prefix, token) * p, slots


def _segments(policy: Toy, slot: Slot) -> list[tuple[int, float, float, float]]:
    path, forks = slot
    p = [policy.probability(path[:t], token) for t, token in enumerate(path)]
    return [
        (
            end - start,
            sum((1 - x) ** 2 for x in p[start:end]),
            0.0,
            sum(map(math.log, p[start:end])),
        )
        for start, end in zip((0, *forks), (*forks, len(path)), strict=True)
    ]

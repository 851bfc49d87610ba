"""Trees of a policy so small that all can be listed, each with its probability: expectations without sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dppo.config import BranchConfig, TreeConfig
from megatron_dppo.rl.types import SEGMENT, Floats, Ints, Segments, StepPlan

Tokens = tuple[int, ...]
Slot = tuple[Tokens, tuple[int, ...], tuple[float, ...]]
"""A leaf: its tokens, where its path forks, and the weight of its branch at each fork."""
Grown = Iterator[tuple[float, list[Slot]]]
LONGEST = 3
PREFIXES = [prefix for length in range(LONGEST) for prefix in itertools.product((0, 1), repeat=length)]


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

    def entropy(self, prefix: Tokens) -> float:
        return -sum(p * math.log(p) for p in (self.probability(prefix, token) for token in (0, 1)))

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
        return sum(p * self.rewards[response] * self.scores(response).sum(axis=0) for p, response in self.responses())


def toy(*ends: Tokens, seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    logits = {prefix: float(rng.normal()) for prefix in PREFIXES}
    longest = itertools.product((0, 1), repeat=LONGEST)
    return Toy(logits, {response: float(rng.normal()) for response in (*PREFIXES, *longest)}, frozenset(ends))


ForkHere = Callable[[Tokens, int], bool]
"""Whether a path forks after these tokens, at a level counted from 0."""


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
    def lengths(self) -> Ints:
        """[Q, G]"""
        return self.segments["tokens"].sum(axis=-1)

    @cached_property
    def forks(self) -> Ints:
        """[Q, G, B], tokens before each fork; all of them where the path ended before."""
        return np.cumsum(self.segments["tokens"], axis=-1)[..., :-1]

    @cached_property
    def scores(self) -> Floats:
        """[Q, G, LONGEST, parameters]"""
        place = {path: row for row, path in enumerate({path for group in self.paths for path in group})}
        return np.array([self.toy.scores(path) for path in place])[[[place[p] for p in group] for group in self.paths]]

    def of_tokens(self, segments: Floats) -> Floats:
        """[Q, G, LONGEST], the advantage of each token from those of segments [Q, G, B + 1]."""
        segment = (self.forks[..., None, :] <= np.arange(LONGEST)[:, None]).sum(axis=-1)
        return np.take_along_axis(segments, segment, axis=-1)

    def gradient(self, segments: Floats) -> Floats:
        """[Q, parameters], the estimate of each outcome: the mean over slots of Σ_t A_t ∇ log π_t."""
        return np.einsum("qgt,qgtp->qp", self.of_tokens(segments), self.scores) / self.rewards.shape[1]

    def expected(self, segments: Floats) -> Floats:
        """[parameters]"""
        return self.probability @ self.gradient(segments)

    def error(self, segments: Floats) -> float:
        """Of the expected gradient, over the true one's length."""
        true = self.toy.gradient()
        return float(np.linalg.norm(self.expected(segments) - true) / np.linalg.norm(true))


def plan_gradient(policy: Toy, step: StepPlan, paths: Sequence[Tokens], segments: Sequence[Ints]) -> Floats:
    """Return the on-policy gradient of a plan of one prompt, Σ over kept paths of scale · Σ_t A_t ∇log π_t.

    Args:
        policy: what generated.
        step: the plan.
        paths: of the prompt's completions.
        segments: for each of them the segment of every token.
    """
    samples, total = step.minibatches[0].samples, np.zeros(len(PREFIXES))
    for k, slot in enumerate(samples.completion):
        advantage = samples.advantage[k, segments[slot]]
        total += samples.scale[k] * advantage @ policy.scores(paths[slot])[: len(advantage)]
    return total


def forests(policy: Toy, children: Sequence[int], fork_here: ForkHere, keep: Sequence[float] = ()) -> Forests:
    """All trees of K = children[0] roots.

    Args:
        policy: what generates.
        children: K, M₁, …, M_B.
        fork_here: decides where to fork from the tokens before.
        keep: ρ of each level, with which a child but the first is generated; empty: 1.
    """
    tree = tree_of(children)
    levels = len(children) - 1
    roots = list(_grown(policy, children, fork_here, keep or (1.0,) * levels, (), 0, (), ()))
    return listed(policy, tree, itertools.product(roots, repeat=children[0]))


def listed(policy: Toy, tree: TreeConfig, outcomes: Iterator[tuple[tuple[float, list[Slot]], ...]]) -> Forests:
    """Outcomes as arrays. Each has a probability and slots for every root."""
    probability, groups = [], []
    for roots in outcomes:
        probability.append(math.prod(p for p, _ in roots))
        groups.append([slot for _, slots in roots for slot in slots])
    assert math.isclose(sum(probability), 1.0, abs_tol=1e-12)
    rows = {slot: _segments(policy, slot) for slot in {slot for group in groups for slot in group}}
    return Forests(
        policy,
        tree,
        np.array(probability),
        [[path for path, _, _ in group] for group in groups],
        rewards=np.array([[policy.rewards[path] for path, _, _ in group] for group in groups]),
        segments=np.array([[rows[slot] for slot in group] for group in groups], SEGMENT),
    )


def tree_of(children: Sequence[int], **more: str) -> TreeConfig:
    branches = tuple(BranchConfig(at=level + 1, children=count) for level, count in enumerate(children[1:]))
    return TreeConfig(roots=children[0], branches=branches, **more)


def fork_at(*positions: int) -> ForkHere:
    return lambda prefix, level: len(prefix) == positions[level]


def fork_by_entropy(policy: Toy, *limits: float) -> ForkHere:
    return lambda prefix, level: policy.entropy(prefix) > limits[level]


def _grown(
    policy: Toy,
    children: Sequence[int],
    fork_here: ForkHere,
    keep: Sequence[float],
    prefix: Tokens,
    level: int,
    forks: tuple[int, ...],
    weights: tuple[float, ...],
) -> Grown:
    """All that a branch can become."""

    def further(*, prefix: Tokens = prefix, level: int = level, at: tuple[int, ...] = (), weight: float = 1.0) -> Grown:
        more = (weight,) if at else ()
        return _grown(policy, children, fork_here, keep, prefix, level, (*forks, *at), (*weights, *more))

    missing = len(children) - 1 - level
    if policy.ended(prefix):
        slot = (prefix, (*forks, *(len(prefix),) * missing), (*weights, *(1.0,) * missing))
        yield 1.0, [slot] * math.prod(children[level + 1 :])
    elif missing and fork_here(prefix, level):
        rho, at = keep[level], (len(prefix),)
        first = list(further(level=level + 1, at=at))
        other = [(rho * p, slots) for p, slots in further(level=level + 1, at=at, weight=1.0 / rho)]
        if rho < 1.0:
            other.append((1.0 - rho, []))
        for (p, slots), *rest in itertools.product(first, *[other] * (children[level + 1] - 1)):
            copy = [(path, at, (*w[:level], 0.0, *w[level + 1 :])) for path, at, w in slots]
            yield math.prod([p, *(q for q, _ in rest)]), [*slots, *(s for _, there in rest for s in there or copy)]
    else:
        for token in (0, 1):
            for p, slots in further(prefix=(*prefix, token)):
                yield policy.probability(prefix, token) * p, slots


def _segments(policy: Toy, slot: Slot) -> list[tuple[int, float, float, float, float]]:
    path, forks, weights = slot
    p = [policy.probability(path[:t], token) for t, token in enumerate(path)]
    return [
        (end - start, sum((1 - x) ** 2 for x in p[start:end]), 0.0, sum(map(math.log, p[start:end])), weight)
        for start, end, weight in zip((0, *forks), (*forks, len(path)), (1.0, *weights), strict=True)
    ]

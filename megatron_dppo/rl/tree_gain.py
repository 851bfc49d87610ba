"""What a tree of completions would gain over a flat group, from the gradients of a few.

K responses to a prompt are continued M times each after the same number of tokens. Let g be the gradient of a path,
(r − b)∇log π, with a baseline b that no path of the prompt has a part in. Its variance is B + W: B is that of its mean
over the continuations, given the tokens before the fork, and W what is left within them. The mean over a tree's paths
has the variance (B + W/M)/K. With a share a of a response's tokens before the fork, a tree of K responses of L tokens
takes K·L·(a + M(1 − a)) tokens. Per generated token it is then worth

    (B + W) / ((B + W/M)(a + M(1 − a)))

flat groups. Over all M that is at most (B + W)/(√(aB) + √((1 − a)W))², and 1 where W/(B + W) = 1 − a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_dppo.rl.types import Floats, Ints

DRAWS, LEVELS = 2000, (0.025, 0.975)
"""Of the bootstrap over prompts, and of its intervals."""
MOST_CHILDREN = 8


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class ForkStatistics:
    """A place to fork, as P prompts see it."""

    between: Floats
    """[P], unbiased estimates of B, which may be below zero."""
    within: Floats
    """[P], of W."""
    length: Floats
    """[P], mean tokens of a path."""
    before: Floats
    """[P], of these, mean tokens before the fork."""

    def shares(self, prompts: Ints) -> tuple[Floats, Floats]:
        """W/(B + W) and 1 − a.

        Args:
            prompts: [..., P], indices of prompts, each as often as it counts.
        """
        between, within = (np.maximum(part[prompts].mean(axis=-1), 0.0) for part in (self.between, self.within))
        total = between + within
        after = 1.0 - self.before[prompts].mean(axis=-1) / self.length[prompts].mean(axis=-1)
        return np.divide(within, total, out=np.full_like(total, np.nan), where=total > 0.0), after

    def gain(self, prompts: Ints, children: int) -> Floats:
        """[...], of a tree with so many children of each branch, over a flat group, per generated token."""
        within, after = self.shares(prompts)
        return 1.0 / ((1.0 - within + within / children) * (1.0 - after + children * after))

    @property
    def tokens_after(self) -> float:
        """1 − a, the share of the tokens after the fork."""
        return 1.0 - float(self.before.mean() / self.length.mean())

    def within_share(self) -> Interval:
        return interval(lambda prompts: self.shares(prompts)[0], len(self.within))

    def best(self) -> tuple[int, Interval]:
        """The best number of children, two at least, and its gain."""
        everyone = np.arange(len(self.within))
        children = max(range(2, MOST_CHILDREN + 1), key=lambda m: float(self.gain(everyone, m)))
        return children, interval(lambda prompts: self.gain(prompts, children), len(self.within))


def interval(of: Callable[[Ints], Floats], prompts: int) -> Interval:
    """A figure of all prompts, with its interval.

    Args:
        of: the figure, [...], of indices of prompts, [..., n], which may repeat.
        prompts: n.
    """
    draws = np.random.default_rng(0).integers(0, prompts, (DRAWS, prompts))
    low, high = np.nanquantile(of(draws), LEVELS)
    return Interval(float(of(np.arange(prompts))), float(low), float(high))


def variance_parts(paths: Floats, responses: Floats, prompts: Floats) -> tuple[Floats, Floats]:
    """Unbiased estimates of B and W, from squared norms alone: the analysis of variance of vectors.

    Args:
        paths: [P, K, M], ‖g‖² of each path.
        responses: [P, K], ‖Σ_m g‖² over the continuations of each response.
        prompts: [P], ‖Σ_k Σ_m g‖².

    Returns:
        [P], [P].
    """
    k, m = paths.shape[1:]
    within = (paths.sum(axis=(1, 2)) - responses.sum(axis=1) / m) / (k * (m - 1))
    of_means = (responses.sum(axis=1) / m - prompts / (k * m)) / (k - 1)
    return (of_means - within) / m, within

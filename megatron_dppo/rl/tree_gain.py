"""What a tree of completions would gain over a flat group, from the gradients of a few.

K responses to a prompt are continued M times each after the same number of tokens. Let g be the gradient of a path,
(r − b)∇log π, with a baseline b that no path of the prompt has a part in. Its variance is B + W: B is that of its mean
over the continuations, given the tokens before the fork, and W what is left within them. The mean over a tree's paths
has the variance (B + W/M)/K. With a share a of a response's tokens before the fork, a tree of K responses of L tokens
takes K·L·(a + M(1 − a)) tokens. Per generated token it is then worth

    (B + W) / ((B + W/M)(a + M(1 − a)))

flat groups. Over all M that is at most (B + W)/(√(aB) + √((1 − a)W))², and 1 where W/(B + W) = 1 − a.

A real baseline is a mean itself, and few roots make a noisy one. Where a gradient's length does not depend on its
reward, the mean of the G − 1 others of a flat group adds 1/(G − 1) to the variance, and that of the K − 1 other roots
(β + ω/M)/((β + ω)(K − 1)), where β and ω are to the rewards what B and W are to the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_dppo.rl.types import Floats, Ints

DRAWS, LEVELS = 2000, (0.025, 0.975)
"""Of the bootstrap over prompts, and of its intervals."""


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
    rewards_between: Floats
    """[P], of β."""
    rewards_within: Floats
    """[P], of ω."""
    length: Floats
    """[P], mean tokens of a path."""
    before: Floats
    """[P], of these, mean tokens before the fork."""

    def variance_after(self, prompts: Ints) -> Floats:
        """[...], W/(B + W).

        Args:
            prompts: [..., P], indices of prompts, each as often as it counts.
        """
        return _share(self.between[prompts], self.within[prompts])

    def tokens_after(self, prompts: Ints) -> Floats:
        """[...], 1 − a."""
        after: Floats = 1.0 - self.before[prompts].mean(axis=-1) / self.length[prompts].mean(axis=-1)
        return after

    def gain(self, prompts: Ints, roots: int, children: int) -> Floats:
        """[...], of a tree over a flat group of as many leaves, per generated token, baselines included."""
        within, after = self.variance_after(prompts), self.tokens_after(prompts)
        of_rewards = _share(self.rewards_between[prompts], self.rewards_within[prompts])
        flat = 1.0 + 1.0 / (roots * children - 1)
        tree = 1.0 + (1.0 - of_rewards + of_rewards / children) / (roots - 1)
        return flat / (tree * (1.0 - within + within / children) * (1.0 - after + children * after))

    def best(self, leaves: int) -> tuple[int, int, Interval]:
        """Roots, children and gain of the tree whose interval has the highest lower end.

        Trees have two roots and two children at least, and about as many leaves as asked.
        """
        prompts = len(self.within)
        trees = [(leaves // children, children) for children in range(2, leaves // 2 + 1)] or [(2, 2)]
        gains = [(*tree, interval(partial(self.gain, roots=tree[0], children=tree[1]), prompts)) for tree in trees]
        return max(gains, key=lambda each: each[-1].low)


def _share(between: Floats, within: Floats) -> Floats:
    """[...], within/(between + within) of means over [..., P]; not a number where both are 0."""
    between, within = (np.maximum(part.mean(axis=-1), 0.0) for part in (between, within))
    total = between + within
    share: Floats = np.divide(within, total, out=np.full_like(total, np.nan), where=total > 0.0)
    return share


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

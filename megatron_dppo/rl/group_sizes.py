"""Advantages of groups of unequal size, with the expected gradient of groups of one size.

What GRPO expects of a group depends on its size, since a completion's own reward is part of the mean and of the
standard deviation that it is held against. For 0/1 rewards of mean p, and without the division, a group of n has
(n − 1)/n of the gradient ∇p. With it, it has E √(p̂(1 − p̂))/(p(1 − p)) of it, p̂ being the group's own share of right
answers: no factor known beforehand. If groups of different sizes went into one sum as they are, the larger ones would
count more, and the objective would depend on who was given how many.

So advantages here are those of groups of m completions. In a larger group they are averaged over the sub-groups of m
that a completion is in: the group's gradient is then the mean of the gradients of these sub-groups (a U-statistic;
Hoeffding, 1948), each of which has the expectation of a group of m.

:func:`allocate` decides how many completions each prompt of a step is given, from what is known of it beforehand.
"""

from __future__ import annotations

import heapq
import math
from functools import cache

import numpy as np

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.rl.objectives import Objective, advantages, shares
from megatron_dppo.rl.rounding import without_rounding
from megatron_dppo.rl.types import Bools, Floats, Ints

SHUFFLES = 32
"""Orders of a group of more than two different rewards, in which sub-groups are windows."""


def counted_size(samples: Ints, rollout: RolloutConfig) -> int:
    """G of c and Z: as how many completions each prompt counts, whatever its group has.

    Args:
        samples: [Q], G_q of each group.
        rollout: its ``allocation`` says whether they may differ.
    """
    if rollout.allocation.rule == "equal" and len(samples):
        return int(samples.max())
    return rollout.samples_per_prompt


def compared_size(rollout: RolloutConfig, objective: Objective) -> int | None:
    """m, the size of the groups whose expected gradient a run's advantages have; None: that which they have themselves.

    Without the division by the standard deviation any size can be had from any group. With it a group must be at least
    as large, so that it is the least that ``rollout.allocation`` gives a prompt.
    """
    if rollout.allocation.rule == "equal":
        return None
    return rollout.allocation.least if objective.normalise else rollout.samples_per_prompt


def minibatch_advantages(
    rewards: Floats, samples: Ints, prompt_inclusion: Floats, rollout: RolloutConfig, objective: Objective
) -> Floats:
    """The advantages of a minibatch's completions, before anything of it is pruned; [Q, G], and 0.0 in padding.

    ``others`` is RLOO's r − mean of the others (arXiv:2402.14740), whose expected gradient is the same for
    groups of any size. ``batch`` and ``whiten`` are REINFORCE++'s r − mean, and the division by the deviation
    (arXiv:2501.03262): moments of the whole minibatch, in which prompts count alike, whatever their group has. A rolled
    out prompt stands for 1/π, so that moments of a window whose prompts were pruned are estimated: advantages are then
    ratios, whose bias vanishes as 1/(number of prompts). The draw of completions does not touch them.

    Args:
        rewards: [Q, G]; what is behind a group's completions is padding.
        samples: [Q], G_q of each group, one at least.
        prompt_inclusion: [Q]
    """
    if not len(samples):
        return np.zeros_like(rewards)
    present: Bools = np.arange(rewards.shape[1]) < samples[:, None]
    weight = shares(samples, present, 1) / prompt_inclusion[:, None]
    weight /= weight.sum()
    deviation = group_advantages(rewards, samples, normalise=False, as_of=None)
    if objective.baseline == "batch":
        rewards = without_rounding(rewards.reshape(1, -1), present.reshape(1, -1)).reshape(rewards.shape)
        mixed = (rewards[present] != rewards[0, 0]).any()
        deviation = np.where(present & mixed, rewards - (weight * rewards).sum(), 0.0)
        result = deviation
    elif objective.baseline == "others":
        result = deviation * (samples / np.maximum(samples - 1, 1))[:, None]
    else:
        as_of = compared_size(rollout, objective)
        result = group_advantages(rewards, samples, normalise=objective.normalise, as_of=as_of)
        if objective.normalise and objective.deviation == "sample":
            size = np.full_like(samples, as_of) if as_of else samples
            result *= np.sqrt((size - 1) / size)[:, None]
    if objective.whiten and (largest := np.abs(deviation).max()) > 0.0:  # squares of tiny ones would vanish
        result = result / largest
        result = result / np.sqrt((weight * result * (deviation / largest)).sum())
    return result


def group_advantages(rewards: Floats, samples: Ints, *, normalise: bool, as_of: int | None) -> Floats:
    """How much better each completion was than its group, as groups of ``as_of`` would have had it.

    Args:
        rewards: [Q, G].
        samples: [Q], G_q of each group; what is behind is padding.
        normalise: divide by the standard deviation of the group.
        as_of: m, or None for each group's own size, which gives GRPO's advantages as they are; with ``normalise`` no
            group may be smaller.

    Returns:
        [Q, G]; exactly 0.0 in padding, and in every group whose rewards are all equal.

    Raises:
        ValueError: a group is too small.
    """
    result = np.zeros_like(rewards)
    for size in np.unique(samples).tolist():
        rows = np.flatnonzero(samples == size)
        of_size = np.ascontiguousarray(rewards[rows, :size])  # sums of rows depend on how they lie in memory
        result[rows, :size] = _of_one_size(of_size, normalise, as_of or size)
    return result


def _of_one_size(rewards: Floats, normalise: bool, m: int) -> Floats:
    """The same for groups [Q, n] of one size."""
    n = rewards.shape[1]
    if n == m:
        return advantages(rewards, normalise=normalise)
    if not normalise:
        return advantages(rewards, normalise=False) * ((m - 1) / m) / ((n - 1) / n)
    if n < m:
        raise ValueError(f"A group of {n} completions has no sub-groups of {m}.")
    rewards = without_rounding(rewards)
    lowest, highest = rewards.min(axis=1, keepdims=True), rewards.max(axis=1, keepdims=True)
    high: Bools = rewards == highest
    of_low, of_high = two_rewards(n, m)
    count = high.sum(axis=1, keepdims=True)
    result = np.where(high, of_high[count], of_low[count])
    for row in np.flatnonzero(~(high | (rewards == lowest)).all(axis=1)):
        result[row] = many_rewards(rewards[row], m)
    return result


@cache
def two_rewards(n: int, m: int) -> tuple[Floats, Floats]:
    """Mean advantages of the lower and of the higher of two rewards over the sub-groups of m out of n completions.

    A sub-group with k high ones gives these √((m − k)/k) and the low ones −√(k/(m − k)); k has a hypergeometric
    distribution.

    Returns:
        [n + 1] and [n + 1], by how many of the n are high; 0 where all are alike.
    """
    of_low, of_high = np.zeros(n + 1), np.zeros(n + 1)
    subgroups = math.comb(n - 1, m - 1)
    for highs in range(1, n):
        for k in range(1, m):
            with_high = math.comb(highs - 1, k - 1) * math.comb(n - highs, m - k)
            with_low = math.comb(highs, k) * math.comb(n - highs - 1, m - k - 1)
            of_high[highs] += with_high / subgroups * math.sqrt((m - k) / k)
            of_low[highs] -= with_low / subgroups * math.sqrt(k / (m - k))
    return of_low, of_high


def many_rewards(rewards: Floats, m: int) -> Floats:
    """Mean advantages of one group [n] over sub-groups of m: the windows of ``SHUFFLES`` orders closed to circles.

    Every completion is in m windows of each order. The orders are the same for all groups of a size, so that they know
    nothing of the rewards, and each window has the law of a group of m.
    """
    n = len(rewards)
    orders = np.random.default_rng((n, m)).permuted(np.tile(np.arange(n), (SHUFFLES, 1)), axis=1)
    windows = orders[:, (np.arange(n)[:, None] + np.arange(m)) % n].reshape(-1, m)
    values = advantages(rewards[windows], normalise=True)
    return np.bincount(windows.ravel(), values.ravel(), minlength=n) / (SHUFFLES * m)


def allocate(variance: Floats, tokens: Floats, *, mean: int, least: int, most: int) -> Ints:
    """Whole numbers of completions of the least Σ σ²/n within a budget of tokens.

    The gradient of a prompt is a mean over its completions, so that n of them leave the variance σ²/n, σ² being that of
    one completion's term. The least Σ σ_q²/n_q that a number of tokens Σ n_q·E[L_q] buys has n_q ∝ σ_q/√E[L_q] (Neyman,
    1934). Predicted success has been used to allocate rollouts by Nguyen et al. (VIP, arXiv:2602.01601).

    From ``least`` each, one more goes to the prompt whose variance falls most per token, σ²/(n(n + 1))/E[L], until the
    next one would go beyond the budget. At equal lengths no other numbers leave less variance: these are the priorities
    by which seats of the U.S. House are apportioned (Wright, 2012). Prompts of no variance share evenly what others
    cannot use.

    Args:
        variance: [Q], σ² of each prompt up to a common factor, times 1/π² of its own draw; not negative.
        tokens: [Q], E[L] up to a common factor; positive.
        mean: completions of each prompt that the budget would buy if all were given as many.
        least: fewest of a prompt, at most ``mean``.
        most: most of a prompt, at least ``mean``.

    Returns:
        [Q], from ``least`` to ``most``; Σ n·E[L] is ``mean``·Σ E[L] to within one completion.
    """
    samples = np.full(len(variance), least, np.int64)
    left = (mean - least) * float(tokens.sum()) * (1.0 + 1e-9)  # rounding must not cost a completion
    gain, price = (variance / tokens).tolist(), tokens.tolist()
    queue = [(-each / (least * (least + 1)), least, q) for q, each in enumerate(gain)]
    heapq.heapify(queue)
    while queue:
        _, n, q = heapq.heappop(queue)
        if n == most:
            continue
        if price[q] > left:
            break
        left -= price[q]
        samples[q] = n = n + 1
        heapq.heappush(queue, (-gain[q] / (n * (n + 1)), n, q))
    return samples

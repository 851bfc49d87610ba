"""The advantages of a tree of completions: one for each stretch of a path between two forks.

A prompt's tree has K roots, and the branches of level l = 1 … B fork into M_l children each. Its G = K·M₁·…·M_B leaves
are the completions of an ordinary group, in order: siblings stand together. A completion is a path of B + 1 segments:
from the start to the first fork, from one fork to the next, and from the last fork to the end. With u over all nodes
and s_u the segment that leads to u

    ĝ = Σ_u ω_u (V(u) − b(u)) ∇log π(s_u | path),    ω_u = (1/K) Π 1/M over u's path

is an unbiased estimate of the gradient of the expected reward, for any baseline b(u) that does not depend on s_u given
u's parent. V of a leaf is its reward, and V of a node the mean of its children's. Each slot of the group counts 1/G.
The slots below a node add up to its ω, so that the aggregation ``constant`` needs no weights: the loss of a token in
segment l of completion g has the advantage ``tree_advantages(…)[q, g, l]``, and is divided by N·G·L_max as ever.

**A path that ends before a fork** stands in each of the slots that its children would have had. Its ω is unchanged.

**What is in several slots is trained on once**: the first slot of a path has the sum of their advantages. The others
have zeros, and a completion with zeros only is what every rule of pruning drops.

A fork is where a number of tokens, or the tokens before it, say so. By enumeration: a fork chosen by what comes after
it is biased; so is 1/(number of different leaves) for each leaf, where some ended early; and the mean of all leaves as
the baseline leaves half of a trunk's gradient at K = 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.numbers import without_rounding
from megatron_dppo.rl.types import Floats, Ints, Segments

if TYPE_CHECKING:
    from megatron_dppo.config import TreeConfig

Number = TypeVar("Number", np.int64, np.float64)
ROUNDING = 1e-12
"""An advantage of this share of the rewards' spread is a rounding error of means, and zero."""
DEVIATION_FLOOR, CLIP = 1e-8, 5.0
"""BranchGRPO's normalisation: least deviation, bound on |A|."""


def biased_settings(tree: TreeConfig) -> Iterator[tuple[str, str]]:
    """The settings under which the expected gradient is not that of the expected reward, and why, for the log."""
    if tree.branches and tree.baseline == "depth":
        why = "a segment's own reward is in its depth's mean, and each depth is divided by a deviation of its own"
        yield "rollout.tree.baseline = depth", why
    if tree.branches and tree.depths:
        yield "rollout.tree.depths", "segments of other depths have a gradient, which nothing makes up for"
    if tree.branches and tree.fusion == "probability":
        yield (
            "rollout.tree.fusion = probability",
            "a likely child counts for more than the share with which it is sampled",
        )


def tree_advantages(rewards: Floats, segments: Segments, tree: TreeConfig) -> Floats:
    """V(u) − b(u) of every segment of every path.

    With K = 2, M₁ = 2, forks after 1 of 3 tokens, and the baseline ``mixed``

        rewards [[1, 0, 0, 0]]    V of the roots [[0.5, 0]]
        → [[[0.5, 1], [0.5, −0.5], [−0.5, −0.25], [−0.5, −0.25]]]

    If the second root had ended after its first token, it would be the third and the fourth completion, of one token.
    Its advantage −0.5 would then be that of the third twice: [[[0.5, 1], [0.5, −0.5], [−1, 0], [0, 0]]].

    Args:
        rewards: [Q, G].
        segments: [Q, G, B + 1]; those after the end of a path have no tokens.
        tree: K, M, the baseline and the depths.

    Returns:
        [Q, G, B + 1]. Exactly 0 for a segment without tokens or of another depth, and where V(u) and b(u) differ by
        rounding only.
    """
    rewards = without_rounding(rewards)
    spread = np.ptp(rewards, axis=1, keepdims=True)[..., None]
    tokens = segments["tokens"]
    by_node = node_values(rewards - rewards[:, :1], segments, tree)
    if tree.baseline == "depth":
        nodes = [normalised_by_depth(v, _of_nodes(tokens[..., b], v.shape[1])) for b, v in enumerate(by_node)]
    else:
        nodes = [v - b for v, b in zip(by_node, _baselines(by_node, tree), strict=True)]
    slots = np.stack([np.repeat(a, rewards.shape[1] // a.shape[1], axis=1) for a in nodes], axis=-1)
    slots[(tokens == 0) | (np.abs(slots) <= ROUNDING * spread)] = 0.0
    if tree.depths:
        slots[..., np.setdiff1d(np.arange(slots.shape[-1]), tree.depths)] = 0.0
    once = np.zeros_like(slots)
    np.add.at(once, (np.arange(len(rewards))[:, None], first_slots(segments, tree)), slots)
    return once


def node_values(rewards: Floats, segments: Segments, tree: TreeConfig) -> list[Floats]:
    """V of every node, level by level: [Q, K], [Q, K·M₁], …, [Q, G].

    With ``tree.fusion`` = ``probability`` the children are weighted by the softmax of their segments'
    log-probabilities, as BranchGRPO (arXiv:2509.06040) has it.
    """
    values = [rewards]
    for level in range(len(tree.branches) - 1, -1, -1):
        nodes, children = values[0].shape[1], tree.branches[level].children
        shape = len(rewards), nodes // children, children
        below = values[0].reshape(shape)
        if tree.fusion == "probability":
            logprob = _of_nodes(segments["logprob"][..., level + 1], nodes).reshape(shape)
            share = np.exp(logprob - logprob.max(axis=-1, keepdims=True))
            values.insert(0, (share * below).sum(axis=-1) / share.sum(axis=-1))
        else:
            values.insert(0, below.mean(axis=-1))
    return values


def _baselines(values: Sequence[Floats], tree: TreeConfig) -> list[Floats]:
    """The baseline ``mixed`` of every node, in the shapes of ``values``.

    For a root, the mean of the other roots; else (Σ of the siblings' V + that mean) / (number of siblings + 1).
    """
    queries, roots = values[0].shape
    of_roots = (values[0].sum(axis=1, keepdims=True) - values[0]) / (roots - 1)
    baselines = [of_roots]
    for level, (value, fork) in enumerate(zip(values[1:], tree.branches, strict=True)):
        other_roots = np.repeat(of_roots, value.shape[1] // roots, axis=1)
        families = value.reshape(queries, values[level].shape[1], fork.children)
        total = (families.sum(axis=-1, keepdims=True) - families).reshape(value.shape)
        baselines.append((total + other_roots) / fork.children)
    return baselines


def normalised_by_depth(values: Floats, tokens: Ints) -> Floats:
    """BranchGRPO's advantage (arXiv:2509.06040): (V − mean)/(std + 1e-8) over a tree's nodes of one depth, within ±5.

    It is biased: a node's own reward is in the mean, and each depth is divided by a deviation of its own.

    Args:
        values: [Q, n] of one depth.
        tokens: [Q, n], of their segments. A node without is none: its path ended before.

    Returns:
        [Q, n]; 0 for a node alone at its depth.
    """
    there = tokens > 0
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    centred = np.where(there, values - np.where(there, values, 0.0).sum(axis=1, keepdims=True) / count, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    return np.clip(np.where(count > 1, centred, 0.0) / (deviation + DEVIATION_FLOOR), -CLIP, CLIP)


def first_slots(segments: Segments, tree: TreeConfig) -> Ints:
    """[Q, G], the first slot of the group that has the same path: its own, but where a path is in several.

    With M₁ = M₂ = 2, and a root whose first branch ended before it forked again: [[0, 0, 2, 3, …]].
    """
    samples = segments.shape[1]
    places = list(np.unravel_index(np.arange(samples), tree.children(samples)))
    for level in range(1, len(places)):
        ended = ~segments["tokens"][..., level:].any(axis=-1)
        places[level] = np.where(ended, 0, places[level])
    shape = np.zeros(segments.shape[:2], np.int64)
    return np.ravel_multi_index(np.broadcast_arrays(shape, *places)[1:], tree.children(samples))


def _of_nodes(slots: NDArray[Number], nodes: int) -> NDArray[Number]:
    """[Q, n] out of [Q, G]: what a node's first slot has, which all of its slots have in common."""
    return slots[:, :: slots.shape[1] // nodes]

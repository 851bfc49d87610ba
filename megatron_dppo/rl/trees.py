"""Advantages of the segments of a tree of completions.

A prompt's tree has K roots. A branch after l − 1 forks has M_l children at its next fork, for l = 1
… B. The G = K·M₁·…·M_B leaves are the completions of a group, in order: the leaves below a node are
consecutive *slots* of the group. A completion is a path of B + 1 segments, divided by forks. With u
over all nodes and s_u the segment that ends at u,

    ĝ = Σ_u ω_u (V(u) − b(u)) ∇log π(s_u | path),    ω_u = (1/K) Π 1/M over u's path

is an unbiased estimate of the gradient of the expected reward, for each baseline b(u) that does not
depend on s_u given u's parent. V of a leaf is its reward, and V of any other node the mean of its
children's V. Each slot has the weight 1/G, and the slots below a node have the weight ω in total.
The aggregation ``constant`` therefore needs no weights: tokens of segment l of completion g have
the advantage ``compute_tree_advantages(…)[q, g, l]``, and the loss is divided by N·G·L_max, as
without a tree.

- A path that ends before a fork is the completion of each slot below its last node. Its ω is
  unchanged.
- A path in several slots is trained on once: its first slot has the sum of the slots' advantages.
  The remaining slots have zeros, and each pruning rule drops a completion with only zeros.
- The position of a fork may depend only on earlier tokens; otherwise forks are biased.

Two alternatives fail in an enumeration of all outcomes. A weight of 1/(number of different leaves)
for each leaf is biased if a path ended early. With the mean of all leaves as the baseline, half of
a root segment's gradient is lost at K = 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_dppo.rl.types import Floats, Ints, Segments

if TYPE_CHECKING:
    from megatron_dppo.config import TreeConfig

ROUNDING = 1e-12
"""Advantages up to this fraction of the range of a group's rewards are rounding errors, set to
0."""
DEVIATION_FLOOR = 1e-8
CLIP = 5.0
"""BranchGRPO's normalisation: least deviation, bound on |A|."""


def find_biased_settings(tree: TreeConfig) -> Iterator[tuple[str, str]]:
    if tree.branches and tree.baseline == "depth":
        why = (
            "a segment's own reward is in its depth's mean, and each depth is divided by a "
            "separate deviation"
        )
        yield "rollout.tree.baseline = depth", why
    if tree.branches and tree.depths:
        yield (
            "rollout.tree.depths",
            "the gradient of segments at other depths is lost without compensation",
        )
    if tree.branches and tree.fusion == "probability":
        yield (
            "rollout.tree.fusion = probability",
            "a likely child counts for more than the share with which it is sampled",
        )


def compute_tree_advantages(rewards: Floats, segments: Segments, tree: TreeConfig) -> Floats:
    """Return V(u) − b(u) of each segment of each path.

    With K = 2, M₁ = 2, forks after 1 of 3 tokens, and the baseline ``mixed``

        rewards [[1, 0, 0, 0]]    V of the roots [[0.5, 0]]
        → [[[0.5, 1], [0.5, −0.5], [−0.5, −0.25], [−0.5, −0.25]]]

    If the second root ends after its first token, the third and the fourth completion are the same
    path. The third then has the advantage −0.5 twice: [[[0.5, 1], [0.5, −0.5], [−1, 0], [0, 0]]].

    Args:
        rewards: [Q, G].
        segments: [Q, G, B + 1]; segments after the end of a path have no tokens.
        tree: K, M, the baseline and the depths.

    Returns:
        [Q, G, B + 1]; exactly 0 for a segment without tokens, of another depth, or with V(u) = b(u)
        up to rounding.
    """
    spread = np.ptp(rewards, axis=1, keepdims=True)[..., None]
    tokens = segments["tokens"]
    samples = rewards.shape[1]
    # Differences from the first reward, so that equal rewards are exactly 0.
    values = compute_node_values(rewards - rewards[:, :1], segments, tree)
    if tree.baseline == "depth":
        nodes = [
            compute_depth_advantages(value, tokens[:, :: samples // value.shape[1], level])
            for level, value in enumerate(values)
        ]
    else:
        nodes = [
            value - baseline
            for value, baseline in zip(values, _compute_baselines(values, tree), strict=True)
        ]
    slots = np.stack([np.repeat(node, samples // node.shape[1], axis=1) for node in nodes], axis=-1)
    # Rounding errors become 0, because pruning rules drop completions that have only zeros.
    slots[(tokens == 0) | (np.abs(slots) <= ROUNDING * spread)] = 0.0
    if tree.depths:
        slots[..., np.setdiff1d(np.arange(slots.shape[-1]), tree.depths)] = 0.0
    # A path in several slots is trained on once, with the sum of its slots.
    once = np.zeros_like(slots)
    np.add.at(once, (np.arange(len(rewards))[:, None], find_first_slots(segments, tree)), slots)
    return once


def compute_node_values(rewards: Floats, segments: Segments, tree: TreeConfig) -> list[Floats]:
    """Return V of each node by level: [Q, K], [Q, K·M₁], …, [Q, G]."""
    values = [rewards]
    for level in range(len(tree.branches), 0, -1):
        nodes = values[0].shape[1]
        siblings = tree.branches[level - 1].children
        shape = len(rewards), nodes // siblings, siblings
        children = values[0].reshape(shape)
        # BranchGRPO's weights (arXiv:2509.06040): the softmax of the children's log-probabilities.
        if tree.fusion == "probability":
            logprob = segments["logprob"][:, :: rewards.shape[1] // nodes, level].reshape(shape)
            # Without the subtraction, exp could underflow for all children.
            weight = np.exp(logprob - logprob.max(axis=-1, keepdims=True))
            values.insert(0, (weight * children).sum(axis=-1) / weight.sum(axis=-1))
        else:
            values.insert(0, children.mean(axis=-1))
    return values


def _compute_baselines(values: Sequence[Floats], tree: TreeConfig) -> list[Floats]:
    """Return the baseline ``mixed`` of each node, in the shapes of ``values``.

    A root's baseline is the mean of the other roots. Any other node's baseline is the mean of its
    siblings' V and, as one more value, its root's baseline.
    """
    queries, roots = values[0].shape
    other_roots = (values[0].sum(axis=1, keepdims=True) - values[0]) / (roots - 1)
    baselines = [other_roots]
    for value, branch in zip(values[1:], tree.branches, strict=True):
        nodes = value.shape[1]
        children = value.reshape(queries, nodes // branch.children, branch.children)
        siblings = (children.sum(axis=-1, keepdims=True) - children).reshape(value.shape)
        baselines.append(
            (siblings + np.repeat(other_roots, nodes // roots, axis=1)) / branch.children
        )
    return baselines


def compute_depth_advantages(values: Floats, tokens: Ints) -> Floats:
    """Return BranchGRPO's (V − mean)/(std + 1e-8) of nodes of one depth, within ±5
    (arXiv:2509.06040).

    Biased: a node's own reward is in the mean, and each depth has a different divisor.

    Args:
        values: [Q, n].
        tokens: [Q, n], tokens of the nodes' segments; 0: no node, because the path ended earlier.

    Returns:
        [Q, n]; 0 for a node alone at its depth.
    """
    there = tokens > 0
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    centred = np.where(
        there, values - np.where(there, values, 0.0).sum(axis=1, keepdims=True) / count, 0.0
    )
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    return np.clip(np.where(count > 1, centred, 0.0) / (deviation + DEVIATION_FLOOR), -CLIP, CLIP)


def find_first_slots(segments: Segments, tree: TreeConfig) -> Ints:
    """Return the first slot [Q, G] with the path of each slot.

    With M₁ = M₂ = 2, and a root whose first branch ended before the second fork: [[0, 0, 2, 3, …]].
    """
    slots = np.arange(segments.shape[1])
    # leaves[l]: number of leaves below the end of segment l.
    leaves = np.cumprod([1, *(branch.children for branch in reversed(tree.branches))])[::-1]
    last_segment = np.maximum(np.count_nonzero(segments["tokens"], axis=-1), 1) - 1
    return slots - slots % leaves[last_segment]

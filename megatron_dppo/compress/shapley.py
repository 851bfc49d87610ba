"""Shapley values of layers: what a policy has of each, with or without others beside it (2407.16286)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from megatron_dppo.compress.reader import Measure, Reader

Absent = Collection[int]
"""Numbers of the layers that a subnetwork lacks."""


def one_at_a_time(layers: int) -> list[Absent]:
    """The whole policy, and for each layer the policy without it."""
    return [(), *((layer,) for layer in range(layers))]


def halves(layers: int, count: int, seed: int) -> list[Absent]:
    """Pairs of subnetworks: one without a random half of the layers, and one without all others.

    Of an odd number, the smaller half goes first. Over each pair every layer is absent once.

        halves(4, 2, seed=1) → [(0, 1), (2, 3), (0, 3), (1, 2)]

    Args:
        count: of pairs.
    """
    draw = np.random.default_rng(seed)
    orders = [draw.permutation(layers).tolist() for _ in range(count)]
    return [tuple(sorted(half)) for order in orders for half in (order[: layers // 2], order[layers // 2 :])]


def shapley_values(reader: Reader, measure: Measure, pairs: int, seed: int) -> list[float]:
    """φ_l = E[m | l absent] − E[m | l present] of each layer l, where a higher m is worse. Collective.

    Args:
        measure: m, see :meth:`Reader.costs`.
        pairs: of random halves, of which both means are taken. 0: each layer is left out alone, and the means are of
            one policy each: m without l, and m of the whole policy.
    """
    layers = reader.shape.num_layers
    if pairs == 0:
        present, *absent = reader.costs(measure, one_at_a_time(layers))
        return [cost - present for cost in absent]
    subnetworks = halves(layers, pairs, seed)
    costs = np.array(reader.costs(measure, subnetworks))
    gone = np.array([[layer in absent for layer in range(layers)] for absent in subnetworks])
    return (np.where(gone, costs[:, None], -costs[:, None]).sum(0) / pairs).tolist()


def passes_of(measure: Measure, layers: int, pairs: int) -> int:
    """How often :func:`shapley_values` reads each sequence."""
    of_the_whole = measure == "logits"  # which are compared with others
    return 2 * pairs + of_the_whole if pairs else 1 + layers

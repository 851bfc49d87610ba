"""The packer's invariants as properties, its targets as measurements."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.errors import UserError
from megatron_dppo.rl.pack import build_prefix_tree
from megatron_dppo.rl.packing import (
    Packing,
    compute_pack_metrics,
    compute_sequence_costs,
    pack_sequences,
)


def contents(packing: Packing) -> list[tuple[int, ...]]:
    return [pack for rank in packing.packs for pack in rank]


def segment_sizes(
    packing: Packing, lengths: np.ndarray, pack: tuple[int, ...], align: int = 1
) -> int:
    """Return what the segments of a pack take up, each padded."""
    segments = (
        build_prefix_tree([int(lengths[k]) for k in pack], [packing.shared[k] for k in pack])
        if pack
        else []
    )
    return sum(-(-(end - begin) // align) * align for *_, begin, end in segments)


@st.composite
def requests(draw):
    """Draw lengths of sequences, what they share with the one before, and the options of the
    packer."""
    options = {
        "ranks": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(24, 600)),
        "align": draw(st.sampled_from([1, 2, 8])),
        "capacity_multiple": draw(st.sampled_from([1, 4, 6])),
        "window": draw(st.sampled_from([1, 3, 64])),
        "min_per_rank": draw(st.integers(1, 4)),
        "share": draw(st.sampled_from(["auto", "on", "off"])),
    }
    unit = int(np.lcm(options["align"], options["capacity_multiple"]))
    longest = options["max_tokens"] // unit * unit
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    common = np.array([0, *(draw(st.integers(0, min(pair))) for pair in pairwise(lengths))])
    in_group = np.arange(len(lengths)) % draw(st.integers(1, 8)) > 0
    return np.array(lengths), {
        "shared": common * in_group,
        "between": common * ~in_group,
        **options,
    }


@given(requests())
def test_packs_hold_every_sequence_once_within_their_capacity(request_):
    lengths, options = request_
    packing = pack_sequences(lengths, **options)
    packs = contents(packing)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert packing.capacity <= options["max_tokens"]
    assert (
        packing.capacity % options["align"] == packing.capacity % options["capacity_multiple"] == 0
    )
    assert len(packing.packs) == options["ranks"]
    [per_rank] = {len(rank) for rank in packing.packs}
    enough = len(lengths) >= options["ranks"] * options["min_per_rank"]
    assert per_rank >= (options["min_per_rank"] if enough else 1)
    for pack in packs:
        assert segment_sizes(packing, lengths, pack, options["align"]) <= packing.capacity
        assert not pack or packing.shared[pack[0]] == 0
        neighbours = [(before, k) for before, k in pairwise(pack) if packing.shared[k]]
        assert all(before == k - 1 for before, k in neighbours)
    filled = sum(segment_sizes(packing, lengths, pack) for pack in packs)
    assert packing.saved == lengths.sum() - filled and not (
        packing.saved and options["share"] == "off"
    )
    assert packing.fill == pytest.approx(filled / (packing.capacity * len(packs)))
    work = compute_sequence_costs(lengths, shared=np.array(packing.shared))
    load = [sum(work[row] for pack in rank for row in pack) for rank in packing.packs]
    assert packing.imbalance == pytest.approx(max(load) / np.mean(load))


@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize(("mean", "sigma"), [(6.6, 1.0), (6.0, 1.2), (8.0, 0.6)])
def test_lengths_as_in_dapo_fill_97_percent_and_balance_within_5(
    ranks: int, mean: float, sigma: float
):
    for seed in range(2):
        drawn = np.random.default_rng(seed).lognormal(mean, sigma, 64 * ranks)
        lengths = np.clip(drawn, 64, 8192).astype(int)
        for max_tokens in (16384, 131072):
            packing = pack_sequences(lengths, ranks=ranks, max_tokens=max_tokens)
            assert packing.fill >= 0.97 and packing.imbalance <= 1.05


def test_balance_counts_attention_and_not_tokens_alone():
    """Packs of 8192, 8190, 8189 and 8188 tokens. By tokens, the first and the last would share a
    rank."""
    lengths = [8192, 8188] + [130] * 63 + [431] * 19
    for hidden, long in ((80, [1, 1]), (math.inf, [2, 0])):
        packing = pack_sequences(lengths, ranks=2, max_tokens=8192, hidden=hidden)
        assert [sum(row < 2 for pack in rank for row in pack) for rank in packing.packs] == long


@pytest.mark.parametrize(
    ("lengths", "options", "capacity", "per_rank"),
    [
        ([100] * 9, {"ranks": 2, "capacity_multiple": 64}, 512, 1),
        ([2000] * 3, {"ranks": 1, "max_tokens": 5000}, 2000, 3),  # no two fit together
        ([100] * 16, {"ranks": 2, "min_per_rank": 4}, 200, 4),
        ([100] * 6, {"ranks": 2, "min_per_rank": 4}, 100, 3),
        ([10, 20], {"ranks": 4}, 20, 1),
        ([100, 80, 60], {"ranks": 2, "min_per_rank": 8, "least_per_rank": 4}, 100, 4),
    ],
)
def test_capacity_and_packs_are_what_a_step_needs(lengths, options, capacity, per_rank):
    packing = pack_sequences(lengths, **({"max_tokens": 4096} | options))
    assert (packing.capacity, [len(rank) for rank in packing.packs]) == (
        capacity,
        [per_rank] * options["ranks"],
    )
    metrics = compute_pack_metrics([packing])
    assert metrics["pack/empty"] == max(metrics["pack/count"] - len(lengths), 0)


def test_sequence_that_fits_into_no_pack_is_named():
    with pytest.raises(UserError, match=r"pack\.max_tokens = 1000: a sequence of 1001 tokens"):
        pack_sequences([5, 1001, 7], ranks=1, max_tokens=1000)
    with pytest.raises(
        UserError, match=r"a sequence of 997 tokens does not fit into a pack of 992 .* 1024 or more"
    ):
        pack_sequences([997], ranks=1, max_tokens=1000, capacity_multiple=32)


def test_metrics_weigh_minibatches_by_their_slots():
    full, half, none = (
        pack_sequences(lengths, ranks=2, max_tokens=64) for lengths in ([64, 64], [64, 32], [])
    )
    metrics = compute_pack_metrics([full, half, none])
    assert metrics["pack/fill"] == (128 + 96) / 256
    assert (metrics["pack/count"], metrics["pack/capacity"]) == (4.0, 64.0)
    assert metrics["pack/imbalance"] == half.imbalance > 1.0


def pack_groups(count: int, prompt: int, responses: int, **options) -> Packing:
    """Pack groups of responses of 1000 tokens to prompts of so many."""
    lengths = [prompt + 1000] * count * responses
    return pack_sequences(lengths, shared=[0, *[prompt] * (responses - 1)] * count, **options)


def test_prefix_group_goes_into_one_pack_where_it_fits():
    given = {"count": 4, "prompt": 2000, "responses": 8, "ranks": 2, "max_tokens": 32768}
    packing, apart = pack_groups(**given), pack_groups(**given, share="off")
    assert packing.saved == 4 * 7 * 2000
    assert packing.cost < 0.6 * apart.cost


def test_auto_shares_nothing_where_large_pieces_idle_a_rank():
    """Two prefix groups for four ranks: pieces of half a group keep all busy."""
    packing = pack_groups(2, 100, 4, ranks=4, max_tokens=8192)
    assert packing.imbalance < 1.01 and packing.saved == 4 * 100
    assert pack_groups(1, 10, 4, ranks=4, max_tokens=8192).saved == 0

"""The packer's invariants as properties, its targets as measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.errors import UserError
from megatron_dppo.rl.pack import prefix_tree
from megatron_dppo.rl.packing import CostModel, Packing, pack_metrics, pack_sequences


def lognormal_lengths(count: int, seed: int, mean: float = 6.6, sigma: float = 1.0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(mean, sigma, count), 64, 8192).astype(int)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """Packs opened by the textbook's packer."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        pack = next((k for k, left in enumerate(room) if left >= length), None)
        if pack is None:
            room.append(capacity - length)
        else:
            room[pack] -= length
    return len(room)


def contents(packing: Packing) -> list[tuple[int, ...]]:
    return [pack for rank in packing.packs for pack in rank]


@st.composite
def requests(draw):
    align = draw(st.sampled_from([1, 2, 8]))
    multiple = draw(st.sampled_from([1, 4, 6]))
    unit = int(np.lcm(align, multiple))
    most = draw(st.integers(unit, 600))
    longest = most // unit * unit
    lengths = draw(st.lists(st.integers(1, longest), max_size=60))
    return lengths, {
        "ranks": draw(st.integers(1, 5)),
        "max_tokens": most,
        "align": align,
        "capacity_multiple": multiple,
        "window": draw(st.sampled_from([1, 3, 64])),
        "min_per_rank": draw(st.integers(1, 4)),
    }


@given(requests())
def test_every_sequence_is_in_exactly_one_pack_and_no_pack_overflows(request_):
    lengths, options = request_
    packing = pack_sequences(lengths, **options)
    assert sorted(row for pack in contents(packing) for row in pack) == list(range(len(lengths)))
    slots = -(-np.array(lengths, dtype=int) // options["align"]) * options["align"]
    assert all(slots[list(pack)].sum() <= packing.capacity for pack in contents(packing))
    assert packing.capacity <= options["max_tokens"]
    assert packing.capacity % options["align"] == packing.capacity % options["capacity_multiple"] == 0


@given(requests())
def test_every_rank_has_equally_many_packs_and_at_least_as_many_as_asked(request_):
    lengths, options = request_
    packing = pack_sequences(lengths, **options)
    assert len(packing.packs) == options["ranks"]
    counts = {len(rank) for rank in packing.packs}
    assert len(counts) == 1
    enough = len(lengths) >= options["ranks"] * options["min_per_rank"]
    assert counts.pop() >= (options["min_per_rank"] if enough else 0)


@given(requests())
def test_the_figures_say_what_the_packs_are(request_):
    lengths, options = request_
    packing = pack_sequences(lengths, **options)
    if not lengths:
        assert (packing.capacity, packing.packs, packing.fill) == (0, ((),) * options["ranks"], 0.0)
        return
    assert packing.fill == pytest.approx(sum(lengths) / (packing.capacity * len(contents(packing))))
    work = CostModel()(np.array(lengths))
    load = [sum(work[row] for pack in rank for row in pack) for rank in packing.packs]
    assert packing.imbalance == pytest.approx(max(load) / np.mean(load))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("mean", "sigma"), [(6.6, 1.0), (7.0, 0.8), (6.0, 1.2), (8.0, 0.6)])
def test_dapo_like_lengths_fill_97_percent_and_balance_within_5(ranks: int, mean: float, sigma: float):
    for seed in range(5):
        lengths = lognormal_lengths(64 * ranks, seed, mean, sigma)
        for max_tokens in (16384, 131072):
            packing = pack_sequences(lengths, ranks=ranks, max_tokens=max_tokens)
            textbook = -(-first_fit_decreasing(lengths, max_tokens) // ranks) * ranks
            assert packing.fill >= max(0.97, lengths.sum() / (textbook * max_tokens))
            assert packing.imbalance <= 1.05


def test_balance_counts_attention_and_not_tokens_alone():
    """Packs of 8192, 8190, 8189 and 8188 tokens. By tokens, the first and the last would share a rank."""
    lengths = [8192, 8188] + [130] * 63 + [431] * 19
    packing = pack_sequences(lengths, ranks=2, max_tokens=8192, costs=CostModel(linear=1.0, quadratic=1e-3))
    assert [sum(row < 2 for pack in rank for row in pack) for rank in packing.packs] == [1, 1]
    by_tokens = pack_sequences(lengths, ranks=2, max_tokens=8192, costs=CostModel(linear=1.0, quadratic=0.0))
    assert [sum(row < 2 for pack in rank for row in pack) for rank in by_tokens.packs] == [2, 0]


def test_the_capacity_shrinks_to_what_the_step_needs():
    packing = pack_sequences([100] * 9, ranks=2, max_tokens=4096)
    assert (packing.capacity, packing.fill) == (500, 0.9)
    assert pack_sequences([100] * 9, ranks=2, max_tokens=4096, capacity_multiple=64).capacity == 512


def test_three_sequences_that_do_not_go_in_pairs_get_a_pack_each():
    packing = pack_sequences([6000, 6000, 6000], ranks=1, max_tokens=16384)
    assert (packing.capacity, len(packing.packs[0]), packing.fill) == (6000, 3, 1.0)


def test_a_pipeline_gets_its_packs_where_there_are_sequences_for_them():
    assert len(pack_sequences([100] * 16, ranks=2, max_tokens=4096, min_per_rank=4).packs[0]) == 4
    assert len(pack_sequences([100] * 6, ranks=2, max_tokens=4096, min_per_rank=4).packs[0]) == 3


def test_interleaved_stages_get_as_many_packs_as_they_need_and_empty_ones_are_counted() -> None:
    packing = pack_sequences([100, 80, 60], ranks=2, max_tokens=4096, min_per_rank=8, least_per_rank=4)
    assert [len(packs) for packs in packing.packs] == [4, 4]
    assert sorted(index for packs in packing.packs for pack in packs for index in pack) == [0, 1, 2]
    metrics = pack_metrics([packing])
    assert (metrics["pack/count"], metrics["pack/empty"]) == (8.0, 5.0)
    assert metrics["pack/fill"] == pytest.approx(240 / (8 * packing.capacity))
    assert pack_sequences([], ranks=2, max_tokens=4096, least_per_rank=4).packs == ((), ())


def test_ranks_without_a_sequence_get_an_empty_pack():
    packing = pack_sequences([10, 20], ranks=4, max_tokens=64)
    assert sorted(packing.packs) == [((),), ((),), ((0,),), ((1,),)]


def test_a_sequence_that_fits_into_no_pack_is_named():
    with pytest.raises(UserError, match=r"pack\.max_tokens = 1000: a sequence of 1001 tokens"):
        pack_sequences([5, 1001, 7], ranks=1, max_tokens=1000)
    with pytest.raises(UserError, match=r"a sequence of 997 tokens does not fit into a pack of 992 .* 1024 or more"):
        pack_sequences([997], ranks=1, max_tokens=1000, capacity_multiple=32)


def test_metrics_weigh_minibatches_by_their_slots():
    full, half = pack_sequences([64, 64], ranks=2, max_tokens=64), pack_sequences([64, 32], ranks=2, max_tokens=64)
    metrics = pack_metrics([full, half, pack_sequences([], ranks=2, max_tokens=64)])
    assert metrics["pack/fill"] == (128 + 96) / 256
    assert metrics["pack/count"] == 4.0
    assert metrics["pack/capacity"] == 64.0
    assert metrics["pack/imbalance"] == half.imbalance > 1.0


def families(count: int, *, prompt: int, responses: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of prompt and response, and what is shared, of families that are all alike."""
    lengths = np.tile(np.array(responses) + prompt, count)
    shared = np.tile([0, *[prompt] * (len(responses) - 1)], count)
    return lengths, shared


def slots_of(packing: Packing, lengths: np.ndarray) -> list[int]:
    return [sum(int(lengths[k]) - packing.shared[k] for k in pack) for rank in packing.packs for pack in rank]


def test_a_family_goes_into_one_pack_where_it_fits():
    lengths, shared = families(4, prompt=2000, responses=[1000] * 8)
    packing = pack_sequences(lengths, shared=shared, ranks=2, max_tokens=32768)
    assert packing.saved == 4 * 7 * 2000
    assert all(
        len({k // 8 for k in pack}) * 10_000 == size
        for pack, size in zip(packing.packs[0], slots_of(packing, lengths)[:2], strict=False)
    )
    apart = pack_sequences(lengths, shared=shared, ranks=2, max_tokens=32768, share="off")
    assert (apart.saved, sum(apart.shared)) == (0, 0)
    assert packing.cost < 0.6 * apart.cost


def test_a_family_over_several_packs_repeats_its_prompt_in_each():
    lengths, shared = families(1, prompt=1000, responses=[1000] * 8)
    packing = pack_sequences(lengths, shared=shared, ranks=2, max_tokens=4096)
    assert packing.capacity <= 4096 and sorted(k for rank in packing.packs for pack in rank for k in pack) == [
        *range(8)
    ]
    for rank in packing.packs:
        for pack in rank:
            assert packing.shared[pack[0]] == 0
    assert 0 < packing.saved < 7 * 1000


def test_auto_shares_nothing_where_large_pieces_leave_a_rank_idle():
    """Two families for four ranks: pieces of half a family keep all busy."""
    lengths, shared = families(2, prompt=100, responses=[1000] * 4)
    packing = pack_sequences(lengths, shared=shared, ranks=4, max_tokens=8192)
    assert packing.imbalance < 1.01 and packing.saved == 4 * 100
    lengths, shared = families(1, prompt=10, responses=[1000] * 4)
    assert pack_sequences(lengths, shared=shared, ranks=4, max_tokens=8192).saved == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 3]),
    st.sampled_from(["auto", "on", "off"]),
    st.sampled_from([0, 30]),
)
def test_shared_packs_hold_every_sequence_once_and_never_more_than_their_capacity(groups, align, ranks, share, message):
    lengths = np.array([prompt + response for prompt, responses in groups for response in responses])
    shared = np.array([prompt if i else 0 for prompt, responses in groups for i in range(len(responses))])
    first = np.flatnonzero([i == 0 for _, responses in groups for i in range(len(responses))])
    prompts, between = np.array([prompt for prompt, _ in groups]), np.zeros_like(shared)
    between[first[1:]] = np.minimum(np.minimum(prompts[1:], prompts[:-1]), message)
    packing = pack_sequences(
        lengths, shared=shared, between=between, ranks=ranks, max_tokens=160, align=align, share=share
    )
    packs = [pack for rank in packing.packs for pack in rank]
    assert sorted(k for pack in packs for k in pack) == [*range(len(lengths))]
    assert len({len(rank) for rank in packing.packs}) == 1 and packing.capacity <= 160
    filled = 0
    for pack in packs:
        shares = [packing.shared[k] for k in pack]
        assert not pack or shares[0] == 0
        assert all(not share or before == k - 1 for before, k, share in zip(pack, pack[1:], shares[1:], strict=False))
        segments = prefix_tree([int(lengths[k]) for k in pack], shares) if pack else []
        assert sum(-(-(end - begin) // align) * align for *_, begin, end in segments) <= packing.capacity
        filled += sum(end - begin for *_, begin, end in segments)
    assert packing.fill == pytest.approx(filled / (len(packs) * packing.capacity))
    assert packing.saved == lengths.sum() - filled
    if share == "off":
        assert packing.saved == 0

"""Law 4 through the plan: what one layout holds, moved slice by slice, is what the other one does. No processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from megatron_dppo.bridge.layout import Layout, holdings
from megatron_dppo.bridge.mapping import Entry, entries, expected_tensors
from megatron_dppo.bridge.reshard import ReshardPlan, plan_reshard
from megatron_dppo.bridge.shards import fill_parameter, fill_tensors
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.test_mapping import SHAPE, SHAPES, shapes

MOE = replace(SHAPES["Qwen3-MoE"], experts=8)
Policy = dict[str, torch.Tensor]
Shards = dict[tuple[int, str], torch.Tensor]
"""Every rank's parameters, by the rank and the name."""


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def layouts(draw: st.DrawFn, tp: int | None = None, pp: int | None = None) -> Layout:
    tp = tp or draw(st.sampled_from([1, 2, 4, 8]))
    pp = pp or draw(st.integers(1, 3))
    dp = draw(st.integers(1, 2))
    etp = draw(st.sampled_from([None, *divisors(tp * dp)]))
    ep = draw(st.sampled_from(divisors(tp * dp // (etp or tp))))
    return Layout(tp=tp, pp=pp, vpp=draw(st.integers(1, 2)) if pp > 1 else 1, ep=ep, etp=etp, dp=dp)


def fitting(*layouts: Layout) -> st.SearchStrategy[PolicyShape]:
    """Policies that can be cut as each of the layouts says."""
    return shapes(
        lcm(*(layout.tp for layout in layouts)),
        lcm(*(layout.pp * layout.vpp for layout in layouts)),
        expert_tp=lcm(*(layout.expert_tp for layout in layouts)),
        expert_shares=lcm(*(layout.ep for layout in layouts)),
    )


def for_family(layout: Layout, shape: PolicyShape) -> Layout:
    """Only experts can be dealt out."""
    return layout if shape.experts else replace(layout, ep=1, etp=None)


def places(layout: Layout) -> list[dict[str, int]]:
    """Every rank's place in its groups, as Megatron lays them out."""
    expert_dp = layout.stage_size // (layout.expert_tp * layout.ep)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=1, order=order)
    expert = RankGenerator(tp=layout.expert_tp, ep=layout.ep, dp=expert_dp, pp=layout.pp, cp=1, order=order)
    found: list[dict[str, int]] = [{} for _ in range(layout.size)]
    for name, groups in {
        "tp": dense.get_ranks("tp"),
        "pp": dense.get_ranks("pp"),
        "etp": expert.get_ranks("tp"),
        "ep": expert.get_ranks("ep"),
    }.items():
        for group in groups:
            for place, rank in enumerate(group):
                found[rank][name] = place
    return found


def parameters(shape: PolicyShape, layout: Layout) -> Iterator[tuple[int, Entry, int, int]]:
    """(rank, entry, part, parts) of every parameter of every rank, from Megatron's groups."""
    for rank, place in enumerate(places(layout)):
        for entry in entries(shape, place["pp"], layout.pp, layout.vpp):
            if entry.expert is None:
                yield rank, entry, place["tp"], layout.tp
            elif entry.expert // (shape.experts // layout.ep) == place["ep"]:
                yield rank, entry, place["etp"], layout.expert_tp


def cut(shape: PolicyShape, layout: Layout, policy: Policy) -> Shards:
    def read(name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        return policy[name].narrow(axis, start, stop - start)

    shards: Shards = {}
    for rank, entry, part, parts in parameters(shape, layout):
        shard = shards[rank, entry.megatron[0]] = policy["model.norm.weight"].new_empty(entry.shard_shape(parts))
        fill_parameter(entry, shard, read, part, parts)
    return shards


def put_together(shape: PolicyShape, layout: Layout, shards: Shards) -> Policy:
    """The way back to Hugging Face, from the last replica of everything."""
    parts: dict[Entry, dict[int, torch.Tensor]] = {}
    for rank, entry, part, _ in parameters(shape, layout):
        parts.setdefault(entry, {})[part] = shards[rank, entry.megatron[0]]
    dtype = next(iter(shards.values())).dtype
    policy = {name: torch.full(size, torch.nan, dtype=dtype) for name, size in expected_tensors(shape).items()}
    for entry, shard_of in parts.items():
        if not entry.row.copies:
            fill_tensors(entry, [shard_of[part] for part in range(len(shard_of))], policy)
    return policy


def carry_out(plan: ReshardPlan, have: Shards, empty: Shards, first_target: int) -> None:
    """Every slice into shards of NaN; what no slice fills is padding and becomes zero."""
    for part in plan.slices:
        place = empty[part.target - first_target, part.target_parameter]
        place = place.narrow(part.axis, part.target_start, part.length)
        assert place.isnan().all(), "written twice"
        place.copy_(have[part.source, part.source_parameter].narrow(part.axis, part.source_start, part.length))
        assert part.bytes == place.numel() * place.element_size()
    for shard in empty.values():
        shard.nan_to_num_(nan=0.0)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_policy_gets_into_any_layout_and_back_bit_by_bit(tp: int, pp: int, data: st.DataObject) -> None:
    drawn = data.draw(layouts(tp, pp)), data.draw(layouts())
    shape = data.draw(fitting(*drawn))
    source, target = (for_family(layout, shape) for layout in drawn)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    first_target = data.draw(st.sampled_from([0, source.size, source.size // 2]))
    generator = torch.Generator().manual_seed(0)
    policy = {
        name: torch.rand(size, generator=generator).add_(0.5).to(dtype)  # no zeros, which padding has
        for name, size in expected_tensors(shape).items()
    }
    plan = plan_reshard(shape, source, target, itemsize=dtype.itemsize, first_target=first_target)
    wanted = cut(shape, target, policy)
    arrived = {place: torch.full_like(shard, torch.nan) for place, shard in wanted.items()}
    carry_out(plan, cut(shape, source, policy), arrived, first_target)
    assert [place for place in wanted if not torch.equal(arrived[place], wanted[place])] == []
    returned = put_together(shape, target, arrived)
    assert all(torch.equal(returned[name], policy[name]) for name in policy)
    assert plan.bytes_moved == plan.least_bytes


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_no_rank_receives_a_weight_that_it_has(data: st.DataObject) -> None:
    """The least, counted weight by weight: what a rank needs, less what the same process has."""
    drawn = data.draw(layouts()), data.draw(layouts())
    shape = data.draw(fitting(*drawn))
    source, target = (for_family(layout, shape) for layout in drawn)
    ends = np.cumsum([np.prod(size) for size in expected_tensors(shape).values()])
    numbered = {
        name: torch.arange(1 + end - int(np.prod(size)), 1 + end).view(size)  # 0 is padding
        for (name, size), end in zip(expected_tensors(shape).items(), ends.tolist(), strict=True)
    }

    def held(layout: Layout) -> list[np.ndarray]:
        by_rank: list[list[np.ndarray]] = [[] for _ in range(layout.size)]
        for (rank, _), shard in cut(shape, layout, numbered).items():
            by_rank[rank].append(shard.flatten().numpy())
        return [np.setdiff1d(np.concatenate(weights), 0) for weights in by_rank]

    has, needs = held(source), held(target)
    for first_target in (0, source.size // 2, source.size):
        processes = [*has[first_target:], *[np.array([])] * target.size]
        missing = [len(np.setdiff1d(needs[rank], processes[rank])) for rank in range(target.size)]
        plan = plan_reshard(shape, source, target, itemsize=2, first_target=first_target)
        assert [plan.bytes_received[first_target + rank] for rank in range(target.size)] == [2 * n for n in missing]
        assert plan.bytes_moved == plan.least_bytes == 2 * sum(missing)
        assert plan.bytes_held == 2 * sum(map(len, needs))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_nothing_moves_where_nothing_changes(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    shape = data.draw(fitting(layout))
    layout = for_family(layout, shape)
    plan = plan_reshard(shape, layout, layout, itemsize=4)
    assert plan.bytes_moved == plan.least_bytes == 0
    assert all(part.source_start == part.target_start for part in plan.slices)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2, dp=4), Layout(tp=4, dp=3), Layout(tp=4, pp=2, ep=4, etp=1, dp=4)]
)
def test_replicas_share_the_sending(layout: Layout) -> None:
    shape = replace(MOE if layout.ep > 1 else SHAPE, num_layers=16, vocab_size=400)
    plan = plan_reshard(shape, layout, Layout(tp=2), itemsize=2, first_target=layout.size)
    for place in places(layout):
        loads = [plan.bytes_sent[rank] for rank, its in enumerate(places(layout)) if its == place]
        assert len(loads) > 1
        assert max(loads) <= 1.02 * min(loads)


def test_both_ends_of_a_slice_meet_it_in_the_same_order() -> None:
    plan = plan_reshard(SHAPE, Layout(tp=2, pp=2), Layout(tp=4, dp=2), itemsize=2)
    ranks = range(plan.target.size)
    for rank in ranks:
        for other in ranks:
            going = [part for part in plan.sends(rank) if part.target == other]
            assert going == [part for part in plan.receives(other) if part.source == rank]
    received, kept = ([part for rank in ranks for part in of(rank)] for of in (plan.receives, plan.keeps))
    assert Counter(received + kept) == Counter(plan.slices)
    assert sum(part.bytes for part in received) == plan.bytes_moved == sum(plan.bytes_received.values())
    assert sum(part.bytes for part in kept) == plan.bytes_held - plan.bytes_moved > 0


def test_query_groups_travel_whole() -> None:
    plan = plan_reshard(SHAPE, Layout(), Layout(tp=2), itemsize=2, first_target=1)
    mixed = [
        part for part in plan.slices if part.target_parameter.endswith("layers.0.self_attention.linear_qkv.weight")
    ]
    half = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim // 2
    assert [(part.target, part.source_start, part.length) for part in mixed] == [(1, 0, half), (2, half, half)]


def test_a_tied_output_layer_is_taken_from_the_embedding_in_the_same_process() -> None:
    shape = replace(SHAPE, tied=True)
    plan = plan_reshard(shape, Layout(), Layout(pp=2), itemsize=4)
    (from_first, to_last) = (part for part in plan.slices if part.source_parameter.startswith("embedding"))
    assert (from_first.target_parameter, from_first.moves) == ("embedding.word_embeddings.weight", False)
    assert (to_last.target_parameter, to_last.moves) == ("output_layer.weight", True)
    back = plan_reshard(shape, Layout(pp=2), Layout(), itemsize=4, first_target=1)
    (embedding,) = (part for part in back.slices if part.target_parameter.startswith("embedding"))
    assert (embedding.source_parameter, embedding.moves) == ("output_layer.weight", False)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=3, dp=4), Layout(tp=2, ep=4, etp=1, dp=4), Layout(tp=4, pp=2, ep=2, dp=4), Layout(ep=8, dp=8)],
)
def test_ranks_stand_where_megatron_puts_them(layout: Layout) -> None:
    shape = replace(MOE, num_layers=6)
    ours = {
        (rank, holding.entry.megatron[0], part, len(holding.ranks))
        for holding in holdings(shape, layout)
        for part, ranks in enumerate(holding.ranks)
        for rank in ranks
    }
    assert ours == {(rank, entry.megatron[0], part, of) for rank, entry, part, of in parameters(shape, layout)}


def test_the_plan_is_described_in_gibibytes() -> None:
    shape = replace(SHAPE, hidden=1024, ffn=65536)
    plan = plan_reshard(shape, Layout(tp=4, pp=2), Layout(tp=2, dp=2, pp=2), itemsize=2)
    words = plan.describe().splitlines()
    assert words[0].startswith("TP 4 x PP 2 (8 ranks) -> TP 2 x PP 2 x DP 2 (8 ranks), ")
    figures = [float(line.split()[-2]) for line in words[1:]]
    ours = (plan.bytes_held, plan.bytes_moved, plan.least_bytes, max(plan.bytes_sent.values()))
    assert figures[:4] == [round(size / 2**30, 2) for size in ours]
    assert figures[4] == round(max(plan.bytes_received.values()) / 2**30, 2) > 0


@pytest.mark.parametrize(
    ("sizes", "setting", "words"),
    [
        ({"tp": 0}, "layout.tp", "1 or more"),
        ({"vpp": 2}, "layout.vpp", "layout.pp to 2"),
        ({"tp": 2, "dp": 3, "etp": 4}, "layout.etp", "one of 1, 2, 3, 6"),
        ({"tp": 2, "dp": 6, "ep": 4}, "layout.ep", "one of 1, 2, 3, 6"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(sizes: dict[str, int], setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Layout(**sizes)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("shape", "layout", "setting", "words"),
    [
        (SHAPE, Layout(tp=8), "layout.tp", "one of 1, 2, 4"),
        (SHAPE, Layout(pp=3), "layout.pp", "one of 1, 2, 4"),
        (SHAPE, Layout(pp=2, vpp=3), "layout.vpp", "one of 1, 2"),
        (SHAPE, Layout(dp=2, ep=2), "layout.ep", "to 1"),
        (MOE, Layout(dp=12, ep=12), "layout.ep", "one of 1, 2, 4"),
        (MOE, Layout(dp=12, etp=3), "layout.etp", "one of 1, 2, 4"),
        (MOE, Layout(tp=8), "layout.tp", "one of 1, 2, 4"),
    ],
)
def test_a_layout_that_does_not_divide_names_those_that_do(
    shape: PolicyShape, layout: Layout, setting: str, words: str
) -> None:
    for source, target in ((Layout(), layout), (layout, Layout())):
        with pytest.raises(UserError, match=words) as caught:
            plan_reshard(shape, source, target, itemsize=2)
        assert caught.value.setting == setting


def test_experts_may_be_cut_otherwise_than_the_rest() -> None:
    Layout(tp=4, etp=1).check(replace(MOE, ffn=5))

"""What experts take of memory and time under expert parallelism, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.kernels import EXCHANGE, PRODUCTS, STREAMS, stage_passes, wire_seconds
from megatron_dppo.estimate.memory import FUSED, feed_forward_elements, held_bytes, parameters_of, rank_elements
from megatron_dppo.estimate.search import with_settings
from megatron_dppo.estimate.time import layer_flops
from megatron_dppo.estimate.workload import mean_pack, place
from megatron_dppo.models.shape import PUBLISHED
from tests.estimate.test_plan import EXPERTS, MIXTURE, of, plan, setup

SHAPE = PUBLISHED["qwen3-30b-a3b"]
EXPERT = 3 * 2048 * 768
"""Weights of one expert of one layer."""


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (LayoutConfig(), 128),
        (LayoutConfig(tp=4), 32),
        (LayoutConfig(ep=8), 16),
        (LayoutConfig(tp=4, ep=8, etp=1), 16),
        (LayoutConfig(tp=4, ep=8), 4),
        (LayoutConfig(tp=2, ep=4, etp=2), 16),
    ],
)
def test_a_rank_has_its_part_of_the_experts_and_of_the_rest(layout: LayoutConfig, experts: int) -> None:
    found = rank_elements(SHAPE, 0, layout)
    assert found.experts == 48 * experts * EXPERT
    others = parameters_of(SHAPE).total - 48 * 128 * EXPERT
    assert found.dense == pytest.approx(others / layout.tp, rel=0.03), "norms and routers are whole on every rank"


def test_stages_have_the_experts_of_their_layers() -> None:
    layout = LayoutConfig(tp=2, cp=2, pp=8, ep=16, etp=1, first_stage_layers=11, last_stage_layers=11)
    shape = PUBLISHED["qwen3-235b-a22b"]
    held = [rank_elements(shape, stage, layout) for stage in range(8)]
    assert [part.experts // (8 * 3 * 4096 * 1536) for part in held] == [11, 12, 12, 12, 12, 12, 12, 11]
    others = parameters_of(shape).total - 94 * 128 * 3 * 4096 * 1536
    assert sum(part.dense for part in held) == pytest.approx(others / 2, rel=0.01)


def test_the_experts_state_is_shared_by_the_ranks_that_have_the_same_experts() -> None:
    """16 ranks: tp 2 x dp 8. The rest is alike on 8 of them, the experts of one rank on 16 / 8 = 2."""
    run = setup(of(file=MIXTURE))
    assert (run.placement.replica, run.placement.expert_replica) == (8, 2)
    elements = rank_elements(SHAPE, 0, run.placement.layout)
    held = held_bytes(run, 0)
    assert held["optimizer"] == 12 * (elements.dense / 8 + elements.experts / 2)
    assert held["gradients"] == 4 * elements.total
    whole = held_bytes(setup(of("optimizer.distributed=false", file=MIXTURE)), 0)
    assert whole["optimizer"] == 12 * elements.total


def test_a_rank_keeps_the_copies_of_the_tokens_that_its_experts_get() -> None:
    def elements(**layout: int) -> float:
        return feed_forward_elements(SHAPE, LayoutConfig(**layout), FUSED)

    copies, inside = 8 * 2048, 3 * 8 * 768
    assert elements() == elements(ep=8) == copies + inside
    assert elements(tp=4) == copies + inside / 4, "every rank of an expert has all of its tokens"
    assert elements(tp=4, etp=1, ep=8) == (copies + inside) / 4


def test_the_shared_expert_sees_every_token_once() -> None:
    """Its three widths are cut as a dense layer's are; what its gate multiplies is kept by the rank that has the token.
    It is as busy as any other rank's."""
    shape, layout = PUBLISHED["qwen3.5-35b-a3b"], LayoutConfig(tp=2, ep=8, etp=1, sequence_parallel=True)
    alone = replace(shape, shared_ffn=0)
    for imbalance in (1.0, 2.0):
        more, less = (feed_forward_elements(each, layout, FUSED, imbalance) for each in (shape, alone))
        assert more - less == 3 * 512 / 2 + 2048 / 2
    run = setup(of("layout.pp=1", file=MIXTURE))
    flops = [layer_flops(replace(run, shape=each))[1] for each in (shape, replace(shape, shared_ffn=1024))]
    assert flops[1] - flops[0] == pytest.approx(2 * 40 * 3 * 2048 * 512)
    seconds = [stage_passes(replace(run, shape=each))[0].update.kernels for each in (alone, shape)]
    assert 1.01 < seconds[1] / seconds[0] < 1.2


def test_the_busiest_rank_keeps_more() -> None:
    def activations(imbalance: float, *overrides: str) -> float:
        parts = plan(*overrides, file=MIXTURE, expert_imbalance=imbalance).actor.parts
        return parts["activations"] + parts["uneven experts"]

    even, twice = activations(1.0), activations(2.0)
    copied = feed_forward_elements(SHAPE, LayoutConfig(tp=2, ep=8, etp=1), FUSED)
    routed = 3 * SHAPE.hidden * SHAPE.experts_per_token / 2  # as sent, received and returned
    assert twice - even == pytest.approx(16384 * 2 * (copied + routed))
    alone = ("layout.ep=1", "layout.tp=4", "layout.etp=4")
    assert activations(1.0, *alone) == activations(2.0, *alone), "without expert parallelism all ranks have all experts"


NVLINK, NETWORK = 450e9 * 0.8, 50e9 * 0.8
COPIES = 8 * 2048 * 2
"""Bytes of a token that goes to eight experts."""


@pytest.mark.parametrize(
    ("layout", "seconds"),
    [
        (LayoutConfig(), 0.0),
        (LayoutConfig(ep=8), COPIES * 7 / 8 / NVLINK),
        (LayoutConfig(ep=16), COPIES * 1 / 2 / NETWORK),
        (LayoutConfig(ep=32), COPIES * 3 / 4 / NETWORK),
        (LayoutConfig(tp=2, ep=8, sequence_parallel=True), COPIES * 1 / 2 / NETWORK),
    ],
)
def test_tokens_go_to_their_experts_over_nvlink_or_the_network(layout: LayoutConfig, seconds: float) -> None:
    run = setup(of("cluster.nodes=4", file=MIXTURE))
    run = replace(run, placement=replace(run.placement, layout=layout))
    assert wire_seconds(run, EXCHANGE, layout.ep, COPIES) == pytest.approx(seconds)


def test_a_pass_waits_for_the_busiest_rank_and_counts_its_exchange() -> None:
    even, busy = (stage_passes(setup(of(file=MIXTURE), expert_imbalance=by))[0].forward for by in (1.0, 1.5))
    assert busy.exchange == pytest.approx(1.5 * even.exchange)
    tokens = mean_pack(setup(of(file=MIXTURE))).tokens / 2
    products = 0.5 * 48 * tokens * 2 * 8 * EXPERT / (989e12 * PRODUCTS)
    streams = 0.5 * 48 * tokens * 8 * (4 * 2048 + 3 * 768) * 2 / (3.35e12 * STREAMS)  # two sorts, SwiGLU
    assert busy.kernels - even.kernels == pytest.approx(products + streams)
    assert busy.messages == even.messages
    step = plan(file=MIXTURE, busy_share=1.0).pruned
    assert step.phases["token exchange"] == pytest.approx(3 * busy.exchange * step.packs), "and recomputation"


def test_no_tokens_are_exchanged_without_experts() -> None:
    assert plan().pruned.phases["token exchange"] == 0.0


def test_expert_parallelism_is_proposed_where_experts_do_not_fit() -> None:
    made = plan("layout.tp=1", "layout.ep=1", "layout.sequence_parallel=false", file=MIXTURE)
    assert not made.fits
    assert {"layout.ep": 8} in made.remedies
    for change in made.remedies:
        assert place(with_settings(made.config, change), SHAPE)
    dense = plan("layout.pp=1", "layout.tp=4")
    assert not any("layout.ep" in change for change in dense.remedies)


def test_virtual_stages_are_given_up_for_memory() -> None:
    tight = (
        "layout.pp=4",
        "layout.tp=4",
        "layout.vpp=2",
        "model.recompute=none",
        "cluster.gpu=h200",
        "pack.max_tokens=20480",
    )
    made = plan(*tight)
    assert plan(*tight, "layout.vpp=1").fits and not made.fits
    assert {"layout.vpp": 1} in made.remedies


@pytest.mark.parametrize("overrides", [("layout.ep=32",), ("layout.ep=16", "layout.etp=2"), ("layout.ep=24",)])
def test_experts_that_the_ranks_cannot_share_are_refused_by_name(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        plan(*overrides, file=MIXTURE)
    assert caught.value.setting == "layout.ep"


def test_the_largest_policy_needs_its_layers_cut_unevenly() -> None:
    assert plan(file=EXPERTS).fits
    with pytest.raises(UserError) as caught:
        plan("layout.first_stage_layers=null", file=EXPERTS)
    assert caught.value.setting.startswith("layout.")

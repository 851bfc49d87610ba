"""What experts take of memory and time under expert parallelism, by hand."""

from __future__ import annotations

import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.estimate.memory import parameters_of, rank_elements
from megatron_dppo.estimate.search import with_settings
from megatron_dppo.estimate.workload import place
from megatron_dppo.models.shape import PUBLISHED
from tests.estimate.test_plan import MIXTURE, plan

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

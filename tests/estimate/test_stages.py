"""What a pipeline's stages hold and compute, by hand."""

from __future__ import annotations

import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.estimate.memory import chunks_in_flight
from megatron_dppo.estimate.workload import packs_of
from tests.estimate.test_plan import of, plan, setup, trainer_parts


@pytest.mark.parametrize(
    ("stages", "virtual", "packs", "measured"),
    [
        (2, 1, 6, [2, 1]),
        (2, 2, 6, [5, 3]),
        (2, 4, 6, [9, 7]),
        (2, 2, 5, [6, 4]),
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 2, 8, [11, 9, 7, 5]),
        (4, 2, 9, [12, 10, 8, 6]),
        (4, 2, 4, [8, 8, 7, 5]),
        (4, 1, 2, [2, 2, 2, 1]),
    ],
)
def test_passes_in_flight_are_those_of_megatrons_schedules(
    stages: int, virtual: int, packs: int, measured: list[int]
) -> None:
    """The first seven were counted on real ranks: forward passes of a virtual stage without their backward pass."""
    layout = LayoutConfig(pp=stages, vpp=virtual)
    assert [chunks_in_flight(stage, layout, packs) for stage in range(stages)] == measured


def test_virtual_stages_divide_the_bubble_and_keep_more_activations() -> None:
    base = ("layout.pp=4", "layout.tp=4", "model.recompute=none")
    made = plan(*base, "layout.vpp=4")
    plain, interleaved = plan(*base).pruned, made.pruned
    assert interleaved.packs == plain.packs
    assert interleaved.phases["pipeline bubble"] == pytest.approx(plain.phases["pipeline bubble"] / 4, rel=0.02), (
        "but for messages of more stages"
    )
    first, first_interleaved = (trainer_parts(of(*base, f"layout.vpp={v}"))["activations"] for v in (1, 4))
    # Four packs in 16 layers against as many in 4 layers as are in flight.
    in_flight = chunks_in_flight(0, LayoutConfig(pp=4, vpp=4), made.unpruned.packs)
    assert first_interleaved == pytest.approx(first * in_flight * 4 / (4 * 16), rel=5e-3)


def test_an_interleaved_pipeline_has_at_least_as_many_packs_as_stages() -> None:
    few = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "layout.pp=4", "layout.tp=8")
    assert packs_of(setup(of(*few))) < 4
    assert packs_of(setup(of(*few, "layout.vpp=2"))) == 4


def test_the_slowest_stage_sets_the_pace_and_each_stage_holds_its_own_layers() -> None:
    uneven = ("layout.pp=4", "layout.tp=4", "pack.min_per_rank=64")
    even = plan(*uneven).pruned.phases["training"]
    longer_first, shorter_last = (
        plan(*uneven, *words).pruned.phases["training"]
        for words in (
            ("layout.first_stage_layers=22", "layout.last_stage_layers=14"),
            ("layout.first_stage_layers=17", "layout.last_stage_layers=13"),
        )
    )
    # 22 layers instead of 16 and the head; 17 in three stages, and 13 with the head in the last one.
    assert shorter_last < even < longer_first
    assert longer_first / shorter_last == pytest.approx(22 / 17, rel=0.01)
    parts = trainer_parts(
        of("layout.pp=4", "layout.tp=4", "layout.first_stage_layers=22", "layout.last_stage_layers=14")
    )
    assert parts["weights"] > 1.2 * trainer_parts(of("layout.pp=4", "layout.tp=4"))["weights"]

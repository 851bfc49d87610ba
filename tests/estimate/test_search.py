"""``megatron-dppo plan --search`` proposes what is faster, fits with room to spare, and can be run."""

from __future__ import annotations

import json
import time

import pytest

from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import layers_of_stage
from megatron_dppo.estimate.plan import make_plan, proposals
from megatron_dppo.estimate.report import plan_search
from megatron_dppo.estimate.search import SPARE, TILE, layouts, stages, with_settings
from megatron_dppo.estimate.time import trainer_phases
from megatron_dppo.models.shape import PUBLISHED, check_layout
from tests.estimate.test_plan import EXPERTS, LARGE, SMALL, of, setup

SLOW = ("layout.tp=8", "layout.pp=1", "layout.cp=1", "layout.first_stage_layers=null", "layout.last_stage_layers=null")


@pytest.mark.parametrize(("file", "slow"), [(LARGE, SLOW), (SMALL, ()), (EXPERTS, ())])
def test_what_is_proposed_fits_with_room_to_spare_the_fastest_first(file: str, slow: tuple[str, ...]) -> None:
    config = of(*slow, "model.recompute=full", file=file)
    began = time.process_time()
    found = proposals(config, Assumptions(), 5)[1]
    assert time.process_time() - began < 5.0, "2 s on an idle machine"
    assert len(found) == 5
    for each in found:
        changed = with_settings(config, each.change)
        made = make_plan(changed, Assumptions())
        assert made.fits and made.actor.total <= (1 - SPARE) * made.actor.room
        assert made.actor.total == pytest.approx(each.actor.total)
        assert sum(trainer_phases(setup(changed)).values()) == pytest.approx(each.seconds)
        assert changed.pack.max_tokens % (TILE * changed.layout.cp) == 0
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds) and seconds[-1] < sum(trainer_phases(setup(config)).values())


def test_a_layout_that_the_ranks_do_not_allow_is_no_hindrance() -> None:
    config = of("cluster.nodes=8", "cluster.server_nodes=8", file=EXPERTS)
    with pytest.raises(UserError, match="layout"):
        setup(config)
    ranks, found = proposals(config, Assumptions(), 1)
    assert ranks == 64 and make_plan(with_settings(config, found[0].change), Assumptions()).fits


def test_no_layout_of_some_is_faster() -> None:
    config = of(*SLOW)
    best = proposals(config, Assumptions(), 1)[1][0].seconds
    for tp, pp, cp in ((8, 1, 1), (8, 2, 1), (4, 4, 1), (4, 2, 1), (8, 4, 1), (2, 4, 4), (4, 2, 2)):
        words = (f"layout.tp={tp}", f"layout.pp={pp}", f"layout.cp={cp}", "model.recompute=none")
        other = setup(of(*SLOW, *words))
        assert not make_plan(other.config, Assumptions()).fits or best <= sum(trainer_phases(other).values())


@pytest.mark.parametrize("file", [LARGE, EXPERTS])
def test_layouts_divide_ranks_and_policy(file: str) -> None:
    run = setup(of(file=file))
    found = list(layouts(run))
    for layout in found:
        check_layout(run.shape, layout)
        assert layout.tp * layout.cp * layout.pp * (layout.dp or 0) == run.placement.ranks
    assert len(set(found)) == len(found)


def test_stages_are_cut_with_fewer_layers_at_the_end_that_has_the_head() -> None:
    assert list(stages(36, 1)) == [(None, None)]
    assert list(stages(36, 2)) == [(None, None), (19, 17), (20, 16)]
    assert (16, 14) in list(stages(64, 4)) and (15, 15) in list(stages(64, 4))
    run = setup(of(*SLOW, "layout.pp=4", "layout.first_stage_layers=16", "layout.last_stage_layers=14"))
    counts = [layers_of_stage(PUBLISHED["qwen3-32b"], stage, run.placement.layout) for stage in range(4)]
    assert counts == [16, 17, 17, 14]


def test_the_command_prints_settings_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SMALL, "--search", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "2 GPUs that train" in head and len(lines) == 2
    pasted = [word for word in lines[0].split() if "=" in word]
    assert make_plan(of(*pasted, file=SMALL), Assumptions()).fits
    assert main(["plan", SMALL, "--search", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(float(lines[0].split()[0]), abs=0.05)


def test_what_cannot_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--search"):
        plan_search(of(), [], 0, json_wanted=False)
    assert plan_search(of("cluster.gpu=a100-40", "cluster.nodes=1", "layout.pp=1"), [], 3, json_wanted=False) == 1
    assert "no layout fits with 5% of the memory to spare" in capsys.readouterr().out

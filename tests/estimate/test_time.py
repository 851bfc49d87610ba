"""Planned seconds: pipelines, and what pruning is worth beside a smaller batch of equal noise."""

import json
import re

import pytest

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.estimate.search import search
from megatron_dppo.estimate.time import VARIANCES, _estimate_decode_step, get_measured_variance
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT, text_of
from tests.estimate.planned import SMALL, of, plan, setup

ARMS = {
    (1.0, 0.5): "tokens 0.5 alone, weights to 10",
    (1.0, "auto"): "tokens auto alone, weights to 10",
    (0.85, 1.0): "prompts 0.85 alone",
    (0.85, "auto"): "prompts 0.85, tokens auto, weights to 10",
    (0.85, 0.5): "prompts 0.85, tokens 0.5, weights to 10",
    (0.7, 1.0): "prompts 0.7 alone",
    (0.7, "auto"): "prompts 0.7, tokens auto, weights to 10",
    (0.7, 0.5): "prompts 0.7, tokens 0.5, weights to 5",
    (0.7, 0.3): "prompts 0.7, tokens 0.3, weights to 10",
    (0.5, 0.3): "prompts 0.5, tokens 0.3, weights to 10",
    (0.4, 0.3): "prompts 0.4, tokens 0.3, weights to 10",
    (0.3, 0.3): "prompts 0.3, tokens 0.3, weights to 10, floor 0.15",
}


def test_variances_equal_the_measured_ones() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "efficiency.json").read_text())
    own = [found for command, found in stored.items() if "--paper" not in command]
    stages = [stage for found in own for stage in found["figures"]["stages"]]
    measured = {
        keep: [stage["arms"][arm]["variance"] for stage in stages] for keep, arm in ARMS.items()
    }
    expected = {
        keep: (round(min(of_all), 2), round(max(of_all), 2)) for keep, of_all in measured.items()
    }
    assert expected | {(1.0, 1.0): (1.0, 1.0)} == VARIANCES


def test_efficiency_compares_with_a_batch_of_equal_noise() -> None:
    off = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
    pruned, half = of("rollout.prompts_per_step=64"), of("rollout.prompts_per_step=32", *off)
    made, smaller = (make_plan(each, Assumptions(variance=2.0)) for each in (pruned, half))
    assert made.efficiency is not None
    assert made.efficiency[0] == pytest.approx(smaller.pruned.seconds / made.pruned.seconds)
    unpruned = plan(*off)
    assert unpruned.variance == (1.0, 1.0) and unpruned.efficiency == (1.0, 1.0)


def test_a_step_of_fewer_tokens_than_ranks_has_a_plan() -> None:
    short = (
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=1",
    )
    made = plan(*short, "cluster.nodes=64", file=SMALL)
    assert made.actor.fits and 0.0 < made.pruned.seconds < 10.0


def test_unmeasured_rules_have_no_efficiency() -> None:
    assert get_measured_variance(of("pruning.prompts.rule=none")) == VARIANCES[1.0, "auto"]
    for words in ("pruning.prompts.rule=greso", "pruning.completions.schedule.shape=linear"):
        assert get_measured_variance(of(words)) is None
    made = plan("pruning.completions.rule=top_k")
    assert made.variance is None and made.efficiency is None


@pytest.mark.parametrize("name", ["qwen3_32b_dppo", "qwen3_5_27b_dppo"])
def test_page_shows_efficiency_at_the_best_split(name: str) -> None:
    file, assume = str(ROOT / "configs" / f"{name}.yaml"), Assumptions()
    off = ("pruning.prompts.rule=none", "pruning.completions.rule=none")

    def seconds(*words: str) -> float:
        found = search(load_config(file, [*off, *words]), assume, made.placement.gpus).fastest
        assert found is not None
        return found.seconds

    made = make_plan(load_config(file, []), assume)
    prompts = [round(128 / factor) for factor in reversed(VARIANCES[0.85, "auto"])]
    fewer = [seconds(f"rollout.prompts_per_step={each}") / made.pruned.seconds for each in prompts]
    assert made.efficiency is not None
    times = f"{made.unpruned.seconds:.0f} | {seconds():.0f}"
    same, apart = ("{:.2f} to {:.2f}".format(*pair) for pair in (made.efficiency, fewer))
    assert f"\n| `{name}.yaml` | {times} | {same} | {apart} |\n" in text_of("docs/scaling.md")


@pytest.mark.parametrize("name", ["qwen3_4b_math", "qwen3_32b_dppo", "qwen3_30b_a3b_dppo"])
def test_page_shows_the_planned_efficiency(name: str) -> None:

    line = next(
        line
        for line in text_of("docs/scaling.md").splitlines()
        if line.startswith(f"| `{name}.yaml`")
    )
    for cell, (prompts, completions) in zip(
        line.split("|")[2:5], [(0.85, "auto"), (1.0, "auto"), (0.4, 0.3)], strict=True
    ):
        words = [
            f"pruning.prompts.keep={prompts}",
            f"pruning.completions.keep={completions}",
            "pruning.max_weight=10",
        ]
        found = make_plan(
            load_config(str(ROOT / "configs" / f"{name}.yaml"), words), Assumptions()
        ).efficiency
        assert found is not None and re.findall(r"[\d.]+", cell) == [
            f"{each:.2f}" for each in found
        ]


def test_decode_step_grows_with_its_completions() -> None:
    config = of(file=str(ROOT / "configs" / "qwen3_8b_node.yaml"))

    def seconds(active: float, **assumed: float) -> float:
        return _estimate_decode_step(setup(config, **assumed), 8, active, 1000.0)

    for active in (1, 870):
        assert seconds(active) - seconds(active, decode_request_us=4.0) == pytest.approx(
            6e-6 * active
        )
        # Two all-reduces in each of 36 layers, over a ring of 8 ranks.
        bytes_sent = 2 * 7 / 8 * active * 4096 * 2
        saved = 100e-6 - max(12e-6, bytes_sent / (0.8 * 450e9))
        assert seconds(active, all_reduce_us=100.0) - seconds(active) == pytest.approx(
            2 * 36 * saved
        )


def test_virtual_stages_divide_the_bubble() -> None:
    """Messages of more stages are added."""
    base = ("layout.pp=4", "layout.tp=4", "model.recompute=none")
    plain, interleaved = plan(*base).pruned, plan(*base, "layout.vpp=4").pruned
    assert interleaved.packs == plain.packs
    assert interleaved.phases["pipeline bubble"] == pytest.approx(
        plain.phases["pipeline bubble"] / 4, rel=0.02
    )


def test_interleaved_pipeline_has_a_pack_per_stage() -> None:
    few = (
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "layout.pp=4",
        "layout.tp=8",
    )
    assert setup(of(*few)).packs < 4
    assert setup(of(*few, "layout.vpp=2")).packs == 4


def test_slowest_stage_sets_the_pace() -> None:
    uneven = ("layout.pp=4", "layout.tp=4", "pack.min_per_rank=64")
    even = plan(*uneven).pruned.phases["training"]
    longer_first, shorter_last = (
        plan(*uneven, *words).pruned.phases["training"]
        for words in (
            ("layout.first_stage_layers=22", "layout.last_stage_layers=14"),
            ("layout.first_stage_layers=17", "layout.last_stage_layers=13"),
        )
    )
    # 22 layers instead of 16 and the head; 17 in three stages, and 13 with the head in the last
    # one.
    assert shorter_last < even < longer_first
    assert longer_first / shorter_last == pytest.approx(22 / 17, rel=0.01)

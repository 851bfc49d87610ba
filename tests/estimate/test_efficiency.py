"""What pruning is worth is told beside an unpruned step of fewer prompts that is as noisy."""

from __future__ import annotations

import json
import re

import pytest

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import shape_of
from megatron_dppo.estimate.plan import as_json, make_plan
from megatron_dppo.estimate.report import as_text
from megatron_dppo.estimate.search import search
from megatron_dppo.estimate.time import VARIANCES, measured_variance
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT, text_of
from tests.estimate.test_plan import of, plan

ARMS = {
    (1.0, 0.5): "completions 0.5 alone",
    (1.0, "auto"): "completions auto alone",
    (0.85, 1.0): "prompts 0.85 alone",
    (0.85, "auto"): "0.85 / auto, the default",
    (0.85, 0.5): "0.85 / 0.5, weights to 10",
    (0.7, 1.0): "prompts 0.7 alone",
    (0.7, "auto"): "0.7 / auto, weights to 10",
    (0.7, 0.5): "0.7 / 0.5, weights to 5",
    (0.7, 0.3): "0.7 / 0.3, weights to 10",
    (0.5, 0.3): "0.5 / 0.3, weights to 10",
    (0.4, 0.3): "0.4 / 0.3, weights to 10",
    (0.3, 0.3): "0.3 / 0.3, weights to 10",
}


def test_variances_are_those_that_were_measured() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "efficiency.json").read_text(encoding="utf-8"))
    stages = [stage for found in stored.values() for stage in found["figures"]["stages"]]
    measured = {keep: [stage["arms"][arm]["variance"] for stage in stages] for keep, arm in ARMS.items()}
    expected = {keep: (round(min(of_all), 2), round(max(of_all), 2)) for keep, of_all in measured.items()}
    assert expected | {(1.0, 1.0): (1.0, 1.0)} == VARIANCES


def test_the_smaller_batch_is_as_noisy_and_its_seconds_are_those_of_its_own_plan() -> None:
    made = plan("rollout.prompts_per_step=64", variance=2.0)
    off = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
    smaller = plan("rollout.prompts_per_step=32", *off)
    assert made.efficiency is not None
    assert made.efficiency[0] == pytest.approx(smaller.pruned.seconds / made.pruned.seconds)
    unpruned = plan(*off)
    assert unpruned.variance == (1.0, 1.0) and unpruned.efficiency == (1.0, 1.0)


def test_a_plan_of_another_shape_has_its_own_seconds() -> None:
    config, smaller = of("rollout.prompts_per_step=64"), shape_of("Qwen/Qwen3-0.6B")
    off = of("rollout.prompts_per_step=32", "pruning.prompts.rule=none", "pruning.completions.rule=none")
    made, half = (make_plan(each, Assumptions(variance=2.0), smaller) for each in (config, off))
    assert made.efficiency is not None
    assert made.efficiency[0] == pytest.approx(half.pruned.seconds / made.pruned.seconds)


def test_a_plan_says_it_in_words_and_as_json() -> None:
    made = plan()
    assert made.variance == VARIANCES[0.85, "auto"] and made.efficiency is not None
    least, most = made.efficiency
    assert f"takes {least:.2f} to {most:.2f} times as long" in "\n".join(as_text(made))
    assert as_json(made)["efficiency"] == [least, most]


def test_what_was_not_measured_has_no_figure() -> None:
    assert measured_variance(of("pruning.prompts.rule=none")) == VARIANCES[1.0, "auto"]
    for words in ("pruning.prompts.rule=greso", "pruning.completions.schedule.shape=linear"):
        assert measured_variance(of(words)) is None
    made = plan("pruning.completions.rule=top_k")
    assert made.variance is None and made.efficiency is None
    assert "was not measured" in "\n".join(as_text(made))


@pytest.mark.parametrize("name", ["qwen3_32b_dppo", "qwen3_5_4b_math", "qwen3_5_27b_dppo"])
def test_the_page_tells_what_pruning_is_worth_with_the_best_split_on_either_side(name: str) -> None:
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
def test_the_page_shows_what_a_plan_prints(name: str) -> None:

    line = next(line for line in text_of("docs/scaling.md").splitlines() if line.startswith(f"| `{name}.yaml`"))
    for cell, (prompts, completions) in zip(
        line.split("|")[2:5], [(0.85, "auto"), (1.0, "auto"), (0.4, 0.3)], strict=True
    ):
        words = [f"pruning.prompts.keep={prompts}", f"pruning.completions.keep={completions}", "pruning.max_weight=10"]
        found = make_plan(load_config(str(ROOT / "configs" / f"{name}.yaml"), words), Assumptions()).efficiency
        assert found is not None and re.findall(r"[\d.]+", cell) == [f"{each:.2f}" for each in found]

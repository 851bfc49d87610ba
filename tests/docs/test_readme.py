"""The README is short and plain, and its figures are those of the stored measurements and of the planner."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT, text_of

README = "README.md"
RESULTS = ROOT / "benchmarks/results"


def _stored(script: str) -> list[dict[str, Any]]:
    """The figures of each recorded command of a script."""
    return [found["figures"] for found in json.loads((RESULTS / f"{script}.json").read_text()).values()]


TIMES: dict[str, Any] = {found["task"]: found for found in _stored("time_to_accuracy")}
EFFICIENCY: dict[str, Any] = {task["task"]: task for task in _stored("efficiency")}
REAL: list[dict[str, Any]] = _stored("real_curves")[0]["runs"]


def _said_of_times() -> list[str]:
    """What the README has to say of the time to an accuracy."""
    differences = []
    for found in (times["final_accuracy_difference"] for times in TIMES.values()):
        low, high = found["interval"]
        differences.append(f"{found['difference']:.3f} ± {(high - low) / 2:.3f} ({found['seeds']} seeds)")
    ratios = [f"{times['equal_noise_run_ratio']['ratio']:.2f}" for times in TIMES.values()]
    return [
        f"whole runs of two toy tasks are {' and '.join(ratios)} times faster",
        f"differs by {' and '.join(differences)}".replace("-", "−"),
    ]


def _said_of_the_picture() -> list[str]:
    """What a page that shows the real language model's curves has to say of them."""
    *own, trl = {run["arm"]: [other["points"] for other in REAL if other["arm"] == run["arm"]] for run in REAL}.values()
    assert [len(seeds) for seeds in own] == [3, 3, 3, 3]
    first, last = ([[100 * points[i][1] for points in seeds] for seeds in own] for i in (0, -1))
    ends = [sum(each) / len(each) for each in last]
    longest = max(sum(points[-1][0] for points in seeds) / 180 for seeds in own)
    (_, _), (soon, low), *_, (late, high) = trl[0]
    said = f"TRL is at {100 * low:.0f}% after {soon / 60:.0f} minutes and {100 * high:.0f}% after {late / 60:.0f}"
    return [
        f"from {sum(first[0]) / 3:.0f}% to {min(ends):.0f}–{max(ends):.0f}% within {longest:.0f} minutes",
        f"{said}, one seed",
    ]


def test_efficiency_is_told_as_it_is_stored() -> None:
    measured, advice, readme = (
        " ".join(text_of(f).split()) for f in ("docs/pruning_measured.md", "docs/pruning.md", README)
    )
    for task in ("sums", "word_problems"):
        early, middle, late = (f"{stage['default_efficiency']:.2f}" for stage in EFFICIENCY[task]["stages"])
        assert f"{early}, {middle} and {late} times" in measured and f"{early}, {middle} and {late} times" in advice, (
            task
        )
    toys = [stage for task in ("sums", "word_problems") for stage in EFFICIENCY[task]["stages"]]
    least, most = (pick(stage["default_efficiency"] for stage in toys) for pick in (min, max))
    assert f"{least:.1f} to {most:.1f} times" in readme
    real = EFFICIENCY["smollm2_steps"]["stages"]
    nearest = (pick(stage["default_over_bound"] for stage in toys + real) for pick in (min, max))
    assert "{:.2f} to {:.2f} of the best draw found".format(*nearest) in advice
    real = [stage["default_efficiency"] for stage in real]
    assert "{:.2f} to {:.2f} times on a real language model".format(*sorted(real)) in readme
    assert "{:.2f} and {:.2f} times".format(*real) in measured and "{:.2f} and {:.2f} times".format(*real) in advice


@pytest.mark.parametrize("task", TIMES)
def test_no_pruned_arm_is_certainly_faster_to_an_accuracy_as_the_pages_say(task: str) -> None:
    arms = TIMES[task]["arms"]
    assert all(arm["time_ratio"]["interval"][0] < 1 for name, arm in arms.items() if not name.startswith("unpruned"))


@pytest.mark.parametrize("name", ("threshold (DPPO's paper), 32 prompts", "dynamic sampling (DAPO), 32 prompts"))
def test_rules_that_the_page_calls_slower_on_sums_are_certainly_slower(name: str) -> None:
    assert TIMES["sums"]["arms"][name]["time_ratio"]["interval"][1] < 1


@pytest.mark.parametrize("prompts", (8, 16))
def test_the_default_over_both_tasks_is_as_fast_as_the_page_says(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import paired_ratio

    names = (f"unpruned, {prompts} prompts", "default, 32 prompts")
    ratio = paired_ratio(*([s for each in TIMES.values() for s in each["arms"][n]["seconds_by_seed"]] for n in names))
    said = "{:.2f} [{:.2f}, {:.2f}] times faster than {}".format(ratio["ratio"], *ratio["interval"], prompts)
    assert said in " ".join(text_of("docs/pruning_measured.md").split())


@pytest.mark.parametrize("said", _said_of_times() + _said_of_the_picture())
def test_figures_of_runs_are_those_that_are_stored(said: str) -> None:
    assert said in " ".join(text_of(README).split())


def test_times_to_an_accuracy_beside_trl_are_those_that_are_stored() -> None:
    trl, ours = (run["points"] for run in _stored("real_curves")[1]["runs"])
    assert max(accuracy for _, accuracy in trl) < 0.5
    (start, low), (end, high) = next(pair for pair in pairwise(ours) if pair[1][1] >= 0.5)
    reached = start + (end - start) * (0.5 - low) / (high - low)
    said = f"reached 50% after {reached:.0f} s: at least {trl[-1][0] / reached:.1f} times faster"
    assert said in " ".join(text_of("docs/runs.md").split())


def test_whole_runs_at_equal_noise_are_those_that_are_stored() -> None:
    ends = {(run["arm"], run["seed"]): run["points"][-1] for run in _stored("real_curves")[2]["runs"]}
    ratios = [ends["unpruned, 16 prompts", seed][0] / ends["equal noise, 16 prompts", seed][0] for seed in (2, 3)]
    said = "{:.2f} and {:.2f} times faster on seeds 2 and 3".format(*ratios)
    assert said in " ".join(text_of("docs/runs.md").split())


@pytest.mark.parametrize("task", TIMES)
def test_every_run_of_a_seed_is_stored(task: str) -> None:
    runs = map(json.loads, (RESULTS / f"time_to_accuracy_{task}.jsonl").read_text().splitlines())
    seeds = {(run["arm"], run["lr"], run["seed"]) for run in runs}
    assert {(name, arm["lr"], seed) for name, arm in TIMES[task]["arms"].items() for seed in range(1, 6)} <= seeds


def test_planned_figures_are_the_planner_s() -> None:
    rows = dict(re.findall(r"^\[[\w.-]+\]\(configs/(\S+)\) \| (.*) \| \S+$", text_of(README), re.MULTILINE))
    row = r"^\| `(qwen3_\S+)` \| ([\d+]+ \| (?:all|adapters) .*) \|$"
    others = dict(re.findall(row, text_of("docs/scaling.md"), re.MULTILINE))
    assert rows.keys() | others.keys() == {file.name for file in (ROOT / "configs").glob("qwen3_*.yaml")}
    for name, shown in (rows | others).items():
        made = make_plan(load_config(str(ROOT / "configs" / name), []), read_assumptions([]))
        trained = "adapters" if made.config.model.lora.rank else "all"
        apart = f"{made.placement.ranks}+{sum(made.placement.servers)}"
        gpus = f"{made.placement.gpus}" if made.placement.shared else apart
        gpus += f" | {trained}" if name in others else ""
        seconds = f"{made.unpruned.seconds:.0f} | {made.pruned.seconds:.0f}"
        assert shown == f"{gpus} | {made.actor.total / GIB:.0f} | {seconds}", name


def test_each_result_stands_on_the_page_that_it_links_to() -> None:
    rows = re.findall(r"^\[[^\]]+\]\((docs/[\w.]+\.md)[^)]*\)[^|\n]*\| (.+)$", text_of(README), re.MULTILINE)
    assert 4 <= len(rows) <= 8
    for page, figure in rows:
        assert figure in text_of(page), f"{figure} is not on {page}"

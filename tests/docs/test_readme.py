"""The README is short and plain, and its figures are those of the stored measurements and of the planner."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT, prose, text_of

README = "README.md"
RESULTS = ROOT / "benchmarks/results"
CURVE: dict[str, Any] = json.loads((RESULTS / "speed_curve.json").read_text())
EFFICIENCY: dict[str, Any] = json.loads((RESULTS / "efficiency.json").read_text())
REAL: list[dict[str, Any]] = json.loads((RESULTS / "real_curves.json").read_text())["runs"]
ROW = re.compile(r"^.*\|.*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def _cells() -> list[str]:
    rows = [row.strip("| ") for row in ROW.findall(prose(README)) if not re.fullmatch(r"[-| :]+", row)]
    return [LINK.sub(r"\1", cell).strip() for row in rows for cell in row.split("|")]


def _sentences() -> list[str]:
    """Those of paragraphs and of lists; a picture's text alternative is one paragraph."""
    text = LINK.sub(r"\1", ROW.sub("", prose(README)))
    blocks = re.split(r"\n\s*\n|\n(?=[-#>] )", text)
    return [part for block in blocks for part in re.split(r"(?<=[.?!:])\**\s+", " ".join(block.split())) if part]


def test_it_is_short_and_plain() -> None:
    assert len(text_of(README).split()) <= 900
    assert [sentence for sentence in _sentences() if len(sentence.split()) > 30] == []
    assert [cell for cell in _cells() if len(cell.split()) > 20] == []
    assert [text for text in (*_sentences(), *_cells()) if re.match(r"\W*(Of|What) ", text)] == []


def _said_of_the_curve() -> list[str]:
    arms, smaller = CURVE["arms"], CURVE["smaller"]
    strong, default = arms["pruned, strong"], arms["pruned, default"]
    prompts = re.search(r"\d+", smaller)
    assert prompts is not None
    steps = [f"{arm['step_time_ratio']['ratio']:.1f}" for arm in (default, strong)]
    seconds = {name: f"{arm['seconds_to_accuracy']:.0f} s" for name, arm in arms.items()}
    return [
        f"is {steps[0]} (mild) to {steps[1]} (strong, keeping 30%) times faster",
        f"64 unpruned prompts a step reached 60% accuracy in {seconds['unpruned, 64 prompts']}",
        f"Mild pruning took {seconds['pruned, default']}, strong pruning {seconds['pruned, strong']}",
        f"{prompts[0]} unpruned prompts {seconds[smaller]}",
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
    stages = [stage for task in EFFICIENCY.values() for stage in task["stages"]]
    for arm in EFFICIENCY["sums"]["stages"][0]["arms"].keys() - {"unpruned"}:
        found = [stage["arms"].get(arm) for stage in stages]
        cells = (
            each and f"{each['efficiency']:.2f} ± {(each['interval'][1] - each['interval'][0]) / 2:.2f}"
            for each in found
        )
        assert f"| {' | '.join(cell or '–' for cell in cells)} |" in measured, arm
    for task in ("sums", "word_problems"):
        early, middle, late = (f"{stage['default_efficiency']:.2f}" for stage in EFFICIENCY[task]["stages"])
        assert f"{early}, {middle} and {late} times" in measured and f"{early}, {middle} and {late} times" in advice, (
            task
        )
    toys = [stage for task in ("sums", "word_problems") for stage in EFFICIENCY[task]["stages"]]
    least, most = (pick(stage["default_efficiency"] for stage in toys) for pick in (min, max))
    assert f"{least:.1f} to {most:.1f} times" in readme
    nearest = (pick(stage["default_over_bound"] for stage in toys) for pick in (min, max))
    assert "{:.2f} to {:.2f} of the best draw found".format(*nearest) in advice


def test_the_smaller_batch_is_within_the_noise_of_pruning() -> None:
    for arm in ("pruned, default", "pruned, strong"):
        low, high = CURVE["arms"][arm]["time_ratio_to_smaller"]["interval"]
        assert low < 1 < high


@pytest.mark.parametrize("said", _said_of_the_curve() + _said_of_the_picture())
def test_the_curve_s_figures_are_those_that_are_stored(said: str) -> None:
    assert said in " ".join(text_of(README).split())


def test_every_run_of_the_curve_is_stored_with_its_origin() -> None:
    assert {"command", "commit", "processor", "date"} <= CURVE.keys()
    runs = [(run["arm"], run["seed"]) for run in CURVE["runs"]]
    assert sorted(runs) == sorted((arm, seed) for arm in CURVE["arms"] for seed in range(1, CURVE["seeds"] + 1))


def test_planned_figures_are_the_planner_s() -> None:
    rows = dict(re.findall(r"^\[[\w.-]+\]\(configs/(\S+)\) \| (.*) \| \S+$", text_of(README), re.MULTILINE))
    row = r"^\| `(qwen3_\S+)` \| (\d+ \| (?:all|adapters) .*) \|$"
    shared = dict(re.findall(row, text_of("docs/scaling.md"), re.MULTILINE))
    assert rows.keys() | shared.keys() == {file.name for file in (ROOT / "configs").glob("qwen3_*.yaml")}
    for name, shown in (rows | shared).items():
        made = make_plan(load_config(str(ROOT / "configs" / name), []), read_assumptions([]))
        trained = "adapters" if made.config.model.lora.rank else "all"
        apart = f"{made.placement.ranks}+{sum(made.placement.servers)}"
        gpus = f"{made.placement.gpus} | {trained}" if made.placement.shared else apart
        seconds = f"{made.unpruned.seconds:.0f} | {made.pruned.seconds:.0f}"
        assert shown == f"{gpus} | {made.actor.total / GIB:.0f} | {seconds}", name


def test_each_result_stands_on_the_page_that_it_links_to() -> None:
    rows = re.findall(r"^\[[^\]]+\]\((docs/[\w.]+\.md)[^)]*\)[^|\n]*\| (.+)$", text_of(README), re.MULTILINE)
    assert 4 <= len(rows) <= 8
    for page, figure in rows:
        assert figure in text_of(page), f"{figure} is not on {page}"

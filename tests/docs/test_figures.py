"""Figures on pages are those of the stored measurements and of the planner, and each stored figure
has its origin."""

import json
import re
import runpy
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.report.timing import compute_student_t
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT, text_of

FIGURES = runpy.run_path(str(ROOT / "tools/site/figures.py"))
MEASURED, ADVICE, README = "docs/pruning_measured.md", "docs/pruning.md", "README.md"
INDEX = "docs/index.md"
TRUST, TRL = "docs/trust.md", "docs/recipes/other_trainers.md"
COMPRESS = "docs/compress.md"


def read_figures(script: str) -> list[dict[str, Any]]:
    """Return the figures of each recorded command of a script, without ``efficiency.py --paper``."""
    stored = json.loads((FIGURES["RESULTS"] / f"{script}.json").read_text())
    return [found["figures"] for command, found in stored.items() if "--paper" not in command]


DEFAULT = "prompts 0.85, tokens auto, weights to 10"
EQUAL_NOISE_ARM = f"{DEFAULT}, noise 1, 16 prompts"
TIMES = {figures["task"]: figures for figures in read_figures("time_to_accuracy")}
STAGES = {figures["task"]: figures["stages"] for figures in read_figures("efficiency")}
CURVES, BESIDE_TRL, EQUAL_NOISE = (figures["runs"] for figures in read_figures("real_curves"))


def describe_efficiency() -> list[tuple[str, str]]:
    stages = [stage for task in STAGES.values() for stage in task]
    of_best = sorted(stage["default_over_bound"] for stage in stages)
    claims = [(MEASURED, f"{of_best[0]:.2f} to {of_best[-1]:.2f} of the best draw found")]
    efficiency = sorted(stage["default_efficiency"] for stage in stages)
    span = f"{efficiency[0]:.2f} to {efficiency[-1]:.2f} times"
    linked = [(page, f"[{span}]") for page in (README, INDEX, ADVICE)]
    return [*claims, *linked, (MEASURED, f"{span} faster")]


def describe_picture() -> tuple[str, str]:
    """The text beside ``real_curves.png``, which ``benchmarks/real_curves.py`` draws."""
    points = {
        arm: [run["points"] for run in CURVES if run["arm"] == arm]
        for arm in {run["arm"] for run in CURVES}
    }
    ours = [
        points["unpruned, 16 prompts"],
        points["prompts 0.7, tokens 0.5, weights to 5, 32 prompts"],
    ]
    first = fmean(100 * seed[0][1] for seed in ours[0])
    low, high = sorted(fmean(100 * seed[-1][1] for seed in arm) for arm in ours)
    minutes = max(fmean(seed[-1][0] / 60 for seed in arm) for arm in ours)
    ((_, (soon, early), *_, (late, last)),) = points["TRL, 16 prompts"]
    trl = (
        f"TRL is at {100 * early:.0f}% after {soon / 60:.0f} minutes and {100 * last:.0f}% after "
        f"{late / 60:.0f}"
    )
    return (
        README,
        f"from {first:.0f}% to {low:.0f}–{high:.0f}% within {minutes:.0f} minutes. {trl}, one seed",
    )


def describe_time_beside_trl() -> tuple[str, str]:
    trl, ours = (run["points"] for run in BESIDE_TRL)
    assert max(accuracy for _, accuracy in trl) < 0.5
    (start, low), (end, high) = next(pair for pair in pairwise(ours) if pair[1][1] >= 0.5)
    reached = start + (end - start) * (0.5 - low) / (high - low)
    return (
        MEASURED,
        f"reached 50% after {reached:.0f} s: at least {trl[-1][0] / reached:.1f} times faster",
    )


def describe_equal_noise() -> tuple[str, str]:
    ends = {(run["arm"], run["seed"]): run["points"][-1] for run in EQUAL_NOISE}
    ratios = [
        ends["unpruned, 16 prompts", seed][0] / ends[EQUAL_NOISE_ARM, seed][0] for seed in (2, 3)
    ]
    return MEASURED, "{:.2f} and {:.2f} times faster on seeds 2 and 3".format(*ratios)


def describe_whole_runs() -> tuple[str, str]:
    ratios = [f"{figures['equal_noise_run_ratio']['ratio']:.2f}" for figures in TIMES.values()]
    return README, " and ".join(ratios)


def describe_verdicts() -> list[tuple[str, str]]:
    (figures,) = read_figures("verdicts")
    judges = {
        "published labels changed to another value": "ours",
        "the same with plain math-verify": "math_verify",
    }
    return [
        (
            TRUST,
            f"| {name}, accepted | {figures['wrong_answers']:,} | "
            f"{figures[judge]['false_positives']:,} |",
        )
        for name, judge in judges.items()
    ]


def describe_pruning_in_trl() -> list[tuple[str, str]]:
    (figures,) = read_figures("in_trl")
    low, high = figures["step_time_interval"]
    rows = {
        "`budget=0.5`": f"{figures['step_time_ratio']:.1f} [{low:.1f}, {high:.1f}]",
        "`budget=1.0`: keeps all completions, sorts micro-batches by length": f"{figures['all_kept_time_ratio']:.1f}",
        "TRL's own step with half of the prompts": f"{figures['smaller_batch_time_ratio']:.1f}",
    }
    return [(TRL, f"| {name} | {value} |") for name, value in rows.items()]


def describe_p2_law() -> tuple[str, str]:
    (figures,) = read_figures("p2_law")
    errors = {
        name.removeprefix("error_"): error
        for name, error in figures.items()
        if name.startswith("error_")
    }
    claim = (
        f"factors of {errors['largest_rate']:.2f} (largest removed fraction), "
        f"{errors['last_half_of_tokens']:.2f} (last half of the tokens) and "
        f"{errors['curve_6']:.2f} (the only recovery of the largest policy"
    )
    return COMPRESS, claim


def join(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def with_sign(points: float, reach: float) -> str:
    return f"{points:+.1f} ± {reach:.1f}".replace("-", "−")


class PaperTask:
    """Table of ``paper_table.py`` on a task, in the words of the page."""

    def __init__(self, command: str) -> None:
        stored = json.loads((FIGURES["RESULTS"] / "paper_table.json").read_text())
        figures = stored[command]["figures"]
        self.error = f"{figures['cost_error']:.0%}"
        self.arms = figures["arms"]
        self.rule = [
            arm for name, arm in self.arms.items() if name.startswith("DPPO: threshold, r")
        ]
        self.faster = join([f"{arm['times_faster']:.2f}" for arm in self.rule])
        self.gains = join([self.gain(arm) for arm in self.rule])
        self.grpo = self.arms["GRPO: unpruned, 32 prompts"]
        self.half = self.arms["unpruned, 16 prompts"]
        self.default = self.arms[f"{DEFAULT}, 32 prompts"]
        self.cppo = self.arms["CPPO: top_k 0.5, divided by the kept, 64 prompts"]
        self.variance = [arm["prune/variance_inflation"] for arm in self.rule]

    @property
    def greso(self) -> dict[str, Any]:
        return self.arms["GRESO: greso, refilled, 32 prompts"]

    def gain(self, arm: dict[str, Any]) -> str:
        return with_sign(*(100 * arm["held_out"][key] for key in ("gain", "gain_reach")))

    def subtract(self, one: dict[str, Any], other: dict[str, Any]) -> list[float]:
        pairs = zip(one["held_out"]["by_seed"], other["held_out"]["by_seed"], strict=True)
        return [100 * (own - base) for own, base in pairs]

    @property
    def half_over_default(self) -> str:
        gains = self.subtract(self.half, self.default)
        return with_sign(fmean(gains), compute_student_t(7) * stdev(gains) / sqrt(8))

    def check(self) -> None:
        """Check what the page says of all rows."""
        for arm in self.rule:
            assert arm["held_out"]["gain"] + arm["held_out"]["gain_reach"] < 0.0336
            assert arm["times_faster"] < 2.37
        half = self.half["held_out"]["mean"]
        for arm in self.arms.values():
            assert arm["longer"]["mean"] < 0.03
            pruned = arm["trained"] < 0.98 and arm["prompts"] > 16
            faster = pruned and arm["times_faster"] > self.half["times_faster"]
            assert not faster or arm["held_out"]["mean"] < half - 0.03


def describe_smollm2(task: PaperTask) -> list[str]:
    grpo = task.grpo["held_out"]
    first, second, _ = (
        f"{gain:+.1f}".replace("-", "−") for gain in task.subtract(task.cppo, task.grpo)
    )
    return [
        f"GRPO itself ends at {100 * grpo['mean']:.1f} ± {100 * grpo['reach']:.1f}%, from",
        f"The rule at 0.5 is {task.rule[0]['times_faster']:.2f} times faster "
        f"({task.gain(task.rule[0])} points), our default {task.default['times_faster']:.2f} "
        f"({task.gain(task.default)}), CPPO {task.cppo['times_faster']:.2f} ({first} with the "
        f"first seed, {second} with the second).",
        f"half of the batch falls to {task.half['held_out']['mean']:.1%}",
    ]


def describe_paper() -> list[tuple[str, str]]:
    sums = PaperTask("paper_table.py --jobs 2")
    words = PaperTask("paper_table.py --task word_problems --jobs 2")
    smollm2 = PaperTask("paper_table.py --task smollm2 --seeds 3 --jobs 2")
    sums.check()
    words.check()
    few = compute_student_t(2) * stdev(sums.subtract(sums.rule[1], sums.grpo)) / sqrt(3)
    stored = json.loads((FIGURES["RESULTS"] / "efficiency.json").read_text())
    arms = [
        item
        for task in ("", " --task word_problems --prompts 48")
        for stage in stored[f"efficiency.py --paper --further 0{task}"]["figures"]["stages"]
        for item in stage["arms"].items()
    ]
    efficiency = {
        kind: [arm["efficiency"] for name, arm in arms if name.startswith(kind)]
        for kind in ("DPPO: threshold, r", DEFAULT)
    }
    steps = f"{sums.cppo['steps']:.0f} and about {sums.greso['steps']:.0f} steps"
    losses = f"{sums.gain(sums.cppo)} and {sums.gain(sums.greso)} points".replace("−", "")
    return [
        ("docs/paper.md", claim)
        for claim in (
            f"with mean errors of {sums.error}, {words.error} and {smollm2.error}.",
            f"is {sums.faster} times faster than GRPO on sums, and {words.faster} times on word",
            f"the rule differs by {sums.gains} points, on word problems by {words.gains}.",
            f"are {sums.half['times_faster']:.2f} times faster at {sums.gain(sums.half)} points on "
            f"sums, and {words.half['times_faster']:.2f} times at {words.gain(words.half)} on word",
            f"is {sums.default['times_faster']:.2f} times faster at {sums.gain(sums.default)} "
            f"points on sums, and {words.default['times_faster']:.2f} times at "
            f"{words.gain(words.default)} on word problems.",
            f"from it by {sums.half_over_default} and {words.half_over_default} points.",
            f"{sums.variance[2]:.2f} and {words.variance[2]:.2f} times at 0.7, and "
            f"{sums.variance[3]:.1f} and {words.variance[3]:.1f} times at 0.9",
            f"`threshold` is at most {max(efficiency['DPPO: threshold, r']):.2f}, and E "
            f"of the default at least {min(efficiency[DEFAULT]):.2f}",
            f"take {steps} on sums, instead of 64, and lose {losses}.",
            f"they differ by {words.gain(words.cppo)} and {words.gain(words.greso)}.",
            f"they would leave about ± {few:.0f} points, eight leave ± "
            f"{100 * sums.rule[1]['held_out']['gain_reach']:.1f}",
            *describe_smollm2(smollm2),
        )
    ]


def describe_losses() -> tuple[str, str]:
    stored = json.loads((FIGURES["RESULTS"] / "paper_table.json").read_text())
    command = "paper_table.py --task losses --seeds 3 --jobs 2 --picture docs/losses.png"
    arms = stored[command]["figures"]["arms"]
    variance = {
        ratio: [
            arm["prune/variance_inflation"] for name, arm in arms.items() if f"r {ratio} /" in name
        ]
        for ratio in ("0.7", "0.9")
    }
    high = join([f"{each:.2f}" for each in variance["0.7"]])
    highest = join([f"{each:.1f}" for each in variance["0.9"]])
    return "docs/paper.md", f"variance is {high} times at 0.7, and {highest} times at 0.9."


def describe_weaknesses() -> list[tuple[str, str]]:
    stored = json.loads((FIGURES["RESULTS"] / "efficiency.json").read_text())
    paper = "efficiency.py --paper --further 0"
    sparse = stored[f"{paper} --task sparse_sums"]["figures"]["stages"]
    early = [
        stored[f"{paper}{samples}"]["figures"]["stages"][0]
        for samples in ("", " --samples 4", " --samples 2")
    ]
    for stage in (*sparse, *early):
        for ratio in ("0.5", "0.7", "0.9"):
            (arm,) = (
                arm
                for name, arm in stage["arms"].items()
                if name.startswith(f"DPPO: threshold, r {ratio}")
            )
            assert arm["efficiency"] < 1.0
    mixed = " and ".join(f"{stage['mixed_groups']:.0%}" for stage in sparse)
    return [(MEASURED, f"{mixed} of the groups have unequal rewards")]


def describe_group_size() -> list[tuple[str, str]]:
    stored = json.loads((FIGURES["RESULTS"] / "group_size.json").read_text())
    stages = [stage["arms"] for found in stored.values() for stage in found["figures"]["stages"]]

    def span(arm: str, size: str) -> str:
        found = [stage[arm][size]["efficiency"] for stage in stages]
        return f"{min(found):.2f} to {max(found):.2f}"

    auto = "tokens auto alone, weights to 10"
    return [
        (MEASURED, f"Twice as many groups of 4 are worth {span(auto, '4')} times"),
        (MEASURED, f"without pruning {span('unpruned', '4')} times"),
        ("docs/reward_flat.md", f"4 was {span(auto, '4')} times"),
        (ADVICE, f"were worth {span('unpruned', '4')} times groups of 8"),
    ]


def describe_removed_scripts() -> list[tuple[str, str]]:
    stored = json.loads((FIGURES["RESULTS"] / "earlier.json").read_text())
    lost = stored["lora.py"]["figures"]["lost_to_rounding"]
    faster = stored["prefixes.py"]["figures"]["times_faster"]
    return [
        ("docs/models.md", f"({lost} of it, by an earlier `lora.py`)"),
        ("docs/concepts.md", f"trained {faster} times faster (earlier `prefixes.py`)"),
    ]


def describe_cuts() -> tuple[str, str]:
    stored = json.loads((FIGURES["RESULTS"] / "earlier.json").read_text())
    gains = [
        stage["ratio_auto"]["efficiency"] - 1.0
        for command, found in stored.items()
        if command.startswith("cuts.py")
        for stage in found["figures"]["stages"]
    ]
    low, high = (f"{100 * each:.1f}" for each in (min(gains), max(gains)))
    return MEASURED, f"random token adds {low} to {high}% to E at `auto`"


CLAIMS = [
    describe_cuts(),
    *describe_removed_scripts(),
    *describe_group_size(),
    *describe_weaknesses(),
    *describe_paper(),
    describe_losses(),
    *describe_efficiency(),
    describe_picture(),
    describe_time_beside_trl(),
    describe_equal_noise(),
    describe_whole_runs(),
    *describe_verdicts(),
    *describe_pruning_in_trl(),
    describe_p2_law(),
]


@pytest.mark.parametrize(("page", "claim"), CLAIMS)
def test_figure_on_a_page_equals_the_stored_one(page: str, claim: str) -> None:
    assert claim in " ".join(text_of(page).split())


def test_no_pruned_arm_is_certainly_faster_to_an_accuracy() -> None:
    for figures in TIMES.values():
        pruned = [arm for name, arm in figures["arms"].items() if not name.startswith("unpruned")]
        assert all(arm["time_ratio"]["interval"][0] < 1 for arm in pruned)


@pytest.mark.parametrize(
    "rule", ["DPPO: threshold, r 0.3 / 0.5, weights to 10", "DAPO: dynamic_sampling"]
)
def test_rules_called_slower_on_sums_are_certainly_slower(rule: str) -> None:
    assert TIMES["sums"]["arms"][f"{rule}, 32 prompts"]["time_ratio"]["interval"][1] < 1


@pytest.mark.parametrize("prompts", [8, 16])
def test_pooled_ratio_equals_the_stored_runs(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import paired_ratio

    arms = [figures["arms"] for figures in TIMES.values()]
    seconds = [
        [second for arm in arms for second in arm[name]["seconds_by_seed"]]
        for name in (f"unpruned, {prompts} prompts", f"{DEFAULT}, 32 prompts")
    ]
    ratio = paired_ratio(*seconds)
    claim = "{:.2f} [{:.2f}, {:.2f}] times faster than {}".format(
        ratio["ratio"], *ratio["interval"], prompts
    )
    assert claim in " ".join(text_of(MEASURED).split())


@pytest.mark.parametrize("task", TIMES)
def test_every_run_of_a_seed_is_stored(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from timed_runs import Store

    stored = Store(FIGURES["RESULTS"] / f"time_to_accuracy_{task}.jsonl")
    seeds = {(run.arm, run.lr, run.seed) for run in stored}
    assert {
        (name, arm["lr"], seed) for name, arm in TIMES[task]["arms"].items() for seed in range(1, 6)
    } <= seeds


OWN_SPLITS = re.compile(r"^\| `(\S+)` \| \d+ \| \d+ \| .* \| (.*) \|$", re.MULTILINE)
"""Rows of the page on scaling: worth of pruning, each side in its own best split of the GPUs."""


def test_planned_figures_equal_the_planner() -> None:
    rows = dict(
        re.findall(r"^\[[\w.-]+\]\(configs/(\S+)\) \| (.*) \| \S+$", text_of(README), re.MULTILINE)
    )
    row_of_page = r"^\| `(qwen3_\S+)` \| ([\d+]+ \| \d+ \| \d+ \| \d+) \|$"
    others = dict(re.findall(row_of_page, text_of("docs/scaling.md"), re.MULTILINE))
    own_splits = dict(OWN_SPLITS.findall(text_of("docs/scaling.md")))
    assert rows.keys() | others.keys() == {
        file.name for file in (ROOT / "configs").glob("qwen3_*.yaml")
    }
    for name, shown in (rows | others).items():
        plan = make_plan(load_config(str(ROOT / "configs" / name), []), read_assumptions([]))
        apart = f"{plan.placement.ranks}+{sum(plan.placement.servers)}"
        gpus = f"{plan.placement.gpus}" if plan.placement.shared else apart
        seconds = f"{plan.unpruned.seconds:.0f} | {plan.pruned.seconds:.0f}"
        row = f"{gpus} | {plan.actor.total / GIB:.0f} | {seconds}"
        if name in rows:
            assert plan.efficiency is not None
            worth = own_splits.get(name, "{:.2f} to {:.2f}".format(*plan.efficiency))
            row += f" | {worth.replace(' to ', '–')}"
        assert re.sub(r"\[(.*)\]\(.*\)", r"\1", shown) == row, name


def test_planned_speed_up_of_the_papers_run_equals_the_planner() -> None:
    ratios = []
    for ahead in (1, 0):
        for size in ("4b", "8b"):
            file = str(ROOT / f"configs/qwen3_{size}_paper.yaml")
            plan = make_plan(load_config(file, [f"rollout.ahead={ahead}"]), read_assumptions([]))
            ratios.append(f"{plan.unpruned.seconds / plan.pruned.seconds:.2f}")
    claim = (
        "a pruned step is {} (4B) and {} (8B) times faster than an unpruned one, "
        "and with `rollout.ahead=0` {} and {} times"
    )
    assert claim.format(*ratios) in " ".join(text_of("docs/scaling.md").split())


def test_plans_of_published_runs_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from plan_published import compare_runs

    (figures,) = read_figures("plan_published")
    stored = [phase["planned_s"] for phase in figures["phases"]]
    assert [phase["planned_s"] for phase in compare_runs()] == pytest.approx(stored, rel=1e-3)


def test_each_result_of_the_readme_stands_on_its_page() -> None:
    rows = re.findall(
        r"^\[[^\]]+\]\((docs/[\w.]+\.md)[^)]*\)[^|\n]*\| (.+)$", text_of(README), re.MULTILINE
    )
    assert 4 <= len(rows) <= 8
    assert [(page, figure) for page, figure in rows if figure not in text_of(page)] == []


@pytest.mark.parametrize("file", [pytest.param(file, id=file.name) for file in FIGURES["pages"]()])
def test_tables_of_a_page_equal_the_stored_figures(file: Path) -> None:
    text = file.read_text()
    assert text == FIGURES["with_tables"](text)


def test_every_table_is_shown() -> None:
    shown = [
        found["name"]
        for text in FIGURES["pages"]().values()
        for found in FIGURES["TABLE"].finditer(text)
    ]
    assert sorted(shown) == sorted(FIGURES["TABLES"])


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.name) for file in FIGURES["RESULTS"].glob("*.json")]
)
def test_every_stored_figure_has_its_origin(file: Path) -> None:
    for command, stored in json.loads(file.read_text()).items():
        assert stored.keys() == {"commit", "date", "processor", "figures"}, command
        assert file.name == "earlier.json" or command.split()[0] == f"{file.stem}.py"
    assert file.name == "earlier.json" or (ROOT / "benchmarks" / f"{file.stem}.py").is_file()


def test_every_cited_benchmark_has_stored_figures() -> None:
    pages = [file.read_text(encoding="utf-8") for file in (ROOT / "docs").glob("**/*.md")]
    cited = {name for text in pages for name in re.findall(r"benchmarks/(\w+)\.py", text)}
    measuring = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    stored = {file.stem for file in FIGURES["RESULTS"].glob("*.json")}
    assert cited & measuring - stored == {"gpu_step"}, "gpu_step.py has only goals"

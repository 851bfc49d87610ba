"""Write the tables of measurements in the documentation, from figures in ``benchmarks/results``.

A table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. ``bash
scripts/figures.sh`` runs the named benchmarks again, and writes all tables.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
TABLE = re.compile(r"(?<=<!-- table: )(?P<name>\w+) -->\n.*?(?=<!-- end of table -->)", re.DOTALL)


class Figure(NamedTuple):
    """Row of a table: a figure of a recorded benchmark."""

    name: str
    command: str
    """Benchmark and options."""
    value: str
    """Format string for the recorded figures."""
    baseline: str = ""
    """Format string for the recorded figures."""


MEASURED = (
    Figure(
        "fill of packs, lengths as in DAPO",
        "packing.py",
        "{fill:.1%}",
        "{packers[ffd][fill]:.1%}, first-fit decreasing",
    ),
    Figure(
        "peak memory of head and loss, 8,192 tokens × 151,936, MiB",
        "policy_head.py --hidden 64",
        "{peak_mib:.0f}",
        "{naive_peak_mib:,.0f}, all logits at once",
    ),
    Figure(
        "Qwen3-1.7B in bf16 to Megatron's format, seconds",
        "convert.py",
        "{to_megatron_seconds:.1f}",
        "{cp_of_the_model_seconds:.1f}, `cp -r`",
    ),
    Figure(
        "right answers refused, of 5,000 in other spellings",
        "verdicts.py",
        "{ours[false_negatives]}",
        "{math_verify[false_negatives]}, math-verify",
    ),
    Figure(
        "milliseconds per verdict",
        "verdicts.py",
        "{ours[milliseconds]:.2f}",
        "{math_verify[milliseconds]:.1f}, math-verify",
    ),
)
DEFAULT = "prompts 0.85, tokens auto, weights to 10"
REHEARSED = {
    "memory / planned": "{memory_over_plan:.3f}",
    "kernels a pack": "{kernels_per_pack:,}",
    "kernels [s]": "{kernel_seconds:.1f}",
    "kernels, planned [s]": "{planned_kernel_seconds:.1f}",
    "collectives [s]": "{collective_seconds:.1f}",
    "matrix rate, kernels only": "{matrix_rate_of_kernels:.2f}",
    "matrix rate, with collectives and pipeline": "{matrix_rate_of_all:.2f}",
}
ARMS_BESIDE_TRL = {
    "unpruned": "none",
    "pruned": "prompts 0.7, tokens 0.5",
    "pruned_to_0.3": "prompts 0.7, tokens 0.3",
    "fastest": "prompts 0.4, tokens 0.3",
}
SMOLLM2 = (
    "efficiency.py --task smollm2_steps --prompts 32 --windows 6 --draws 40 --further 1 --steps 24"
)
EFFICIENCY = {
    "sums": "efficiency.py",
    "words": "efficiency.py --task word_problems --prompts 48",
    "SmolLM2": SMOLLM2,
}
"""Recorded command of each task."""
NOT_SHOWN = {
    "efficiency": re.compile(
        r"auto, weights to (5|20)$|tokens 0\.3, weights to 10, floor|0\.7 alone$|a quarter$"
        r"|prompts 0\.(85|7|5), tokens 0\.|tokens 0\.5 alone"
    ),
    "errors": re.compile("neyman, (head|advantage)|threshold_deterministic"),
    "times": re.compile(r"prompts 0\.7|64 prompts$"),
    "weaknesses": re.compile(r"r 0\.[37] /|threshold_deterministic"),
}
"""Arms that only the stored results have, by table."""


def load_figures() -> dict[str, dict[str, Any]]:
    """Return figures and origin of each recorded command."""
    return {
        command: found
        for file in sorted(RESULTS.glob("*.json"))
        for command, found in json.loads(file.read_text(encoding="utf-8")).items()
    }


def render_measured() -> Iterator[str]:
    results = load_figures()
    yield "| figure | value | baseline | command |"
    yield "|---|---|---|---|"
    for row in MEASURED:
        found = results[row.command]
        value, baseline = (text.format(**found["figures"]) for text in (row.value, row.baseline))
        yield f"| {row.name} | {value} | {baseline} | `{row.command}` |"


def render_efficiency() -> Iterator[str]:
    """Render E of each pruning arm at each stage of each task's training."""
    figures = load_figures()
    stages = {
        f"{task}, {stage['stage']}": stage
        for task, command in EFFICIENCY.items()
        for stage in figures[command]["figures"]["stages"]
    }
    yield _format_row("arm", stages)
    yield "|---" * (len(stages) + 1) + "|"
    yield _format_row("answers right", (f"{stage['accuracy']:.0%}" for stage in stages.values()))
    yield _format_row(
        "groups of unequal rewards", (f"{stage['mixed_groups']:.0%}" for stage in stages.values())
    )
    for name in next(iter(stages.values()))["arms"]:
        if name != "unpruned" and not NOT_SHOWN["efficiency"].search(name):
            arms = [stage["arms"][name] for stage in stages.values()]
            yield _format_row(_format_arm(name), (f"{arm['efficiency']:.2f}" for arm in arms))
            if name == DEFAULT:
                yield _format_row("± of the default", (f"{_get_reach(arm):.2f}" for arm in arms))
    yield _format_row(
        "best draw found", (f"{stage['bound']['efficiency']:.2f}" for stage in stages.values())
    )


def render_curves() -> Iterator[str]:
    """Render the arms of the real language model: final accuracy, and seconds to an accuracy."""
    # Benchmarks are scripts in a folder, not a package.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    benchmark = import_module("real_curves")
    runs = load_figures()["real_curves.py"]["figures"]["runs"]
    yield _format_row(
        "arm",
        (
            "learning rate",
            "s/step",
            "steps",
            "accuracy [%]",
            "to 50% [s]",
            f"times faster than {benchmark.BASELINE}",
        ),
    )
    yield "|---" * 7 + "|"
    for name in dict.fromkeys(run["arm"] for run in runs):
        arm = benchmark.ARMS[name]
        found = benchmark.compared(runs, name, 0.5)
        times = found["seconds_to_accuracy"]
        ratio = found["time_to_accuracy_ratio"]
        taken = "not reached" if None in times else f"{statistics.geometric_mean(times):.0f}"
        if not ratio:
            faster = ""
        elif name == benchmark.BASELINE:
            faster = "1"
        else:
            low, high = ratio["interval"]
            faster = f"{ratio['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        accuracy = f"{100 * found['final_accuracy']:.1f}"
        yield _format_row(
            name,
            (
                f"{arm.lr:g}",
                f"{found['seconds_per_step']:.1f}",
                str(arm.steps),
                accuracy,
                taken,
                faster,
            ),
        )


def render_errors() -> Iterator[str]:
    """Render the squared error of the pruned gradient by rule, at two budgets of each stage.

    The loss is ``grpo``, with weights up to 5.
    """
    rows = [
        row
        for row in load_figures()["estimator.py"]["figures"]["rows"]
        if row["max_weight"] in (None, 5.0)
    ]
    found = {
        (row["rule"], row["stage"], row["budget"]): row["error"]
        for row in rows
        if row["objective"] == "grpo"
    }
    cells = [(stage, budget) for stage in ("early", "middle", "late") for budget in (0.5, 0.3)]
    yield _format_row("rule", (f"{stage}, {budget}" for stage, budget in cells))
    yield "|---" * (len(cells) + 1) + "|"
    for rule in dict.fromkeys(row["rule"] for row in rows):
        if NOT_SHOWN["errors"].search(rule):
            continue
        yield _format_row(
            rule, (_format_error(found[rule, stage, budget]) for stage, budget in cells)
        )


def _format_error(error: float | None) -> str:
    return "–" if error is None else "0" if error < 5e-5 else f"{error:.2g}"


def render_trl_comparison() -> Iterator[str]:
    """Render the speed-up of a step over TRL, by pruning and workload."""
    found = load_figures()["against_trl.py --steps 10"]["figures"]
    yield "| pruning here | answers of varied length | answers of equal length |"
    yield "|---|---|---|"
    for arm, pruning in ARMS_BESIDE_TRL.items():
        yield _format_row(
            pruning,
            (f"{found[workload][arm]['seconds_ratio']:.1f}" for workload in ("varied", "equal")),
        )


def render_group_sizes() -> Iterator[str]:
    """Render the worth of other group sizes beside groups of 8, under the default pruning of
    completions."""
    figures = load_figures()
    columns = {
        f"{task}, {stage['stage']}": stage["arms"]["tokens auto alone, weights to 10"]
        for task, name in (("sums", "sums"), ("words", "word_problems"))
        for stage in figures[f"group_size.py --task {name} --windows 100"]["figures"]["stages"]
    }
    yield _format_row("completions per prompt", columns)
    yield "|---" * (1 + len(columns)) + "|"
    for size in ("2", "4", "16"):
        yield _format_row(size, (_format_interval(arm[size]) for arm in columns.values()))


def render_rehearsals() -> Iterator[str]:
    """Render memory, kernels and collectives of each published configuration."""
    yield _format_row("configuration", REHEARSED)
    yield "|---" * (len(REHEARSED) + 1) + "|"
    for name, figures in load_figures()["rehearsal.py"]["figures"].items():
        yield _format_row(f"`{name}`", (text.format(**figures) for text in REHEARSED.values()))


def render_published_runs() -> Iterator[str]:
    """Render seconds of published runs, and seconds of the planner."""
    yield "| run | phase | published [s] | planned [s] | planned / published |"
    yield "|---|---|---|---|---|"
    for found in load_figures()["plan_published.py"]["figures"]["phases"]:
        ratio = f"{found['ratio']:.2f}"
        # Mark ratios outside of 1/1.3 to 1.3 in bold.
        is_close = 1 / 1.3 <= found["ratio"] <= 1.3
        seconds = (f"{found[name]:.3g}" for name in ("published_s", "planned_s"))
        yield _format_row(
            found["run"], (found["phase"], *seconds, ratio if is_close else f"**{ratio}**")
        )


def _format_row(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _format_arm(arm: str) -> str:
    """Mark the default in bold."""
    return f"**{arm}**, the default" if arm == DEFAULT else arm


def _format_interval(found: dict[str, Any]) -> str:
    return f"{found['efficiency']:.2f} ± {_get_reach(found):.2f}"


def _get_reach(found: dict[str, Any]) -> float:
    """Return half of the width of an interval."""
    low, high = found["interval"]
    return float(high - low) / 2


def render_times() -> Iterator[str]:
    """Render seconds to an accuracy on both tasks, in the order of the first task."""
    tasks = {
        each["figures"]["task"]: each["figures"]
        for name, each in load_figures().items()
        if name.startswith("time_to_accuracy.py")
    }
    sums, words = tasks["sums"], tasks["word_problems"]
    heads = (
        f"{task}, to {100 * found['accuracy']:g}% [s] | times faster than {found['control']}"
        for task, found in (("sums", sums), ("words", words))
    )
    yield _format_row("arm", heads)
    yield "|---|---|---|---|---|"
    arms = sorted(sums["arms"], key=lambda name: sums["arms"][name]["seconds"])
    for name in dict.fromkeys([*arms, *words["arms"]]):
        if NOT_SHOWN["times"].search(name):
            continue
        yield _format_row(name, (_format_time(found["arms"].get(name)) for found in (sums, words)))


def _format_time(arm: dict[str, Any] | None) -> str:
    if arm is None:
        return " | "
    low, high = arm["time_ratio"]["interval"]
    ratio = f"{arm['time_ratio']['ratio']:.2f} [{low:.2f}, {high:.2f}]" if low < high else "1"
    return f"{arm['seconds']:.1f} | {ratio}"


def render_paper(command: str, efficiency: str, *, beside_paper: bool = False) -> Iterator[str]:
    """Render whole runs of the methods of DPPO's paper.

    Args:
        command: recorded command of ``paper_table.py``.
        efficiency: recorded command of ``efficiency.py`` on the same task.
        beside_paper: whether a column has the paper's own figures.
    """
    figures = load_figures()
    found = figures[command]["figures"]
    stages = figures[efficiency]["figures"]["stages"]
    heads = [
        "times faster",
        "accuracy [%]",
        "minus GRPO",
        "other kind [%]",
        "tokens generated/trained, over GRPO's",
        "variance",
        f"E, {'/'.join(stage['stage'] for stage in stages)}",
    ]
    if beside_paper:
        heads.insert(0, "the paper")
    yield _format_row("method", heads)
    yield "|---" * (1 + len(heads)) + "|"
    for name, arm in found["arms"].items():
        if beside_paper and name.startswith("DPPO: threshold, r 0.3"):
            yield _format_row("DPPO, ratios not known to us", ("2.37×, +3.36", *[""] * 7))
        held_out = arm["held_out"]
        gain = f"{100 * held_out['gain']:+.1f} ± {100 * held_out['gain_reach']:.1f}"
        inflation = arm.get("prune/variance_inflation")
        cells = [
            f"{arm['times_faster']:.2f}",
            f"{100 * held_out['mean']:.1f}",
            gain.replace("-", "−") if held_out["gain"] else "",
            f"{100 * arm['longer']['mean']:.1f}",
            f"{arm['generated']:.2f}/{arm['trained']:.2f}",
            f"{inflation:.2f}" if inflation else "",
            _find_efficiency(name, stages),
        ]
        if beside_paper:
            cells.insert(0, arm["paper"])
        yield _format_row(_format_arm(name.removesuffix(", 32 prompts")), cells)


def render_cuts() -> Iterator[str]:
    """Render E of cuts inside completions over E of whole completions, by task and stage."""
    figures = load_figures()
    columns = {}
    for task, command in (
        ("sums", "cuts.py"),
        ("words", "cuts.py --task word_problems --prompts 48"),
    ):
        for stage in figures[command]["figures"]["stages"]:
            columns[f"{task}, {stage['stage']}"] = stage
    yield _format_row("fraction of tokens", columns)
    yield "|---" * (len(columns) + 1) + "|"
    for name, key in (("auto", "ratio_auto"), ("best of seven", "ratio_best")):
        found = (stage[key] for stage in columns.values())
        yield _format_row(
            name, (f"{each['efficiency']:.3f} ± {_get_reach(each):.3f}" for each in found)
        )


def render_weaknesses() -> Iterator[str]:
    """Render E of the paper's methods under sparse rewards, and with small groups early in
    training."""
    paper = "efficiency.py --paper --further 0"
    figures = load_figures()
    sparse = figures[f"{paper} --task sparse_sums"]["figures"]["stages"]
    columns = {f"{stage['accuracy']:.0%} right, G = 8": stage for stage in sparse}
    for samples, command in ((2, f"{paper} --samples 2"), (4, f"{paper} --samples 4"), (8, paper)):
        stage = figures[command]["figures"]["stages"][0]
        columns[f"{stage['accuracy']:.0%} right, G = {samples}"] = stage
    yield _format_row("arm", columns)
    yield "|---" * (len(columns) + 1) + "|"
    for name in sparse[0]["arms"]:
        if name != "unpruned" and not NOT_SHOWN["weaknesses"].search(name):
            found = (stage["arms"][name]["efficiency"] for stage in columns.values())
            yield _format_row(_format_arm(name), (f"{each:.2f}" for each in found))


def _find_efficiency(name: str, stages: Sequence[dict[str, Any]]) -> str:
    """Return E at all stages of the arm of this name, without its number of prompts."""
    arm = re.sub(r", (16|32|64) prompts$|: unpruned.*", "", name)
    arm = {"unpruned": "unpruned, half of the prompts", "GRPO": "unpruned"}.get(arm, arm)
    found = [stage["arms"].get(arm) for stage in stages]
    return "/".join(f"{each['efficiency']:.2f}" for each in found if each)


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "measured": render_measured,
    "efficiency": render_efficiency,
    "beside_trl": render_trl_comparison,
    "curves": render_curves,
    "cuts": render_cuts,
    "errors": render_errors,
    "group_size": render_group_sizes,
    "paper_smollm2": partial(
        render_paper,
        "paper_table.py --task smollm2 --seeds 3 --jobs 2",
        "efficiency.py --task smollm2_steps --prompts 32 --windows 6 --draws 40 --further 1 "
        "--steps 24",
    ),
    "paper_sums": partial(
        render_paper,
        "paper_table.py --jobs 2",
        "efficiency.py --paper --further 0",
        beside_paper=True,
    ),
    "paper_word_problems": partial(
        render_paper,
        "paper_table.py --task word_problems --jobs 2",
        "efficiency.py --paper --further 0 --task word_problems --prompts 48",
    ),
    "published": render_published_runs,
    "rehearsed": render_rehearsals,
    "times": render_times,
    "weaknesses": render_weaknesses,
}


def with_tables(text: str) -> str:
    """Return a page with all tables rendered again."""
    return TABLE.sub(
        lambda found: "\n".join([f"{found['name']} -->", *TABLES[found["name"]](), ""]), text
    )


def pages() -> dict[Path, str]:
    """Return the pages with tables of measurements."""
    texts = {
        file: file.read_text(encoding="utf-8")
        for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    }
    return {file: text for file, text in texts.items() if TABLE.search(text)}


def measure(script: str) -> None:
    """Run all recorded commands of a benchmark again, and record their figures."""
    for command in json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8")):
        name, *options = shlex.split(command)
        words = [sys.executable, f"benchmarks/{name}", *options, "--json", "--record"]
        subprocess.run(words, cwd=ROOT, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        measure(each)
    for file, text in pages().items():
        file.write_text(with_tables(text), encoding="utf-8")

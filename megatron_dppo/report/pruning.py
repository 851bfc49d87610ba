"""Pruning, its reasons, and its noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_dppo.observe.console import get_colour
from megatron_dppo.report.charts import (
    Chart,
    Form,
    Layer,
    Line,
    format_tick,
    make_line_chart,
    make_stack_chart,
    with_title,
)
from megatron_dppo.report.parts import Charts, Part, Section
from megatron_dppo.report.run import RunRecord
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES
from megatron_dppo.rl.pruning.sampling import Rule
from megatron_dppo.rl.types import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES: Mapping[str, Mapping[str, Rule[Any]]] = {
    "prompts": PROMPT_RULES,
    "completions": COMPLETION_RULES,
}
CHANCES = ("never", "25%", "50%", "75%", "always")
FATES = ("trained on", "pruned", "zero advantage", "not rolled out")


def make_pruning_section(runs: Sequence[RunRecord]) -> Section:
    lead = (
        "An answer has a gradient where its group's rewards differ. An unbiased rule keeps each of "
        "these answers with a known probability, and weights those that it keeps so that the "
        "expected gradient stays the same."
    )
    parts: list[Part] = []
    measured = [run for run in runs if run.compute_mean("prune/kept_token_fraction") is not None]
    for run in measured:
        charts = [
            make_tokens_chart(run),
            make_answers_chart(run),
            make_causes_chart(run),
            make_noise_chart(run),
        ]
        parts.append(
            Charts([chart for chart in charts if not chart.empty], run.name, _describe_rules(run))
        )
    return Section(lead, parts, "These runs have no record of pruning.")


def has_pruning(run: RunRecord) -> bool:
    """Return whether any pruning rule was on."""
    return any(run.get_setting(f"pruning.{level}.rule") != "none" for level in RULES)


@with_title("Which answers are trained on")
def make_answers_chart(run: RunRecord) -> Chart:
    """Chart the probability of training, by the answer's group."""
    # Rewards of 0 and 1 give an accuracy; other rewards are relative to the group.
    binary = all(row["binary"] for row in run.census)
    about = "probability, over all steps"
    cells = _collect_cells(run, "by_group" if binary else "by_reward")
    if nothing := _describe_empty(cells):
        return Chart(about, empty=nothing)
    words = ("right", "wrong") if binary else ("above the mean", "below the mean")
    sides = zip((1.0, -1.0), ("good", "bad"), words, strict=True)
    lines = [
        Line(name, colour, *cells[cells[:, 1] == side][:, [0, 3]].T) for side, colour, name in sides
    ]
    x_label = (
        "accuracy of the answer's group"
        if binary
        else "reward, in deviations from the group's mean"
    )
    x_form: Form = "share" if binary else "number"
    return make_line_chart(
        about, lines, x_label=x_label, x_form=x_form, form="share", low=0.0, high=1.02
    )


@with_title("Length and score")
def make_causes_chart(run: RunRecord) -> Chart:
    """Chart the probability of training (colour) by length and score."""
    about = "score over the step's median, by length; stronger: more answers"
    cells = _collect_cells(run, "by_cause")
    if nothing := _describe_empty(cells):
        return Chart(about, empty=nothing)
    x, y, count, chance = cells.T
    width, height = (min(np.diff(np.unique(values)).min(initial=np.inf), 1.0) for values in (x, y))
    colours = np.round(4 * np.clip(chance, 0.0, 1.0)).astype(int)
    # The square root keeps cells with few answers visible.
    strengths = 0.25 + 0.75 * np.sqrt(count / count.max())

    def draw(axes: Axes) -> None:
        # Add empty plots as legend entries.
        for i, word in enumerate(CHANCES):
            axes.plot([], [], "s", color=get_colour(f"chance{i}"), label=word)
        fills = [
            (get_colour(f"chance{colour}"), strength)
            for colour, strength in zip(colours, strengths, strict=True)
        ]
        axes.bar(x, np.full(len(x), height), width, y - height / 2, color=fills, linewidth=0)
        axes.set_xlabel("tokens of the response")
        locator: Any = axes.xaxis.get_major_locator()
        locator.set_params(integer=True)
        axes.xaxis.set_major_formatter(lambda power, _: format_tick(2.0**power, "count"))
        axes.yaxis.set_major_formatter(lambda power, _: f"{2.0**power:.3g}×")

    return Chart(about, draw)


@with_title("Noise of the gradient")
def make_noise_chart(run: RunRecord) -> Chart:
    """Chart the variance by source."""
    about = "variance over the full batch's, as estimated for independent draws"
    if not has_pruning(run) or run.compute_mean("prune/kept_token_fraction") is None:
        return Chart(about, empty="no pruning")
    keys = ("step", "prune/noise_share_prompts", "prune/noise_share_completions")
    rows = []
    for row in run.rows:
        if row.keys() >= set(keys):
            rows.append([row[key] for key in keys])
    steps, by_prompts, by_completions = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    # A share of 1 for pruning would divide by zero.
    sampling = np.maximum(1.0 - by_prompts - by_completions, 1e-9)
    sources = (
        ("sampling", sampling),
        ("prompts pruned", by_prompts),
        ("completions pruned", by_completions),
    )
    layers = []
    for i, (name, share) in enumerate(sources):
        label = f"{100 * share.mean():.0f}%" if len(share) else ""
        layers.append(Layer(name, f"noise{i}", share / sampling, label))
    return make_stack_chart(
        about, steps, layers, form="times", empty="not estimated: the rule is biased"
    )


@with_title("Tokens of a step")
def make_tokens_chart(run: RunRecord) -> Chart:
    """Chart the tokens of a step by fate."""
    unseen = {row["step"]: row.get("prune/saved_tokens_prompts", 0.0) for row in run.rows}
    steps = np.array([row["step"] for row in run.census], dtype=np.float64)
    # pruning.jsonl calls zero advantage ``idle``.
    counts = [
        [row["kept"][1], row["pruned"][1], row["idle"][1], unseen.get(row["step"], 0.0)]
        for row in run.census
    ]
    counted = np.array(counts, dtype=np.float64).reshape(-1, 4)
    shares = counted.sum(axis=0) / max(counted.sum(), 1.0)
    layers = [
        Layer(name, f"fate{i}", counted[:, i], f"{100 * share:.0f}%")
        for i, (name, share) in enumerate(zip(FATES, shares, strict=True))
        if share > 0.0
    ]
    about = "by their use; tokens that were not rolled out are estimated"
    return make_stack_chart(about, steps, layers, form="count", empty="no pruning")


def _describe_rules(run: RunRecord) -> str:
    """Describe the active rules."""
    words = []
    for level, known in RULES.items():
        rule = run.get_setting(f"pruning.{level}.rule")
        keep = run.get_setting(f"pruning.{level}.keep")
        why = known[rule].biased if rule in known else ""
        rule = run.get_setting(f"pruning.{level}.function") or rule
        biased = f", biased: {why}" if why else ""
        words.append(
            f"{level} by {rule} (keep {keep}){biased}" if rule != "none" else f"{level} not pruned"
        )
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _collect_cells(run: RunRecord, table: Literal["by_group", "by_reward", "by_cause"]) -> Floats:
    """Return [cells, 4]: two coordinates, answers of all steps, mean inclusion."""
    cells = np.array(
        [cell[:4] for row in run.census for cell in row[table]], dtype=np.float64
    ).reshape(-1, 4)
    places, cell = np.unique(cells[:, :2], axis=0, return_inverse=True)
    count, inclusion = (np.bincount(cell.ravel(), column) for column in cells[:, 2:].T)
    return np.column_stack([places, count, inclusion / count])


def _describe_empty(cells: Floats) -> str:
    """Return the reason for an empty chart, or ""."""
    if (cells[:, 3] < 1.0).any():
        return ""
    return (
        "every answer with a gradient was trained on" if len(cells) else "no answer had a gradient"
    )

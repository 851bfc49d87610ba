"""Sections of tables: sample answers, benchmark scores, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dppo.data.tokenizer import strip_chat_marks
from megatron_dppo.observe.private import format_masked
from megatron_dppo.report.parts import (
    CollapsibleText,
    Note,
    Part,
    SampleAnswer,
    SampleAnswers,
    SampleProblem,
    Section,
    Table,
)
from megatron_dppo.report.run import Record, RunRecord, get_default, is_number
from megatron_dppo.settings import get_settings

MOST_EVALUATIONS = 12
"""Most evaluations shown per run."""
MOST_PROBLEMS = 8
# An answer's end has the result.
HEAD = 400
TAIL = 800


def make_answers_section(runs: Sequence[RunRecord]) -> Section:
    """Show sample problems with the runs' answers."""
    # In the order of the first run with each problem.
    found: dict[tuple[str, str], dict[int, list[SampleAnswer]]] = {}
    for run in runs:
        for row in _select_evenly([row for row in run.answers if row.get("answers")]):
            for shown in row["answers"]:
                prompt = strip_chat_marks(shown["prompt"])
                of_run = found.setdefault((prompt, shown["label"]), {}).setdefault(run.number, [])
                of_run.append(
                    SampleAnswer(int(row["step"]), _clip_text(shown["answer"]), shown["correct"])
                )
    problems = []
    for (prompt, label), by_run in list(found.items())[:MOST_PROBLEMS]:
        answers = [(runs[i].name, runs[i].colour, of_run) for i, of_run in by_run.items()]
        problems.append(SampleProblem(prompt, label, answers))
    steps = sorted(
        {answer.step for problem in problems for _, _, of_run in problem.runs for answer in of_run}
    )
    lead = "The first held-out problems, before training and at the step that is chosen below."
    nothing = "No answers were kept: a run shows eval.show of them at each evaluation."
    return Section(lead, [SampleAnswers(problems, steps)] if problems else [], nothing)


def make_benchmarks_section(runs: Sequence[RunRecord]) -> Section:
    """Show a table per evaluation."""
    parts: list[Part] = []
    for run in runs:
        for folder, found in run.scores:
            k = found.get("samples", "k")
            shares = f"avg@{k}", "pass", f"majority@{k}"
            head = (
                "benchmark",
                "problems",
                *shares,
                "mean reward",
                "mean tokens",
                "cut off",
                "unscored",
            )
            rows = [
                _format_scores(name, scores)
                for name, scores in found["benchmarks"].items()
                if isinstance(scores, dict)
            ]
            place = f" · {folder}" * (folder != ".")
            parts.append(Table(head, rows, f"{run.name}{place}: {_describe_method(found)}"))
    lead = "In brackets 95% intervals, over the problems of a benchmark."
    nothing = "No scores.json lies in these folders: megatron-dppo eval writes one."
    return Section(lead, parts, nothing)


def _select_evenly(rows: Sequence[Record]) -> list[Record]:
    """Return at most ``MOST_EVALUATIONS`` rows, the first and the last included."""
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), MOST_EVALUATIONS)).round().astype(int)
    return [rows[i] for i in np.unique(chosen)]


def _clip_text(text: str) -> str:
    left_out = len(text) - HEAD - TAIL
    return f"{text[:HEAD]}\n[… {left_out:,} characters …]\n{text[-TAIL:]}" if left_out > 0 else text


def _describe_method(found: Record) -> str:
    step = f"step {found['step']}, " if found.get("step") is not None else ""
    formats = (
        ("samples", "{} samples a problem"),
        ("temperature", "temperature {}"),
        ("engine", "{}"),
    )
    words = [form.format(found[key]) for key, form in formats if found.get(key) is not None]
    return f"{found.get('model', 'a model')}, {step}{', '.join(words)}"


def _format_scores(name: str, scores: Record) -> list[str]:
    found = scores.get("pass@k")
    entries = found.items() if isinstance(found, dict) else ()
    passes = {k: value for k, value in entries if str(k).isdigit()}
    # The keys are texts in JSON: 16 comes after 8 as a number only.
    most = max(passes, key=int, default=None)
    return [
        name,
        str(scores.get("problems", "–")),
        _format_interval(scores.get("avg@k")),
        f"@{most} {_format_interval(passes[most])}" if most is not None else "–",
        _format_interval(scores.get("majority")),
        _format_interval(scores.get("mean_reward"), "{:.3f}"),
        _format_interval(scores.get("mean_length"), "{:,.0f}"),
        _format_interval(scores.get("truncated")),
        str(scores.get("unscored", "–")),
    ]


def _format_interval(found: Any, template: str = "{:.1%}") -> str:
    """Format a number, with an interval if recorded."""
    value, low, high = (
        map(found.get, ("value", "low", "high")) if isinstance(found, dict) else (found, None, None)
    )
    if not is_number(value):
        return "–"
    if not is_number(low) or not is_number(high):
        return template.format(value)
    return (
        f"{template.format(value)} "
        f"({template.format(low).rstrip('%')}–{template.format(high).rstrip('%')})"
    )


def make_settings_section(runs: Sequence[RunRecord]) -> Section:
    """Show settings that differ between runs, or from the defaults; then all."""
    # Mask secrets, because pages are shared.
    configured = [run for run in runs if run.config]
    parts: list[Part] = []
    if len(configured) > 1:
        keys = dict.fromkeys(key for run in configured for key in run.config)
        rows = []
        for key in keys:
            values = [run.get_setting(key) for run in configured]
            if key != "run.dir" and any(value != values[0] for value in values):
                rows.append([key, *[format_masked(key, value) for value in values]])
        head = ["setting", *(run.name for run in configured)]
        parts.append(
            Table(head, rows, words=True) if rows else Note("No setting but the folder differs.")
        )
    elif configured:
        run = configured[0]
        rows = [
            [key, format_masked(key, value), format_masked(key, get_default(key))]
            for key, value in run.config.items()
            if key not in get_settings() or value != get_default(key)
        ]
        parts.append(Table(["setting", "value", "default"], rows, words=True))
    for run in runs:
        rows = [
            [
                f"{step:,}",
                change.key,
                format_masked(change.key, change.before),
                format_masked(change.key, change.now),
            ]
            for step, changes in run.changes
            for change in changes
        ]
        if rows:
            parts.append(Note(f"Changed in {run.name} when it was started again:"))
            parts.append(Table(["after step", "setting", "before", "then"], rows, words=True))
    for run in configured:
        text = "\n".join(
            f"{key} = {format_masked(key, value)}" for key, value in run.config.items()
        )
        parts.append(CollapsibleText(f"All settings of {run.name}", text))
    lead = "Only what is not the default."
    if len(configured) > 1:
        lead = "Only what differs between the runs."
    return Section(lead, parts)

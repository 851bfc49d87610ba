"""Sections of tables: sample answers, scores of benchmarks, settings."""

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
"""Most evaluations shown of a run; the first and the last are among them."""
MOST_PROBLEMS = 8
HEAD = 400
TAIL = 800
"""Characters of an answer that are shown; the end is where the result stands."""


def make_answers_section(runs: Sequence[RunRecord]) -> Section:
    """Problems in the order of the first run that was shown them."""
    found: dict[tuple[str, str], dict[int, list[SampleAnswer]]] = {}
    for run in runs:
        for row in _select_evenly([row for row in run.answers if row.get("answers")]):
            for shown in row["answers"]:
                prompt = strip_chat_marks(shown["prompt"])
                of_run = found.setdefault((prompt, shown["label"]), {}).setdefault(run.number, [])
                of_run.append(
                    SampleAnswer(int(row["step"]), _clip_text(shown["answer"]), shown["correct"])
                )
    problems = [
        SampleProblem(
            prompt, label, [(runs[i].name, runs[i].colour, of_run) for i, of_run in by_run.items()]
        )
        for (prompt, label), by_run in list(found.items())[:MOST_PROBLEMS]
    ]
    steps = sorted(
        {answer.step for problem in problems for _, _, of_run in problem.runs for answer in of_run}
    )
    lead = "The first held-out problems, before training and at the step that is chosen below."
    nothing = "No answers were kept: a run shows eval.show of them at each evaluation."
    return Section(lead, [SampleAnswers(problems, steps)] if problems else [], nothing)


def make_benchmarks_section(runs: Sequence[RunRecord]) -> Section:
    """One table for each evaluation; a figure that a file does not hold is a dash."""
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
            parts.append(
                Table(
                    head,
                    rows,
                    f"{run.name}{f' · {folder}' * (folder != '.')}: {_describe_method(found)}",
                )
            )
    lead = "In brackets 95% intervals, over the problems of a benchmark."
    nothing = "No scores.json lies in these folders: megatron-dppo eval writes one."
    return Section(lead, parts, nothing)


def _select_evenly(rows: Sequence[Record]) -> list[Record]:
    """The first, the last, and some between."""
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
    passes = (
        {k: value for k, value in found.items() if str(k).isdigit()}
        if isinstance(found, dict)
        else {}
    )
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
    """A number, with its interval where the file holds one; a dash where it holds no number."""
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
    """The settings that differ between several runs, or from the defaults in one run; then all
    settings of each run.

    Pages are passed on: secrets are left out.
    """
    configured = [run for run in runs if run.config]
    parts: list[Part] = []
    if len(configured) > 1:
        keys = [
            key
            for key in dict.fromkeys(key for run in configured for key in run.config)
            if key != "run.dir"
        ]
        values = [(key, [run.get_setting(key) for run in configured]) for key in keys]
        rows = [
            [key, *(format_masked(key, value) for value in shown)]
            for key, shown in values
            if any(v != shown[0] for v in shown)
        ]
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
    lead = (
        "Only what differs between the runs."
        if len(configured) > 1
        else "Only what is not the default."
    )
    return Section(lead, parts)

"""Sections of tables: sample answers, scores of benchmarks, smaller policies (``compress sweep``), settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dppo.data.tokenizer import without_chat_marks
from megatron_dppo.observe.private import public_text
from megatron_dppo.report.parts import (
    Chapter,
    Folded,
    Form,
    Note,
    Part,
    Plot,
    Plots,
    SampleAnswer,
    SampleAnswers,
    SampleProblem,
    Table,
)
from megatron_dppo.report.plot import Line, line_plot, say
from megatron_dppo.report.run import Record, RunRecord, default_of, is_number
from megatron_dppo.settings import settings

MOST_EVALUATIONS = 12
"""Most evaluations shown of a run; the first and the last are among them."""
MOST_PROBLEMS = 8
HEAD, TAIL = 400, 800
"""Characters of an answer that are shown; the end is where the result stands."""
FRONTIER = ("policy", "weights", "loss", "accuracy", "recovered", "tokens to recover", "speed", "frontier")


def sample_answers(runs: Sequence[RunRecord]) -> Chapter:
    """Problems in the order of the first run that was shown them."""
    found: dict[tuple[str, str], dict[int, list[SampleAnswer]]] = {}
    for run in runs:
        for row in _evenly([row for row in run.answers if row.get("answers")]):
            for shown in row["answers"]:
                prompt = without_chat_marks(shown["prompt"])
                of_run = found.setdefault((prompt, shown["label"]), {}).setdefault(run.number, [])
                of_run.append(SampleAnswer(int(row["step"]), _clipped(shown["answer"]), shown["correct"]))
    problems = [
        SampleProblem(prompt, label, [(runs[i].name, runs[i].colour, of_run) for i, of_run in by_run.items()])
        for (prompt, label), by_run in list(found.items())[:MOST_PROBLEMS]
    ]
    steps = sorted({answer.step for problem in problems for _, _, of_run in problem.runs for answer in of_run})
    lead = "The first held-out problems, before training and at the step that is chosen below."
    nothing = "No answers were kept: a run shows eval.show of them at each evaluation."
    return Chapter("answers", "Sample answers", lead, [SampleAnswers(problems, steps)] if problems else [], nothing)


def benchmarks(runs: Sequence[RunRecord]) -> Chapter:
    """One table for each evaluation; a figure that a file does not hold is a dash."""
    parts: list[Part] = []
    for run in runs:
        for folder, found in run.scores:
            k = found.get("samples", "k")
            shares = f"avg@{k}", "pass", f"majority@{k}"
            head = ("benchmark", "problems", *shares, "mean reward", "mean tokens", "cut off", "unscored")
            rows = [_scores(name, of) for name, of in found["benchmarks"].items() if isinstance(of, dict)]
            parts.append(Table(head, rows, f"{run.name}{f' · {folder}' * (folder != '.')}: {_how(found)}"))
    lead = "In brackets 95% intervals, over the problems of a benchmark."
    nothing = "No scores.json lies in these folders: megatron-dppo eval writes one."
    return Chapter("benchmarks", "Benchmarks", lead, parts, nothing)


def _evenly(rows: Sequence[Record]) -> list[Record]:
    """The first, the last, and some between."""
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), MOST_EVALUATIONS)).round().astype(int)
    return [rows[i] for i in np.unique(chosen)]


def _clipped(text: str) -> str:
    left_out = len(text) - HEAD - TAIL
    return f"{text[:HEAD]}\n[… {left_out:,} characters …]\n{text[-TAIL:]}" if left_out > 0 else text


def _how(found: Record) -> str:
    step = f"step {found['step']}, " if found.get("step") is not None else ""
    asked = (("samples", "{} samples a problem"), ("temperature", "temperature {}"), ("engine", "{}"))
    words = [form.format(found[key]) for key, form in asked if found.get(key) is not None]
    return f"{found.get('model', 'a model')}, {step}{', '.join(words)}"


def _scores(name: str, of: Record) -> list[str]:
    found = of.get("pass@k")
    passes = {k: value for k, value in found.items() if str(k).isdigit()} if isinstance(found, dict) else {}
    most = max(passes, key=int, default=None)
    return [
        name,
        str(of.get("problems", "–")),
        _interval(of.get("avg@k")),
        f"@{most} {_interval(passes[most])}" if most is not None else "–",
        _interval(of.get("majority")),
        _interval(of.get("mean_reward"), "{:.3f}"),
        _interval(of.get("mean_length"), "{:,.0f}"),
        _interval(of.get("truncated")),
        str(of.get("unscored", "–")),
    ]


def _interval(found: Any, form: str = "{:.1%}") -> str:
    """A number, with its interval where the file holds one; a dash where it holds no number."""
    value, low, high = map(found.get, ("value", "low", "high")) if isinstance(found, dict) else (found, None, None)
    if not is_number(value):
        return "–"
    if not is_number(low) or not is_number(high):
        return form.format(value)
    return f"{form.format(value)} ({form.format(low).rstrip('%')}–{form.format(high).rstrip('%')})"


def options(runs: Sequence[RunRecord]) -> Chapter:
    """The settings that differ between several runs, or from the defaults in one run; then all settings of each run.

    Pages are passed on: secrets are left out.
    """
    told = [run for run in runs if run.config]
    parts: list[Part] = []
    if len(told) > 1:
        keys = [key for key in dict.fromkeys(key for run in told for key in run.config) if key != "run.dir"]
        values = [(key, [run.setting(key) for run in told]) for key in keys]
        rows = [[key, *(public_text(key, value) for value in of)] for key, of in values if any(v != of[0] for v in of)]
        head = ["setting", *(run.name for run in told)]
        parts.append(Table(head, rows, words=True) if rows else Note("No setting but the folder differs."))
    elif told:
        run = told[0]
        rows = [
            [key, public_text(key, value), public_text(key, default_of(key))]
            for key, value in run.config.items()
            if key not in settings() or value != default_of(key)
        ]
        parts.append(Table(["setting", "value", "default"], rows, words=True))
    for run in runs:
        rows = [
            [f"{step:,}", change.key, public_text(change.key, change.before), public_text(change.key, change.now)]
            for step, changes in run.changes
            for change in changes
        ]
        if rows:
            parts.append(Note(f"Changed in {run.name} when it was started again:"))
            parts.append(Table(["after step", "setting", "before", "then"], rows, words=True))
    for run in told:
        text = "\n".join(f"{key} = {public_text(key, value)}" for key, value in run.config.items())
        parts.append(Folded(f"All settings of {run.name}", text))
    lead = "Only what differs between the runs." if len(told) > 1 else "Only what is not the default."
    return Chapter("settings", "Settings", lead, parts)


def frontier(runs: Sequence[RunRecord]) -> list[Chapter]:
    """The section of sweeps; none where no folder is a sweep's."""
    parts: list[Part] = []
    for run in (run for run in runs if run.sweep):
        rows = _with_figures(run.sweep)
        parts.append(Plots(_frontier_plots(rows, run.sweep.get("enough")), run.name))
        head, *cells = frontier_table(run.sweep)
        parts.append(Table(head, cells, run.name))
        without = [row["name"] for row in rows if row.get("recovered") and row.get("recovery_tokens") is None]
        if without:
            parts.append(Note(f"No budget was enough for {', '.join(without)}."))
    lead = (
        "Each line is a method and a score, with or without a refit. On the frontier is what no other policy beats: "
        "none is as small and better, or smaller and as good. Speeds are of transformers' generate, over the whole "
        "policy's."
    )
    return [Chapter("frontier", "Smaller policies", lead, parts)] if parts else []


def frontier_table(sweep: Record) -> list[list[str]]:
    """Head, the whole policy and each smaller one, the largest first; what was not measured is a dash."""
    whole = sweep["whole"]
    size = f"{whole['weights'] / 1e6:,.2f} M" if "weights" in whole else "–"
    first = ["whole", size, _loss(whole.get("loss")), say(whole.get("accuracy"), "share"), "–", "–", "1.00×", ""]
    rows = [
        [
            row["name"],
            say(row["size"], "share"),
            _loss(row.get("loss_after")),
            say(row.get("accuracy"), "share"),
            say(row["best"] if row.get("recovered") else None, "share"),
            say(row.get("recovery_tokens"), "count"),
            say(row.get("tokens_per_second_ratio"), "times"),
            "✓" if row.get("frontier") else "",
        ]
        for row in _with_figures(sweep)
    ]
    return [list(FRONTIER), first, *rows]


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def _with_figures(sweep: Record) -> list[Record]:
    """The smaller policies with their shares of the weights, and the best accuracies after recovery or before it."""
    whole = sweep["whole"].get("weights") or 1
    rows: list[Record] = []
    for row in sorted(sweep["rows"], key=lambda row: -row.get("weights", 0)):
        accuracies = [of.get("accuracy") for of in (row, *row.get("recovered", ()))]
        size = row["weights"] / whole if "weights" in row else None
        rows.append({**row, "size": size, "best": max(filter(is_number, accuracies), default=None)})
    return rows


def _method(row: Record) -> str:
    """Method that a line's rows share."""
    return f"{row.get('method')} {row.get('score')}" + (" refit" if row.get("refit") else "")


def _frontier_plots(rows: Sequence[Record], share: Any) -> list[Plot]:
    def drawn(title: str, about: str, x: str, y: str, forms: tuple[Form, Form], to: str = "weights left") -> Plot:
        lines = []
        for number, method in enumerate(dict.fromkeys(_method(row) for row in rows if "method" in row)):
            known = [(row.get(x), row.get(y)) for row in rows if _method(row) == method]
            points = sorted(point for point in known if None not in point)
            lines.append(Line(method, f"run{number % 6}", *np.array(points, dtype=np.float64).reshape(-1, 2).T))
        return line_plot(title, about, lines, x_label=to, x_form=forms[0], form=forms[1])

    highest, faster = "the best, after recovery where there was one", "tokens per second, over the whole's"
    enough = f"{100 * share:g}% of the whole policy's accuracy" if is_number(share) else "enough accuracy"
    return [
        drawn("Accuracy by size", highest, "size", "best", ("share", "share")),
        drawn("Accuracy by speed", highest, "tokens_per_second_ratio", "best", ("times", "share"), faster),
        drawn("Loss by size", "before recovery, nats per token", "size", "loss_after", ("share", "number")),
        drawn("Tokens to recover", f"of sft, to {enough}", "size", "recovery_tokens", ("share", "count")),
    ]

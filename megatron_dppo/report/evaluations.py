"""What runs answered: the same held-out problems at each evaluation, and results of ``megatron-dppo eval``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dppo.report.parts import Answer, Answers, Part, Problem, Section, Table
from megatron_dppo.report.run import Row, Run, is_number

MOST_EVALUATIONS = 12
"""Of a run, that are shown; the first and the last are among them."""
MOST_PROBLEMS = 8
HEAD, TAIL = 400, 800
"""Characters of an answer that are shown; the end is where the result stands."""


def sample_answers(runs: Sequence[Run]) -> Section:
    """Problems in the order of the first run that was shown them."""
    found: dict[tuple[str, str], dict[int, list[Answer]]] = {}
    for run in runs:
        for row in _evenly([row for row in run.answers if row.get("answers")]):
            for shown in row["answers"]:
                of_run = found.setdefault((shown["prompt"], shown["label"]), {}).setdefault(run.number, [])
                of_run.append(Answer(int(row["step"]), _clipped(shown["answer"]), shown["correct"]))
    problems = [
        Problem(prompt, label, [(runs[number].name, runs[number].colour, of_run) for number, of_run in by_run.items()])
        for (prompt, label), by_run in list(found.items())[:MOST_PROBLEMS]
    ]
    steps = sorted({answer.step for problem in problems for _, _, of_run in problem.runs for answer in of_run})
    lead = "The first held-out problems, before training and at the step that is chosen below."
    nothing = "No answers were kept: a run shows eval.show of them at each evaluation."
    return Section("answers", "Sample answers", lead, [Answers(problems, steps)] if problems else [], nothing)


def benchmarks(runs: Sequence[Run]) -> Section:
    """One table for each evaluation; a figure that a file does not hold is a dash."""
    parts: list[Part] = []
    for run in runs:
        for place, found in run.scores:
            k = found.get("samples", "k")
            head = ("benchmark", "problems", f"avg@{k}", "pass", f"majority@{k}", "mean tokens", "cut off", "unscored")
            rows = [_scores(name, of) for name, of in found["benchmarks"].items() if isinstance(of, dict)]
            parts.append(Table(head, rows, f"{run.name}{f' · {place}' * (place != '.')}: {_how(found)}"))
    lead = "In brackets 95% intervals, over the problems of a benchmark."
    nothing = "No scores.json lies in these folders: megatron-dppo eval writes one."
    return Section("benchmarks", "Benchmarks", lead, parts, nothing)


def _evenly(rows: Sequence[Row]) -> list[Row]:
    """The first, the last, and some between."""
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), MOST_EVALUATIONS)).round().astype(int)
    return [rows[i] for i in np.unique(chosen)]


def _clipped(text: str) -> str:
    left_out = len(text) - HEAD - TAIL
    return f"{text[:HEAD]}\n[… {left_out:,} characters …]\n{text[-TAIL:]}" if left_out > 0 else text


def _how(found: Row) -> str:
    step = f"step {found['step']}, " if found.get("step") is not None else ""
    asked = (("samples", "{} samples a problem"), ("temperature", "temperature {}"), ("engine", "{}"))
    words = [form.format(found[key]) for key, form in asked if found.get(key) is not None]
    return f"{found.get('model', 'a model')}, {step}{', '.join(words)}"


def _scores(name: str, of: Row) -> list[str]:
    found = of.get("pass@k")
    passes = {k: value for k, value in found.items() if str(k).isdigit()} if isinstance(found, dict) else {}
    most = max(passes, key=int, default=None)
    return [
        name,
        str(of.get("problems", "–")),
        _share(of.get("avg@k")),
        f"@{most} {_share(passes[most])}" if most is not None else "–",
        _share(of.get("majority")),
        _interval(of.get("mean_length"), 1.0, 0),
        _share(of.get("truncated")),
        str(of.get("unscored", "–")),
    ]


def _share(found: Any) -> str:
    return _interval(found, 100.0, 1, "%")


def _interval(found: Any, scale: float, decimals: int, unit: str = "") -> str:
    """A number, with its interval where the file holds one; a dash where it holds no number."""
    if is_number(found):
        return f"{scale * found:,.{decimals}f}{unit}"
    if not isinstance(found, dict) or not is_number(found.get("value")):
        return "–"
    words = f"{scale * found['value']:,.{decimals}f}{unit}"
    low, high = found.get("low"), found.get("high")
    if is_number(low) and is_number(high):
        words += f" ({scale * low:,.{decimals}f}–{scale * high:,.{decimals}f})"
    return words

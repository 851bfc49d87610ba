"""Sections that show what a run's folder holds: sample answers, scores of benchmarks, settings; and what it cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megatron_dppo.data.tokenizer import without_chat_marks
from megatron_dppo.observe.timers import saving
from megatron_dppo.report.axes import say
from megatron_dppo.report.parts import Folded, Note, Part, SampleAnswer, SampleAnswers, SampleProblem, Section, Table
from megatron_dppo.report.run import Record, Run, default_of, is_number
from megatron_dppo.report.timing import race
from megatron_dppo.settings import settings, short

MOST_EVALUATIONS = 12
"""Of a run, that are shown; the first and the last are among them."""
MOST_PROBLEMS = 8
HEAD, TAIL = 400, 800
"""Characters of an answer that are shown; the end is where the result stands."""
LAUNCH, ENV = "rollout.launch.", "rollout.launch.env"
SECRET = re.compile(r"(token(?!s|iz)|key|secret|passw|credential|bearer)[\w.-]*(['\"]?[=:\s]+|$)", re.IGNORECASE)
"""A name that looks like a secret's, with the characters up to the secret, or up to the end of the word if the secret
is the next word. ``--tokenizer`` and ``--max-total-tokens`` are no such names."""


def sample_answers(runs: Sequence[Run]) -> Section:
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
    return Section("answers", "Sample answers", lead, [SampleAnswers(problems, steps)] if problems else [], nothing)


def benchmarks(runs: Sequence[Run]) -> Section:
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
    return Section("benchmarks", "Benchmarks", lead, parts, nothing)


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


def options(runs: Sequence[Run]) -> Section:
    """The settings that differ between several runs, or from the defaults in one run; then all settings of each run."""
    told = [run for run in runs if run.config]
    parts: list[Part] = []
    if len(told) > 1:
        keys = [key for key in dict.fromkeys(key for run in told for key in run.config) if key != "run.dir"]
        values = [(key, [run.setting(key) for run in told]) for key in keys]
        rows = [[key, *(_word(key, value) for value in of)] for key, of in values if any(v != of[0] for v in of)]
        head = ["setting", *(run.name for run in told)]
        parts.append(Table(head, rows, words=True) if rows else Note("No setting but the folder differs."))
    elif told:
        run = told[0]
        rows = [
            [key, _word(key, value), _word(key, default_of(key))]
            for key, value in run.config.items()
            if key not in settings() or value != default_of(key)
        ]
        parts.append(Table(["setting", "value", "default"], rows, words=True))
    for run in runs:
        rows = [
            [f"{step:,}", change.key, _word(change.key, change.before), _word(change.key, change.now)]
            for step, changes in run.changes
            for change in changes
        ]
        if rows:
            parts.append(Note(f"Changed in {run.name} when it was started again:"))
            parts.append(Table(["after step", "setting", "before", "then"], rows, words=True))
    for run in told:
        text = "\n".join(f"{key} = {_word(key, value)}" for key, value in run.config.items())
        parts.append(Folded(f"All settings of {run.name}", text))
    lead = "Only what differs between the runs." if len(told) > 1 else "Only what is not the default."
    return Section("settings", "Settings", lead, parts)


def _word(key: str, value: Any) -> str:
    """As YAML writes it. Because pages are passed on, values that look like secrets are left out, and so are the values
    of all environment variables."""
    if key == ENV and isinstance(value, list):
        value = [f"{str(variable).partition('=')[0]}=…" for variable in value]
    elif key.startswith(LAUNCH) and isinstance(value, list):
        value = list(_masked(value))
    return short(value)


def _masked(words: Sequence[Any]) -> Iterator[Any]:
    """The words without what follows the name of a secret, in the same word or in the next one."""
    named = False
    for word in words:
        found = SECRET.search(str(word))
        if named and not str(word).startswith("--"):
            found = None
            yield "…"
        elif found and found.end() < len(word):
            yield word[: found.end()] + "…"
        else:
            yield word
        named = found is not None and found.end() == len(word)


@dataclass(frozen=True, slots=True)
class Spent:
    """GPU-hours of one run, or hours of its processes if it has no GPUs."""

    hours: float
    """Of steps and evaluations, without the start and without checkpoints."""
    by_prompts: float
    """Estimated hours saved by pruning prompts, with the pruning of completions left as it is."""
    by_completions: float
    both: float
    """Hours saved by both levels, which is more than the sum: what is not rolled out is not trained on either."""
    devices: str
    """``8 GPUs``, ``2 processes``; and whether servers are among them."""

    @property
    def unit(self) -> str:
        return "GPU-h" if "GPU" in self.devices else "process-h"

    @property
    def share(self) -> float:
        """The share that both levels saved of the hours of a run without pruning."""
        return self.both / (self.hours + self.both) if self.hours else 0.0


def spent(run: Run) -> Spent:
    """The seconds of every row, times the GPUs or processes that the run held then."""
    servers = _server_gpus(run)
    # In pruning.jsonl ``idle`` counts completions with zero advantage.
    dropped = {row["step"]: (row["pruned"][1], row["idle"][1]) for row in run.census}
    hours, saved = 0.0, [0.0, 0.0, 0.0]
    for row in run.rows:
        held = (_ranks(run, row) + (servers or 0)) / 3600.0
        hours += held * (row.get("perf/step_time", 0.0) + row.get("perf/eval_time", 0.0))
        pruned, zero_advantage = dropped.get(row["step"], (0, 0))
        for i, seconds in enumerate(saving(row, pruned=pruned, zero_advantage=zero_advantage)):
            saved[i] += held * seconds
    return Spent(hours, saved[0], saved[1], saved[2], _devices(run, servers))


def _ranks(run: Run, row: Record) -> int:
    """The trainer's ranks: those of the row, else those of the layout."""
    sizes = (int(run.setting(f"layout.{size}") or 1) for size in ("tp", "pp", "cp", "dp"))
    return int(row.get("perf/ranks", 0)) or prod(sizes)


def _server_gpus(run: Run) -> int | None:
    """GPUs of servers besides the trainer's. None if the run did not start the servers itself: then neither their size
    nor their number is known."""
    if run.setting("rollout.engine") == "local" or run.setting("rollout.colocated"):
        return 0
    tp, count = run.setting("rollout.launch.tp"), int(run.setting("rollout.launch.count"))
    if not count:
        return None
    return sum(tp[:count]) if isinstance(tp, list) else count * int(tp)


def _devices(run: Run, servers: int | None) -> str:
    held = max((_ranks(run, row) for row in run.rows), default=0) + (servers or 0)
    # A run that does not say whether it had GPUs is taken for one that had.
    on_gpus = any(row.get("perf/gpus", 1) for row in run.rows)
    word = ("GPU" if on_gpus else "process") + ("" if held == 1 else "s" if on_gpus else "es")
    of_servers = "servers not counted" if servers is None else f"{servers} of them for servers"
    return f"{held} {word}" + (f", {of_servers}" if servers != 0 else "")


def cost(runs: Sequence[Run], price: float | None) -> Section:
    """Hours and money: what was spent, what each run estimates that pruning saved, and how long the runs took.

    Args:
        runs: at least one.
        price: of one GPU for one hour; None: each run's own.
    """
    prices = [run.setting("cluster.price_per_gpu_hour") if price is None else price for run in runs]
    priced = any(rate is not None for rate in prices)
    found = [(spent(run), rate) for run, rate in zip(runs, prices, strict=True)]

    def hours(what: str, field: str) -> list[str]:
        return [what, *(f"{say(getattr(of, field), 'number')} {of.unit}" for of, _ in found)]

    def money(what: str, field: str) -> list[str]:
        return [what, *("–" if rate is None else _money(getattr(of, field) * rate) for of, rate in found)]

    rows = [
        ["held", *(of.devices for of, _ in found)],
        hours("spent", "hours"),
        hours("saved by pruning prompts, estimated", "by_prompts"),
        hours("saved by pruning completions, estimated", "by_completions"),
        hours("saved by both, estimated", "both"),
        ["… of what the run would have taken", *(say(of.share, "share") for of, _ in found)],
    ]
    if priced:
        rows.append(["price of an hour", *("–" if rate is None else f"{rate:g}" for rate in prices)])
        rows += [money("money spent", "hours"), money("money saved, estimated", "both")]
    if outcome := race(runs):
        rows.append(["measured, a step", *(outcome.cells(outcome.pace, run.name) for run in runs)])
        if outcome.target is not None:
            what = f"measured, until {say(outcome.target, 'share')} were right"
            rows.append([what, *(outcome.cells(outcome.reached, run.name) for run in runs)])
    lead = (
        "Spent: seconds of all steps and evaluations, times the GPUs or processes held; not starts and checkpoints. "
        "Saved: estimated from each run's own timers, as if every token of a step cost the same; either level with the "
        "pruning of the other as it is, so that both together save more than their sum. Costs that do not "
        "depend on the tokens are not saved: where a run without pruning is on this page, trust the measured times."
    )
    if any(_server_gpus(run) is None for run in runs):
        lead += (
            " Servers that a run was given are not counted, because the number of their GPUs is not known: its hours "
            "and money are those of the trainer alone."
        )
    parts: list[Part] = [Table(["", *(run.name for run in runs)], rows)]
    if outcome and outcome.differs:
        parts.append(Note(outcome.unlike))
    if not priced:
        parts.append(Note("--price, or cluster.price_per_gpu_hour, turns hours into money."))
    return Section("cost", "Cost", lead, parts)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}" if amount >= 0.1 or not amount else f"{amount:.1g}"

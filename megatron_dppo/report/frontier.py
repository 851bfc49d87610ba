"""Smaller policies compared: size, accuracy, speed and the tokens that recover them (``compress sweep``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dppo.report.axes import Form, say
from megatron_dppo.report.parts import Chapter, Note, Part, Plots, Table
from megatron_dppo.report.plot import Line, Plot, line_plot
from megatron_dppo.report.run import Record, RunRecord, is_number

HEAD = (
    "policy",
    "weights",
    "loss",
    "accuracy",
    "recovered",
    "tokens to recover",
    "speed, over the whole policy's",
    "frontier",
)


def frontier(runs: Sequence[RunRecord]) -> list[Chapter]:
    """The section of sweeps; none where no folder is a sweep's."""
    swept = [run for run in runs if run.sweep]
    parts: list[Part] = []
    for run in swept:
        rows = sorted(run.sweep["rows"], key=lambda row: -row.get("weights", 0))
        best = {row["name"]: _best(row) for row in rows}
        parts.append(Plots(_plots(run, rows, best), run.name))
        parts.append(Table(HEAD, [_whole(run), *(_cells(run, row, best[row["name"]]) for row in rows)], run.name))
        without = [row["name"] for row in rows if row.get("recovered") and row.get("recovery_tokens") is None]
        if without:
            parts.append(Note(f"No budget was enough for {', '.join(without)}."))
    lead = (
        "Each line is a method and a score, with or without a refit. On the frontier is what no other policy beats: "
        "none is as small and better, or smaller and as good. Speeds are of transformers' generate, over the whole "
        "policy's."
    )
    return [Chapter("frontier", "Smaller policies", lead, parts)] if parts else []


def _best(row: Record) -> float | None:
    """The best accuracy after recovery, or before it."""
    found = [of.get("accuracy") for of in (row, *row.get("recovered", ()))]
    return max(filter(is_number, found), default=None)


def _method(row: Record) -> str:
    """Method that a line's rows share."""
    return f"{row.get('method')} {row.get('score')}" + (" refit" if row.get("refit") else "")


def _plots(run: RunRecord, rows: Sequence[Record], best: dict[str, float | None]) -> list[Plot]:
    whole = run.sweep["whole"].get("weights", 0) or 1
    sizes = {row["name"]: row["weights"] / whole for row in rows if "weights" in row}
    speeds = {row["name"]: row.get("tokens_per_second_ratio") for row in rows}
    losses = {row["name"]: row.get("loss_after") for row in rows}
    tokens = {row["name"]: row.get("recovery_tokens") for row in rows}

    def drawn(
        title: str,
        about: str,
        x: dict[str, float | None],
        y: dict[str, float | None],
        forms: tuple[Form, Form],
        to: str,
    ) -> Plot:
        lines = []
        for number, method in enumerate(dict.fromkeys(_method(row) for row in rows if "method" in row)):
            names = [row["name"] for row in rows if _method(row) == method]
            points = sorted((x[name], y[name]) for name in names if x.get(name) is not None and y[name] is not None)
            at = np.array(points, dtype=np.float64).reshape(-1, 2)
            lines.append(Line(method, f"run{number % 6}", *at.T))
        return line_plot(title, about, lines, x_label=to, x_form=forms[0], form=forms[1])

    left, highest = "weights left", "the best, after recovery where there was one"
    share = run.sweep.get("enough")
    enough = f"{100 * share:g}% of the whole policy's accuracy" if is_number(share) else "enough accuracy"
    return [
        drawn("Accuracy by size", highest, sizes, best, ("share", "share"), left),
        drawn("Accuracy by speed", highest, speeds, best, ("times", "share"), "tokens per second, over the whole's"),
        drawn("Loss by size", "before recovery, nats per token", sizes, losses, ("share", "number"), left),
        drawn("Tokens to recover", f"of sft, to {enough}", sizes, tokens, ("share", "count"), left),
    ]


def _whole(run: RunRecord) -> list[str]:
    whole = run.sweep["whole"]
    size = f"{whole['weights'] / 1e6:,.2f} M" if "weights" in whole else "–"
    return ["whole", size, say(whole.get("loss"), "number"), say(whole.get("accuracy"), "share"), "–", "–", "1×", ""]


def _cells(run: RunRecord, row: Record, best: float | None) -> list[str]:
    size = row["weights"] / run.sweep["whole"]["weights"] if "weights" in row else None
    return [
        row["name"],
        say(size, "share"),
        say(row.get("loss_after"), "number"),
        say(row.get("accuracy"), "share"),
        say(best if row.get("recovered") else None, "share"),
        say(row.get("recovery_tokens"), "count"),
        say(row.get("tokens_per_second_ratio"), "times"),
        "✓" if row.get("frontier") else "",
    ]
